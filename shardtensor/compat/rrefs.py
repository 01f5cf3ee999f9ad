"""Shards shown to other ranks over torch.distributed.rpc: ``init_rrefs=True`` and ``remote_shards()``.

A tensor that asks for it owns a `RemoteShards`, which the other ranks fill with RRefs by its number. It is registered
weakly and does not know its tensor, and an RRef shows a shard of its own over the same bytes: nothing keeps a tensor
alive, and no weak reference to a tensor keeps torch from swapping it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import rpc

from shardtensor.comm.process_group import as_group, rpc_is_up
from shardtensor.errors import LayoutError, RuleError
from shardtensor.tensor.shard import Shard
from shardtensor.tensor.sharded_tensor import ShardedTensor


class RemoteShards(dict[int, list[Any]]):
    """What other ranks show of one tensor: RRefs by rank, of those that hold any of it."""


SHOWN: WeakValueDictionary[int, RemoteShards] = WeakValueDictionary()
"""By a number that this process gave; an entry leaves with its tensor."""

_numbers = count()


def share(tensor: ShardedTensor) -> ShardedTensor:
    """Show this rank's shards to all ranks, and return `tensor` when theirs are shown here.

    Every rank of the world calls it, whatever the tensor's process group. The shards share the tensor's bytes; a
    tensor that is set in a shard later is not shown. Copies, conversions and results of operations show nothing.
    """
    world = as_group(dist.group.WORLD)
    shown, number = RemoteShards(), next(_numbers)
    SHOWN[number] = shown
    here = rpc.get_worker_info().id if rpc_is_up() else None
    peers = dict(zip(world.ranks, world.exchange_objects((number, here)), strict=True))
    check({rank: rpc_rank for rank, (_, rpc_rank) in peers.items()})
    if shards := [rpc.RRef(Shard(shard.tensor, shard.metadata)) for shard in tensor.local_shards()]:
        others = {rank: number for rank, (number, _) in peers.items() if rank != world.rank}
        sent = [rpc.rpc_async(rank, _receive, (number, world.rank, shards)) for rank, number in others.items()]
        torch.futures.wait_all(sent)
    world.barrier()
    tensor._remote = shown
    return tensor


def with_rrefs(make: Callable[..., ShardedTensor]) -> Callable[..., ShardedTensor]:
    """Return `make` with the option ``init_rrefs=True``: show the shards to all ranks; see `share`."""

    @wraps(make)
    def made(*args: Any, init_rrefs: bool = False, **options: Any) -> ShardedTensor:
        tensor = make(*args, **options)
        return share(tensor) if init_rrefs else tensor

    return made


def check(rpc_ranks: dict[int, int | None]) -> None:
    """Raise when a rank has no RPC (None), or another number there than in the process group."""
    absent = [rank for rank, rpc_rank in rpc_ranks.items() if rpc_rank is None]
    if absent:
        raise RuleError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc if init_rrefs is set to True",
            {"ranks without": ", ".join(map(str, absent[:8]))},
            ["call init_rpc on every rank", "leave init_rrefs out: full_tensor() and gather() need no RPC"],
        )
    for rank, rpc_rank in rpc_ranks.items():
        if rank != rpc_rank:
            raise LayoutError(
                "Default ProcessGroup and RPC ranks must be the same for ShardedTensor",
                {"process group rank": rank, "its RPC rank": rpc_rank},
                "pass init_rpc the rank that init_process_group has",
            )


def _receive(number: int, rank: int, shards: list[Any]) -> None:
    """Run by another rank, here: take the RRefs to its shards."""
    shown = SHOWN.get(number)
    if shown is None:
        raise RuntimeError(f"the tensor number {number}, whose shards rank {rank} shows, is gone")
    shown[rank] = shards


def remote_shards(tensor: ShardedTensor) -> dict[int, list[Any]]:
    """Return RRefs to the `Shard` objects of other ranks, by rank; ranks that hold nothing are absent. Sends
    nothing. ``rref.to_here()`` brings a shard. The tensor has to be made with ``init_rrefs=True``."""
    if tensor._remote is None:
        raise RuleError(
            "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available",
            fix=["metadata() has the ranks of all shards", "full_tensor() or gather() copy them here"],
        )
    return dict(sorted(tensor._remote.items()))


ShardedTensor.remote_shards = remote_shards  # type: ignore[attr-defined]
