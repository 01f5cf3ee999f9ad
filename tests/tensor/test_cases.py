"""Public bug reports about construction, gathering and operations, by case number; some are in test_init_local."""

from __future__ import annotations

import io
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def mean_over_uneven_rows() -> None:
    values = torch.arange(12.0, device=device()).view(3, 4)
    x = st.distribute(values, chunk(0), requires_grad=True)
    mean = x.mean()
    assert mean.item() == 5.5
    mean.backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((3, 4), 1 / 12, device=device()))
    row = st.distribute(values[:1], chunk(0), requires_grad=True)  # rank 1 holds nothing of it
    mean = row.mean()
    assert mean.item() == 1.5
    mean.backward()
    assert torch.equal(row.grad.full_tensor(), torch.full((1, 4), 0.25, device=device()))
    for source in (values, values[:1]):
        for call in (
            lambda t: t.mean(0),
            lambda t: t.mean(1),
            lambda t: t.var(correction=0),
            lambda t: t.std(1),
            lambda t: t.max(),
            lambda t: t.min(),
            lambda t: t.prod(1),
            lambda t: t.logsumexp((0, 1)),
        ):
            sharded = st.distribute(source, chunk(0), requires_grad=True)
            dense = source.clone().requires_grad_()
            found, want = call(sharded), call(dense)
            torch.testing.assert_close(whole(found), want)
            found.sum().backward()
            want.sum().backward()
            torch.testing.assert_close(sharded.grad.full_tensor(), dense.grad)


def test_b07_mean_over_uneven_rows(world):
    world(mean_over_uneven_rows, 2)


def index_of_the_maximum() -> None:
    values = torch.tensor([10.0, 5.0, 3.0, 8.0], device=device())
    x = st.distribute(values, chunk(0), requires_grad=True)
    assert x.argmax().item() == 0
    largest, smallest = x.max(0), x.min(0)
    assert (largest.values.item(), largest.indices.item()) == (10, 0)
    assert (smallest.values.item(), smallest.indices.item()) == (3, 2)
    assert whole(x.topk(2).indices).tolist() == [0, 3]
    assert whole(x.detach().sort().values).tolist() == [3, 5, 8, 10]
    assert whole(x.detach().sort().indices).tolist() == [2, 1, 3, 0]
    x.max().backward()
    assert x.grad.full_tensor().tolist() == [1, 0, 0, 0]
    ties = torch.tensor([3.0, 8.0, 8.0, 3.0], device=device())
    tied = st.distribute(ties, chunk(0))
    assert tied.argmax().item() == ties.argmax().item() == 1
    assert tied.argmin().item() == ties.argmin().item() == 0
    assert tied.max(0).indices.item() == ties.max(0).indices.item()
    assert whole(tied.topk(2).values).tolist() == [8, 8]
    square = (torch.arange(16.0, device=device()) % 5).view(4, 4)
    columns = st.distribute(square, chunk(1), requires_grad=True)
    dense = square.clone().requires_grad_()
    found, want = columns.max(dim=1), dense.max(dim=1)
    assert torch.equal(whole(found.values), want.values)
    assert torch.equal(whole(found.indices), want.indices)
    found.values.sum().backward()
    want.values.sum().backward()
    assert torch.equal(columns.grad.full_tensor(), dense.grad)


def test_b09_index_of_the_maximum(world):
    world(index_of_the_maximum, 2)


def norm_of_an_unreduced_sum() -> None:
    mine = torch.tensor([[1.0, 3.0], [2.0, 1.0]][dist.get_rank()], device=device())
    x = st.init_from_local_tensor(mine, "replicate partial(tp)", 2)
    assert [x.norm(p).item() for p in (2, 1, math.inf)] == [5, 7, 4]
    assert [torch.linalg.vector_norm(x, p).item() for p in (2, 1, math.inf)] == [5, 7, 4]


def test_b10_norm_of_an_unreduced_sum(world):
    world(norm_of_an_unreduced_sum, 2)


def weighted_mean() -> None:
    likely = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1], [0.2, 0.8]], device=device()).log()
    targets, weights = torch.tensor([0, 0, 1, 1], device=device()), torch.tensor([1.0, 10.0], device=device())
    ignored = torch.tensor([0, 0, 1, -100], device=device())  # two live ones on a rank, one on the other
    for loss, target, number in (
        (lambda x, t: F.nll_loss(x, t, weights), targets, 1.2425786),
        (lambda x, t: F.cross_entropy(x, t, weights, ignore_index=-100), ignored, None),
        (lambda x, t: F.cross_entropy(x, t), ignored, None),
    ):
        sharded, dense = st.distribute(likely, chunk(0), requires_grad=True), likely.clone().requires_grad_()
        found, want = loss(sharded, target), loss(dense, target)
        torch.testing.assert_close(found, want)
        assert number is None or math.isclose(found.item(), number, rel_tol=1e-6)
        found.backward()
        want.backward()
        torch.testing.assert_close(sharded.grad.full_tensor(), dense.grad)


def test_b11_class_weighted_mean_loss(world):
    world(weighted_mean, 2)


def views_across_a_cut() -> None:
    values = torch.arange(96.0, device=device())
    x = st.distribute(values.view(12, 8), chunk(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", st.GatherWarning)
        across = gathered_or_whole(x.view(16, 6))
        assert across[1].tolist() == [6, 7, 8, 9, 10, 11]
        assert torch.equal(across, values.view(16, 6))
        assert torch.equal(gathered_or_whole(x.view(-1)), values)
        assert torch.equal(gathered_or_whole(x.view(3, 4, 8)), values.view(3, 4, 8))
        cube = st.distribute(values.view(3, 8, 4), chunk(1))
        assert torch.equal(gathered_or_whole(cube.flatten(0, 1)), values.view(24, 4))


def gathered_or_whole(x: torch.Tensor) -> torch.Tensor:
    """What rank 0 gathers, where the result is sharded; the plain result else."""
    return gathered(x) if isinstance(x, st.ShardedTensor) else x


def test_b12_a_view_that_crosses_a_cut(world):
    world(views_across_a_cut, 4)


def norm_of_whole_rows() -> None:
    for dim in (0, 1):
        table = st.distribute(torch.tensor([[3.0, 4.0], [0.0, 0.5]], device=device()), chunk(dim), requires_grad=True)
        rows = F.embedding(torch.tensor([0, 1], device=device()), table, max_norm=1.0)
        want = torch.tensor([[0.6, 0.8], [0.0, 0.5]], device=device())
        torch.testing.assert_close(whole(rows), want)
        torch.testing.assert_close(table.detach().full_tensor(), want)


def test_b17_max_norm_is_of_whole_rows(world):
    world(norm_of_whole_rows, 2)


def vocabulary_in_parts() -> None:
    logits, label = torch.arange(4.0, device=device()).view(1, 4), torch.tensor([3], device=device())
    want = torch.tensor([[0.0320586, 0.0871443, 0.2368828, -0.3560857]], device=device())
    for spec in (chunk(1), "replicate"):
        x = st.distribute(logits, spec, requires_grad=True)
        loss = F.cross_entropy(x, label)
        assert math.isclose(loss.item(), 0.4401897, rel_tol=1e-6)
        loss.backward()
        torch.testing.assert_close(x.grad.full_tensor(), want)
    seven = st.distribute(torch.arange(7.0, device=device()).view(1, 7), chunk(1))
    assert math.isclose(F.cross_entropy(seven, torch.tensor([6], device=device())).item(), 0.4577628, rel_tol=1e-6)
    steep = st.distribute(logits * 1e4, chunk(1), requires_grad=True)
    F.cross_entropy(steep, label - 1).backward()
    assert steep.grad.full_tensor().isfinite().all()


def test_b18_cross_entropy_over_a_cut_vocabulary(world):
    world(vocabulary_in_parts, 2)
