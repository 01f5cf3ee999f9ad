"""Measure the time of collectives and products on the available ranks, and write it to a hardware profile."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from shardtensor.cli.arguments import quiet_processes
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.cost.profile import KINDS, Curve, Profile, read_profile, received_share

_ROUNDS = 12
_ROUND_S = 0.02
_WARM_S = 0.1
_MOST_CALLS = 50
_SIZES = {"cuda": [1 << n for n in range(16, 30)], "cpu": [1 << n for n in range(14, 25, 2)]}  # bytes of a full tensor
_MOST_SLEEP_S = 0.02
_CYCLES_PER_S = 2e9  # of a GPU, at most


def calibrate(out: Path) -> int:
    """Measure on the ranks that torchrun started, else on ranks of this machine; write the profile; about a minute.

    On this machine it starts one rank for each GPU, else two to four processes with gloo. Returns the exit status.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", 0)), str(out))
        return 0
    count = torch.cuda.device_count()
    if count == 1:
        print(
            "shardtensor plan: collectives want two GPUs, and this machine has one; start it with torchrun on several"
        )
        return 2
    quiet_processes()
    world = count or max(2, min(4, os.cpu_count() or 2))
    with socket.socket() as s:
        s.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(s.getsockname()[1]), LOCAL_WORLD_SIZE=str(world))
    torch.multiprocessing.spawn(_started, (world, str(out)), nprocs=world)
    return 0


def _started(rank: int, world: int, out: str) -> None:
    _work(rank, world, rank, out)


def _work(rank: int, world: int, local_rank: int, out: str) -> None:
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        profile = measure_profile(int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        if rank == 0:
            Path(out).write_text(profile.as_text())
            print(f"{profile.about}\nwritten to {out}")
    finally:
        dist.destroy_process_group()


def measure_profile(ranks_per_node: int) -> Profile:
    """Measure all values of a profile. All ranks of the default group call it; it takes at most a minute.

    Args:
        ranks_per_node: as they were started. The links between nodes are measured if there are several nodes, else
            taken from the nearest packaged profile.
    """
    world = as_group(None)
    node = [r for r in world.ranks if r // ranks_per_node == world.rank // ranks_per_node]
    within = _curves(world.subgroup(node) if len(node) < world.size else world, world)
    across = [r for r in world.ranks if r % ranks_per_node == world.rank % ranks_per_node]
    base = read_profile(nearest() if world.device_type == "cuda" else "cpu")  # gloo ranks may be on a machine with GPUs
    between: Mapping[str, Curve] = base.between
    if len(across) > 1:
        between = _curves(world.subgroup(across), world)
    dtype, rate = _product_rate(world)
    name = torch.cuda.get_device_name() if world.device_type == "cuda" else "cpu"
    return attrs.evolve(
        base,
        name=name,
        about=f"{name}: {world.size} ranks, {len(node)} in a node, torch {torch.__version__}, measured",
        ranks_per_node=base.ranks_per_node if len(across) == 1 else ranks_per_node,
        memory_bytes=torch.cuda.mem_get_info()[1] if world.device_type == "cuda" else base.memory_bytes,
        flops_per_s={**base.flops_per_s, dtype: rate},
        within=within,
        between=between,
    )


def measure(kind: str, whole_bytes: int, group: Group) -> tuple[float, float]:
    """Measure one collective: many calls, one after the other, at the speed of the devices. All members call it.

    Args:
        kind: one of `KINDS`.
        whole_bytes: of the full tensor: the argument of an all-reduce, the result of an all-gather, the argument of a
            reduce-scatter, all that one rank sends in an all-to-all, with its own part.

    Returns:
        the bytes that a rank receives, and the seconds of one call on the slowest rank: the lower quartile of some
        rounds, since other work of a machine only makes rounds longer.
    """
    call, received = _call(kind, whole_bytes, group)
    return received, _module_change(call, group)


def _module_change(call: Callable[[], Any], group: Group) -> float:
    """Return the seconds of one call, after warm-up calls for connections and clocks."""
    for _ in range(3):
        call()
    first = _slowest(_timed(call, 3, group), group)  # equal on all ranks, as are the numbers of calls below
    calls = max(1, min(int(_ROUND_S / first), _MOST_CALLS))
    for _ in range(max(1, int(_WARM_S / (first * calls)))):
        _timed(call, calls, group)
    times = sorted(_slowest(_timed(call, calls, group), group) for _ in range(_ROUNDS))
    return times[len(times) // 4]


def _call(kind: str, whole_bytes: int, group: Group) -> tuple[Callable[[], Any], float]:
    """Return a function that calls the collective once, and the bytes that a rank receives in it."""
    n = group.size
    dtype = torch.bfloat16 if group.device_type == "cuda" else torch.float32
    each = max(whole_bytes // dtype.itemsize // n, 1)
    whole = torch.zeros(each * n, dtype=dtype, device=group.device_type)
    part, other = torch.zeros(each, dtype=dtype, device=group.device_type), torch.zeros_like(whole)
    counts = [each] * n
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather_into(whole, part).wait(),
        "reduce_scatter": lambda: group.reduce_scatter_into(part, whole).wait(),
        "all_to_all": lambda: group.all_to_all(whole, counts, counts, out=other),
    }
    return calls[kind], whole.numel() * dtype.itemsize * received_share(kind, n)


def _timed(call: Callable[[], Any], calls: int, group: Group) -> float:
    """Return the mean seconds of `calls` calls."""
    group.barrier()
    if group.device_type == "cuda":
        return _timed_on_gpu(call, calls)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _timed_on_gpu(call: Callable[[], Any], calls: int) -> float:
    """Measure by the clock of the GPU, which waits until the host has queued all calls: host speed does not matter."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    for _ in range(4):
        call()
    call_s = (time.perf_counter() - start) / 4
    torch.cuda.synchronize()
    torch.cuda._sleep(int(_CYCLES_PER_S * min(1.5 * call_s * (calls + 1), _MOST_SLEEP_S)))
    call()  # synchronizes the ranks
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def _slowest(seconds: float, group: Group) -> float:
    times = torch.tensor([seconds], dtype=torch.float64, device=group.device_type)
    return float(group.all_reduce(times, "max"))


def _curves(group: Group, world: Group) -> dict[str, Curve]:
    pair = None
    if group.size > 2:
        mine = group.ranks[group.index - group.index % 2 :][:2]
        pair = world.subgroup(list(mine))
    found = {}
    for kind in KINDS:
        points = [measure(kind, size, group) for size in _SIZES[group.device_type]]
        hop_s = 0.0
        if pair is not None and pair.size == 2:
            turns = 2 if kind == "all_reduce" else 1
            _, alone = measure(kind, _SIZES[group.device_type][0], pair)
            hop_s = max(points[0][1] - alone, 0.0) / (turns * (group.size - 2))
        points = [(size, _slowest(time, world)) for size, time in points]  # of all nodes
        hop_s = _slowest(hop_s, world)
        found[kind] = Curve(group.size, hop_s, [size for size, _ in points], _growing([time for _, time in points]))
    return found


def _growing(times: list[float]) -> list[float]:
    """Return times that grow: one above that of a larger message is lowered to it, since the host was busy then."""
    return list(accumulate(reversed(times), min))[::-1]


def nearest() -> str:
    """Return the name of the packaged profile that is nearest to this machine."""
    if not torch.cuda.is_available():
        return "cpu"
    return "h200" if "H200" in torch.cuda.get_device_name() else "h100"


def _product_rate(group: Group) -> tuple[str, float]:
    """Return the dtype and the FLOP/s of a large product on the slowest rank."""
    on_gpu = group.device_type == "cuda"
    dtype, side = (torch.bfloat16, 8192) if on_gpu else (torch.float32, 768)
    a = torch.randn(side, side, device=group.device_type).to(dtype)
    out = torch.empty_like(a)

    def call() -> None:
        torch.mm(a, a, out=out)

    seconds = _module_change(call, group)
    return str(dtype).removeprefix("torch."), 2 * side**3 / seconds
