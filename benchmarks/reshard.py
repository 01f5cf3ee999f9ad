"""What laying a tensor out anew costs, beside the bare collective that moves the same bytes.

Every rank of a world does it: gloo on the CPU ([4096, 4096] float32), NCCL where there are GPUs ([16384, 16384]
bfloat16). All ways take turns in every round; the slowest rank's median over the rounds is told, its ratio to the bare
collective, and the bytes that a rank received, which are those it lacked.

    python benchmarks/reshard.py [--world 2] [--side 4096] [--rounds 30]

* pack + all-to-all: the hand-written way on the CPU; the buffer it packs into is kept, its result is allocated.
* raw all-to-all, raw all-gather: the collective alone, of the same bytes, packed already, into a result it allocates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import spawn, wait
from report import write
from shardtensor.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing import assert_close

import shardtensor as st
from shardtensor.layout.route import route

Way = Callable[[], Any]


def ways(side: int, dtype: torch.dtype, device: torch.device) -> dict[str, dict[str, Way]]:
    """For each move, the ways to do it; all start from this rank's rows of one tensor."""
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = side // size
    whole_rows = torch.arange(rows * side, device=device).remainder_(251).view(rows, side).to(dtype) + rank
    ours = st.init_from_local_tensor(whole_rows, "[tp, -]", side, side)
    theirs = DTensor.from_local(whole_rows, init_device_mesh(device.type, (size,)), [Shard(0)], run_check=False)
    buffer = torch.empty_like(whole_rows)

    def pack() -> torch.Tensor:
        return buffer.view(size, rows, rows).copy_(whole_rows.view(rows, size, rows).transpose(0, 1))

    def all_to_all() -> torch.Tensor:
        out = torch.empty(side, rows, dtype=dtype, device=device)
        dist.all_to_all_single(out.view(-1), buffer.view(-1))
        return out

    def packed_all_to_all() -> torch.Tensor:
        pack()
        return all_to_all()

    def all_gather() -> torch.Tensor:
        out = torch.empty(side, side, dtype=dtype, device=device)
        dist.all_gather_into_tensor(out, whole_rows)
        return out

    pack()
    columns = st.reshard(ours, "[-, tp]")._local
    assert_close(columns, packed_all_to_all(), rtol=0, atol=0)
    assert_close(columns, theirs.redistribute(placements=[Shard(1)]).to_local(), rtol=0, atol=0)
    return {
        "rows to columns": {
            "raw all-to-all": all_to_all,
            "pack + all-to-all": packed_all_to_all,
            "shardtensor": lambda: st.reshard(ours, "[-, tp]"),
            "DTensor": lambda: theirs.redistribute(placements=[Shard(1)]),
        },
        "rows to whole": {
            "raw all-gather": all_gather,
            "shardtensor": lambda: st.reshard(ours, "replicate"),
            "DTensor": lambda: theirs.redistribute(placements=[Replicate()]),
        },
    }


def measure(named: dict[str, Way], rounds: int, device: torch.device) -> dict[str, float]:
    """The median over the rounds of each way's time, ms; of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in named}
    for number in range(rounds + 3):
        for name, way in named.items():
            dist.barrier()
            wait(device)
            start = time.perf_counter()
            result = way()
            wait(device)
            spent = time.perf_counter() - start
            del result
            if number >= 3:
                times[name].append(spent * 1e3)
    medians = torch.tensor([statistics.median(values) for values in times.values()], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def received_and_lacked(source: ShardedTensor, spec: str) -> tuple[int, int]:
    """Bytes: what the steps of the route bring this rank, and what its new boxes have that its old ones have not."""
    target = st.reshard(source, spec)
    rank, item = dist.get_rank(), source.element_size()
    brought = sum(step.received(rank) for step in route(source._layout, target._layout))
    (old,), (new,) = source._layout.boxes(rank), target._layout.boxes(rank)
    both = old.overlap(new)
    return brought * item, (new.numel - (both.numel if both else 0)) * item


def run(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: measure, and on the first print and write."""
    side, dtype = args.side, torch.bfloat16 if device.type == "cuda" else torch.float32
    table = []
    for move, named in ways(side, dtype, device).items():
        medians = measure(named, args.rounds, device)
        ours = st.empty("[tp, -]", side, side, dtype=dtype)
        received, lacked = received_and_lacked(ours, "[-, tp]" if "columns" in move else "replicate")
        assert received == lacked, "a rank receives what it lacks"
        floor = next(iter(medians.values()))
        for name, value in medians.items():
            table.append(
                {
                    "move": move,
                    "way": name,
                    "ms": round(value, 3),
                    "to the bare collective": round(value / floor, 2),
                    "to pack + all-to-all": round(value / medians.get("pack + all-to-all", floor), 2),
                    "MiB lacked": round(lacked / 2**20, 1),
                }
            )
    if dist.get_rank() == 0:
        facts = {"world": args.world, "side": side, "dtype": str(dtype), "rounds": args.rounds}
        write("reshard" + ("_gpu" if device.type == "cuda" else ""), table, **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument("--world", type=int, default=min(count, 4) or 2)
    parser.add_argument("--side", type=int, default=16384 if count else 4096)
    parser.add_argument("--rounds", type=int, default=30)
    spawn(run, parser.parse_args())


if __name__ == "__main__":
    main()
