"""Gradients of sums and means over unequal batches, by hand; and how many collectives a step has."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import FULL
from spmd_steps import STYLES, compiled, eager_optimizer, plain_step, spread, whole
from torch import nn

from shardtensor.comm.torch_group import TorchGroup

styles = pytest.mark.parametrize("style", STYLES)


def sum_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    return loss


def sums(style, reduce_op):
    torch.manual_seed(0)
    module = nn.Linear(2, 1, bias=False)
    run = compiled(sum_step, style, reduce_op=reduce_op)
    batch = torch.full((1, 2), dist.get_rank() + 1.0)
    run(module, torch.optim.SGD(module.parameters(), lr=0.0), batch)
    return whole(module.weight.grad).unique().tolist()


@styles
@pytest.mark.parametrize(("reduce_op", "gradient"), [("mean", 1.5), ("sum", 3.0)])
def test_the_gradient_of_a_sum(world, style, reduce_op, gradient):
    assert world(sums, 2, style=style, reduce_op=reduce_op) == [[gradient]] * 2


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.w * x


def square_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = (model(x) - 1).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def unequal(style, reduce_op):
    module = Scalar()
    run = compiled(square_step, style, reduce_op=reduce_op)
    x = torch.tensor([[1.0, 2.0, 3.0], [10.0]][dist.get_rank()]) if dist.get_rank() == 0 else torch.tensor([10.0])
    loss = run(module, torch.optim.SGD(module.parameters(), lr=0.0), x)
    return whole(module.w.grad).tolist(), loss.item()


@styles
@pytest.mark.parametrize("reduce_op", ["mean", "sum"])
def test_unequal_batches_weigh_by_samples(world, style, reduce_op):
    assert world(unequal, 2, style=style, reduce_op=reduce_op) == [([-8.0], 1.0)] * 2


def uneven_at_the_end(style):
    """Batches that are equal first; then one rank has fewer samples, and then all have as many as before."""
    module = Scalar()
    run = compiled(square_step, style)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    grads = []
    for first, second in (
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]),
        ([1.0, 2.0, 3.0], [10.0]),
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]),
    ):
        run(module, optimizer, torch.tensor([first, second][dist.get_rank()]))
        grads += whole(module.w.grad).tolist()
    return grads


@pytest.mark.parametrize("style", STYLES[: 1 + FULL])
def test_one_rank_has_a_smaller_last_batch(world, style):
    assert world(uneven_at_the_end, 2, timeout_s=8, style=style) == [[-7.0, -8.0, -7.0]] * 2


def label_step(model, optimizer, batch, weight):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1], weight=weight, ignore_index=-1)
    loss.backward()
    optimizer.step()
    return loss


def labels_that_count(style, weighted, rows):
    """The loss is divided by what the labels of all ranks count."""
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    dense = deepcopy(module)
    x, labels = torch.randn(8, 5), torch.tensor([0, -1, -1, -1, 1, 2, -1, 2])
    weight = torch.tensor([1.0, 2.0, 3.0]) if weighted else None
    batch = tuple(part.split(rows)[dist.get_rank()].clone() for part in (x, labels))
    run = compiled(lambda model, optimizer, batch: label_step(model, optimizer, batch, weight), style)
    loss = run(module, torch.optim.SGD(module.parameters(), lr=0.1), batch)
    expected = label_step(dense, torch.optim.SGD(dense.parameters(), lr=0.1), (x, labels), weight)
    torch.testing.assert_close(loss, expected.detach())
    for p, q in zip(module.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


@styles
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [[4, 4], [3, 5]])
def test_labels_that_do_not_count(world, style, weighted, rows):
    world(labels_that_count, 2, style=style, weighted=weighted, rows=rows)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return (self.w * x).sum()


CLASSES = {"SGD": {}, "momentum": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "Adagrad": {}}


def synced(style, name):
    cls = getattr(torch.optim, "SGD" if name == "momentum" else name)
    options = {"lr": 0.1} | CLASSES[name]
    module = Weights()
    other = spread(deepcopy(module), style)
    optimizer, beside = cls(module.parameters(), **options), eager_optimizer(other, style, cls, options)
    run = compiled(sum_step, style)
    found = []
    for batches in (([0.0, 4.0], [2.0, 0.0]), ([6.0, 0.0], [0.0, -8.0])):
        x = torch.tensor([batches[dist.get_rank()]])
        run(module, optimizer, x)
        sum_step(other, beside, x)
        assert torch.equal(whole(module.w), whole(other.w))
        found.append(whole(module.w).tolist())
    return found


@styles
@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_steps_with_the_reduced_gradient(world, style, name):
    first, second = world(synced, 2, style=style, name=name)
    assert first == second
    if name == "Adam":
        torch.testing.assert_close(torch.tensor(first), torch.tensor([[0.9, 0.9], [0.8082219, 0.9366104]]))


# -- collectives


SENT = ("all_reduce_async", "all_reduce", "all_gather_into", "reduce_scatter_into", "broadcast_async", "broadcast",
        "all_gather", "exchange", "exchange_objects")  # fmt: skip


def sent(run, *args):
    """Count what one call sends."""
    counts: Counter[str] = Counter()
    was = {name: getattr(TorchGroup, name) for name in SENT}

    def counting(name, self, *args, **kwargs):
        counts[name] += 1
        return was[name](self, *args, **kwargs)

    for name in SENT:

        def method(self, *args, _name=name, **kwargs):
            return counting(_name, self, *args, **kwargs)

        setattr(TorchGroup, name, method)
    try:
        run(*args)
    finally:
        for name, function in was.items():
            setattr(TorchGroup, name, function)
    if counts.pop("exchange", 0):  # which kinds of arguments the ranks have: an all_gather of 8 bytes
        counts.subtract(all_gather=1)
    return {name: count for name, count in counts.items() if count}


def silent(model, optimizer, batch):
    plain_step(model, optimizer, batch)


def classifying(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


class Repeated(nn.Module):
    def __init__(self, repeats):
        super().__init__()
        self.first = nn.Linear(5, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.head = nn.Linear(256, 3)
        self.repeats = repeats

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.repeats):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return self.head(x)


def counted_steps(style, step, repeats, labels=False, **mode):
    torch.manual_seed(0)
    module = Repeated(repeats)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = compiled(step, style, **mode)
    batch = torch.randn(4, 5), torch.randint(3, (4,)) if labels else torch.randn(4, 3)
    run(module, optimizer, batch)
    return sent(run, module, optimizer, batch)


@pytest.mark.parametrize("step", [silent, plain_step, classifying])
def test_collectives_of_replicated_parameters(world, step):
    """The loss is in the bucket, the number of labels that count in the comparison of programs."""
    found = world(counted_steps, 2, style="replicate", step=step, repeats=1, labels=step is classifying)
    assert found == [{"all_gather_into": 1, "all_reduce_async": 1}] * 2


def test_collectives_of_small_buckets(world):
    found = world(counted_steps, 2, style="replicate", step=silent, repeats=1, bucket_mib=1e-9)
    assert found == [{"all_gather_into": 1, "all_reduce_async": 10}] * 2


@pytest.mark.parametrize("repeats", [3, 1][: 1 + FULL])
@pytest.mark.parametrize(("keep_mib", "again"), [(0, 3), (0.3, 2), (64, 0)])
def test_collectives_of_sharded_parameters(world, repeats, keep_mib, again):
    """Units: three layers of 0.25 MiB, and the rest, which stays gathered from forward to backward; the comparison."""
    found = world(counted_steps, 2, style="fully_shard", step=silent, repeats=repeats, keep_mib=keep_mib)
    assert found == [{"all_gather_into": 3 + 1 + again + 1, "reduce_scatter_into": 4}] * 2
