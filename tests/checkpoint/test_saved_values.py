"""What is saved beside tensors: extra values, schedulers, scalers, dataloaders, the states of random generators."""

from __future__ import annotations

import enum
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from harness import device
from torch import nn, optim
from torch.optim import lr_scheduler, swa_utils

import shardtensor as st
from shardtensor.checkpoint.random_states import rng_state, set_rng_state
from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")


class Color(enum.IntEnum):
    RED = 3


VALUES: dict[str, Any] = {
    "numbers": [0, -(2**70), True, 1.5, float("inf"), -float("inf"), 0.1, 5e-324, 1 + 2j, complex(0.0, -0.0)],
    "text": ["", "ä\n\0", "$tensor", "\ud800", "a/b"],
    "none": None,
    "bytes": b"\x00\xff",
    "tuple": (1, (2, ()), [3]),
    "keys": {1: "a", (1, "b"): 2, None: 3, 1.5: 4, False: 5, "$dict": 6},
    "one key": [{"$tensor": "x"}, {"$": 1}, {}, {"$float": "nan"}],
    "sets": [{1, 2}, set(), {(1, 2), "a"}],
    "ordered": OrderedDict(b=1, a=2),
    "dtype": [torch.bfloat16, torch.device("cuda", 1), torch.float8_e4m3fn],
    "tensors": [torch.arange(6).view(2, 3).t(), torch.ones(0, 2), torch.tensor([True])],
    "scalars": [torch.tensor(x, dtype=d) for x, d in ((1.1, torch.float32), (1.1, torch.bfloat16), (7, torch.int64))],
    "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3).T, np.zeros((0, 2)), np.arange(3)[::-1], np.array(2.5)],
    "nested": {"a": [{"b": (torch.ones(2), {"c": np.ones(2, np.float32)})}]},
    "a/b": torch.tensor([1]),
    "a": {"b": torch.tensor([2])},
}


def assert_equal(got: Any, want: Any) -> None:
    """Equal values of equal types."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor) and got.dtype == want.dtype and torch.equal(got, want), (got, want)
    elif isinstance(want, np.ndarray):
        assert isinstance(got, np.ndarray) and got.dtype == want.dtype and np.array_equal(got, want), (got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want), (got, want)
        for key in want:
            assert_equal(got[key], want[key])
    elif isinstance(want, list | tuple | deque):
        assert type(got) is type(want) and len(got) == len(want), (got, want)
        for pair in zip(got, want, strict=True):
            assert_equal(*pair)
    elif isinstance(want, float) and math.isnan(want):
        assert math.isnan(got)
    else:
        assert repr(got) == repr(want) and (type(got) is type(want) or isinstance(want, set | frozenset)), (got, want)


def extra_round_trip(path: str, value: Any) -> None:
    kept: dict[str, Any] = {"mine": 1}
    st.save(path, extra=value)
    assert_equal(st.load(path, extra=kept), value)
    assert kept["mine"] == 1 and set(kept) == {"mine", *value}


@sim
@pytest.mark.parametrize("size", [1, 3])
def test_extra_holds_every_kind_of_value(world, tmp_path, size):
    world(extra_round_trip, size, path=str(tmp_path / "c"), value=VALUES)


def after(tmp_path: Any, value: Any) -> Any:
    st.save(tmp_path / "c", extra={"x": value})
    return st.load(tmp_path / "c")["x"]


@pytest.mark.parametrize("value", [float("nan"), complex("nan+infj"), torch.tensor(float("nan")), np.float32("nan")])
def test_nan_stays(tmp_path, value):
    assert value != value
    found = after(tmp_path, value)
    assert found != found


def test_values_of_subclasses_become_those_of_their_base(tmp_path):
    found = after(tmp_path, [Color.RED, np.int64(3), np.float64(2.5), np.bool_(True), defaultdict(int, a=1)])
    assert found == [3, 3, 2.5, True, {"a": 1}]


def test_tensors_in_deques(tmp_path):
    assert_equal(after(tmp_path, deque([torch.ones(2), (torch.zeros(1),)])), deque([torch.ones(2), (torch.zeros(1),)]))


def test_counters_stay_counters(tmp_path):
    assert isinstance(after(tmp_path, Counter("aab")), Counter)


@pytest.mark.parametrize("make", [frozenset, lambda x: {frozenset(x)}], ids=["alone", "in a set"])
def test_frozensets_stay_frozensets(tmp_path, make):
    found = None
    with suppress(st.CheckpointError):
        found = after(tmp_path, make({1, 2}))
    assert found == make({1, 2}) and type(found) is type(make({1, 2}))


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_lazy_conjugates_and_negatives_are_saved_as_their_values(tmp_path, lazy):
    x = lazy(torch.tensor([1 + 2j, 3 - 4j]))
    assert torch.equal(after(tmp_path, x), x.resolve_conj().resolve_neg())


def test_an_integer_of_many_digits(tmp_path):
    assert after(tmp_path, {"x": 10**5000, "y": -(1 << 63) - 1}) == {"x": 10**5000, "y": -(1 << 63) - 1}


def different(path: str) -> None:
    """Rank 0's values are saved, numbers and tensors."""
    rank = as_group().rank
    st.save(path, extra={"n": rank, "l": [rank] * (rank + 1), "s": torch.tensor(rank), "t": torch.full((3,), rank)})
    assert_equal(st.load(path), {"n": 0, "l": [0], "s": torch.tensor(0), "t": torch.zeros(3, dtype=torch.int64)})


@sim
def test_of_different_values_those_of_rank_0_are_saved(world, tmp_path):
    world(different, 3, path=str(tmp_path / "c"))


def different_tensors(path: str) -> None:
    rank = as_group().rank
    st.save(path, extra={name: torch.full((3,), rank) for name in "abc"})
    assert_equal(st.load(path), {name: torch.zeros(3, dtype=torch.int64) for name in "abc"})


@sim
def test_of_different_tensors_those_of_rank_0_are_saved(world, tmp_path):
    world(different_tensors, 3, path=str(tmp_path / "c"))


def sharded_extra(path: str, spec: str) -> None:
    x = torch.arange(10.0).view(5, 2)
    st.save(path, extra={"x": st.distribute(x, spec)})
    assert_equal(st.load(path), {"x": x})


@sim
@pytest.mark.parametrize("spec", ["[tp balanced, -]", "flat(tp)", "replicate"])
def test_sharded_tensors_of_extra_are_loaded_whole(world, tmp_path, spec):
    world(sharded_extra, 3, path=str(tmp_path / "c"), spec=spec)


# -- schedulers and scalers --------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def epochs(optimizer: Any, scheduler: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        found.append(optimizer.param_groups[0]["lr"])
    return found


def scheduled(path: str, name: str, make: str) -> None:
    def objects() -> tuple[nn.Module, Any, Any]:
        model = nn.Linear(4, 3).to(device())
        if make == "zero":
            optimizer: Any = st.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)
        else:
            st.shard_parameter(model, "weight", "[tp balanced, -]")
            optimizer = st.ShardedOptimizer(model, optim.SGD, lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    model, optimizer, scheduler = objects()
    epochs(optimizer, scheduler, 3)
    st.save(path, model=model, optimizer=optimizer, scheduler=scheduler)
    fresh, its, again = objects()
    st.load(path, model=fresh, optimizer=its, scheduler=again)
    assert epochs(its, again, 4) == epochs(optimizer, scheduler, 4)


@sim
@pytest.mark.parametrize("make", ["sharded", "zero"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on(world, tmp_path, name, make):
    world(scheduled, 2, path=str(tmp_path / "c"), name=name, make=make)


def test_a_scaler_and_a_scheduler_in_a_dict(tmp_path):
    def objects() -> dict[str, Any]:
        optimizer = optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
        return {"lr": lr_scheduler.StepLR(optimizer, 2), "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}

    saved, loaded = objects(), objects()
    saved["scaler"].scale(torch.ones(1))
    saved["scaler"].update(4.0)
    saved["lr"].last_epoch = 7
    st.save(tmp_path / "c", scheduler=saved)
    st.load(tmp_path / "c", scheduler=loaded)
    assert (loaded["scaler"].get_scale(), loaded["lr"].last_epoch) == (4.0, 7)
    alone = torch.amp.GradScaler("cpu", init_scale=2.0)
    st.load(tmp_path / "c", scheduler={"scaler": alone})
    assert alone.get_scale() == 4.0


def test_an_object_that_refuses_its_state_leaves_the_model_as_it_was(tmp_path):
    model, optimizer = nn.Linear(2, 2), optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    st.save(tmp_path / "c", model=model, scheduler=lr_scheduler.StepLR(optimizer, 2))
    fresh = nn.Linear(2, 2)
    before = fresh.weight.detach().clone()
    with pytest.raises(st.CheckpointError):
        st.load(tmp_path / "c", model=fresh, scheduler=lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0))
    assert torch.equal(fresh.weight, before)


# -- what each rank has for itself -------------------------------------------------------------------------------------


class Loader:
    def __init__(self, place: Any = 0) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "order": torch.arange(4) + self.place, "few": (np.arange(2), self.place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["order"], torch.arange(4) + state["place"])
        assert isinstance(state["few"], tuple) and np.array_equal(state["few"][0], np.arange(2))
        self.place = state["place"]


def save_loaders(path: str, same: bool) -> None:
    own = 5 if same else as_group().rank + 5
    st.save(path, dataloader={"train": Loader(own), "test": Loader(9)})


def load_loaders(path: str) -> tuple[int, int]:
    loaders = {"test": Loader(), "train": Loader()}
    st.load(path, dataloader=loaders)
    return loaders["train"].place, loaders["test"].place


def refused(path: str) -> str:
    loaders = {"train": Loader(), "test": Loader()}
    with pytest.raises(st.CheckpointError) as caught:
        st.load(path, dataloader=loaders)
    assert [each.place for each in loaders.values()] == [0, 0]
    st.load(path, dataloader={"test": loaders["test"]})
    assert loaders["test"].place == 9
    return str(caught.value)


@sim
def test_each_rank_loads_the_state_of_its_dataloader(world, tmp_path):
    path = str(tmp_path / "c")
    world(save_loaders, 3, path=path, same=False)
    assert world(load_loaders, 3, path=path) == [(rank + 5, 9) for rank in range(3)]
    texts = world(refused, 2, path=path)
    assert texts == [texts[0]] * 2 and "3 ranks" in texts[0] and "2 ranks" in texts[0]
    world(save_loaders, 3, path=path, same=True)
    assert world(load_loaders, 4, path=path) == [(5, 9)] * 4


def draws() -> list[Any]:
    dropped = nn.functional.dropout(torch.ones(32), 0.5).tolist()
    return [dropped, random.random(), np.random.rand()]


def random_states(path: str, same: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    own = 0 if same else as_group().rank
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own)
    draws()
    st.save(path, model=model, optimizer=optimizer)
    want = draws()
    st.load(path, model=model, optimizer=optimizer)
    assert draws() == want
    draws()
    st.load(path, model=model)
    assert draws() != want  # a model alone: the generators go on
    st.load(path, model=model, rng=True)
    assert draws() == want
    torch.manual_seed(7)
    before = draws()
    torch.manual_seed(7)
    random.seed(3)
    st.load(path, model=model, optimizer=optimizer, rng=False)
    assert draws()[0] == before[0]


def other_world(path: str, sets: bool) -> None:
    torch.manual_seed(50)
    before = torch.get_rng_state()
    st.load(path, rng=True)
    assert torch.equal(torch.get_rng_state(), before) != sets


@pytest.mark.parametrize("same", [True, False])
def test_the_next_dropout_is_the_same(world, tmp_path, same):
    """Also in a world of another size if all ranks were in the same state; else the generators are left alone."""
    path = str(tmp_path / "c")
    world(random_states, 2, path=path, same=same)
    world(other_world, 3, path=path, sets=same)


def test_without_random_states(tmp_path):
    st.save(tmp_path / "c", extra=1, rng=False)
    before = torch.get_rng_state()
    assert st.load(tmp_path / "c", rng=True) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_place_in_numpys_generator_that_it_does_not_have_is_refused():
    """numpy sets it, and the next random number would be read from memory of others."""
    state = rng_state()
    kind, words, _, *rest = state["numpy"]
    with pytest.raises(ValueError, match="a place that it does not have"):
        set_rng_state({**state, "numpy": (kind, words, 2**31 - 1, *rest)})
