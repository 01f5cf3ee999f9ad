"""Gradients that are reduced in backward to the ranks that step them equal those of the dense program, as do steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from harness import device, every_size
from harness.quick import sampled
from torch import optim
from zero_models import (
    AVERAGED,
    MANY,
    PARTITIONS,
    STEPS,
    Factored,
    assert_averaged,
    assert_equal,
    batch,
    groups_of,
    in_turns,
    loss_of,
    names_for,
    part_of,
    reducing,
    train_both,
    twins,
)

from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")
every_mode = pytest.mark.parametrize("mode", PARTITIONS)

CLASSES = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"foreach": True},
    "Adam": {"fused": True, "amsgrad": True},
    "Adafactor": {},
    "Muon": {},
    "Factored": {},
    "Adagrad": {"initial_accumulator_value": 0.5},
}
EXACT = {"rtol": 1e-6, "atol": 1e-7}
"""In float64 a wrong scale or a missing element is no rounding; Adam's denominator has an epsilon of 1e-8."""
BY_BFLOAT16 = {"rtol": 1e-2, "atol": 1e-2}  # Muon computes in bfloat16


def double(params):
    return {name: torch.nn.Parameter(param.detach().double()) for name, param in params.items()}


def class_of(name):
    return Factored if name == "Factored" else getattr(optim, name)


def steps_of(name, mode, bucket_mib, dtype=torch.float64):
    """Two groups whose parameters take turns, with a learning rate each."""
    model, oracle = twins(names_for("Adafactor" if name == "Factored" else name))
    dtype = torch.float32 if name == "Factored" else dtype
    if dtype == torch.float64:
        model, oracle = double(model), double(oracle)
    cls, options = class_of(name), {"lr": 0.05, **CLASSES[name]}
    ours = reducing(groups_of(model), cls, mode, bucket_mib=bucket_mib, **options)
    plain = cls(groups_of(oracle), **options)
    close = BY_BFLOAT16 if name == "Muon" else EXACT if dtype == torch.float64 else AVERAGED
    train_both(model, ours, oracle, plain, range(STEPS), **close)
    assert all(leaf.grad is None for group in ours.optim.param_groups for leaf in group["params"])


BUCKETS = {"one": 64.0, "many": MANY, "each": 1e-9}
CASES = sampled(product(CLASSES, PARTITIONS, BUCKETS), 22)


@sim
@pytest.mark.parametrize(("case", "ranks"), in_turns(CASES))
def test_gradients_and_steps_equal_the_dense_ones(world, case, ranks):
    name, mode, buckets = case
    world(steps_of, ranks, name=name, mode=mode, bucket_mib=BUCKETS[buckets])


@pytest.mark.parametrize(("name", "mode"), [("SGD", "default"), ("AdamW", "of_owners"), ("Adam", "of_ranges")])
def test_gradients_and_steps_in_processes(world, name, mode):
    world(steps_of, 3, name=name, mode=mode, bucket_mib=MANY)


@sim
@every_mode
def test_gradients_of_float32(world, mode):
    world(steps_of, 4, name="SGD", mode=mode, bucket_mib=MANY, dtype=torch.float32)


@sim
@every_size
@every_mode
def test_every_number_of_ranks(world, size, mode):
    world(steps_of, size, name="AdamW", mode=mode, bucket_mib=MANY)


def few(names, mode, cls):
    model, oracle = twins(names)
    ours, plain = reducing(model, cls, mode, lr=0.1), cls(oracle.values(), lr=0.1)
    train_both(model, ours, oracle, plain, range(STEPS))


@sim
@every_mode
@pytest.mark.parametrize("names", [["number"], ["last"], ["number", "empty"], ["matrix", "number"]], ids=str)
def test_fewer_parameters_than_ranks(world, names, mode):
    world(few, 4, names=names, mode=mode, cls=optim.SGD)
    world(few, 3, names=names, mode=mode, cls=optim.Adagrad)


def mixed(mode, other, cls):
    """Parameters of another dtype come in a group of their own: a call of the constructor takes one dtype."""
    model, oracle = twins()
    names = list(model)
    for params in (model, oracle):
        for name in names[::2]:
            params[name] = torch.nn.Parameter(params[name].detach().to(other))
    ours = reducing([model[name] for name in names[::2]], cls, mode, lr=0.05)
    plain = cls([oracle[name] for name in names[::2]], lr=0.05)
    for optimizer, params in ((ours, model), (plain, oracle)):
        optimizer.add_param_group({"params": [params[name] for name in names[1::2]]})
    close = {"rtol": 0.05, "atol": 0.05} if other == torch.bfloat16 else AVERAGED
    train_both(model, ours, oracle, plain, range(STEPS), **close)


@sim
@every_mode
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW])
def test_parameters_of_two_dtypes(world, cls, other, mode):
    world(mixed, 3, mode=mode, other=other, cls=cls)


def as_closure(name, mode):
    """A step whose closure computes the gradients."""
    model, oracle = (double(params) for params in twins(names_for(name)))
    cls, x = class_of(name), batch(0)
    ours, plain = reducing(model, cls, mode, lr=0.05), cls(oracle.values(), lr=0.05)

    def closure(params, optimizer, rows):
        optimizer.zero_grad()
        loss = loss_of(params, rows)
        loss.backward()
        return loss.detach()

    for step in range(STEPS):
        got = ours.step(lambda: closure(model, ours, part_of(x)))
        want = plain.step(lambda: closure(oracle, plain, x))
        torch.testing.assert_close(as_group().all_reduce(got.clone(), "avg"), want)
        assert_equal(model, oracle, step, **EXACT)
        assert_averaged(model, oracle, step)


@sim
@every_mode
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_closure_computes_the_gradients(world, name, mode):
    world(as_closure, 3, name=name, mode=mode)


def other_memory(mode, what):
    """Complex parameters, and ones in channels_last: their memory is in another order than that of buckets."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 3, 2, 2, generator=generator, dtype=torch.complex64 if what == "complex" else None)
    values = values.to(device()).to(memory_format=torch.channels_last)
    model, oracle = ({"weight": torch.nn.Parameter(values.clone())} for _ in range(2))
    ours, plain = reducing(model, optim.SGD, mode, lr=0.1), optim.SGD(oracle.values(), lr=0.1)

    def loss(params, x):
        return (x @ params["weight"].reshape(24, 3)).abs().square().mean()

    for step in range(2):
        x = batch(step).to(values.dtype)
        loss(model, part_of(x)).backward()
        loss(oracle, x).backward()
        assert_averaged(model, oracle, what)
        ours.step()
        plain.step()
        assert_equal(model, oracle, what, **AVERAGED)
        ours.zero_grad()
        plain.zero_grad()


@sim
@every_mode
@pytest.mark.parametrize("what", ["complex", "channels_last"])
def test_parameters_with_other_memory(world, what, mode):
    world(other_memory, 3, mode=mode, what=what)
