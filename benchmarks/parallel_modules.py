"""What layers under flows cost on GPUs, beside hand-written autograd functions and DTensor: forward and backward, ms.

Each way has the same weights and gets the same input; times are wall clock of steps in a row, all ways take turns in
every round, told are medians on the slowest rank.

    python benchmarks/parallel_modules.py [--world 4] [--rounds 7] [--only mlp,sequence,block]

* mlp: 4096-14336-4096 in bfloat16, a column-parallel and a row-parallel Linear. By hand: two functions around the local
  products, one all-reduce forward and one backward. No communication: the local products alone. spmd-types joins where
  it is installed.
* sequence: the same with the tokens between cut, gathered before and scattered after.
* block: a decoder block with grouped attention and a gated MLP; DTensor and ours eager and compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Copied, Gathered, Scattered, Summed, spmd_types
from ranks import spawn, wait
from report import write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import shardtensor as st

Step = Callable[[], Any]


class ByHand(nn.Module):
    """This rank's part of an MLP, between what the ranks tell each other."""

    def __init__(self, whole: nn.Sequential, enter: Any, leave: Any) -> None:
        super().__init__()
        size, rank = dist.get_world_size(), dist.get_rank()
        self.up = nn.Parameter(whole[0].weight.detach().chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(whole[2].weight.detach().chunk(size, 1)[rank].clone())
        self.enter, self.leave = enter, leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(F.linear(F.gelu(F.linear(self.enter(x), self.up)), self.down))


def with_spmd_types(whole: nn.Sequential, is_stream: bool) -> dict[str, nn.Module]:
    around = spmd_types(is_stream)
    return {} if around is None else {"spmd-types": ByHand(whole, *around)}


class Attention(nn.Module):
    """Grouped attention; the number of heads follows from what the products give."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """Gate, up and down."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A decoder block."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attn, self.mlp = Attention(width, heads, kv_heads), GatedMLP(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def seeded(make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return make().to(dtype)


def step_of(module: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Step:
    params = [x, *module.parameters()]

    def step() -> torch.Tensor:
        y = module(x)
        y.backward(grad)
        for param in params:
            param.grad = None
        return y

    return step


def mlp_ways(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> dict[str, Step]:
    def mlp() -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, width * 7 // 2, bias=False), nn.GELU(), nn.Linear(width * 7 // 2, width, bias=False)
        )

    x = torch.randn(tokens, width, device=device, dtype=dtype)
    dist.broadcast(x, 0)
    grad = torch.ones_like(x)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    whole = seeded(mlp, device, dtype)
    rules = {"0": st.colwise(), "2": st.rowwise()}
    modules = {
        "no communication": ByHand(whole, lambda x: x, lambda x: x),
        "by hand": ByHand(whole, Copied.apply, Summed.apply),
        **with_spmd_types(whole, is_stream=False),
        "shardtensor": st.shard_module(seeded(mlp, device, dtype), rules),
        "DTensor": parallelize_module(whole, mesh, styles),
    }
    ways = {name: step_of(module, x.clone().requires_grad_(), grad) for name, module in modules.items()}
    _same(ways["shardtensor"](), ways["by hand"](), dtype)
    return ways


def sequence_ways(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> dict[str, Step]:
    def mlp() -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, width * 7 // 2, bias=False), nn.GELU(), nn.Linear(width * 7 // 2, width, bias=False)
        )

    size = dist.get_world_size()
    x = torch.randn(tokens // size, width, device=device, dtype=dtype)
    grad = torch.ones_like(x)
    mesh = init_device_mesh(device.type, (size,))
    styles = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    whole = seeded(mlp, device, dtype)
    rules = {"0": {**st.colwise(), "in": "[tp, -] -> replicate"}, "2": st.rowwise(to="[tp, -]"), "out": "[tp, -]"}
    modules = {
        "no communication": ByHand(whole, lambda x: x.repeat(size, 1), lambda x: x[: tokens // size]),
        "by hand": ByHand(whole, Gathered.apply, Scattered.apply),
        **with_spmd_types(whole, is_stream=True),
        "shardtensor": st.shard_module(seeded(mlp, device, dtype), rules),
        "DTensor": parallelize_module(whole, mesh, styles),
    }
    ways = {name: step_of(module, x.clone().requires_grad_(), grad) for name, module in modules.items()}
    _same(ways["shardtensor"](), ways["by hand"](), dtype)
    return ways


def block_ways(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> dict[str, Step]:
    heads = width // 128 if width >= 512 else 8
    make = lambda: Block(width, heads, max(heads // 4, 4), width * 7 // 2)  # noqa: E731
    x = torch.randn(1, tokens, width, device=device, dtype=dtype)
    dist.broadcast(x, 0)
    grad = torch.ones_like(x)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    replicated = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    styles = {
        **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
        **{"attn.o": RowwiseParallel(), "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()},
        **{"mlp.down": RowwiseParallel(), "attn": replicated, "mlp": replicated},
    }
    rules = {
        "attn": {"in": "replicate", "{q,k,v}": st.colwise(unit=width // heads), "o": st.rowwise(unit=width // heads)},
        "mlp": {"in": "replicate", "{gate,up}": st.colwise(), "down": st.rowwise()},
    }
    ours = [st.shard_module(seeded(make, device, dtype), rules) for _ in range(2)]
    theirs = [parallelize_module(seeded(make, device, dtype), mesh, styles) for _ in range(2)]
    modules = {
        "shardtensor": ours[0],
        "shardtensor compiled": torch.compile(ours[1], fullgraph=True),
        "DTensor": theirs[0],
        "DTensor compiled": torch.compile(theirs[1]),
    }
    ways = {name: step_of(module, x.clone().requires_grad_(), grad) for name, module in modules.items()}
    _same(ways["shardtensor"](), ways["DTensor"](), dtype)
    return ways


def _same(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    theirs = theirs.to_local() if hasattr(theirs, "to_local") else theirs
    bound = 0.03 if dtype == torch.bfloat16 else 1e-4
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error < bound, f"the ways differ by {error}"


def measure(ways: dict[str, Step], rounds: int, repeats: int, device: torch.device) -> dict[str, float]:
    """The median over the rounds of a step's wall clock, ms; of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, step in ways.items():
            dist.barrier()
            wait(device)
            start = time.perf_counter()
            for _ in range(repeats):
                step()
            wait(device)
            if number:
                times[name].append((time.perf_counter() - start) / repeats * 1e3)
    medians = torch.tensor([statistics.median(values) for values in times.values()], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def run(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: measure, and on the first print and write."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    width = 4096 if on_gpu else 256
    sizes = {"mlp": (64, 1024, 8192), "sequence": (1024, 8192), "block": (1024, 8192)}
    makers = {"mlp": mlp_ways, "sequence": sequence_ways, "block": block_ways}
    rows = []
    for work in args.only.split(","):
        for tokens in sizes[work] if on_gpu else (64,):
            ways = makers[work](tokens, width, device, dtype)
            medians = measure(ways, args.rounds, args.repeats, device)
            base = medians.get("by hand", medians["DTensor"])
            for name, value in medians.items():
                ratio = round(value / base, 2)
                by_hand, dtensor = (ratio, "") if "by hand" in medians else ("", ratio)
                rows.append(
                    {
                        "work": f"{work}, {tokens} tokens",
                        "way": name,
                        "ms": round(value, 3),
                        "to by hand": by_hand,
                        "to DTensor": dtensor,
                    }
                )
    if dist.get_rank() == 0:
        write("parallel_modules", rows, world=args.world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=20, help="steps in a row, in each round")
    parser.add_argument("--only", default="mlp,sequence,block")
    args = parser.parse_args()
    spawn(run, args)


if __name__ == "__main__":
    main()
