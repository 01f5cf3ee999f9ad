"""Models of every kind: on the meta device, of other dtypes, wrapped, with own state; and what fits in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import device
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from trained import COLUMNS, ROWS, Net, adamw, assert_same, integers, map_whole, save_columns, step, values, whole

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.optim.fqn import plain_name

sim = pytest.mark.worlds("sim")
# -- the meta device ---------------------------------------------------------------------------------------------------


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


def load_on_meta(path: str, kind: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).to(device())
    model[1].running_mean += 3
    st.save(path, model=model)
    fresh = on_meta()
    if kind == "sharded":
        st.shard_module(fresh, {"0": "[tp balanced, ...]", "2.weight": "flat(tp)"})
    if kind == "fully_shard":
        st.fully_shard(fresh)
    params = list(fresh.parameters())
    st.load(path, model=fresh)
    assert [id(p) for p in fresh.parameters()] == [id(p) for p in params]
    assert_same(map_whole(fresh), map_whole(model))
    assert all(p.requires_grad and p.is_leaf for p in fresh.parameters())
    whole(fresh(torch.ones(2, 6, device=device()))).sum().backward()


@sim
@pytest.mark.parametrize("kind", ["plain", "sharded", "fully_shard"])
def test_a_model_on_the_meta_device_gets_memory(world, tmp_path, kind):
    world(load_on_meta, 2, path=str(tmp_path / "c"), kind=kind)


def optimizer_on_meta(path: str, kind: str) -> None:
    want = save_columns(path)
    with torch.device("meta"):
        fresh = nn.Module()
        fresh.first, fresh.last = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 5, dtype=torch.float64)
        fresh.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        fresh.register_buffer("count", torch.tensor(0))
    if kind == "sharded":
        st.shard_module(fresh, ROWS)
    its = adamw(fresh) if kind == "sharded" else optim.AdamW(fresh.parameters())
    st.load(path, model=fresh, optimizer=its)
    assert_same(values(fresh, its), want)


@sim
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_an_optimizer_of_a_model_on_the_meta_device(world, tmp_path, kind):
    world(optimizer_on_meta, 2, path=str(tmp_path / "c"), kind=kind)


# -- names, shapes and dtypes ------------------------------------------------------------------------------------------


def cast_to(path: str, dtype: torch.dtype) -> None:
    model = Net()
    model.last.weight.data.add_(1 / 3)
    st.save(path, model=st.shard_module(model, COLUMNS))
    fresh = st.shard_module(Net(5).to(dtype), ROWS)
    st.load(path, model=fresh, cast=True)
    assert_same(map_whole(fresh), {name: x.to(dtype) if x.dim() else x for name, x in map_whole(model).items()} | {
        "scale": whole(model.scale).detach().to(dtype), "count": model.count
    })  # fmt: skip


@sim
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cast_converts_on_the_way(world, tmp_path, dtype):
    world(cast_to, 3, path=str(tmp_path / "c"), dtype=dtype)


class Other(nn.Module):
    """One name of `Net`, one of another shape, one more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.more = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(2, 2)
        self.double()


def not_strict(path: str) -> None:
    save_columns(path)
    fresh = st.shard_module(Other(), {"last.weight": "[-, tp balanced]"})
    before = map_whole(fresh)
    with pytest.raises(st.CheckpointError, match="does not fit") as caught:
        st.load(path, model=fresh)
    for words in ("more.weight", "more.bias", "scale", "count", "last.weight: 5 x 8 saved, 4 x 8 here"):
        assert words in str(caught.value)
    assert_same(map_whole(fresh), before)
    if as_group().index == 0:
        with pytest.warns(UserWarning, match="left as they are.*more.weight"):
            st.load(path, model=fresh, strict=False)
    else:
        st.load(path, model=fresh, strict=False)
    found, saved = map_whole(fresh), map_whole(Net())
    assert found["first.weight"].shape == saved["first.weight"].shape
    for name in found:
        assert torch.equal(found[name], before[name]) == (not name.startswith("first")), name


@sim
def test_strict_false_loads_what_fits(world, tmp_path):
    world(not_strict, 2, path=str(tmp_path / "c"))


def memory_of_any_strides(path: str) -> None:
    """Transposed, sliced and channels_last tensors keep their strides."""

    def made(fill: bool) -> dict[str, torch.Tensor]:
        seed = 0 if fill else 9
        found = {
            "transposed": integers((4, 6), seed).t(),
            "every other": integers((6, 6), seed)[::2, 1::2],
            "channels last": integers((2, 3, 4, 4), seed).to(memory_format=torch.channels_last),
            "sharded": st.distribute(integers((6, 4), seed), "[tp balanced, -]"),
        }
        local = found["sharded"]._local
        found["sharded"]._local = local.new_empty(local.shape[::-1]).t().copy_(local)
        return found

    saved, loaded = made(True), made(False)
    assert not any(getattr(x, "_local", x).is_contiguous() for x in saved.values())
    strides = {name: getattr(x, "_local", x).stride() for name, x in loaded.items()}
    for layout in ("whole", "as is"):
        st.save(path, model=saved, layout=layout)
        st.load(path, model=loaded)
        assert_same({k: whole(x) for k, x in loaded.items()}, {k: whole(x) for k, x in saved.items()})
        assert {name: getattr(x, "_local", x).stride() for name, x in loaded.items()} == strides
        loaded = made(False)


@sim
def test_local_memory_that_is_not_contiguous(world, tmp_path):
    world(memory_of_any_strides, 2, path=str(tmp_path / "c"))


# -- wrapped models ----------------------------------------------------------------------------------------------------


def wrapped(path: str, saved: str, loaded: str) -> None:
    def made(how: str, seed: int) -> tuple[nn.Module, nn.Module]:
        model = st.shard_module(Net(seed), COLUMNS if how == "no" else ROWS)
        if how == "compiled":
            return model, torch.compile(model)
        if how == "compiled inside":
            model.first = torch.compile(model.first)
        if how == "recomputed":
            model.first = checkpoint_wrapper(model.first)
        return model, model

    (model, outer), (fresh, its_outer) = made(saved, 0), made(loaded, 7)
    optimizers = [adamw(model), adamw(fresh)]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizers[0].step()
    st.save(path, model=outer, optimizer=optimizers[0])
    st.load(path, model=its_outer, optimizer=optimizers[1])
    found, want = values(fresh, optimizers[1]), values(model, optimizers[0])
    assert_same({plain_name(name): x for name, x in found.items()}, {plain_name(k): x for k, x in want.items()})


@sim
@pytest.mark.parametrize(
    ("saved", "loaded"), [("compiled", "no"), ("no", "compiled inside"), ("recomputed", "compiled")]
)
def test_names_do_not_depend_on_wrappers(world, tmp_path, saved, loaded):
    world(wrapped, 2, path=str(tmp_path / "c"), saved=saved, loaded=loaded)


def in_ddp(path: str) -> None:
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = st.ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    step(model, optimizer, 0)
    st.save(path, model=model, optimizer=optimizer)
    fresh = st.shard_module(Net(3), COLUMNS)
    its = adamw(fresh)
    st.load(path, model=fresh, optimizer=its)
    assert_same(values(fresh, its), values(model.module, optimizer))
    again = nn.parallel.DistributedDataParallel(Net(4))
    st.load(path, model=again)
    assert_same(map_whole(again.module), map_whole(fresh))


def test_ddp_leaves_no_trace_in_names(world, tmp_path):
    world(in_ddp, 2, path=str(tmp_path / "c"))


def own_statistics(path: str) -> None:
    """Ranks that see other batches have other statistics in the buffers of BatchNorm."""
    torch.manual_seed(0)
    model, fresh = (nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(4))) for _ in range(2))
    model(as_group().rank * torch.arange(3.0) + torch.randn(4, 3))
    st.save(path, model=model)
    st.load(path, model=fresh)
    found = as_group().exchange_objects([x.tolist() for x in fresh.buffers()])
    assert found == [found[0]] * len(found)


@sim
@pytest.mark.parametrize("size", [2, 3])
def test_buffers_that_differ_between_ranks_are_those_of_one_of_them(world, tmp_path, size):
    world(own_statistics, size, path=str(tmp_path / "c"))


class Counting(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.ones(2)), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class InTensor(Counting):
    """Has its state in a new tensor each time, of another length now and then."""

    def get_extra_state(self) -> Any:
        return torch.tensor(self.state)

    def set_extra_state(self, state: Any) -> None:
        self.state = state.tolist()


def extra_state(path: str, cls: Any, old: Any, new: Any, compiled: bool = False) -> None:
    st.save(path, model=nn.Sequential(cls(new)))
    fresh = nn.Sequential(cls(old))
    st.load(path, model=torch.compile(fresh) if compiled else fresh)
    assert fresh[0].state == new


@sim
@pytest.mark.parametrize("state", [{"a": (1, [2.5])}, 7, {1: b"x"}])
def test_extra_state_of_modules(world, tmp_path, state):
    world(extra_state, 2, path=str(tmp_path / "c"), cls=Counting, old=None, new=state)


@pytest.mark.parametrize("new", [[3, 4], [5, 6, 7]])
def test_extra_state_that_is_a_tensor(tmp_path, new):
    extra_state(str(tmp_path / "c"), InTensor, [1, 2], new)


def test_extra_state_in_a_compiled_module(tmp_path):
    extra_state(str(tmp_path / "c"), Counting, None, 7, compiled=True)


def test_a_state_dict_with_extra_state(tmp_path):
    st.save(tmp_path / "c", model=nn.Sequential(Counting({"a": 1})).state_dict())
