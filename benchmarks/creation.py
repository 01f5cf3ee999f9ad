"""What it costs to create a sharded tensor, at 8 ranks and at 16,384.

One process on torch's fake process group, so that any number of ranks can be pretended; nothing is sent. Every spec is
new to every cache and made before the clock starts. Beside it: DTensor's `zeros` over a mesh of as many ranks, and
torch's own `_shard` factories (which list all ranks for each tensor).

    python benchmarks/creation.py [--tensors 400]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from report import write
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtensor as st

WORLDS = (8, 16384)


def microseconds(make: Callable[[object], object], arguments: list[object]) -> float:
    """Median time of one call, each with a fresh argument."""
    times = []
    for argument in arguments:
        start = time.perf_counter()
        made = make(argument)
        times.append(time.perf_counter() - start)
        del made
    return 1e6 * statistics.median(times)


def ours(world: int, tensors: int) -> dict[str, float]:
    # A dim that no earlier call used makes every spec, layout and binding new.
    rows = [world * (i + 2) for i in range(tensors)]
    by_range = [(st.ChunkShardingSpec(0, [f"rank:0-{world - 1}/cpu"]), n) for n in rows]
    by_axis = [(st.Spec(st.Cut("tp", sizes=None, unit=i + 1), None), world * (i + 1)) for i in range(tensors)]
    st.zeros("[warm]", world)
    return {
        "shardtensor, ranks by range": microseconds(lambda a: st.empty(a[0], a[1], 4), by_range),
        "shardtensor, mesh axis": microseconds(lambda a: st.empty(a[0], a[1], 4), by_axis),
    }


def dtensor(world: int, tensors: int) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    mesh = init_device_mesh("cpu", (world,))
    rows = [world * (i + 2) for i in range(tensors)]
    return {"DTensor": microseconds(lambda n: empty(n, 4, device_mesh=mesh, placements=[Shard(0)]), rows)}


def torch_shard(world: int, tensors: int) -> dict[str, float]:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    count = min(tensors, 3 if world > 100 else 50)
    specs = [(ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(world)]), world * (i + 2)) for i in range(count)]
    return {"torch _shard": microseconds(lambda a: sharded_tensor.empty(a[0], a[1], 4), specs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=400)
    tensors = parser.parse_args().tensors
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[int, float]] = {}
    for world in WORLDS:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        for measure in (ours, dtensor, torch_shard):
            for name, value in measure(world, tensors).items():
                found.setdefault(name, {})[world] = value
        dist.destroy_process_group()
    rows = [
        {
            "what": name,
            **{f"{world} ranks, us": round(values[world], 2) for world in WORLDS},
            "ratio": round(values[WORLDS[1]] / values[WORLDS[0]], 2),
        }
        for name, values in found.items()
    ]
    write("creation", rows)


if __name__ == "__main__":
    main()
