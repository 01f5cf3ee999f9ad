"""A fully sharded module that is converted, moved, loaded or given other parameters computes with what it has then."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp.twins import WORLDS, backward, ids_of, loss_of, net, same_values, shard, train, twins
from harness import FULL
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError, RuleError, StaleParameterError
from shardtensor.fsdp import fully_shard


def is_packed(model: nn.Module) -> bool:
    """Whether every leaf is a view of its flat's range."""
    flats = {id(p._param_group): p._param_group for p in model.parameters()}.values()
    return all(
        wrapper._local.untyped_storage().data_ptr() == flat.shard.untyped_storage().data_ptr()
        for flat in flats
        for wrapper in flat.sharded_params
    )


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "float": lambda m: m.float(),
    "bfloat16": lambda m: m.bfloat16(),
    "there and back": lambda m: m.float().double(),
    "to": lambda m: m.to("cpu", torch.float32),
    "apply": lambda m: m.apply(lambda each: each.float()),
}


@pytest.mark.parametrize("world", [1, 2, 4] if FULL else [2])
@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("when", ["before the first forward", "after a step", "with gradients"])
def test_conversions(world: int, name: str, when: str) -> None:
    convert = CONVERSIONS[name]

    def body() -> None:
        dense, sharded = twins()
        before = list(sharded.parameters())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (dense, sharded)]
        if when == "after a step":
            train(dense, sharded, optimizers, 1)
        if when == "with gradients":
            backward(dense, sharded)
        convert(dense)
        assert convert(sharded) is sharded
        assert is_packed(sharded)
        assert all(a is b for a, b in zip(before, sharded.parameters(), strict=True))
        if name == "bfloat16":
            for p in sharded.parameters():
                assert p.dtype == torch.bfloat16
            loss_of(sharded(ids_of(1)[1])).backward()
            assert all(p.grad.dtype == torch.bfloat16 for p in sharded.parameters())
            return
        if when == "with gradients":
            backward(dense, sharded, 1)
        train(dense, sharded, optimizers, 2)

    st.simulate(world, body)


def test_a_part_of_a_unit_cannot_be_converted() -> None:
    def body() -> str:
        _, sharded = twins()
        sharded.blocks[0].norm.float()
        with pytest.raises(RuleError) as error:
            sharded(ids_of(0)[1])
        sharded.blocks[0].norm.double()
        loss_of(sharded(ids_of(0)[1])).backward()
        return str(error.value)

    for text in st.simulate(3, body):
        assert "float32" in text and "norm.weight" in text and "up.weight" in text


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", ["to_empty", "materialize", "load", "assign"])
def test_meta_device(world: int, way: str) -> None:
    def body() -> None:
        dense = net()
        for p in dense.modules():
            if hasattr(p, "reset_parameters"):
                torch.manual_seed(1)
                p.reset_parameters()
        with torch.device("meta"):
            sharded = shard(type(dense)().double())
        assert all(p.is_meta for p in sharded.parameters())
        with pytest.raises(LayoutError, match="meta device"):
            sharded(ids_of(0)[1])
        if way == "to_empty":
            sharded.to_empty(device="cpu")
            for each in sharded.modules():
                if hasattr(each, "reset_parameters"):
                    torch.manual_seed(1)
                    each.reset_parameters()
            sharded.scale.fill_(0.5)
        elif way == "materialize":

            def init(each: nn.Module) -> None:
                if hasattr(each, "reset_parameters"):
                    torch.manual_seed(1)
                    each.reset_parameters()
                if hasattr(each, "scale"):
                    each.scale.fill_(0.5)

            st.materialize(sharded, init=init)
        else:
            sharded.load_state_dict(dense.state_dict(), assign=way == "assign")
        same_values(dense, sharded, 0.0)
        train(dense, sharded, [torch.optim.Adam(m.parameters(), lr=0.1) for m in (dense, sharded)])
        assert is_packed(sharded)

    st.simulate(world, body)


LOADS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "whole": lambda m: m.state_dict(),
    "sharded alike": lambda m: shard(copy.deepcopy(m)).state_dict(),
    "one unit": lambda m: fully_shard(copy.deepcopy(m)).state_dict(),
    "rows": lambda m: {
        name: st.distribute(value, "[tp sizes(*), ...]".replace("*", _rows(value))) if value.dim() else value
        for name, value in m.state_dict().items()
    },
}


def _rows(value: torch.Tensor) -> str:
    size = as_group().size
    return ", ".join(["0"] * (size - 1) + [str(value.shape[0])])


@pytest.mark.parametrize("world", [1, 2, 3] if FULL else [3])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("tied", [False, True])
def test_load_state_dict(world: int, name: str, assign: bool, tied: bool) -> None:
    def body() -> None:
        dense, sharded = twins(tied=tied)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (dense, sharded)]
        train(dense, sharded, optimizers, 1)
        source = net(seed=5, tied=tied)
        values = LOADS[name](source)
        missing = sharded.load_state_dict({**values, "more": torch.ones(1)}, strict=False, assign=assign)
        assert missing.unexpected_keys == ["more"]
        dense.load_state_dict(source.state_dict())
        same_values(dense, sharded, 0.0)
        if assign:
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (dense, sharded)]
        train(dense, sharded, optimizers)
        assert is_packed(sharded)
        assert not tied or sharded.head.weight is sharded.embed.weight
        same_values(net(seed=5, tied=tied), source, 0.0)

    st.simulate(world, body)


def test_an_optimizer_of_replaced_parameters_refuses() -> None:
    def body() -> None:
        dense, sharded = twins()
        optimizer = st.ShardedOptimizer(sharded, torch.optim.AdamW, lr=0.1)
        loss_of(sharded(ids_of(0)[1])).backward()
        optimizer.step()
        sharded.load_state_dict(dense.state_dict(), assign=True)
        loss_of(sharded(ids_of(0)[1])).backward()
        with pytest.raises(StaleParameterError, match=r"blocks\.0\.up\.weight"):
            optimizer.step()

    st.simulate(2, body)


@pytest.mark.parametrize("world", WORLDS)
def test_state_dict_and_files(world: int) -> None:
    def body() -> None:
        dense, sharded = twins()
        train(dense, sharded, [torch.optim.SGD(m.parameters(), lr=0.1) for m in (dense, sharded)])
        state = sharded.state_dict()
        assert list(state) == list(dense.state_dict())
        for name, value in state.items():
            assert isinstance(value, st.ShardedTensor) == (name != "scale")
            torch.testing.assert_close(getattr(value, "full_tensor", lambda v=value: v)(), dense.state_dict()[name])
        file = io.BytesIO()
        torch.save(state, file)
        local = sum(v._local.numel() * 8 for v in state.values() if isinstance(v, st.ShardedTensor))
        assert file.tell() < 2 * local + 40_000
        one = io.BytesIO()
        torch.save(state["blocks.0.norm.weight"], one)
        file.seek(0)
        read = torch.load(file, weights_only=True)
        other = shard(net(seed=9))
        other.load_state_dict(read)
        same_values(dense, other)

    st.simulate(world, body)


def test_a_piece_is_saved_without_its_flat() -> None:
    def body() -> int:
        model = fully_shard(nn.Sequential(nn.Linear(200, 200), nn.LayerNorm(200)))
        file = io.BytesIO()
        torch.save(model.state_dict()["1.weight"], file)
        return file.tell()

    assert max(st.simulate(2, body)) < 10_000


@pytest.mark.parametrize("world", WORLDS)
def test_data_of_another_tensor(world: int) -> None:
    """`param.data = other` counts, also on ranks that hold nothing of the parameter; gradients add up on."""

    def body() -> None:
        dense, sharded = twins()
        train(dense, sharded, [], 1)
        for model in (dense, sharded):
            model.blocks[1].norm.weight.data = model.blocks[1].norm.weight.data * 3
            model.head.weight.data = model.head.weight.detach().clone() * 2
        backward(dense, sharded, 1)
        assert is_packed(sharded)
        kept = sharded.head.weight.data
        whole = kept.full_tensor()
        sharded.head.weight.data = sharded.head.weight.detach().clone().zero_()
        assert sharded(ids_of(0)[1]).abs().max() == 0
        sharded.head.weight.data = kept
        assert torch.equal(sharded.head.weight.full_tensor(), whole)
        backward(dense, sharded, 2)

    st.simulate(world, body)


@pytest.mark.parametrize("world", WORLDS)
def test_a_parameter_put_in_place(world: int) -> None:
    def body() -> None:
        dense, sharded = twins()
        train(dense, sharded, [], 1)
        new = torch.arange(35.0, dtype=torch.float64).view(7, 5) / 35
        dense.head.weight = nn.Parameter(new.clone())
        sharded.head.weight = nn.Parameter(new.clone())
        backward(dense, sharded, 1)
        assert isinstance(sharded.head.weight, st.ShardedTensor) and is_packed(sharded)
        sharded.head.weight = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))
        with pytest.raises(RuleError, match="another shape"):
            sharded(ids_of(0)[1])

    st.simulate(world, body)


FORMS = {
    "rows": lambda p: "flat(dp, unit=row)",
    "dim 0": lambda p: Shard(0),
    "dim 1": lambda p: Shard(p.dim() - 1),
    "sixteens": lambda p: "flat(dp, unit=16)",
}


@pytest.mark.parametrize("world", [1, 2, 3] if FULL else [3])
@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_shards(world: int, name: str) -> None:
    def body() -> None:
        dense = net()
        sharded = shard(copy.deepcopy(dense), shard_placement_fn=FORMS[name])
        train(dense, sharded, [torch.optim.Adam(m.parameters(), lr=0.1) for m in (dense, sharded)], 1)
        for model in (dense, sharded):
            model.float().double()
        assert is_packed(sharded)
        other = copy.deepcopy(sharded)
        train(dense, sharded, [torch.optim.Adam(m.parameters(), lr=0.1) for m in (dense, sharded)], 1)
        other.load_state_dict(dense.state_dict(), assign=True)
        train(dense, other, [torch.optim.Adam(m.parameters(), lr=0.1) for m in (dense, other)], 1)
        other.head.weight.requires_grad_(False)
        dense.head.weight.requires_grad_(False)
        train(dense, other, [torch.optim.Adam(m.parameters(), lr=0.1) for m in (dense, other)], 1)
        assert is_packed(other)

    st.simulate(world, body)


def test_hybrid() -> None:
    def body() -> None:
        dense = net()
        sharded = shard(copy.deepcopy(dense), mesh=as_group())
        train(dense, sharded, [torch.optim.Adam(m.parameters(), lr=0.1) for m in (dense, sharded)], 1)
        for model in (dense, sharded):
            model.float().double()
        other = copy.deepcopy(sharded)
        other.load_state_dict(dense.state_dict(), assign=True)
        for each in (sharded, other):
            same_values(dense, each)
            train(copy.deepcopy(dense), each, [], 1)
            assert is_packed(each)

    st.simulate("rep=2, dp=2", body)
