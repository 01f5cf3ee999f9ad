"""A decoder of 1.1 B parameters trained by fully_shard, by torch's FSDP2, and by no one but the products themselves.

Every way is built, trained and freed by itself, so that its peak of memory is its own; told are ms of a step (wall
clock of steps in a row), what the host takes to hand one over, tokens a second, the part of the peak that the products
reach (MFU), GiB of memory at most allocated and reserved, and how often the allocator went to the device in the steps
that were timed. The floor is the same decoder in bfloat16 without communication and without an optimizer. Before
anything is timed, 50 captured steps of a small model, with resharding, accumulation and a changing rate, are compared
with 50 eager ones, bit for bit, and the losses of 50 steps with FSDP2's. bfloat16 compute and reductions, float32
parameters, AdamW.

    python benchmarks/fully_shard.py [--world 4] [--batches 1 2 4 8] [--ways ours fsdp2 floor ...]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from decoder import SMALL, Decoder, Size
from ranks import spawn, wait
from report import write
from torch import nn

import shardtensor as st
from shardtensor.fsdp import MixedPrecisionPolicy

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PEAK = {"H100": 989e12, "H200": 989e12}  # bfloat16 products a second, dense


def model(size: Size, device: torch.device) -> Decoder:
    torch.manual_seed(0)
    with torch.device(device):
        return Decoder(size)


def step_of(module: nn.Module, optimizer: Any) -> Step:
    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = module(ids, targets)
        loss.backward()
        if optimizer is None:
            module.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def ours(size: Size, device: torch.device, compiled: bool = False, captured: bool = False) -> tuple[Step, Any]:
    module = model(size, device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in module.layers:
        if compiled:
            layer.compile()
        st.fully_shard(layer, mp_policy=policy)
    st.fully_shard(module, mp_policy=policy)
    optimizer = st.ShardedOptimizer(module, partial(torch.optim.AdamW, fused=True), lr=1e-4)
    step = step_of(module, optimizer)
    if not captured:
        return step, None
    graphed = st.graphed_step(step)
    return graphed, graphed.close


def fsdp2(size: Size, device: torch.device, compiled: bool = False) -> tuple[Step, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = model(size, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in module.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return step_of(module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)), None


def floor(size: Size, device: torch.device, compiled: bool = False, captured: bool = False) -> tuple[Step, Any]:
    module = model(size, device).to(torch.bfloat16)
    if compiled:
        for layer in module.layers:
            layer.compile()
    step = step_of(module, None)
    if not captured:
        return step, None
    graphed = st.graphed_step(step)
    return graphed, graphed.close


WAYS: dict[str, Callable[[Size, torch.device], tuple[Step, Any]]] = {
    "fsdp2": fsdp2,
    "ours": ours,
    "floor": floor,
    "fsdp2, compiled": partial(fsdp2, compiled=True),
    "ours, compiled": partial(ours, compiled=True),
    "floor, compiled": partial(floor, compiled=True),
    "ours, captured": partial(ours, captured=True),
    "floor, captured": partial(floor, captured=True),
}


def trained(device: torch.device, is_captured: bool, steps: int = 50) -> list[torch.Tensor]:
    """Losses and parameters of steps of two micro-batches each, the first without communication, with a changing rate.

    The layers are ones whose kernels always add up in one order, which not all kernels of attention do.
    """
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        module = nn.Sequential(*blocks, nn.Linear(64, 64))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        st.fully_shard(block, mp_policy=policy, reshard_after_forward=True)
    st.fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = []
        for half in range(2):
            module.set_requires_gradient_sync(half == 1)  # type: ignore[operator]
            loss = nn.functional.mse_loss(module(x[half]).float(), y[half])
            loss.backward()
            losses.append(loss.detach())
        st.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses)

    run = st.graphed_step(step) if is_captured else step
    losses = []
    for i in range(steps):
        generator = torch.Generator().manual_seed(i * dist.get_world_size() + dist.get_rank())
        x, y = (torch.randn(2, 32, 64, generator=generator).to(device) for _ in range(2))
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3 / (1 + i)).item()
        losses.append(run(x, y).clone())
    assert not is_captured or device.type == "cpu" or run.is_captured  # type: ignore[union-attr]
    found = [torch.stack(losses), *(param.full_tensor() for param in module.parameters())]  # type: ignore[operator]
    if is_captured:
        run.close()  # type: ignore[union-attr]
    return found


def batch_of(size: Size, batch: int, device: torch.device, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    drawn = [torch.randint(size.vocabulary, (batch, size.sequence), generator=generator) for _ in range(2)]
    return drawn[0].to(device), drawn[1].to(device)


def measured(way: str, size: Size, batch: int, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """One row: a way with a batch, of the slowest rank."""
    on_gpu = device.type == "cuda"
    step, close = WAYS[way](size, device)
    batches = [batch_of(size, batch, device, number) for number in range(4)]
    losses = [step(*batches[i % 4]).detach().clone() for i in range(args.warmup)]
    wait(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    before = _device_allocations()
    for _ in range(args.rounds):
        dist.barrier()
        wait(device)
        start = time.perf_counter()
        for i in range(args.repeats):
            losses.append(step(*batches[i % 4]).detach())
            if not i:
                host.append((time.perf_counter() - start) * 1e3)
        wait(device)
        times.append((time.perf_counter() - start) * 1e3 / args.repeats)
    grown = _device_allocations() - before
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if on_gpu else [0, 0]
    found = torch.tensor([statistics.median(times), statistics.median(host), *peaks], dtype=torch.float64)
    found = found.to(device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    ms, host_ms, allocated, reserved = found.tolist()
    peak = PEAK.get(next((name for name in PEAK if on_gpu and name in torch.cuda.get_device_name()), ""), 0)
    if close is not None:
        close()
    return {
        "batch": batch,
        "way": way,
        "ms": round(ms, 1),
        "host ms": round(host_ms, 2),
        "tokens/s": round(batch * size.sequence / ms * 1e3),
        "MFU": round(size.flops(batch) / ms * 1e3 / peak, 3) if peak else 0,
        "allocated": round(allocated / 2**30, 2),
        "reserved": round(reserved / 2**30, 2),
        "grown": grown,
        "loss": round(losses[-1].item(), 4),
    }


def curve(way: str, size: Size, steps: int, device: torch.device) -> list[float]:
    """The loss of each of `steps` steps over four batches in turn, the mean of the ranks."""
    step, close = WAYS[way](size, device)
    batches = [batch_of(size, 1, device, number) for number in range(4)]
    losses = torch.stack([step(*batches[i % 4]).detach().float().clone() for i in range(steps)])
    dist.all_reduce(losses)
    if close is not None:
        close()
    return (losses / dist.get_world_size()).tolist()


def print_curves(size: Size, steps: int, device: torch.device) -> None:
    """Losses of the same training by FSDP2 and by us, and how far they are apart at most."""
    curves = {}
    for way in ("fsdp2", "ours", "ours, captured"):
        gc.collect()
        curves[way] = curve(way, size, steps, device)
    if dist.get_rank() == 0:
        for way, losses in curves.items():
            apart = max(abs(a - b) / b for a, b in zip(losses, curves["fsdp2"], strict=True))
            shown = " ".join(f"{loss:.4f}" for loss in (*losses[:: max(1, steps // 6)], losses[-1]))
            print(f"losses of {steps} steps, {way}: {shown}; at most {apart:.1e} from fsdp2", flush=True)


def _device_allocations() -> int:
    return torch.cuda.memory_stats()["num_device_alloc"] if torch.cuda.is_available() else 0


def run(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: every way with every batch; the first rank prints."""
    for eager, captured in zip(trained(device, False), trained(device, True), strict=True):
        assert torch.equal(eager, captured), "captured steps give other numbers than eager ones"
    if dist.get_rank() == 0:
        print("50 captured steps equal 50 eager ones bit for bit, resharding and accumulating", flush=True)
    size = Size() if device.type == "cuda" else SMALL
    if args.curve:
        print_curves(size, args.curve, device)
    rows = []
    for batch in args.batches:
        for way in args.ways or WAYS:
            gc.collect()
            torch._dynamo.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            rows.append(measured(way, size, batch, device, args))
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
    if dist.get_rank() == 0:
        write("fully_shard", rows, world=args.world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), help="all if not given")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=6, help="steps in a row, in each round")
    parser.add_argument("--curve", type=int, default=50, metavar="N", help="steps of the loss curves; 0 for none")
    spawn(run, parser.parse_args())


if __name__ == "__main__":
    main()
