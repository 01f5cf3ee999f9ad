"""The state of optimizers by the names of parameters: in any groups, of tied parameters, of several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import device
from torch import nn, optim
from trained import Matrices, assert_same, map_whole, train, values, whole

import shardtensor as st

pytestmark = [pytest.mark.worlds("sim"), pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")]
ROUNDED = {"rtol": 1e-9, "atol": 1e-9}


class Parts(nn.Module):
    """Parameters that are frozen, that are not in the loss, and some of each group."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(3, 2)
        self.frozen.requires_grad_(False)
        self.to(device(), torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x))))


def named_groups(model: nn.Module, backwards: bool, empty: bool) -> list[dict[str, Any]]:
    """Matrices and vectors with other options, and perhaps a group without parameters."""
    named = list(model.named_parameters())
    named = named[::-1] if backwards else named
    found = [
        {"params": [pair for pair in named if pair[1].dim() > 1], "lr": 0.01, "weight_decay": 0.5},
        {"params": [pair for pair in named if pair[1].dim() < 2], "lr": 0.1},
    ]
    found = found[::-1] if backwards else found
    return [*found, {"params": [], "lr": 7.0}] if empty else found


def made(way: str, seed: int, backwards: bool = False, empty: bool = False) -> tuple[nn.Module, Any]:
    model = Parts(seed)
    if way in ("ours", "stock"):
        st.shard_module(model, {"first": "[tp balanced, ...]", "frozen.weight": "[-, tp balanced]"})
    if way == "fully_shard":
        st.fully_shard(model)
    groups = named_groups(model, backwards, empty)
    if way == "ours":
        return model, st.ShardedOptimizer(groups, optim.AdamW)
    if way == "zero":
        return model, st.ZeroRedundancyOptimizer(groups, optim.AdamW)
    unnamed = [{**group, "params": [param for _, param in group["params"]]} for group in groups]
    return model, optim.AdamW(unnamed)


def group_options(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The options of each parameter by its name."""
    groups = st.optim_state_dict(model, optimizer)["param_groups"]
    return {
        name: {key: x for key, x in group.items() if key not in ("params", "param_names")}
        for group in groups
        for name in group["params"]
    }


def save_parts(path: str, way: str) -> dict[str, Any]:
    model, optimizer = made(way, 0)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.03
    st.save(path, model=model, optimizer=optimizer)
    before = group_options(model, optimizer)
    train(model, optimizer, range(2, 4))
    return {"options": before, "values": values(model, optimizer)}


def load_parts(path: str, way: str, want: dict[str, Any], backwards: bool, empty: bool) -> None:
    model, optimizer = made(way, 1, backwards, empty)
    st.load(path, model=model, optimizer=optimizer)
    assert group_options(model, optimizer) == want["options"]
    train(model, optimizer, range(2, 4))
    found = values(model, optimizer)
    assert not [name for name in found if name.startswith(("frozen", "unused")) and name.count("/")]
    assert_same(found, want["values"], **ROUNDED)


@pytest.mark.parametrize("other", ["stock", "ours", "zero", "fully_shard"])
@pytest.mark.parametrize("way", ["stock", "ours", "zero", "fully_shard"])
@pytest.mark.parametrize(("backwards", "empty"), [(False, False), (True, False)], ids=["same", "reordered"])
def test_frozen_unused_and_reordered_groups(world, tmp_path, way, other, backwards, empty):
    path = str(tmp_path / "step-2")
    want = world(save_parts, 2, path=path, way=way)[0]
    world(load_parts, 3, path=path, way=other, want=want, backwards=backwards, empty=empty)


def with_an_empty_group(path: str, saved: bool, loaded: bool) -> None:
    model, optimizer = made("stock", 0, empty=saved)
    train(model, optimizer, range(2))
    st.save(path, model=model, optimizer=optimizer)
    fresh, its = made("stock", 1, empty=loaded)
    st.load(path, model=fresh, optimizer=its)
    for each in ((model, optimizer), (fresh, its)):
        train(*each, range(2, 4))
    assert_same(values(fresh, its), values(model, optimizer))
    assert [group["lr"] for group in its.param_groups][2:] == [7.0] * loaded


@pytest.mark.parametrize(("saved", "loaded"), [(True, True), (True, False), (False, True)])
def test_a_group_without_parameters(world, tmp_path, saved, loaded):
    world(with_an_empty_group, 2, path=str(tmp_path / "c"), saved=saved, loaded=loaded)


def never_stepped(path: str, way: str) -> None:
    model, optimizer = made(way, 0)
    st.save(path, model=model, optimizer=optimizer)
    fresh, its = made(way, 1)
    train(fresh, its, range(1))
    st.load(path, model=fresh, optimizer=its)
    for each in ((model, optimizer), (fresh, its)):
        train(*each, range(2))
    assert_same(values(fresh, its), values(model, optimizer))


@pytest.mark.parametrize("way", ["stock", "ours", "zero", "fully_shard"])
def test_an_optimizer_that_was_never_stepped_has_no_state_after_the_load_either(world, tmp_path, way):
    world(never_stepped, 2, path=str(tmp_path / "c"), way=way)


class Tied(nn.Module):
    def __init__(self, seed: int = 0, head_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        if head_first:
            self.head, self.embed = nn.Linear(6, 12, bias=False), nn.Embedding(12, 6)
        else:
            self.embed, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.to(device(), torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.tanh() + self.embed(torch.arange(4, device=x.device)))


def tied(path: str, head_first: bool, is_tied: bool, rules: dict[str, str]) -> None:
    """Saved with the embedding first; the head is first or not where it is loaded, or has a weight of its own."""
    model = st.shard_module(Tied(), {"embed": "[tp balanced, -]"})
    optimizer = st.ShardedOptimizer(model, optim.AdamW)
    train(model, optimizer, range(2))
    st.save(path, model=model, optimizer=optimizer)
    fresh = Tied(1, head_first)
    if not is_tied:
        fresh.head.weight = nn.Parameter(torch.zeros_like(fresh.embed.weight))
        st.load(path, model=st.shard_module(fresh, rules))
        assert torch.equal(whole(fresh.head.weight), whole(model.embed.weight))
        assert torch.equal(whole(fresh.embed.weight), whole(model.embed.weight))
        return
    st.shard_module(fresh, rules)
    its = st.ShardedOptimizer(fresh, optim.AdamW)
    st.load(path, model=fresh, optimizer=its)
    assert fresh.head.weight is fresh.embed.weight
    for each in ((model, optimizer), (fresh, its)):
        train(*each, range(2, 4))
    assert torch.allclose(whole(fresh.embed.weight), whole(model.embed.weight), **ROUNDED)


@pytest.mark.parametrize("rules", [{"embed": "[-, tp balanced]"}, {"head": "[tp balanced, -]"}], ids=["embed", "head"])
@pytest.mark.parametrize(("head_first", "is_tied"), [(False, True), (True, True), (False, False), (True, False)])
def test_tied_parameters_load_under_either_name(world, tmp_path, head_first, is_tied, rules):
    world(tied, 2, path=str(tmp_path / "c"), head_first=head_first, is_tied=is_tied, rules=rules)


# -- several models ----------------------------------------------------------------------------------------------------


def several(path: str) -> None:
    """Two models and two optimizers in dicts, one optimizer over parameters of both."""
    models = {"actor": Matrices(0), "critic": Parts(0)}
    st.shard_module(models["actor"], {"up": "[tp balanced, -]"})
    optimizers = dict_optimizers(models)
    for name, model in models.items():
        train(model, optimizers["of actor" if name == "actor" else "of critic"], range(2))
    st.save(path, model=models, optimizer={key.replace(" ", "_"): x for key, x in optimizers.items()})
    fresh = {"critic": Parts(1), "actor": Matrices(1)}
    st.shard_module(fresh["actor"], {"down": "[-, tp balanced]"})
    its = dict_optimizers(fresh)
    st.load(path, model=fresh, optimizer={key.replace(" ", "_"): x for key, x in its.items()})
    for name in models:
        key = "of actor" if name == "actor" else "of critic"
        train(models[name], optimizers[key], range(2, 4))
        train(fresh[name], its[key], range(2, 4))
        assert_same(map_whole(fresh[name]), map_whole(models[name]), **ROUNDED)
    alone = Matrices(2)
    st.load(path, model={"actor": alone})
    assert set(map_whole(alone)) == {"up", "down"}


def dict_optimizers(models: dict[str, nn.Module]) -> dict[str, Any]:
    return {
        "of actor": st.ShardedOptimizer(models["actor"], optim.AdamW, lr=0.1),
        "of critic": optim.SGD(models["critic"].parameters(), lr=0.1, momentum=0.9),
    }


def test_several_models_and_optimizers(world, tmp_path):
    world(several, 2, path=str(tmp_path / "c"))


def one_over_two(path: str) -> None:
    models = {"actor": Matrices(0), "critic": Matrices(1)}
    optimizer = optim.AdamW([p for model in models.values() for p in model.parameters()], lr=0.1)
    train(models["actor"], optimizer, range(2))
    st.save(path, model=models, optimizer=optimizer)
    fresh = {"actor": Matrices(2), "critic": Matrices(3)}
    its = optim.AdamW([p for model in reversed(fresh.values()) for p in model.parameters()], lr=0.1)
    st.load(path, model=fresh, optimizer=its)
    for name in models:
        train(models[name], optimizer, range(2, 4))
        train(fresh[name], its, range(2, 4))
    for name in models:
        assert_same(map_whole(fresh[name]), map_whole(models[name]))


def test_one_optimizer_over_several_models(world, tmp_path):
    world(one_over_two, 2, path=str(tmp_path / "c"))


def test_options_that_are_tensors_are_loaded(tmp_path):
    model = nn.Linear(3, 2)
    optimizer, its = (optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    optimizer.param_groups[0]["weights"], its.param_groups[0]["weights"] = torch.ones(3), torch.zeros(3)
    st.save(tmp_path / "c", model=model, optimizer=optimizer)
    st.load(tmp_path / "c", model=model, optimizer=its)
    assert torch.equal(its.param_groups[0]["weights"], torch.ones(3))
