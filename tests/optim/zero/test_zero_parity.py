"""Partitioned steps equal the plain optimizer's: bit for bit for whole parameters, to rounding for ranges."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from harness import every_size
from torch import optim
from zero_models import (
    MATRICES,
    MODES,
    OPTIONS,
    ROUNDED,
    SHAPES,
    STEPS,
    Factored,
    assert_equal,
    groups_of,
    in_turns,
    names_for,
    quadratic,
    set_grads,
    twins,
    zero,
)

import shardtensor as st

SKIPPED = [(), ("matrix", "number"), ("bias", "empty", "strided")]
"""The parameters without a gradient in each step."""


def test_every_class_for_dense_gradients_is_tried():
    classes = {name for name, x in vars(optim).items() if isinstance(x, type) and issubclass(x, optim.Optimizer)}
    assert classes - {"Optimizer", "SparseAdam"} == set(OPTIONS)


def steps_of(name, mode, names, with_groups):
    for options in OPTIONS[name]:
        model, oracle = twins(names)
        cls, options = getattr(optim, name), {"lr": 0.05, **options}
        # Sums, and the last elements of fused kernels, depend on strides and lengths, which are others in flat buffers.
        rounds = mode == "ranges" or (mode == "views" and (options.get("fused") or name in ("Adafactor", "Muon")))
        close = ROUNDED if rounds else {}
        if with_groups:
            plain = cls(groups_of(oracle, name), **options)
            ours = zero(groups_of(model, name), cls, mode, **options)
        else:
            plain, ours = cls(list(oracle.values()), **options), zero(model, cls, mode, **options)
        for step in range(STEPS):
            if name == "LBFGS":
                assert ours.step(quadratic(model)).item() == plain.step(quadratic(oracle)).item()
            else:
                set_grads(step, model, oracle, skipped=SKIPPED[step % len(SKIPPED)])
                assert ours.step() is None
                plain.step()
            assert_equal(model, oracle, (name, options, mode, step), **close)


def sweep(name, mode):
    steps_of(name, mode, names_for(name), with_groups=False)
    steps_of(name, mode, names_for(name), with_groups=True)
    steps_of(name, mode, names_for(name)[:1], with_groups=False)  # on most ranks there is nothing to step


@pytest.mark.worlds("sim")
@pytest.mark.parametrize(("case", "ranks"), in_turns(product(OPTIONS, MODES)))
def test_steps_equal_the_plain_optimizer(world, case, ranks):
    name, mode = case
    world(sweep, ranks, name=name, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_steps_in_processes_equal_the_plain_optimizer(world, mode):
    world(steps_of, 3, name="AdamW", mode=mode, names=list(SHAPES), with_groups=True)


def closures(mode):
    """A closure computes gradients in the step, for a class that calls it once."""
    model, oracle = twins()
    plain, ours = optim.Adam(oracle.values(), lr=0.1), zero(model, optim.Adam, mode, lr=0.1)
    for _ in range(STEPS):
        assert ours.step(quadratic(model)).item() == plain.step(quadratic(oracle)).item()
        assert_equal(model, oracle, mode, **(ROUNDED if mode == "ranges" else {}))


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("mode", MODES)
def test_a_closure_computes_the_gradients_of_the_step(world, mode):
    world(closures, 3, mode=mode)


def other_dtype(mode, dtype):
    model, oracle = ({name: torch.nn.Parameter(x.detach().to(dtype)) for name, x in own.items()} for own in twins())
    plain, ours = optim.SGD(oracle.values(), lr=0.1, momentum=0.9), zero(model, optim.SGD, mode, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        set_grads(step, model, oracle)
        plain.step()
        ours.step()
        rounds = mode == "ranges" or (
            mode == "views" and dtype == torch.bfloat16
        )  # flat, other vectors round otherwise
        assert_equal(model, oracle, mode, **({"rtol": 1e-2, "atol": 1e-2} if rounds else {}))


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_another_dtype(world, mode, dtype):
    world(other_dtype, 3, mode=mode, dtype=dtype)


def shapes_stepped(cls):
    model, oracle = twins(MATRICES)
    ours, plain = zero(model, cls, "ranges", lr=0.1), cls(list(oracle.values()), lr=0.1)
    set_grads(0, model, oracle)
    ours.step()
    plain.step()
    assert_equal(model, oracle, **ROUNDED)  # in a flat buffer a matrix has other strides
    return [tuple(leaf.shape) for group in ours.optim.param_groups for leaf in group["params"]]


@pytest.mark.worlds("sim")
@pytest.mark.parametrize(("cls", "ranks"), in_turns([optim.Muon, optim.Adafactor, Factored]))
def test_ranges_do_not_divide_a_matrix_that_is_updated_as_one(world, cls, ranks):
    shapes = [shape for found in world(shapes_stepped, ranks, cls=cls) for shape in found]
    assert sorted(shapes) == sorted(SHAPES[name] for name in MATRICES)


def elements_stepped():
    model, _ = twins(["matrix", "strided", "bias"])
    ours = zero(model, optim.AdamW, "ranges")
    set_grads(0, model)
    ours.step()
    leaves = [leaf for group in ours.optim.param_groups for leaf in group["params"]]
    states = [ours.state[param]["exp_avg"] for param in model.values() if param in ours.state]
    local = [x._local if isinstance(x, st.ShardedTensor) else x for x in states]
    return sum(leaf.numel() for leaf in leaves), sum(x.numel() for x in local)


@every_size
@pytest.mark.worlds("sim")
def test_state_is_held_once_in_all(world, size):
    found = world(elements_stepped, size)
    assert sum(elements for elements, _ in found) == sum(states for _, states in found) == 15 + 24 + 12


def memory_kept():
    """With owners and without views, parameters stay where they are."""
    model, _ = twins()
    before = {name: (param.data_ptr(), param.stride()) for name, param in model.items()}
    ours = zero(model, optim.AdamW)
    set_grads(0, model)
    ours.step()
    assert {name: (param.data_ptr(), param.stride()) for name, param in model.items()} == before


@pytest.mark.worlds("sim")
def test_with_owners_the_memory_of_parameters_stays_as_it_is(world):
    world(memory_kept, 3)


def large_params():
    """Parameters above the size that is sent alone, one of them not contiguous."""
    torch.manual_seed(0)
    values = [torch.randn(300, 300), torch.randn(200, 400).t(), torch.randn(5)]
    for mode in MODES:
        model, oracle = ({str(i): torch.nn.Parameter(v.clone()) for i, v in enumerate(values)} for _ in range(2))
        plain, ours = optim.AdamW(oracle.values(), lr=0.1), zero(model, optim.AdamW, mode, lr=0.1)
        for step in range(2):
            set_grads(step, model, oracle)
            plain.step()
            ours.step()
        assert_equal(model, oracle, mode, **(ROUNDED if mode == "ranges" else {}))


@pytest.mark.worlds("sim")
def test_large_parameters(world):
    world(large_params, 3)
