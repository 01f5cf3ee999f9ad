"""Public bug reports about construction and gathering, by case number; B03, B05 and B06 are in test_init_local."""

from __future__ import annotations

import io
import math

import pytest
import torch
import torch.distributed as dist
from harness import device

import shardtensor as st


def chunk(dim: int) -> st.ChunkShardingSpec:
    return st.ChunkShardingSpec(dim, [f"rank:{rank}/{device(rank)}" for rank in range(dist.get_world_size())])


def gathered(x: st.ShardedTensor) -> torch.Tensor:
    """What rank 0 gathers, which must be what every rank sees; other ranks receive nothing."""
    out = torch.empty(x.shape, device=device()) if dist.get_rank() == 0 else None
    x.gather(0, out)
    full = x.full_tensor()
    assert out is None or torch.equal(out, full)
    return full


def with_an_empty_rank(n: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    values = torch.arange(float(n), device=device())
    x = st.distribute(values, chunk(0))
    step = math.ceil(n / size)
    sizes = [max(min(n - r * step, step), 0) for r in range(size)]
    if n == 6:
        assert sizes == [2, 2, 2, 0]
    assert x.size() == (n,)
    (shard,) = x.local_shards()
    assert shard.tensor.shape == (sizes[rank],)
    assert shard.metadata.shard_sizes == [sizes[rank]]
    assert shard.metadata.shard_offsets == [min(rank * step, n)]
    assert [m.shard_sizes for m in x.metadata().shards_metadata] == [[length] for length in sizes]
    assert torch.equal(gathered(x), values)

    source, target = torch.nn.Module(), torch.nn.Module()
    source.weight = torch.nn.Parameter(x)
    target.weight = torch.nn.Parameter(st.zeros(chunk(0), n))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file))
    assert torch.equal(gathered(target.weight.detach()), values)


@pytest.mark.parametrize("n", range(10))
def test_b01_a_rank_that_owns_nothing(world, n):
    world(with_an_empty_rank, 4, n=n)


def there_and_back(dim: int) -> None:
    for n in (5, *range(10)):
        shape = [10, 10]
        shape[dim] = n
        values = torch.arange(float(10 * n), device=device()).view(shape)
        x = st.distribute(values, chunk(dim))
        if n == 5:
            sizes = [m.shard_sizes[dim] for m in x.metadata().shards_metadata]
            assert sizes == [2, 2, 1, 0]
        assert torch.equal(gathered(x), values)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_b04_shard_then_gather_is_the_identity(world, dim):
    world(there_and_back, 4, dim=dim)
