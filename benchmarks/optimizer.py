"""What an optimizer step costs over many small sharded parameters.

One process on torch's fake process group of four ranks; an elementwise step sends nothing. AdamW over 1,000
parameters, local shapes 4x4 and 64x64, fused and (with --all) foreach and for-loop. All ways take turns in every
round, and the median over the rounds is told beside its ratio to the bare local tensors.

    python benchmarks/optimizer.py [--params 1000] [--rounds 30] [--all]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import write
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtensor as st

WORLD = 4
Step = Callable[[], Any]


def ways(side: int, count: int, options: dict[str, Any]) -> dict[str, Step]:
    """An optimizer step over parameters that are each `side` x `side` on this rank, in every way of holding them."""
    made = {
        "bare local tensors": bare,
        "ShardedOptimizer": sharded_optimizer,
        "torch.optim on ShardedTensors": stock,
        "torch.optim on DTensors": dtensors,
        "torch _shard ShardedOptimizer": torch_shard,
    }
    steps = {}
    for name, make in made.items():
        try:
            step = make(side, count, options)
            step()
        except Exception as error:
            print(f"{name}: cannot, {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        else:
            steps[name] = step
    return steps


def bare(side: int, count: int, options: dict[str, Any]) -> Step:
    params = [torch.nn.Parameter(torch.zeros(side, side)) for _ in range(count)]
    return _stepper(params, torch.optim.AdamW(params, **options))


def _sharded(side: int, count: int) -> list[st.ShardedTensor]:
    return [st.zeros("[tp, -]", side * WORLD, side, requires_grad=True) for _ in range(count)]


def sharded_optimizer(side: int, count: int, options: dict[str, Any]) -> Step:
    params = _sharded(side, count)
    named = {f"layer{i}.weight": param for i, param in enumerate(params)}
    return _stepper([p.local_tensor() for p in params], st.ShardedOptimizer(named, torch.optim.AdamW, **options))


def stock(side: int, count: int, options: dict[str, Any]) -> Step:
    params = _sharded(side, count)
    return _stepper([p.local_tensor() for p in params], torch.optim.AdamW(params, **options))


def dtensors(side: int, count: int, options: dict[str, Any]) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (WORLD,))

    def make() -> DTensor:
        return DTensor.from_local(torch.ones(side, side), mesh, [Shard(0)])

    params = [torch.nn.Parameter(make()) for _ in range(count)]
    for param in params:
        param.grad = make()
    return torch.optim.AdamW(params, **options).step


def torch_shard(side: int, count: int, options: dict[str, Any]) -> Step:
    from torch.distributed._shard.sharded_optim import ShardedOptimizer
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharding_spec import ShardMetadata

    def make() -> ShardedTensor:  # with metadata given: the factories gather it, which a fake group cannot
        shards = [ShardMetadata([rank * side, 0], [side, side], f"rank:{rank}/cpu") for rank in range(WORLD)]
        local = torch.zeros(side, side, requires_grad=True)
        properties = TensorProperties(dtype=torch.float32, requires_grad=True)
        whole = ShardedTensorMetadata(shards, torch.Size((side * WORLD, side)), properties)
        return ShardedTensor._init_from_local_shards_and_global_metadata([Shard(local, shards[0])], whole)

    params = {f"layer{i}.weight": make() for i in range(count)}
    leaves = [param.local_shards()[0].tensor for param in params.values()]
    return _stepper(leaves, ShardedOptimizer(params, torch.optim.AdamW, **options))


def _stepper(leaves: list[torch.Tensor], optimizer: Any) -> Step:
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    return optimizer.step


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """The median time of a step of each, in microseconds; all take turns in each round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    gc.enable()
    return {name: 1e6 * statistics.median(measured) for name, measured in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--all", action="store_true", help="also foreach and for-loop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    implementations: dict[str, dict[str, Any]] = {"fused": {"fused": True}}
    if arguments.all:
        implementations |= {"foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    rows = []
    for kind, options in implementations.items():
        for side in (4, 64):
            steps = ways(side, arguments.params, options)
            times = medians(steps, arguments.rounds)
            for name, us in times.items():
                ratio = us / times["bare local tensors"]
                rows.append(
                    {
                        "AdamW": kind,
                        "local": f"{side}x{side}",
                        "way": name,
                        "us a step": round(us),
                        "ratio": round(ratio, 2),
                    }
                )
    write("optimizer", rows, params=arguments.params, rounds=arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
