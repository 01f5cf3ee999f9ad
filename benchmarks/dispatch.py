"""What it costs to call an operation on a sharded tensor rather than on its local tensor, forward and backward.

One process on torch's fake process group of four ranks. Layouts are such that every operation is local and sends
nothing: what is left is dispatch. Beside it plain torch on the local tensors, and DTensor. Operands are 4x4 and
1024x1024 on this rank. All ways take turns in every round; told are the medians of the rounds, of the thread's own
processor time, so that other programs on the machine count less. A backward is one pass through the results of many
calls. Then what a call costs whose rule is known but whose shapes are new, which is when layouts are chosen.

    python benchmarks/dispatch.py [--rounds 60] [--only add,matmul] [--small]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtensor as st

WORLD = 4
WAYS = ("plain", "ours", "dtensor")


class Operand(NamedTuple):
    """A local tensor, the dim that is cut over the ranks (None: a copy on all), and whether it wants a gradient."""

    local: torch.Tensor
    dim: int | None = 0
    grad: bool = True

    def held(self, way: str) -> torch.Tensor:
        local = self.local.clone()
        if way == "plain" or (way == "ours" and self.dim is None):
            return local.requires_grad_(self.grad)
        if way == "dtensor":
            placement = Replicate() if self.dim is None else Shard(self.dim)
            return DTensor.from_local(local, MESH[0], [placement], run_check=False).detach().requires_grad_(self.grad)
        shape = [n * WORLD if d == self.dim else n for d, n in enumerate(local.shape)]
        spec = ", ".join("tp" if d == self.dim else "-" for d in range(local.dim()))
        made = st.zeros(f"[{spec}]", *shape, dtype=local.dtype)
        made.local_tensor().copy_(local)
        return made.requires_grad_(self.grad)


MESH: list[Any] = []
Call = tuple[Callable[..., torch.Tensor], list[Operand]]


def calls(side: int) -> dict[str, Call]:
    """Every operation with its operands, each of them of about `side` x `side` elements."""
    torch.manual_seed(0)
    half, quarter = max(side // 2, 1), max(side // 4, 1)

    def rows() -> Operand:
        return Operand(torch.randn(side, side))

    def copy(*shape: int) -> Operand:
        return Operand(torch.randn(shape), None, False)

    x, y = rows(), rows()
    batch = Operand(torch.randn(4, half, half))
    heads = Operand(torch.randn(4, 4, quarter, quarter))
    labels = Operand(torch.randint(0, side, (side,)), 0, False)
    ids = Operand(torch.randint(0, side, (side,)), None, False)
    return {
        "add": (torch.add, [x, y]),
        "mul": (torch.mul, [x, y]),
        "x * 2": (lambda a: a * 2, [x]),
        "relu": (torch.relu, [x]),
        "gelu": (F.gelu, [x]),
        "exp": (torch.exp, [x]),
        "where": (torch.where, [Operand(x.local > 0, 0, False), x, y]),
        "matmul": (torch.matmul, [x, copy(side, side)]),
        "linear": (F.linear, [copy(side, side), x]),
        "bmm": (torch.bmm, [batch, batch]),
        "einsum": (lambda a, b: torch.einsum("bik,bkj->bij", a, b), [batch, batch]),
        "sum": (lambda a: a.sum(1), [x]),
        "mean": (lambda a: a.mean(-1, keepdim=True), [x]),
        "view": (lambda a: a.view(-1, half, side // half), [x]),
        "reshape": (lambda a: a.reshape(-1, half, side // half), [x]),
        "transpose": (lambda a: a.transpose(0, 1), [x]),
        "unsqueeze": (lambda a: a.unsqueeze(1), [x]),
        "slice": (lambda a: a[:, :half], [x]),
        "cat": (lambda a, b: torch.cat([a, b], 1), [x, y]),
        "softmax": (lambda a: torch.softmax(a, -1), [x]),
        "layer_norm": (lambda a, w, b: F.layer_norm(a, (side,), w, b), [x, copy(side), copy(side)]),
        "rms_norm": (lambda a, w: F.rms_norm(a, (side,), w), [x, copy(side)]),
        "embedding": (F.embedding, [ids, Operand(torch.randn(side, side), 1)]),
        "cross_entropy": (lambda a, t: F.cross_entropy(a, t, reduction="none"), [x, labels]),
        "attention": (F.scaled_dot_product_attention, [heads, heads, heads]),
        "cumsum": (lambda a: a.cumsum(1), [x]),
        "clone": (torch.clone, [x]),
        "add_": (lambda a, b: a.add_(b), [Operand(x.local, 0, False), Operand(torch.zeros(side, side), 0, False)]),
    }  # fmt: skip


class Way(NamedTuple):
    """A call in one way: on its operands, and the gradient to start its backward from (None: it has none)."""

    func: Callable[..., torch.Tensor]
    held: list[torch.Tensor]
    outer: torch.Tensor | None

    def forward(self, repeats: int) -> tuple[float, list[torch.Tensor]]:
        """Seconds for one call, and the results."""
        func, held = self.func, self.held
        results = [None] * repeats
        start = time.thread_time()
        for i in range(repeats):
            results[i] = func(*held)
        return (time.thread_time() - start) / repeats, results

    def backward(self, results: list[torch.Tensor]) -> float:
        """Seconds for the backward of one call, of one pass through all of them."""
        outers = [self.outer] * len(results)
        start = time.thread_time()
        torch.autograd.backward(results, outers)
        spent = (time.thread_time() - start) / len(results)
        for x in self.held:
            x.grad = None
        return spent


def ways_of(call: Call) -> dict[str, Way]:
    func, operands = call
    found = {}
    for name in WAYS:
        held = [operand.held(name) for operand in operands]
        result = func(*held)
        outer = None
        if result.requires_grad:
            outer = torch.ones_like(result.detach())
            try:
                torch.autograd.backward([func(*held)], [outer])
            except NotImplementedError:
                if name != "dtensor":
                    raise
                outer = None  # DTensor has no backward for it
        found[name] = Way(func, held, outer)
    return found


def seconds(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(side: int, rounds: int, only: set[str]) -> list[dict[str, Any]]:
    """One row per operation: what each way takes, in microseconds, and what ours adds to plain torch."""
    rows = []
    for name, call in calls(side).items():
        if only and name not in only:
            continue
        ways = ways_of(call)
        once = max(sum(ways["plain"].forward(2)[:1]) for _ in range(3))
        repeats, turns = max(1, min(40, int(0.002 / once))), max(7, min(rounds, int(1 / once)))
        times: dict[str, list[float]] = {}
        for turn in range(turns):
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                spent, results = ways[way].forward(repeats)
                times.setdefault(f"{way} forward", []).append(1e6 * spent)
                if ways[way].outer is not None:
                    back = ways[way].backward(results)
                    times.setdefault(f"{way} backward", []).append(1e6 * back)
                    times.setdefault(f"{way} both", []).append(1e6 * (spent + back))
                del results
        gc.collect()
        rows.append(_row(name, side, times))
    return rows


def _row(name: str, side: int, times: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"op": name, "side": side}
    for phase in ("forward", "backward"):
        for way in WAYS:
            found = times.get(f"{way} {phase}")
            row[f"{way} {phase}"] = "" if found is None else round(statistics.median(found), 2)
    for phase in ("forward", "backward"):
        row[f"added {phase}"] = _median(times, f"plain {phase}", f"ours {phase}", lambda a, b: b - a)
    for other in ("plain", "dtensor"):
        phase = "both" if f"{other} both" in times else "forward"
        row[f"ours/{other}"] = _median(times, f"{other} {phase}", f"ours {phase}", lambda a, b: b / a)
    return row


def _median(times: dict[str, list[float]], a: str, b: str, compare: Callable[[float, float], float]) -> Any:
    """The median over the rounds of a comparison within each round; nothing where one of the two is missing."""
    if a not in times or b not in times:
        return ""
    return round(statistics.median(map(compare, times[a], times[b])), 2)


def misses(count: int = 200) -> list[dict[str, Any]]:
    """What a first call on new shapes costs, in all: the rule bound, layouts chosen, the local work on 2 columns."""
    made: dict[str, Callable[[int], Callable[[], Any]]] = {
        "matmul, rows": lambda n: partial(torch.matmul, st.zeros("[tp, -]", n, 2), torch.zeros(2, 2)),
        "matmul, contracted": lambda n: partial(torch.matmul, st.zeros("[-, tp]", 2, n), st.zeros("[tp, -]", n, 2)),
        "linear, columns": lambda n: partial(F.linear, torch.zeros(2, 2), st.zeros("[tp, -]", n, 2)),
        "add, broadcast": lambda n: partial(torch.add, st.zeros("[tp, -]", n, 2), torch.zeros(n, 1)),
        "softmax": lambda n: partial(lambda x: torch.softmax(x, -1), st.zeros("[tp, -]", n, 2)),
        "layer_norm": lambda n: partial(lambda x: F.layer_norm(x, (2,)), st.zeros("[tp, -]", n, 2)),
        "view": lambda n: partial(lambda x: x.view(-1, 2, 1), st.zeros("[tp, -]", n, 2)),
        "slice": lambda n: partial(lambda x: x[:, :1], st.zeros("[tp, -]", n, 2)),
        "sum": lambda n: partial(lambda x: x.sum(1), st.zeros("[tp, -]", n, 2)),
        "cat": lambda n: partial(lambda x: torch.cat([x, x], 1), st.zeros("[tp, -]", n, 2)),
    }  # fmt: skip
    rows = []
    for name, make in made.items():
        news = [make(WORLD * (17 + i)) for i in range(count)]
        first = [1e6 * seconds(call) for call in news]
        again = [1e6 * seconds(call) for call in news]
        row = {"op": name, "first call": statistics.median(first), "second call": statistics.median(again)}
        row["miss"] = statistics.median(a - b for a, b in zip(first, again, strict=True))
        rows.append({key: value if isinstance(value, str) else round(value, 1) for key, value in row.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="names of operations, apart by commas")
    parser.add_argument("--small", action="store_true", help="4x4 only")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    MESH.append(init_device_mesh("cpu", (WORLD,)))
    gc.disable()
    only = set(filter(None, args.only.split(",")))
    rows = measure(4, args.rounds, only)
    if not args.small:
        rows += measure(1024, args.rounds, only)
    missed = misses() if not only else []
    write("dispatch", rows, unit="us", misses=missed)
    if missed:
        write("dispatch_misses", missed, unit="us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
