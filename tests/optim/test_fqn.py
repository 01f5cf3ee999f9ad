"""Optimizer state by name: the same for every way a model is wrapped, and back into any optimizer."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(2, 2)
        self.tied = self.b

    def forward(self, x):
        return self.tied(torch.relu(self.a(x))) * self.scale


def wrapped(way):
    torch.manual_seed(0)
    model = Net()
    if way == "dense":
        return model
    if way == "parts":  # the rest stays plain
        fully_shard(model.a)
        fully_shard(model.b)
    elif way == "policy":
        fully_shard(model, policy=ModuleWrapPolicy({nn.Linear}))
    else:
        fully_shard(model)
    return model


def trained(model, optimizer, steps=2):
    group = as_group()
    for step in range(steps):
        x = torch.randn(2 * group.size, 5, generator=torch.Generator().manual_seed(step))
        is_sharded = isinstance(model.a.weight, st.ShardedTensor)
        model(x[2 * group.index :][:2] if is_sharded else x).pow(2).mean().backward()
        if is_sharded and not isinstance(model.scale, st.ShardedTensor):
            group.all_reduce(model.scale.grad)
            model.scale.grad /= group.size
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def groups(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed, "weight_decay": 0.5}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


def named_groups(model):
    named = list(model.named_parameters())
    decayed = [(n, p) for n, p in named if p.dim() > 1]
    return [{"params": decayed, "weight_decay": 0.5}, {"params": [(n, p) for n, p in named if p.dim() < 2]}]


MAKERS = {
    "stock": lambda model: optim.Adam(groups(model), lr=1e-2),
    "stock_fused": lambda model: optim.AdamW(groups(model), lr=1e-2, fused=True),
    "ours": lambda model: st.ShardedOptimizer(named_groups(model), optim.Adam, lr=1e-2),
}


def whole(x):
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def assert_same(one, other):
    assert list(one["state"]) == list(other["state"])
    for name, values in one["state"].items():
        assert values.keys() == other["state"][name].keys()
        for key, value in values.items():
            torch.testing.assert_close(
                whole(value), whole(other["state"][name][key]), msg=lambda t, n=name: f"{n}: {t}"
            )
    assert [g["params"] for g in one["param_groups"]] == [g["params"] for g in other["param_groups"]]
    for mine, theirs in zip(one["param_groups"], other["param_groups"], strict=True):
        assert (mine["lr"], mine["weight_decay"]) == (theirs["lr"], theirs["weight_decay"])


def equal_however_wrapped(maker):
    dense = wrapped("dense")
    kind = "stock" if maker == "ours" else maker
    want = st.optim_state_dict(dense, trained(dense, MAKERS[kind](dense)))
    assert set(want["state"]) == {"a.weight", "a.bias", "b.weight", "b.bias", "scale"}
    for way in ("parts", "policy", "one"):
        model = wrapped(way)
        optimizer = trained(model, MAKERS[maker](model))
        before = copy.deepcopy(optimizer.state_dict())
        got = st.optim_state_dict(model, optimizer)
        assert_same(got, want)
        assert isinstance(got["state"]["a.weight"]["exp_avg"], st.ShardedTensor)
        assert got["state"]["a.weight"]["exp_avg"]._layout == model.a.weight._layout
        step = got["state"]["a.weight"]["step"]
        assert type(step) is torch.Tensor and step.dim() == 0
        full = st.optim_state_dict(model, optimizer, full=True)
        assert_same(full, want)
        assert not any(isinstance(v, st.ShardedTensor) for values in full["state"].values() for v in values.values())
        for saved in (got, full, want):
            for other in MAKERS:
                if (other == "stock_fused") != (maker == "stock_fused"):
                    continue  # other hyperparameters
                again = MAKERS[other](model)
                again.load_state_dict(st.optim_state_dict_to_load(model, again, saved))
                assert_same(st.optim_state_dict(model, again), want)
        same = MAKERS[maker](model)
        same.load_state_dict(st.optim_state_dict_to_load(model, optimizer, got, is_named_optimizer=False))
        for sd in (optimizer.state_dict(), same.state_dict()):
            assert sd.keys() == before.keys()
            assert sd["param_groups"] == before["param_groups"]
            assert sd["state"].keys() == before["state"].keys()
            for key, values in before["state"].items():
                for name, value in values.items():
                    assert torch.equal(whole(sd["state"][key][name]), whole(value))
        moments = optimizer.state[model.a.weight]["exp_avg"], same.state[model.a.weight]["exp_avg"]
        moments[0].zero_()
        assert whole(moments[1]).abs().sum() > 0


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_dense_models_state_however_wrapped(world, maker):
    st.simulate(world, lambda: equal_however_wrapped(maker))


def goes_on_alike():
    """A run that is saved, and loaded into another wrapping, ends where the one that was not interrupted does."""
    first = wrapped("policy")
    saved = st.optim_state_dict(first, trained(first, MAKERS["stock"](first), 2), full=True)
    weights = {name: param.full_tensor().detach() for name, param in first.named_parameters()}
    second = wrapped("one")
    optimizer = MAKERS["stock"](second)
    optimizer.load_state_dict(st.optim_state_dict_to_load(second, optimizer, saved))
    with torch.no_grad():
        for name, param in second.named_parameters():
            param.copy_(weights[name])
    group = as_group()
    for step in (0, 1):
        x = torch.randn(2 * group.size, 5, generator=torch.Generator().manual_seed(step))
        second(x[2 * group.index :][:2]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    again = wrapped("one")
    reference = trained(again, MAKERS["stock"](again), 2)
    for step in (0, 1):
        x = torch.randn(2 * group.size, 5, generator=torch.Generator().manual_seed(step))
        again(x[2 * group.index :][:2]).pow(2).mean().backward()
        reference.step()
        reference.zero_grad()
    for p, q in zip(again.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p.full_tensor())


@pytest.mark.parametrize("world", [2, 3])
def test_training_goes_on_in_another_wrapping(world):
    st.simulate(world, goes_on_alike)


WHOLE = {
    "Adafactor": (optim.Adafactor, {"lr": 0.1}, {}),
    "Adafactor foreach": (optim.Adafactor, {"lr": 0.1, "foreach": True}, {}),
    "Muon": (optim.Muon, {"lr": 0.01}, {"rtol": 2e-2, "atol": 2e-3}),  # computes in bfloat16
}
"""Classes that look at whole matrices. Their state has shapes of its own, such as Adafactor's rows and columns."""


def goes_on(name, ways, make, laid_out):
    """Two steps, the optimizer saved and loaded anew between them, perhaps in another layout; and both states."""
    states = []
    values = None
    for step, way in enumerate(ways):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 5, bias=False)).double()
        laid_out(model, way)
        optimizer = make(model, WHOLE[name][0], WHOLE[name][1])
        if values is not None:
            model.load_state_dict(values)
            optimizer.load_state_dict(st.optim_state_dict_to_load(model, optimizer, states[-1]))
            states.append(copy.deepcopy(st.optim_state_dict(model, optimizer, full=True)["state"]))
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).double()
        model(x).square().sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", st.GatherWarning)
            optimizer.step()
        values = st.full_state_dict(model)
        states.append(st.optim_state_dict(model, optimizer, full=step == 1))
    return values, states[1], states[2]["state"]


def lay_out(model, way):
    if way == "fsdp":
        st.fully_shard(model)
    elif way == "cut":
        st.shard_parameter(model, "0.weight", "[tp balanced, -]")
        st.shard_parameter(model, "2.weight", "[-, tp balanced]")


def stock(model, cls, options):
    return cls(model.parameters(), **options)


def sharded(model, cls, options):
    return st.ShardedOptimizer(model, cls, **options)


@pytest.mark.parametrize("make", [stock, sharded])
@pytest.mark.parametrize("name", WHOLE)
def test_states_of_other_shapes_than_the_parameters(name, make):
    want = goes_on(name, ["dense", "dense"], stock, lay_out)
    for ways in (["dense", "dense"], ["fsdp", "fsdp"], ["cut", "fsdp"], ["fsdp", "cut"]):
        for found in st.simulate(3, goes_on, name, ways, make, lay_out):
            torch.testing.assert_close(found, want, msg=lambda text, ways=ways: f"{ways}: {text}", **WHOLE[name][2])


def test_wrappers_names_are_no_part_of_names():
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    optimizer = optim.SGD(compiled.parameters(), lr=0.1)
    assert st.optim_state_dict(compiled, optimizer)["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    stripped = st.optim_state_dict_to_load(compiled, optimizer, st.optim_state_dict(model, optimizer), True)
    assert stripped["param_groups"][0]["params"] == ["0.weight", "0.bias"]


def test_faults_are_told():
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = st.optim_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="the model does not have"):
        st.optim_state_dict(other, optimizer)
    with pytest.raises(ValueError, match="the model does not have"):
        st.optim_state_dict_to_load(other, optimizer, saved)
    with pytest.raises(ValueError, match="bias"):
        st.optim_state_dict_to_load(model, optimizer, {"state": {}, "param_groups": [{"params": ["weight"]}]})
    wrong = {**saved, "state": {"bias": {"momentum_buffer": torch.ones(3)}}}
    with pytest.raises(ValueError, match="another shape"):
        st.optim_state_dict_to_load(model, optimizer, wrong)


def one_rank_faults():
    model = wrapped("one")
    optimizer = trained(model, MAKERS["stock"](model))
    saved = st.optim_state_dict(model, optimizer)
    if as_group().index == 1:
        saved["param_groups"][0]["params"].remove("b.weight")
    with pytest.raises(ValueError, match="rank 1"):
        st.optim_state_dict_to_load(model, optimizer, saved)


def test_a_fault_on_one_rank_is_told_on_all():
    st.simulate(2, one_rank_faults)


def test_an_empty_group_that_was_not_saved_keeps_its_options():
    model = nn.Linear(3, 2)
    saved = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups = [{"params": list(model.parameters())}, {"params": [], "lr": 7.0}]
    fresh = optim.SGD(groups, lr=0.5)
    named = st.optim_state_dict(model, saved)
    fresh.load_state_dict(st.optim_state_dict_to_load(model, fresh, named))
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 7.0]
    assert len(fresh.param_groups[0]["params"]) == 2 and fresh.param_groups[1]["params"] == []
    fresh.step()


def becomes_sharded_and_plain(cls, **options):
    """The state follows: its layout is the parameter's, and a rank keeps the memory of its part alone."""
    torch.manual_seed(0)
    oracle = nn.Linear(6, 8, bias=False)
    model = copy.deepcopy(oracle)
    plain, ours = cls(oracle.parameters(), **options), st.ShardedOptimizer(model, cls, **options)

    def step():
        for each, optimizer in ((oracle, plain), (model, ours)):
            optimizer.zero_grad()
            each(torch.arange(12.0).view(2, 6)).square().sum().backward()
            optimizer.step()

    step()
    st.shard_module(model, {"weight": "[tp, -]"})
    step()
    for key, value in ours.state[model.weight].items():
        if isinstance(value, st.ShardedTensor):
            local = value._local
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size(), key
            if value.shape == model.weight.shape:
                assert value._layout == model.weight._layout, key
    st.unshard_module(model)
    step()
    torch.testing.assert_close(model.weight.detach(), oracle.weight.detach())
    assert not any(isinstance(value, st.ShardedTensor) for value in ours.state[model.weight].values())


@pytest.mark.worlds("sim")
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")  # of Adafactor on an earlier torch
@pytest.mark.parametrize(("cls", "options"), [(optim.AdamW, {"lr": 0.1}), (optim.Adafactor, {"lr": 0.1})])
def test_state_follows_a_parameter_that_becomes_sharded_and_plain(world, cls, options):
    world(becomes_sharded_and_plain, 2, cls=cls, **options)
