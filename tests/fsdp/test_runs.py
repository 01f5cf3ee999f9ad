"""A fully sharded module's leaves are stepped as one tensor: the same values, state of each parameter as before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard
from shardtensor.optim.flat_groups import find_flat_groups

ELEMENTWISE = {
    "adamw": (optim.AdamW, {"lr": 1e-2}),
    "adamw_fused": (optim.AdamW, {"lr": 1e-2, "fused": True}),
    "amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True, "foreach": False}),
    "sgd": (optim.SGD, {"lr": 1e-2}),
    "momentum": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "adagrad": (optim.Adagrad, {"lr": 1e-2}),
    "rprop": (optim.Rprop, {"lr": 1e-2}),
    "nadam": (optim.NAdam, {"lr": 1e-2}),
    "asgd": (optim.ASGD, {"lr": 1e-2}),
    "rmsprop": (optim.RMSprop, {"lr": 1e-2, "centered": True}),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
        self.outer = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.uses_scale = True

    def forward(self, x):
        y = self.outer(self.inner(x))
        return y * self.scale if self.uses_scale else y


def pair():
    torch.manual_seed(0)
    dense = Net()
    model = copy.deepcopy(dense)
    fully_shard(model.inner)
    return dense, fully_shard(model)


def backward(dense, model, step):
    group = as_group()
    x = torch.randn(2 * group.size, 5, generator=torch.Generator().manual_seed(step))
    for module, part in ((dense, x), (model, x[2 * group.index :][:2])):
        module(part).pow(2).mean().backward()


def same(dense, model, optimizers):
    plain, ours = optimizers
    for (name, p), q in zip(dense.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p, msg=lambda text, name=name: f"{name}: {text}")
        assert (p in plain.state) == (q in ours.state), name
        for key, value in plain.state.get(p, {}).items():
            got = ours.state[q][key]
            got = got.full_tensor() if isinstance(got, st.ShardedTensor) else got
            torch.testing.assert_close(got, value, msg=lambda text, name=name, key=key: f"{name}.{key}: {text}")


def runs_of(optimizer):
    return [run for runs, _ in optimizer._flat_groups._groups for run in runs]


def stepped_as_one(name):
    kind, options = ELEMENTWISE[name]
    dense, model = pair()
    both = kind(dense.parameters(), **options), st.ShardedOptimizer(model, kind, **options)
    for step in range(4):
        backward(dense, model, step)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        same(dense, model, both)
    assert sorted(len(run.leaves) for run in runs_of(both[1])) == [3, 4]
    assert all(run.tensor.grad is None for run in runs_of(both[1]))
    names = set(both[1].state_dict()["state"])
    assert names == ({n for n, _ in dense.named_parameters()} if name != "sgd" else set())


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("world", [1, 3])
def test_as_the_dense_one(world, name):
    st.simulate(world, lambda: stepped_as_one(name))


def falls_back_and_comes_back():
    options = {"lr": 1e-2, "fused": True}
    dense, model = pair()
    plain, ours = optim.AdamW(dense.parameters(), **options), st.ShardedOptimizer(model, optim.AdamW, **options)

    def step(number):
        backward(dense, model, number)
        for optimizer in (plain, ours):
            optimizer.step()
            optimizer.zero_grad()
        same(dense, model, (plain, ours))

    step(0)
    state = ours.state[model.outer.weight]
    dense.uses_scale = model.uses_scale = False
    step(1)  # one parameter of the outer unit has no gradient: its count of steps stays behind
    assert [len(run.leaves) for run in runs_of(ours)] == [4], "the inner unit's"
    torch.testing.assert_close(state["step"], torch.tensor(2.0))
    dense.uses_scale = model.uses_scale = True
    step(2)
    for loaded in (ours.state_dict(), plain.state_dict()):
        ours.load_state_dict(copy.deepcopy(loaded))
        step(3)
    assert ours.state[model.scale]["step"] == 4 and ours.state[model.outer.bias]["step"] == 5
    ours.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.5
    step(5)
    for module in (dense, model):
        for param in module.parameters():
            assert param.grad is None
    backward(dense, model, 6)
    for param in model.parameters():
        param.grad = param.grad * 1  # gradients of the user's own
    for optimizer in (plain, ours):
        optimizer.step()
    same(dense, model, (plain, ours))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_pieces_where_gradients_or_counts_differ(world):
    st.simulate(world, falls_back_and_comes_back)


def writes_and_copies():
    dense, model = pair()
    plain, ours = optim.Adam(dense.parameters()), st.ShardedOptimizer(model, optim.Adam)
    both = plain, ours
    for step in range(2):
        backward(dense, model, step)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    ours.state[model.outer.weight]["exp_avg"] = torch.ones(2, 3)
    plain.state[dense.outer.weight]["exp_avg"] = torch.ones(2, 3)
    ours.state[model.outer.bias]["exp_avg_sq"].zero_()
    plain.state[dense.outer.bias]["exp_avg_sq"].zero_()
    same(dense, model, both)
    seen = ours.state_dict()["state"]["inner.0.weight"]["exp_avg"]
    backward(dense, model, 2)
    for optimizer in both:
        optimizer.step()
    same(dense, model, both)
    torch.testing.assert_close(seen.full_tensor(), plain.state[dense.inner[0].weight]["exp_avg"])
    stock = optim.Adam(model.parameters())
    stock.load_state_dict(st.optim_state_dict_to_load(model, stock, st.optim_state_dict(model, ours)))
    steps = [values["step"] for values in stock.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps), "every parameter counts for itself"


def test_state_is_read_written_and_copied_by_parameter():
    st.simulate(2, writes_and_copies)


def groups_split_a_flat():
    dense, model = pair()

    def groups(module, names=False):
        found = {True: [], False: []}
        for name, param in module.named_parameters():
            found[name.startswith("inner.0")].append((name, param) if names else param)
        return [{"params": found[True], "weight_decay": 0.5}, {"params": found[False]}]

    both = optim.AdamW(groups(dense), lr=1e-2), st.ShardedOptimizer(groups(model, True), optim.AdamW, lr=1e-2)
    for step in range(3):
        backward(dense, model, step)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        same(dense, model, both)
    assert sorted(len(run.leaves) for run in runs_of(both[1])) == [2, 2, 3]


@pytest.mark.parametrize("world", [1, 3])
def test_runs_of_the_leaves_that_share_hyperparameters(world):
    st.simulate(world, groups_split_a_flat)


def test_leaves_of_their_own_are_in_no_run():
    leaves = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    assert find_flat_groups(leaves) == ([], leaves)
