"""Share shards with other ranks over torch.distributed.rpc: ``init_rrefs=True`` and ``remote_shards()``.

A tensor made with that option owns a `RemoteShards`; other ranks find it by its number and store RRefs in it. It is
registered weakly and has no reference to its tensor, and an RRef holds another `Shard` over the same memory. So nothing
keeps a tensor alive, and no weak reference to a tensor prevents torch from swapping it.
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
    """RRefs to the shards of one tensor on other ranks, by rank; without ranks that hold no shard."""


SHOWN: WeakValueDictionary[int, RemoteShards] = WeakValueDictionary()
"""By a number that this process counts; an entry is removed with its tensor."""

_numbers = count()


def share(tensor: ShardedTensor) -> ShardedTensor:
    """Send RRefs to this rank's shards to all ranks; return `tensor` when theirs have arrived.

    Every rank of the world calls it, whatever the tensor's process group. The shards share the tensor's memory; a
    tensor assigned to a shard later is not shared. Copies, conversions and results of operations have no RRefs.
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
    """Return `make` with the option ``init_rrefs=True``: share the shards with all ranks; see `share`."""

    @wraps(make)
    def made(*args: Any, init_rrefs: bool = False, **options: Any) -> ShardedTensor:
        tensor = make(*args, **options)
        return share(tensor) if init_rrefs else tensor

    return made


def check(rpc_ranks: dict[int, int | None]) -> None:
    """Raise if a rank has no RPC (None), or an RPC rank that differs from its rank in the process group."""
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
    """Store the RRefs to the shards of another rank, which calls this over RPC."""
    shown = SHOWN.get(number)
    if shown is None:
        raise RuntimeError(f"the tensor number {number}, whose shards rank {rank} shows, is gone")
    shown[rank] = shards


def remote_shards(tensor: ShardedTensor) -> dict[int, list[Any]]:
    """Return RRefs to the `Shard` objects of other ranks, by rank; ranks that hold nothing are absent. Sends
    nothing. ``rref.to_here()`` fetches a shard. The tensor must be made with ``init_rrefs=True``."""
    if tensor._remote is None:
        raise RuleError(
            "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available",
            fix=["metadata() has the ranks of all shards", "full_tensor() or gather() copy them here"],
        )
    return dict(sorted(tensor._remote.items()))


ShardedTensor.remote_shards = remote_shards  # type: ignore[attr-defined]
