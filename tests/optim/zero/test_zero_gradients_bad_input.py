"""What an optimizer that reduces gradients refuses, on every rank, and how it goes on."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from harness import device
from torch import nn, optim
from zero_models import (
    MATRICES,
    PARTITIONS,
    assert_value,
    dense,
    reducing,
    train_both,
    twins,
    zero,
)

import shardtensor as st
from shardtensor.comm.process_group import as_group

pytestmark = pytest.mark.worlds("sim")
every_mode = pytest.mark.parametrize("mode", PARTITIONS)


def arguments():
    with pytest.raises(ValueError, match="overlap_with_ddp"):
        reducing(dense(), optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(st.RuleError, match="LBFGS"):
        reducing(dense(MATRICES), optim.LBFGS)
    with pytest.raises(ValueError, match="partition"):
        reducing(dense(), optim.SGD, partition="rows", lr=0.1)
    plain = zero(dense(), optim.SGD, lr=0.1)
    with pytest.raises(st.RuleError, match="overlap_gradients"), plain.no_sync():
        pass


def test_arguments_that_exclude_each_other(world):
    world(arguments, 2)


def averaged_twice(mode):
    """Gradients are averaged once: by this optimizer, by another one, or by data_parallel."""
    model = st.data_parallel(nn.Linear(3, 2).to(device()))
    with pytest.raises(st.LayoutError):
        reducing(list(model.parameters()), optim.SGD, mode, lr=0.1)
    params, oracle = twins()
    ours, plain = reducing(params, optim.SGD, mode, lr=0.1), optim.SGD(oracle.values(), lr=0.1)
    with pytest.raises(st.LayoutError):
        st.data_parallel(nn.ParameterDict(params))
    train_both(params, ours, oracle, plain, range(2))
    with pytest.raises(st.LayoutError):
        reducing(params, optim.SGD, mode, lr=0.1)


@every_mode
def test_gradients_are_averaged_once(world, mode):
    world(averaged_twice, 2, mode=mode)


def made_again(mode):
    """After an optimizer is dropped, another one can reduce the gradients of the same parameters at once."""
    params, oracle = twins()
    ours, plain = reducing(params, optim.SGD, mode, lr=0.1), optim.SGD(oracle.values(), lr=0.1)
    train_both(params, ours, oracle, plain, [0])
    del ours
    again = reducing(params, optim.SGD, mode, lr=0.1)
    train_both(params, again, oracle, plain, [1, 2])


@every_mode
def test_another_optimizer_after_one_that_was_dropped(world, mode):
    gc.disable()
    try:
        world(made_again, 3, mode=mode)
    finally:
        gc.enable()


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, words):
        return self.head(self.table(words)).square().mean()


def sparse_gradient(mode):
    """Every rank raises; when the layer is changed, training goes on."""
    torch.manual_seed(0)
    module = Words(sparse=True).to(device())
    model = dict(module.named_parameters())
    oracle = {name: nn.Parameter(param.detach().clone()) for name, param in model.items()}
    ours = reducing(list(model.values()), optim.SGD, mode, lr=0.1)
    words = torch.tensor([1, 2 + as_group().rank], device=device())
    with pytest.raises(st.RuleError, match="sparse") as caught:
        module(words).backward()
    assert "sparse=False" in str(caught.value)
    assert_value(dict(module.named_parameters()), oracle, "nothing was stepped")
    module.table.sparse = False
    ours.zero_grad()
    module(words).backward()
    assert all(isinstance(param.grad, st.ShardedTensor) for param in model.values())
    ours.step()
    return {name: param.detach() for name, param in model.items()}


@every_mode
def test_a_sparse_gradient_is_refused_on_every_rank(world, mode):
    found = world(sparse_gradient, 3, mode=mode)
    for other in found[1:]:
        assert_value(other, found[0], "equal on all ranks")


DIFFERENCES = ("shape", "number", "dtype", "frozen", "mode", "bucket", "class")


def differing(what):
    """Rank 1 differs."""
    is_other = as_group().rank == 1
    shapes = {"a": (4, 3), "b": (5,), "c": (2,)}
    if is_other and what == "shape":
        shapes["b"] = (6,)
    if is_other and what == "number":
        del shapes["c"]
    dtype = torch.float64 if is_other and what == "dtype" else torch.float32
    params = [nn.Parameter(torch.ones(shape, dtype=dtype, device=device())) for shape in shapes.values()]
    if is_other and what == "frozen":
        params[1].requires_grad_(False)
    options = {"bucket_mib": 1.0} if is_other and what == "bucket" else {}
    cls = optim.AdamW if is_other and what == "class" else optim.Adam
    make = partial(zero, mode="ranges") if is_other and what == "mode" else reducing
    with pytest.raises(st.DisagreementError) as caught:
        make(params, cls, lr=0.1, **options)
    return str(caught.value)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_what_differs_between_ranks(world, what):
    texts = world(differing, 3, what=what)
    assert texts == [texts[0]] * 3
    assert "rank 1" in texts[0]
