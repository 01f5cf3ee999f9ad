"""Cases B01, B34, B35 and B36: what went wrong elsewhere when checkpoints were saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import device, every_size
from torch import nn, optim
from trained import whole

import shardtensor as st
from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")


# -- B01: a rank that owns nothing -------------------------------------------------------------------------------------


def chunks(path: str, n: int, layout: str) -> None:
    group = as_group()
    spec = st.ChunkShardingSpec(0, [f"rank:{r}/{device(r)}" for r in range(group.size)])
    want = torch.arange(float(n), device=device())
    x, fresh = st.distribute(want, spec), st.zeros(spec, n, device=device())
    st.save(path, model={"x": x}, layout=layout)
    st.load(path, model={"x": fresh})
    chunk = -(-n // group.size) or 1
    sizes = [max(0, min(chunk, n - chunk * rank)) for rank in range(group.size)]
    for each in (x, fresh):
        assert tuple(each.size()) == (n,)
        assert [shard.tensor.numel() for shard in each.local_shards()] in ([sizes[group.rank]], [])
        assert torch.equal(each.full_tensor(), want)


@both
@every_size
@pytest.mark.parametrize("layout", ["whole", "as is"])
def test_b01_chunks_of_which_some_are_empty(world, tmp_path, size, layout):
    for n in range(10):
        world(chunks, size, path=str(tmp_path / str(n)), n=n, layout=layout)


# -- B34: weights and AdamW state across rank counts -------------------------------------------------------------------


def model_of_b34() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3)).to(device())


def train(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    whole(model(torch.ones(2, 4, device=device()))).square().mean().backward()
    optimizer.step()


def fully_shard(model: nn.Module) -> Any:
    st.fully_shard(model[0])
    st.fully_shard(model)
    return optim.AdamW(model.parameters(), lr=0.1)


def shard_parameters(model: nn.Module) -> Any:
    st.shard_parameter(model, "0.weight", "[tp balanced, -]")
    st.shard_parameter(model, "1.weight", "[-, tp balanced]")
    return st.ShardedOptimizer(model, optim.AdamW, lr=0.1)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "zero": lambda model: st.ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1),
    "fully_shard": fully_shard,
    "shard_parameter": shard_parameters,
}


def first_step(path: str, way: str) -> None:
    model = model_of_b34()
    optimizer = WAYS[way](model)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.03
    st.save(path, model=model, optimizer=optimizer)


def second_step(path: str, way: str, then: str) -> list[torch.Tensor]:
    model = model_of_b34()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = WAYS[way](model)
    st.load(path, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.03
    st.save(then, model=model, optimizer=optimizer)
    train(model, optimizer)
    return [whole(param).detach() for param in model.parameters()]


def oracle_of_b34() -> list[torch.Tensor]:
    model = model_of_b34()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.03
    train(model, optimizer)
    return [param.detach() for param in model.parameters()]


@sim
@pytest.mark.parametrize("first", WAYS)
def test_b34_adamw_goes_on_with_other_ranks_and_layouts(world, tmp_path, first):
    """Saved by four ranks; each load is saved again, and the next one loads that."""
    path, want = str(tmp_path / "0"), oracle_of_b34()
    world(first_step, 4, path=path, way=first)
    for number, size in enumerate((1, 2, 3, 8, 4)):
        for i, way in enumerate(WAYS):
            then = str(tmp_path / f"{number + 1}-{i}")
            for found in world(second_step, size, path=path, way=way, then=then):
                for x, y in zip(found, want, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
            path = then


def test_b34_in_processes(world, tmp_path):
    path, want = str(tmp_path / "0"), oracle_of_b34()
    world(first_step, 4, path=path, way="zero")
    for way in WAYS:
        for found in world(second_step, 3, path=path, way=way, then=str(tmp_path / way)):
            for x, y in zip(found, want, strict=True):
                torch.testing.assert_close(x.to(y.device), y, rtol=1e-5, atol=1e-6)


# -- B35: dtype and shape of the target --------------------------------------------------------------------------------


def other_dtype_and_shape(path: str, is_sharded: bool) -> list[str]:
    def made(x: torch.Tensor) -> torch.Tensor:
        return st.distribute(x, "[tp balanced]") if is_sharded else x

    st.save(path, model={"w": made(torch.tensor([1.0009765625])), "v": made(torch.arange(5.0))})
    texts = []
    for into in (
        {"w": made(torch.full((1,), 7.0, dtype=torch.bfloat16)), "v": made(torch.zeros(5))},
        {"w": made(torch.full((2,), 7.0)), "v": made(torch.zeros(5))},
    ):
        with pytest.raises(st.CheckpointError) as caught:
            st.load(path, model=into)
        texts.append(str(caught.value))
        assert (whole(into["w"]) == 7).all() and not whole(into["v"]).any()
    into = {"w": made(torch.zeros(1, dtype=torch.bfloat16)), "v": made(torch.zeros(5))}
    st.load(path, model=into, cast=True)
    assert whole(into["w"]).tolist() == [1.0] and whole(into["v"]).tolist() == [0, 1, 2, 3, 4]
    return texts


@both
@every_size
@pytest.mark.parametrize("is_sharded", [False, True])
def test_b35_another_dtype_or_shape_is_refused_and_nothing_changes(world, tmp_path, size, is_sharded):
    found = world(other_dtype_and_shape, size, path=str(tmp_path / "c"), is_sharded=is_sharded)
    assert found == [found[0]] * size
    of_dtype, of_shape = found[0]
    assert "w: float32 saved, bfloat16 here" in of_dtype and "cast=True" in of_dtype
    assert "w: 1 saved, 2 here" in of_shape


# -- B36: one rank calls save, or brings other keys --------------------------------------------------------------------


def alone(path: str) -> str:
    if as_group().rank == 1:
        return ""
    with pytest.raises(st.ShardTensorError) as caught:
        st.save(path, extra=1)
    return str(caught.value)


@sim
def test_b36_a_call_of_one_rank_names_those_that_are_absent(world, tmp_path):
    text, _ = world(alone, 2, path=str(tmp_path / "c"))
    assert "rank 1" in text and "test_checkpoint_cases.py" in text and "in alone" in text, text
    assert list(tmp_path.iterdir()) == []


SIZES_OF_B36 = {"a": 4, "b": 6, "c": 8}


def tensors_of(kind: str) -> dict[str, torch.Tensor]:
    found = {name: st.distribute(torch.arange(float(n)) + n, "[tp balanced]") for name, n in SIZES_OF_B36.items()}
    if as_group().rank == 0 and kind == "extra":
        found["d"] = torch.zeros(2)
    if as_group().rank == 1 and kind == "missing":
        del found["b"]
    return dict(reversed(found.items())) if as_group().rank == 1 and kind == "order" else found


def other_keys(path: str, kind: str, call: str) -> str:
    st.save(path, model=tensors_of("equal"))
    found = tensors_of(kind)
    before = {name: whole(x).clone() for name, x in found.items()} if kind == "extra" else {}
    with pytest.raises(st.CheckpointError) as caught:
        st.save(path, model=found) if call == "save" else st.load(path, model=found)
    assert all(torch.equal(whole(found[name]), x) for name, x in before.items())
    into = {name: torch.zeros(n) for name, n in SIZES_OF_B36.items()}
    st.load(path, model=into)  # what was saved before is there
    assert into["c"].tolist() == (torch.arange(8.0) + 8).tolist()
    return str(caught.value)


@both
@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize(("kind", "name"), [("extra", "d"), ("missing", "b")])
def test_b36_keys_that_one_rank_has_alone_are_listed(world, tmp_path, kind, name, call):
    texts = world(other_keys, 2, path=str(tmp_path / "c"), kind=kind, call=call)
    assert texts == [texts[0]] * 2
    assert name in texts[0] and "rank " in texts[0], texts[0]


def other_order(path: str, call: str, layout: str) -> None:
    st.save(path, model=tensors_of("order" if call == "save" else "equal"), layout=layout)
    for kind in ("equal", "order"):
        into = {name: st.distribute(whole(x) * 0, "[tp balanced]") for name, x in tensors_of("equal").items()}
        into = dict(reversed(into.items())) if kind == "order" and as_group().rank == 1 else into
        st.load(path, model=into)
        for name, n in SIZES_OF_B36.items():
            assert whole(into[name]).tolist() == (torch.arange(float(n)) + n).tolist()


@both
@pytest.mark.parametrize(
    ("call", "layout"),
    [
        ("save", "whole"),
        ("save", "as is"),
        ("load", "whole"),
    ],
)
def test_b36_order_does_not_matter(world, tmp_path, call, layout):
    world(other_order, 2, path=str(tmp_path / "c"), call=call, layout=layout)
