"""What is refused, on every rank and with nothing changed; and parameters that were replaced after construction."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import device
from torch import nn, optim
from zero_models import MODES, ROUNDED, assert_equal, assert_value, dense, set_grads, twins, zero

import shardtensor as st
from shardtensor.comm.process_group import as_group

pytestmark = pytest.mark.worlds("sim")
every_mode = pytest.mark.parametrize("mode", MODES)


def tensors(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.ones(shape, dtype=dtype, device=device())) for shape in shapes]


def differing(what):
    """The parameters and options of a rank; those of rank 1 differ."""
    is_other = as_group().rank == 1
    if what == "number":
        return tensors((2, 3), (3,), (4,)) if is_other else tensors((2, 3), (3,)), {}
    if what == "shape":
        return tensors((3, 2) if is_other else (2, 3), (3,)), {}
    if what == "dtype":
        return tensors((2, 3), (3,), dtype=torch.float64 if is_other else torch.float32), {}
    if what == "order":
        return tensors(*((3,), (2, 3)) if is_other else ((2, 3), (3,))), {}
    if what == "names":
        names = ("b", "a") if is_other else ("a", "b")
        return list(zip(names, tensors((3,), (3,)), strict=True)), {}
    if what == "groups":
        first, second = tensors((3,), (3,))
        return [{"params": [first, second]}] if is_other else [{"params": [first]}, {"params": [second]}], {}
    return tensors((2, 3)), {"lr": 0.2 if is_other else 0.1}


def disagree(what, mode):
    params, options = differing(what)
    with pytest.raises(st.DisagreementError) as caught:
        zero(params, optim.Adam, mode, **options)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["owners", "ranges"])
@pytest.mark.parametrize("what", ["number", "shape", "dtype", "order", "names", "groups", "options"])
def test_parameters_that_differ_between_ranks(world, what, mode):
    texts = world(disagree, 3, what=what, mode=mode)
    assert texts[0] == texts[1] == texts[2] and "rank 1" in texts[0]


def disagree_later(mode):
    """A group that differs is not added, and the optimizer goes on."""
    model, oracle = twins()
    ours, plain = zero(model, optim.Adam, mode, lr=0.1), optim.Adam(oracle.values(), lr=0.1)
    with pytest.raises(st.DisagreementError):
        ours.add_param_group({"params": tensors((3,) if as_group().rank else (4,))})
    set_grads(0, model, oracle)
    ours.step()
    plain.step()
    assert_equal(model, oracle, mode, **(ROUNDED if mode == "ranges" else {}))
    assert len(ours.param_groups) == len(ours.optim.param_groups) == 1


@every_mode
def test_a_group_that_differs_is_not_added(world, mode):
    world(disagree_later, 2, mode=mode)


def partitions_differ():
    with pytest.raises(st.DisagreementError):
        zero(tensors((4,)), optim.Adam, "owners" if as_group().rank else "ranges")


def test_partitions_that_differ_between_ranks(world):
    world(partitions_differ, 2)


def wrong_types(mode):
    sharded = st.distribute(torch.ones(4, device=device()), "[tp]", requires_grad=True)
    with pytest.raises(st.RuleError, match="some are sharded"):
        zero([sharded], optim.SGD, mode, lr=0.1)
    plain = nn.Parameter(torch.ones(4, device=device()))
    with pytest.raises(st.RuleError, match="some are sharded"):  # the others raise the error of one rank
        zero([sharded if as_group().rank else plain], optim.SGD, mode, lr=0.1)
    with pytest.raises(ValueError, match="sparse"):
        zero([torch.ones(2, 2).to_sparse().requires_grad_()], optim.SGD, mode, lr=0.1)
    mixed = [*tensors((2,)), *tensors((2,), dtype=torch.float64)]
    if mode == "ranges":
        zero(mixed, optim.SGD, mode, lr=0.1)
    else:
        with pytest.raises(ValueError, match="same dense type"):
            zero(mixed, optim.SGD, mode, lr=0.1)
    with pytest.raises(ValueError, match="listed twice"):
        zero([plain, plain], optim.SGD, mode, lr=0.1)
    with pytest.raises(ValueError, match="empty"):
        zero([], optim.SGD, mode, lr=0.1)
    for params in (plain, 3, None):
        with pytest.raises(TypeError):
            zero(params, optim.SGD, mode, lr=0.1)
    with pytest.raises(TypeError):
        zero([plain, "weight"], optim.SGD, mode, lr=0.1)
    with pytest.raises(ValueError, match="params"):
        zero([{"lr": 0.1}], optim.SGD, mode, lr=0.1)


@every_mode
def test_types_that_are_refused(world, mode):
    world(wrong_types, 2, mode=mode)


def wrong_states(plain):
    """State dicts of other parameters: each of one kind."""
    good = plain.state_dict()
    shape, groups, extra = (copy.deepcopy(good) for _ in range(3))
    shape["state"][1]["exp_avg"] = torch.ones(3, 3)
    groups["param_groups"] = [*groups["param_groups"], {"params": [9]}]
    extra["state"][77] = {"exp_avg": torch.ones(3)}
    names = copy.deepcopy(good)
    names["param_groups"][0]["params"] = ["other.weight", *names["param_groups"][0]["params"][1:]]
    return {"shape": shape, "groups": groups, "extra": extra, "names": names}


def refuse_state(kind, mode, on_one_rank):
    model, oracle = twins(["matrix", "row", "bias"])
    ours, plain = zero(model, optim.Adam, mode, lr=0.1), optim.Adam(oracle.values(), lr=0.1)
    set_grads(0, model, oracle)
    ours.step()
    plain.step()
    good = plain.state_dict()
    wrong = wrong_states(plain)[kind]
    wrong["param_groups"][0]["lr"] = 9.0
    for values in list(wrong["state"].values())[:1]:
        values["exp_avg"] = values["exp_avg"] + 1
    with pytest.raises(st.LayoutError) as caught:
        ours.load_state_dict(good if on_one_rank and as_group().rank == 0 else wrong)
    assert isinstance(caught.value, ValueError)
    assert ours.param_groups[0]["lr"] == ours.optim.param_groups[0]["lr"] == 0.1
    for step in range(1, 3):
        set_grads(step, model, oracle)
        ours.step()
        plain.step()
        assert_equal(model, oracle, (kind, mode), **(ROUNDED if mode == "ranges" else {}))


@every_mode
@pytest.mark.parametrize("on_one_rank", [False, True], ids=["everywhere", "on_one_rank"])
@pytest.mark.parametrize("kind", ["shape", "groups", "extra", "names"])
def test_state_of_other_parameters_is_refused_and_nothing_loaded(world, kind, mode, on_one_rank):
    world(refuse_state, 2, kind=kind, mode=mode, on_one_rank=on_one_rank)


def replaced(mode):
    """A parameter whose .data was replaced is stepped with its new values."""
    model, oracle = twins()
    ours, plain = zero(model, optim.Adam, mode, lr=0.1), optim.Adam(oracle.values(), lr=0.1)
    for step in range(3):
        for name in ("bias", "matrix"):
            value = torch.full(model[name].shape, float(step), device=device())
            for params in (model, oracle):
                params[name].data = value.clone()
        set_grads(step, model, oracle)
        ours.step()
        plain.step()
        assert_equal(model, oracle, step, **(ROUNDED if mode == "ranges" else {}))


@every_mode
def test_a_parameter_whose_data_was_replaced_is_stepped(world, mode):
    world(replaced, 3, mode=mode)


def loaded_model(mode):
    """module.load_state_dict writes in place, or assigns with assign=True."""
    linear, twin = nn.Linear(4, 3).to(device()), nn.Linear(4, 3).to(device())
    state = {name: torch.full_like(value, 0.5) for name, value in linear.state_dict().items()}
    ours, plain = zero(list(linear.parameters()), optim.Adam, mode), optim.Adam(twin.parameters())
    linear.load_state_dict(state)
    twin.load_state_dict(state)
    for each in (linear, twin):
        for param in each.parameters():
            param.grad = torch.ones_like(param)
    ours.step()
    plain.step()
    assert_value(linear.state_dict(), twin.state_dict(), **ROUNDED)


@every_mode
def test_a_model_loaded_after_the_optimizer_was_made(world, mode):
    world(loaded_model, 2, mode=mode)


def converted(mode):
    """Nothing changes, on any rank, if a parameter that is a view of a buffer has another dtype."""
    model = dense()
    ours = zero(model, optim.Adam, mode, lr=0.1)
    set_grads(0, model)
    ours.step()
    model["row"].grad = None
    model["row"].data = model["row"].data.double()
    before = {name: param.detach().clone() for name, param in model.items()}
    set_grads(1, model)
    with pytest.raises(st.StaleParameterError, match="was converted"):
        ours.step()
    assert_equal(model, before)
    ours.consolidate_state_dict()
    if as_group().rank == 0:
        assert {float(values["step"]) for values in ours.state_dict()["state"].values()} == {1.0}


@pytest.mark.parametrize("mode", ["views", "ranges"])
def test_a_converted_parameter_is_noticed_before_anything_changes(world, mode):
    world(converted, 3, mode=mode)


def sparse_gradient():
    table = nn.Embedding(6, 2, sparse=True).to(device())
    ours = zero(list(table.parameters()), optim.SGD, "ranges", lr=0.1)
    table(torch.tensor([1, 2], device=device())).sum().backward()
    with pytest.raises(st.RuleError, match="sparse"):
        ours.step()


def test_a_sparse_gradient_and_ranges(world):
    world(sparse_gradient, 1)
