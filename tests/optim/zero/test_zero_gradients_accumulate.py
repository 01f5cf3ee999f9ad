"""Gradients that add up over backwards, that some ranks lack, or that are frozen."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from harness.quick import sampled
from torch import nn, optim
from zero_models import (
    AVERAGED,
    PARTITIONS,
    SHAPES,
    assert_averaged,
    assert_equal,
    backward,
    batch,
    loss_of,
    part_of,
    reducing,
    twins,
)

import shardtensor as st
from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")
every_mode = pytest.mark.parametrize("mode", PARTITIONS)


def pair(mode, cls=optim.SGD, names=tuple(SHAPES), **options):
    model, oracle = twins(names)
    options = {"lr": 0.1, **({"momentum": 0.9, "weight_decay": 0.1} if cls is optim.SGD else {}), **options}
    return model, reducing(model, cls, mode, **options), oracle, cls(oracle.values(), **options)


def step_both(model, ours, oracle, plain, why=""):
    assert_averaged(model, oracle, why)
    ours.step()
    plain.step()
    assert_equal(model, oracle, why, **AVERAGED)


# -- accumulation: S is a backward that reduces, N one in no_sync; Z zeros all gradients, D drops them


def accumulate(order, mode):
    model, ours, oracle, plain = both_of = pair(mode)
    for round_ in range(2):
        for i, kind in enumerate(order):
            if kind in "ZD":
                for optimizer in (ours, plain):
                    optimizer.zero_grad(set_to_none=kind == "D")
            elif kind == "N":
                with ours.no_sync():
                    backward(model, oracle, 10 * round_ + i)
                assert not any(isinstance(param.grad, st.ShardedTensor) for param in model.values())
            else:
                backward(model, oracle, 10 * round_ + i)
                assert_averaged(model, oracle, (order, i))
        step_both(*both_of, order)
        ours.zero_grad()
        plain.zero_grad()


ORDERS = ["SS", "NS", "NNS", "SNS", "SNSNNS", "SZS", "SZ", "NZS", "SDS", "NDS", "SNDS", "SNZS"]


@both
@pytest.mark.parametrize(("order", "mode"), sampled(product(ORDERS, PARTITIONS), 14))
def test_gradients_of_several_backwards_add_up(world, order, mode):
    world(accumulate, 3, order=order, mode=mode)


def dropped_by_the_module():
    """`Module.zero_grad` and `grad = None` drop what a backward in no_sync put aside, too."""
    model, ours, oracle, plain = pair("default")
    for _ in range(2):
        backward(model, oracle, 0)
        with ours.no_sync():
            backward(model, oracle, 1)
        nn.ParameterDict(model).zero_grad()
        for param in oracle.values():
            param.grad = None
        backward(model, oracle, 2)
        step_both(model, ours, oracle, plain)
        ours.zero_grad()
        plain.zero_grad()


@sim
def test_gradients_dropped_by_the_module_are_dropped(world):
    world(dropped_by_the_module, 2)


def nested_contexts():
    model, ours, oracle, _ = pair("default")
    with ours.no_sync():
        with ours.no_sync():
            backward(model, oracle, 0)
        backward(model, oracle, 1)
    assert not any(isinstance(param.grad, st.ShardedTensor) for param in model.values())
    with pytest.raises(ZeroDivisionError), ours.no_sync():
        raise ZeroDivisionError
    backward(model, oracle, 2)
    assert_averaged(model, oracle)


@sim
def test_no_sync_is_nested_and_ends_with_an_error(world):
    world(nested_contexts, 2)


def computed_apart(mode):
    """`torch.autograd.grad` returns this rank's gradients and leaves those of parameters alone."""
    model, ours, oracle, plain = pair(mode)
    for step in range(2):
        backward(model, oracle, step)
        loss = loss_of(model, part_of(batch(9)))
        apart = torch.autograd.grad(loss, list(model.values()))
        assert not any(isinstance(grad, st.ShardedTensor) for grad in apart)
        step_both(model, ours, oracle, plain, step)
        ours.zero_grad()
        plain.zero_grad()


@sim
@every_mode
def test_gradients_computed_apart_are_not_reduced(world, mode):
    world(computed_apart, 3, mode=mode)


# -- who has which gradients


USED = {
    "unused on all ranks": lambda rank: [n for n in SHAPES if n not in ("bias", "number")],
    "unused on one rank": lambda rank: [n for n in SHAPES if rank != 1 or n not in ("matrix", "last", "number")],
    "each on one rank": lambda rank: list(SHAPES)[rank :: as_group().size],
    "in another order": lambda rank: list(SHAPES)[:: 1 if rank else -1],
}


def partly_used(how, mode, cls):
    """Only some parameters are used in the middle step; what no rank uses is not stepped, nor decayed."""
    model, ours, oracle, plain = pair(mode, cls)
    for step, used in enumerate((None, USED[how], None, USED[how])):
        backward(model, oracle, step, used)
        assert how != "unused on all ranks" or not step % 2 or model["bias"].grad is None
        step_both(model, ours, oracle, plain, step)
        if step < 3:
            ours.zero_grad()
            plain.zero_grad()
    backward(model, oracle, 9, USED[how])  # added to those of the step before
    step_both(model, ours, oracle, plain, "added")


@both
@every_mode
@pytest.mark.parametrize("how", USED)
def test_gradients_that_ranks_lack(world, how, mode):
    world(partly_used, 3, how=how, mode=mode, cls=optim.SGD)


@sim
@every_mode
@pytest.mark.parametrize("how", USED)
def test_gradients_that_ranks_lack_with_state(world, how, mode):
    world(partly_used, 4, how=how, mode=mode, cls=optim.AdamW)


WHEN = ("first", "before zero_grad", "after zero_grad")


def frozen(mode, when, is_thawed):
    """Parameters that require no gradient at first, or from some step on."""
    model, oracle = twins()
    names = ("bias", "number", "matrix")

    def change(value):
        for params in (model, oracle):
            for name in names:
                params[name].requires_grad_(value)

    if is_thawed or when == "first":
        change(False)
    ours = reducing(model, optim.SGD, mode, lr=0.1, momentum=0.9)
    plain = optim.SGD(oracle.values(), lr=0.1, momentum=0.9)
    for step in range(4):
        backward(model, oracle, step)
        step_both(model, ours, oracle, plain, step)
        if step == 1 and when == "before zero_grad":
            change(is_thawed)
        ours.zero_grad()
        plain.zero_grad()
        if step == 1 and when == "after zero_grad":
            change(is_thawed)


@sim
@every_mode
@pytest.mark.parametrize("when", WHEN)
def test_frozen_parameters(world, when, mode):
    world(frozen, 3, mode=mode, when=when, is_thawed=False)


@sim
@every_mode
def test_parameters_that_require_a_gradient_later(world, mode):
    world(frozen, 3, mode=mode, when="before zero_grad", is_thawed=True)


def too_late(mode):
    model, oracle = twins()
    for params in (model, oracle):
        params["bias"].requires_grad_(False)
    ours = reducing(model, optim.SGD, mode, lr=0.1)
    ours.zero_grad()
    for params in (model, oracle):
        params["bias"].requires_grad_(True)
    before = {name: param.detach().clone() for name, param in model.items()}
    loss_of(model, part_of(batch(0))).backward()
    with pytest.raises(st.RuleError, match=r"before optimizer\.zero_grad"):
        ours.step()
    assert all(torch.equal(model[name], value) for name, value in before.items()), "nothing was stepped"
    ours.zero_grad()
    backward(model, oracle, 1)
    step_both(model, ours, oracle, optim.SGD(oracle.values(), lr=0.1), 1)


@sim
@every_mode
def test_a_gradient_required_after_the_drop_of_the_others_is_an_error(world, mode):
    world(too_late, 3, mode=mode)
