"""What a partitioned optimizer costs: ZeroRedundancyOptimizer beside plain torch, torch's own class and code by hand.

Three tables, each with ratios to its first row; all ways take turns in every round, and medians are printed.

* host: microseconds of a fused AdamW step over many small parameters, on the CPU, one process on torch's fake process
  group of four ranks. The floor is plain AdamW over a quarter of the parameters and the bare collectives.
* decoder: milliseconds of a training step of the 1.1 B decoder, forward and backward in bfloat16, float32 parameters:
  DistributedDataParallel with fused AdamW, torch's ZeroRedundancyOptimizer, ours, and a distributed Adam by hand.
* muon: milliseconds of a step of torch's Muon over the decoder's matrices: every rank steps all of them, or its part.

With four GPUs the last two run on four ranks with NCCL, else on one device with the fake group, whose collectives
return at once: what computation and the host take.

    python benchmarks/zero.py [--tables host decoder muon] [--rounds 20] [--batch 2]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from decoder import SMALL, Decoder, Size
from ranks import spawn, wait
from report import write
from torch import nn
from torch.distributed import optim as upstream
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtensor as st

WORLD = 4
Step = Callable[[], Any]
ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}


# -- by hand ----------------------------------------------------------------------------------------------------------


class ByHand:
    """A distributed Adam for one model: buckets of parameters, reduced, stepped and gathered in ranges."""

    def __init__(self, model: nn.Module, bucket_bytes: int = 64 * 2**20) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = next(model.parameters()).device
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        buckets: list[list[nn.Parameter]] = [[]]
        for param in reversed(list(model.parameters())):
            if sum(p.nbytes for p in buckets[-1]) >= bucket_bytes:
                buckets.append([])
            buckets[-1].append(param)
        self.buckets = [self._flat(params) for params in buckets]
        self.shards = [nn.Parameter(own) for _, _, own, _ in self.buckets]
        self.optimizer = torch.optim.AdamW(self.shards, **ADAMW)
        self.left = [len(params) for params in buckets]
        self.turn, self.packed = 0, [torch.empty(max(f.numel() for _, f, _, _ in self.buckets), device=self.device)] * 2
        self.packed[1] = torch.empty_like(self.packed[0])
        self.done = [torch.cuda.Event() if self.stream else None for _ in range(2)]
        for number, params in enumerate(buckets):
            for param in params:
                param.register_post_accumulate_grad_hook(partial(self._arrived, number))

    def _flat(self, params: list[nn.Parameter]) -> Any:
        total = sum(param.numel() for param in params)
        flat = torch.zeros(-(-total // (16 * self.world)) * 16 * self.world, device=self.device)
        sizes = [param.numel() for param in params]
        views = [v.view(p.shape) for v, p in zip(flat[:total].split(sizes), params, strict=True)]
        for view, param in zip(views, params, strict=True):
            view.copy_(param.data)
            param.data = view
        chunk = flat.numel() // self.world
        return params, flat, flat[self.rank * chunk : (self.rank + 1) * chunk], sizes

    @torch.no_grad()
    def _arrived(self, number: int, _: torch.Tensor) -> None:
        self.left[number] -= 1
        if self.left[number]:
            return
        params, flat, own, sizes = self.buckets[number]
        turn = self.turn = 1 - self.turn
        if self.stream:
            torch.cuda.current_stream().wait_event(self.done[turn])
        packed = self.packed[turn][: flat.numel()]
        views = [v.view(p.shape) for v, p in zip(packed[: sum(sizes)].split(sizes), params, strict=True)]
        torch._foreach_copy_(views, [param.grad for param in params])
        for param in params:
            param.grad = None
        self.shards[number].grad = grad = torch.empty_like(own)
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            dist.reduce_scatter_tensor(grad, packed, op=dist.ReduceOp.AVG if self.stream else dist.ReduceOp.SUM)
            if self.stream:
                self.done[turn].record(self.stream)

    def step(self) -> None:
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.optimizer.step()
        for shard, (_, flat, own, _) in zip(self.shards, self.buckets, strict=True):
            dist.all_gather_into_tensor(flat, own)
            shard.grad = None
        self.left = [len(params) for params, *_ in self.buckets]


# -- host -------------------------------------------------------------------------------------------------------------


def small_params(count: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(64, 64)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(64, 64)
    return params


def quarter(sends: str, count: int) -> Step:
    """Plain AdamW over a quarter of the parameters, and bare collectives of as many bytes as all of them."""
    params = small_params(count)
    flat = torch.empty(count * params[0].numel())
    own = flat.chunk(WORLD)[0]
    sent = {"parameters": params, "flats": flat.chunk(WORLD)}.get(sends, [])
    optimizer = torch.optim.AdamW(params[::WORLD], **ADAMW)

    def step() -> None:
        optimizer.step()
        if not sent:
            dist.all_gather_into_tensor(flat, own)
        for work in [dist.broadcast(t.detach(), i % WORLD, async_op=True) for i, t in enumerate(sent)]:
            work.wait()

    return step


def partitioned(cls: Any, count: int, **options: Any) -> Step:
    return cls(small_params(count), torch.optim.AdamW, **options, **ADAMW).step


_BUCKETS = {"parameters_as_bucket_view": True}
HOST: dict[str, dict[str, Callable[[int], Step]]] = {
    "memory of parameters kept": {
        "plain over a quarter, a broadcast each": partial(quarter, "parameters"),
        "plain over all": lambda count: torch.optim.AdamW(small_params(count), **ADAMW).step,
        "torch ZeRO": partial(partitioned, upstream.ZeroRedundancyOptimizer),
        "ours": partial(partitioned, st.ZeroRedundancyOptimizer),
    },
    "bucket views": {
        "plain over a quarter, 4 broadcasts": partial(quarter, "flats"),
        "torch ZeRO": partial(partitioned, upstream.ZeroRedundancyOptimizer, **_BUCKETS),
        "ours": partial(partitioned, st.ZeroRedundancyOptimizer, **_BUCKETS),
    },
    "ranges": {
        "plain over a quarter, an all-gather": partial(quarter, "one"),
        "ours": partial(partitioned, st.ZeroRedundancyOptimizer, partition="ranges"),
    },
}


# -- decoder ----------------------------------------------------------------------------------------------------------


def decoder(size: Size, device: torch.device) -> Decoder:
    torch.manual_seed(0)
    with torch.device(device):
        return Decoder(size)


def trainer(module: nn.Module, step: Step, zero_grad: Step, size: Size, batch: int, device: torch.device) -> Step:
    torch.manual_seed(dist.get_rank())
    ids, targets = (torch.randint(size.vocabulary, (batch, size.sequence), device=device) for _ in range(2))

    def train() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = module(ids, targets)
        loss.backward()
        step()
        zero_grad()
        return loss.detach()

    return train


def all_reduced(state, bucket):  # without annotations: DDP refuses those that are text
    buffer = bucket.buffer().div_(WORLD)
    dist.all_reduce(buffer)
    future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    future.set_result(buffer)
    return future


def by_ddp(make: Callable[[Any], Any], size: Size, batch: int, device: torch.device) -> Step:
    module = DistributedDataParallel(
        decoder(size, device), device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    if dist.get_backend() == "fake":  # its handles have no results, which DDP needs
        module.register_comm_hook(None, all_reduced)
    optimizer = make(module)
    return trainer(module, optimizer.step, optimizer.zero_grad, size, batch, device)


def ours(size: Size, batch: int, device: torch.device, **options: Any) -> Step:
    module = decoder(size, device)
    optimizer = st.ZeroRedundancyOptimizer(
        module.named_parameters(), torch.optim.AdamW, overlap_gradients=True, module=module, **options, **ADAMW
    )
    return trainer(module, optimizer.step, optimizer.zero_grad, size, batch, device)


def by_hand(size: Size, batch: int, device: torch.device, bucket_mib: int = 64) -> Step:
    module = decoder(size, device)
    optimizer = ByHand(module, bucket_mib * 2**20)
    return trainer(module, optimizer.step, lambda: None, size, batch, device)


def zero_of(cls: Any, trained: nn.Module, **options: Any) -> Any:
    return cls(trained.parameters(), torch.optim.AdamW, **options, **ADAMW)


def behind_forward(trained: nn.Module) -> Any:
    return zero_of(st.ZeroRedundancyOptimizer, trained, partition="ranges", module=trained)


TRAINED: dict[str, Callable[[Size, int, torch.device], Step]] = {
    "DDP, AdamW": partial(by_ddp, lambda module: torch.optim.AdamW(module.parameters(), **ADAMW)),
    "DDP, torch ZeRO": partial(
        by_ddp, partial(zero_of, upstream.ZeroRedundancyOptimizer, parameters_as_bucket_view=True)
    ),
    "DDP, ours": partial(by_ddp, partial(zero_of, st.ZeroRedundancyOptimizer, parameters_as_bucket_view=True)),
    "DDP, ours, module": partial(by_ddp, behind_forward),
    "by hand": by_hand,
    "by hand, 256 MiB": partial(by_hand, bucket_mib=256),
    "ours, owners": partial(ours, partition="owners"),
    "ours, ranges": ours,
    "ours, ranges, 256 MiB": partial(ours, bucket_mib=256),
}


# -- muon -------------------------------------------------------------------------------------------------------------


def matrices(size: Size, device: torch.device) -> list[nn.Parameter]:
    params = [param for param in decoder(size, device).layers.parameters() if param.dim() == 2]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


MUON: dict[str, Callable[[Size, torch.device], Step]] = {
    "every rank steps all": lambda size, device: torch.optim.Muon(matrices(size, device), lr=1e-3).step,
    "ours": lambda size, device: (
        st.ZeroRedundancyOptimizer(
            matrices(size, device), torch.optim.Muon, lr=1e-3, parameters_as_bucket_view=True
        ).step
    ),
}


# -- measure ----------------------------------------------------------------------------------------------------------


def medians(ways: dict[Any, Step], rounds: int, repeats: int, device: torch.device) -> dict[Any, float]:
    """The median seconds of a step of each way; all take turns in every round."""
    spent: dict[Any, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        for _ in range(3):
            step()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, step in ways.items():
            wait(device)
            begun = time.perf_counter()
            for _ in range(repeats):
                step()
            wait(device)
            spent[name].append((time.perf_counter() - begun) / repeats)
    gc.enable()
    return {name: statistics.median(found) for name, found in spent.items()}


def rows(table: str, case: str, found: dict[str, float], unit: str, scale: float) -> list[dict[str, Any]]:
    first = next(iter(found.values()))
    return [
        {"table": table, "case": case, "way": way, unit: round(value * scale, 2), "ratio": round(value / first, 3)}
        for way, value in found.items()
    ]


def run(device: torch.device, args: argparse.Namespace) -> None:
    """Measure the tables on this rank, and print them on the first one."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of collectives, which torch 2.11 lacks
    torch.set_flush_denormal(True)  # the fake group leaves results as the memory was: denormal numbers would be slow
    size = Size() if device.type == "cuda" else SMALL
    found: list[dict[str, Any]] = []
    if "host" in args.tables:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for count in (200, 1000):
            steps = {(kind, name): make(count) for kind, ways in HOST.items() for name, make in ways.items()}
            times = medians(steps, args.rounds, 20, torch.device("cpu"))
            for kind, ways in HOST.items():
                own = {name: times[kind, name] for name in ways}
                found += rows("host", f"{count} parameters, {kind}", own, "us", 1e6)
        torch.set_num_threads(threads)
    if "decoder" in args.tables:
        ways = {name: TRAINED[name](size, args.batch, device) for name in args.ways or TRAINED}
        found += rows("decoder", f"batch {args.batch}", medians(ways, args.rounds, 3, device), "ms", 1e3)
        for row in found[-len(ways) :] if dist.get_backend() != "fake" else []:  # after as many steps of each
            row["loss"] = round(ways[row["way"]]().item(), 4)
        del ways
        gc.collect()
    if "muon" in args.tables:
        ways = {name: make(size, device) for name, make in MUON.items()}
        found += rows(
            "muon", f"{len(matrices(size, device))} matrices", medians(ways, args.rounds, 1, device), "ms", 1e3
        )
    if dist.get_rank() == 0:
        for table in args.tables:
            write(f"zero_{table}", [row for row in found if row["table"] == table], world=dist.get_world_size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", default=["host", "decoder", "muon"], choices=["host", "decoder", "muon"])
    parser.add_argument("--ways", nargs="+", choices=list(TRAINED))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--world", type=int, default=WORLD, help="the ranks, if there are as many GPUs (default 4)")
    args = parser.parse_args()
    if torch.cuda.device_count() >= args.world:
        spawn(run, args)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    run(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), args)


if __name__ == "__main__":
    main()
