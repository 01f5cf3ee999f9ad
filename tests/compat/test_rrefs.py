"""Shards over RPC: what `remote_shards` shows and when it is gone, placements by worker name, errors on every rank."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from shardtensor.sharded_tensor import ShardedTensor, _sharded_tensor_map
from torch.distributed import rpc

import shardtensor as st
from shardtensor import sharded_tensor
from shardtensor.compat.rrefs import check, share
from shardtensor.errors import RuleError


@contextmanager
def workers(store: str) -> Iterator[None]:
    """RPC between the ranks of the default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2, init_method=f"file://{store}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own use of a process group
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown()


def check_shown() -> None:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    chunk = st.ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    whole = torch.arange(10.0).view(5, 2)
    x = sharded_tensor.empty(chunk, 5, 2, init_rrefs=True, requires_grad=True)
    with torch.no_grad():
        x.copy_(whole)
    dist.barrier()
    shown = x.remote_shards()
    assert list(shown) == [other] and [rref.owner().id for rref in shown[other]] == [other]
    there = shown[other][0].to_here()
    assert there.metadata == x.metadata().shards_metadata[rank]  # the chunks are in the order of the placements
    assert torch.equal(there.tensor, whole[there.metadata.shard_offsets[0] :][: there.metadata.shard_sizes[0]])

    several = sharded_tensor.ones(st.ChunkShardingSpec(0, ["rank:0/cpu"] * 3), 5, 2, init_rrefs=True)
    shapes = [tuple(rref.to_here().tensor.shape) for rrefs in several.remote_shards().values() for rref in rrefs]
    assert shapes == ([(2, 2), (2, 2), (1, 2)] if rank else [])
    here = [st.Shard.from_tensor_and_offsets(torch.ones(2), [2 * rank], rank)]
    for made in (
        sharded_tensor.init_from_local_shards(here, 4, init_rrefs=True),
        ShardedTensor._init_from_local_tensor(torch.ones(2), "[tp]", 4, init_rrefs=True),
    ):
        assert len(made.remote_shards()[other]) == 1
    for none in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x * 2, x.double(), st.ones(chunk, 5, 2)):
        with pytest.raises(RuntimeError, match="ShardedTensor created with init_rrefs=False"):
            none.remote_shards()
    dist.barrier()  # a peer may still ask


def check_freed() -> None:
    gc.collect()
    gc.disable()
    try:
        assert not _sharded_tensor_map
        x, y = (sharded_tensor.zeros("[tp, -]", 4, 2, init_rrefs=True) for _ in range(2))
        assert len(_sharded_tensor_map) == 2
        torch.utils.swap_tensors(x, st.zeros("[tp, -]", 4, 2))  # refuses a tensor that has weak references
        assert x._remote is None and len(_sharded_tensor_map) == 1
        twin = copy.copy(y)
        del y
        assert list(twin.remote_shards()) == [1 - dist.get_rank()]
        del twin
        assert not _sharded_tensor_map
    finally:
        gc.enable()


def check_names() -> None:
    rank = dist.get_rank()
    boxes = st.EnumerableShardingSpec([st.ShardMetadata([2 * r], [2], f"worker{r}/cpu") for r in range(2)])
    assert sharded_tensor.zeros(boxes, 4, init_rrefs=True).metadata().shards_metadata == boxes.shards
    piece = st.Shard(torch.ones(2), st.ShardMetadata([2 * rank], [2], f"worker{rank}/cpu"))
    assert st.init_from_local_shards([piece], 4).metadata().shards_metadata == boxes.shards
    assert st.shard_tensor(torch.arange(4), boxes).full_tensor().tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="Invalid worker name: workerfoo"):
        st.zeros(st.ChunkShardingSpec(0, ["workerfoo/cpu"]), 4)


def check_all(folder: str) -> None:
    """All in one RPC world: torch does not take well to a second one in a process."""
    spec = st.ChunkShardingSpec(0, ["worker1/cpu", "worker0/cpu"])
    with pytest.raises(RuntimeError, match="RPC framework needs to be initialized"):
        st.zeros(spec, 3)
    with pytest.raises(RuntimeError, match="RPC Framework needs to be initialized"):
        sharded_tensor.zeros("[tp]", 4, init_rrefs=True)
    with workers(f"{folder}/store"):
        check_shown()
        check_freed()
        check_names()
        x = st.distribute(torch.arange(3), spec)
        dist.barrier()
    rank = dist.get_rank()
    assert x.local_tensor().tolist() == ([2] if rank == 0 else [0, 1])
    assert x.sharding_spec() == spec and str(x.local_shards()[0].metadata.placement) == f"worker{rank}/cpu"
    assert pickle.loads(pickle.dumps(x)).full_tensor().tolist() == [0, 1, 2]  # by rank: there is no RPC now


def test_shards_over_rpc(world, tmp_path):
    world(check_all, 2, folder=str(tmp_path))


def test_ranks_in_rpc_must_be_those_of_the_process_group():
    check({0: 0, 1: 1})
    with pytest.raises(ValueError, match="Default ProcessGroup and RPC ranks must be the same"):
        check({0: 1, 1: 0})
    with pytest.raises(RuntimeError, match="RPC Framework needs to be initialized"):
        check({0: 0, 1: None})


def test_a_world_of_one_without_rpc_is_refused():
    with pytest.raises(RuleError, match="ranks without"):
        share(st.zeros("[tp]", 4))
