"""Leaves that lie end to end are stepped as one tensor: in any program values and states are those of each alone."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import optim

import shardtensor as st
from shardtensor.optim.flat_groups import FlatGroup, FlatGroups, find_flat_groups, step_without_hooks
from shardtensor.optim.named_params import ParamRecord
from shardtensor.optim.state import ParamState
from shardtensor.optim.update_units import ELEMENTWISE
from shardtensor.tensor.bucket import FlatShard

SHAPES = ((2, 3), (4,), (1, 5), (3,), (2, 2))
STARTS = (0, 8, 12, 20, 24)  # with gaps, as alignment leaves them
LENGTH = 32
KINDS = {
    "adamw": (optim.AdamW, {"lr": 0.1}),
    "fused": (optim.AdamW, {"lr": 0.1, "fused": True}),
    "amsgrad": (optim.Adam, {"lr": 0.1, "amsgrad": True, "foreach": False}),
    "sgd": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "adadelta": (optim.Adadelta, {"lr": 0.1}),
    "adamax": (optim.Adamax, {"lr": 0.1}),
    "nadam": (optim.NAdam, {"lr": 0.1}),
    "radam": (optim.RAdam, {"lr": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
    "asgd": (optim.ASGD, {"lr": 0.1, "t0": 1.0}),
    "rprop": (optim.Rprop, {"lr": 0.1}),
}


def makes_state_anew(kind: str) -> bool:
    """Whether torch's optimizer steps a parameter whose state was dropped; Adagrad of torch 2.11 does not."""
    cls, options = KINDS[kind]
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    optimizer: Any = cls([param], **options)
    optimizer.state.clear()
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def laid_end_to_end(seed: int) -> tuple[FlatShard, list[torch.Tensor]]:
    """A flat tensor, zero in its gaps, and the leaves that are its pieces."""
    generator = torch.Generator().manual_seed(seed)
    pieces = FlatShard(torch.zeros(LENGTH), STARTS)
    leaves = []
    for i, (shape, start) in enumerate(zip(SHAPES, STARTS, strict=True)):
        leaf = part_of(pieces.whole, i).detach()
        leaf.copy_(torch.randn(shape, generator=generator))
        leaf.requires_grad_()._flat_shard = (pieces, i)
        assert leaf.storage_offset() == start
        leaves.append(leaf)
    return pieces, leaves


def part_of(whole: torch.Tensor, i: int) -> torch.Tensor:
    return whole.narrow(0, STARTS[i], torch.Size(SHAPES[i]).numel()).view(SHAPES[i])


class Twins:
    """Parameters that are pieces of two flat tensors and one that is of none, and the same ones each alone."""

    def __init__(self, kind: str, seed: int = 0, groups: bool = True) -> None:
        self.kind = kind
        cls, options = KINDS[kind]
        (first, a), (second, b) = laid_end_to_end(seed), laid_end_to_end(seed + 1)
        self.pieces = (first, second)
        b[2].requires_grad_(False)
        self.ours = {f"a{i}": x for i, x in enumerate(a)} | {f"b{i}": x for i, x in enumerate(b)}
        self.ours["lone"] = torch.ones(3, requires_grad=True)
        self.plain = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in self.ours.items()}
        names = random.Random(seed).sample(list(self.ours), len(self.ours))
        low = [name for name in names if name in ("a3", "a4", "b0")] if groups else []
        self.names = [name for name in names if name not in low], low
        made = [
            [
                {"params": [(name, own[name]) for name in some], **more}
                for some, more in zip(self.names, ({}, {"lr": 0.05}), strict=True)
                if some
            ]
            for own in (self.ours, self.plain)
        ]
        self.optimizers = [
            st.ShardedOptimizer(made[0], cls, **options),
            cls([{**group, "params": [x for _, x in group["params"]]} for group in made[1]], **options),
        ]

    def give_gradients(self, draw: random.Random, how: str) -> None:
        for prefix, pieces in zip("ab", self.pieces, strict=True):
            generator = torch.Generator().manual_seed(draw.randrange(10**6))
            whole = torch.zeros_like(pieces.whole)
            for i in range(len(SHAPES)):
                part_of(whole, i).copy_(torch.randn(SHAPES[i], generator=generator))
                name = f"{prefix}{i}"
                grad = part_of(whole, i)
                if not self.ours[name].requires_grad or how == "none" or (how == "some" and draw.random() < 0.5):
                    self.ours[name].grad = self.plain[name].grad = None
                    continue
                self.ours[name].grad = grad.clone() if how == "own" else grad
                self.plain[name].grad = grad.clone()
        for own in (self.ours, self.plain):
            own["lone"].grad = torch.full((3,), 2.0)

    def same(self, **close: float) -> None:
        ours, plain = self.optimizers
        for name, x in self.plain.items():
            torch.testing.assert_close(self.ours[name].detach(), x.detach(), **close, msg=lambda m, n=name: f"{n}: {m}")
            mine, theirs = self.ours[name], x
            assert (mine in ours.state) == (theirs in plain.state), name
            if theirs in plain.state:
                entry = ours.state[mine]
                assert set(entry) == set(plain.state[theirs]) and len(entry) == len(plain.state[theirs])
                for key, value in plain.state[theirs].items():
                    torch.testing.assert_close(entry[key], value, **close, msg=lambda m, n=name, k=key: f"{n} {k}: {m}")
        assert len(ours.state) == len(plain.state)
        mine, theirs = {id(x): n for n, x in self.ours.items()}, {id(x): n for n, x in self.plain.items()}
        assert {mine[id(key)] for key in ours.state} == {theirs[id(key)] for key in plain.state}
        for pieces in self.pieces:
            gaps = pieces.whole.clone()
            for i in range(len(SHAPES)):
                part_of(gaps, i).zero_()
            assert not gaps.any()


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def step(twins: Twins, draw: random.Random, how: str) -> None:
    twins.give_gradients(draw, how)
    for optimizer in twins.optimizers:
        optimizer.step()


def act(twins: Twins, draw: random.Random) -> str:
    """Do something to both: a step most often, or a change of the state of one parameter."""
    name = draw.choice([name for name in twins.ours if twins.ours[name].requires_grad])
    states = [optimizer.state for optimizer in twins.optimizers]
    params = twins.ours[name], twins.plain[name]
    has_state = params[1] in states[1]
    what = draw.choice(
        ("step", "step", "own", "some", "none", "count", "value", "forget", "set", "lose", "load", "copy")
    )
    if what in ("step", "own", "some", "none"):
        step(twins, draw, "one" if what == "step" else what)
    elif what == "count" and has_state and "step" in states[1][params[1]]:
        for state, param in zip(states, params, strict=True):
            count = state[param]["step"]
            state[param]["step"] = count + 3
    elif what == "value" and has_state:
        for state, param in zip(states, params, strict=True):
            for key, value in state[param].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.mul_(2)  # in place: through the view
                    state[param][key] = value * 0.5
    elif what == "forget" and has_state and makes_state_anew(twins.kind):
        for state, param in zip(states, params, strict=True):
            del state[param]
        assert params[0] not in states[0]
    elif what == "set" and has_state:
        for state, param in zip(states, params, strict=True):
            state[param] = {key: copy.deepcopy(value) for key, value in state[param].items()}
    elif what == "lose" and has_state and "momentum_buffer" in states[1][params[1]]:
        for state, param in zip(states, params, strict=True):
            state[param]["momentum_buffer"] = torch.zeros_like(param)
    elif what == "load":
        for optimizer in twins.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif what == "copy":
        own, again = twins.optimizers[0], copy.deepcopy(twins.optimizers[0])
        for param, other in zip(own.named_params.values(), again.named_params.values(), strict=True):
            assert param is not other and torch.equal(param, other)
            assert (param in own.state) == (other in again.state)
            for key in own.state.get(param, ()):
                value, copied = own.state[param][key], again.state[other][key]
                assert value is not copied and torch.equal(torch.as_tensor(value), torch.as_tensor(copied))
    return what


@pytest.mark.parametrize("kind", KINDS)
def test_any_program_gives_what_each_leaf_alone_gives(kind):
    for seed in range(2):
        twins, draw = Twins(kind, seed), random.Random(seed)
        done = []
        if kind == "adagrad":
            twins.same()
        step(twins, draw, "one")
        twins.same(**CLOSE)
        for _ in range(9):
            done.append(act(twins, draw))
            try:
                twins.same(**CLOSE)
            except AssertionError as error:
                raise AssertionError(f"seed {seed} after {done}: {error}") from None


def test_every_elementwise_class_is_tried():
    assert {cls for cls, _ in KINDS.values()} == ELEMENTWISE


def runs_of(optimizer: Any) -> list[FlatGroup]:
    return [run for runs, _ in optimizer._flat_groups._groups for run in runs]


def test_what_lies_together_is_stepped_as_one():
    twins, draw = Twins("adamw", groups=False), random.Random(0)
    step(twins, draw, "one")
    runs = runs_of(twins.optimizers[0])
    names = {id(x): name for name, x in twins.ours.items()}
    assert sorted([names[id(x)] for x in run.leaves] for run in runs) == [
        ["a0", "a1", "a2", "a3", "a4"],
        ["b0", "b1"],
        ["b3", "b4"],
    ]
    assert {run.tensor.numel() for run in runs} == {LENGTH, 12, 8}
    inner = twins.optimizers[0]._inner
    assert sum(len(group["params"]) for group in inner.param_groups) == 11, "people see their parameters"
    assert len(inner.state) == 4 and all(run.tensor in inner.state for run in runs)
    assert all(run.tensor.grad is None for run in runs)
    calls = []

    def counted(optimizer):
        calls.append([len(g["params"]) for g in optimizer.param_groups])
        return step_without_hooks(optimizer)

    with mock.patch("shardtensor.optim.sharded_optimizer.step_without_hooks", counted):
        step(twins, draw, "own")
        step(twins, draw, "none")
        step(twins, draw, "some")
    assert calls[:2] == [[5], [2]], (
        "three runs, the lone one and the one that is frozen; without gradients the last two"
    )
    assert calls[2][0] > 5


def test_gradients_that_are_pieces_of_one_are_not_copied():
    twins = Twins("sgd", groups=False)
    twins.give_gradients(random.Random(0), "one")
    for run in (run for run in find_flat_groups(twins.ours.values())[0]):
        grad, is_uneven = run.gradient()
        base = run.leaves[0].grad._base
        assert not is_uneven and grad.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert grad.shape == run.tensor.shape
        for i, leaf in enumerate(run.leaves):
            assert run.part(i, grad).data_ptr() == leaf.grad.data_ptr()
            assert run.part(i, run.tensor).data_ptr() == leaf.data_ptr()
    twins.give_gradients(random.Random(0), "own")
    for run in find_flat_groups(twins.ours.values())[0]:
        grad, is_uneven = run.gradient()
        assert not is_uneven and not grad.requires_grad
        assert all(torch.equal(run.part(i, grad), leaf.grad) for i, leaf in enumerate(run.leaves))
        run.leaves[-1].grad = None
        assert run.gradient() == (None, True)
        for leaf in run.leaves:
            leaf.grad = None
        assert run.gradient() == (None, False)


def test_each_leaf_has_a_count_of_its_own_once_they_part():
    twins, draw = Twins("adamw", groups=False), random.Random(0)
    step(twins, draw, "one")
    ours = twins.optimizers[0]
    counts = [ours.state[twins.ours[f"a{i}"]]["step"] for i in range(5)]
    assert len({count.data_ptr() for count in counts}) == 5
    step(twins, random.Random(1), "some")
    ours._flat_groups.split_all()
    counts = [ours.state[twins.ours[f"a{i}"]]["step"] for i in range(5)]
    counts[0].add_(5)
    assert len({float(count) for count in counts[1:]}) == 2 and float(counts[0]) >= 6


def test_states_that_differ_in_more_than_elements_are_not_joined():
    twins, draw = Twins("adamw", groups=False), random.Random(0)
    step(twins, draw, "one")
    for optimizer, own in zip(twins.optimizers, (twins.ours, twins.plain), strict=True):
        optimizer.state[own["a1"]]["step"] = torch.tensor(9.0)
    step(twins, draw, "one")
    twins.same(**CLOSE)
    assert sorted(len(run.leaves) for run in runs_of(twins.optimizers[0])) == [2, 2]
    twins.optimizers[0].load_state_dict(twins.optimizers[0].state_dict())
    step(twins, draw, "one")
    twins.same(**CLOSE)


def test_a_run_joins_states_that_lie_in_one_tensor_without_a_copy():
    twins = Twins("momentum", groups=False)
    for _ in range(2):
        step(twins, random.Random(0), "one")
    ours = twins.optimizers[0]
    (run,) = [run for run in runs_of(ours) if len(run.leaves) == 5]
    before = ours._inner.state[run.tensor]["momentum_buffer"].data_ptr()
    ours._flat_groups.split_all()
    assert run.tensor not in ours._inner.state and all(leaf in ours._inner.state for leaf in run.leaves)
    step(twins, random.Random(1), "one")
    (run,) = [run for run in runs_of(ours) if len(run.leaves) == 5]
    assert ours._inner.state[run.tensor]["momentum_buffer"].data_ptr() == before
    twins.same(**CLOSE)


def test_pickles_hold_the_state_of_each_leaf():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = st.ShardedOptimizer({"w": weight}, optim.SGD, lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    (copied,) = again.named_params.values()
    assert torch.equal(again.state[copied]["momentum_buffer"], torch.ones(3))
    copied.grad = torch.ones(3)
    weight.grad = torch.ones(3)
    again.step(), optimizer.step()
    assert torch.equal(copied, weight)
    twins = Twins("momentum", groups=False)
    step(twins, random.Random(0), "one")
    assert sorted(len(run.leaves) for run in runs_of(twins.optimizers[0])) == [2, 2, 5]
    own = twins.optimizers[0]
    own.__getstate__()
    assert own._flat_groups._groups is None and all(
        x in own._inner.state for x in twins.ours.values() if x.requires_grad
    )


def test_a_differentiable_step_sees_the_leaves():
    _, leaves = laid_end_to_end(0)
    weight = {f"w{i}": leaf for i, leaf in enumerate(leaves)}
    optimizer = st.ShardedOptimizer(weight, optim.SGD, lr=0.1, differentiable=True)
    seen = []
    with mock.patch(
        "shardtensor.optim.sharded_optimizer.step_without_hooks",
        lambda inner: seen.extend(inner.param_groups[0]["params"]),
    ):
        optimizer.step()
    assert len(seen) == 5 and all(x is leaf for x, leaf in zip(seen, leaves, strict=True))


@pytest.mark.parametrize("is_known", [True, False])
def test_state_of_a_leaf_that_is_unknown_is_made_by_the_optimizer(is_known):
    _, (leaf, other, *_) = laid_end_to_end(0)
    records = {id(x): ParamRecord.of(name, x) for name, x in (("a", leaf), ("b", other))} if is_known else {}
    state = ParamState(FlatGroups(optim.SGD([leaf, other])), records)
    assert leaf not in state and len(state) == 0 and list(state) == []
    assert dict(state[leaf]) == {} and leaf in state
    state[other] = {"a": 1}
    assert state[other]["a"] == 1 and repr(state[other]) == "{'a': 1}" and list(state) == [leaf, other]
    del state[leaf]
    assert list(state) == [other] and leaf not in state
    assert not is_known or repr(state) == "{'b': {'a': 1}}"
