"""Which modules and parameters become units, and what is refused before anything moves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp.twins import WORLDS, Net, backward, ids_of, loss_of, net, same_values, shard, train, twins
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import DisagreementError, LayoutError, RuleError
from shardtensor.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@pytest.mark.parametrize("world", WORLDS)
def test_tied_in_one_unit(world: int) -> None:
    def body() -> None:
        dense, sharded = twins(tied=True)
        assert sharded.head.weight is sharded.embed.weight
        before = sharded.embed.weight.full_tensor()
        train(dense, sharded, [torch.optim.SGD(m.parameters(), lr=0.5) for m in (dense, sharded)], 1)
        assert sharded.head.weight is sharded.embed.weight
        assert (sharded.embed.weight.full_tensor() != before).any(1).all()

    st.simulate(world, body)


def test_tied_across_units() -> None:
    def body() -> None:
        model = net(tied=True)
        fully_shard(model.embed)
        with pytest.raises(ValueError, match=r'"weight" of this Linear is one tensor with "Embedding\.weight"'):
            fully_shard(model.head)
        assert type(model.head) is nn.Linear
        with pytest.raises(ValueError, match=r'"head\.weight" of this Net is one tensor with "embed\.weight"'):
            fully_shard(model)
        assert type(model) is Net

    st.simulate(2, body)


def _twice(model: Net) -> None:
    fully_shard(model.blocks[0])
    fully_shard(model.blocks[0])


def _top_down(model: Net) -> None:
    fully_shard(model)
    fully_shard(model.blocks[0])


def _in_a_backward_graph(model: Net) -> None:
    kept.append(model(ids_of(0)[1]))
    fully_shard(model)


def _float8(model: Net) -> None:
    model.extra = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn))
    fully_shard(model)


kept: list[torch.Tensor] = []
REFUSED: dict[str, tuple[Callable[[Net], Any], type[Exception], str]] = {
    "twice": (_twice, LayoutError, "already"),
    "top down": (_top_down, LayoutError, "bottom up"),
    "list": (lambda m: fully_shard(m.blocks), LayoutError, "do not implement forward"),
    "dict": (lambda m: fully_shard(nn.ModuleDict({"a": m})), LayoutError, "do not implement forward"),
    "nothing": (lambda m: fully_shard([]), LayoutError, "empty list"),
    "live graph": (_in_a_backward_graph, RuleError, "something else refers to it"),
    "float8": (_float8, LayoutError, '"extra" would be summed'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    wrap, kind, text = REFUSED[name]

    def body() -> str:
        model = net()
        values = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
        with pytest.raises(kind, match=text) as error:
            wrap(model)
        kept.clear()
        if name not in ("twice", "top down"):
            assert type(model) is Net and type(model.blocks[0]).__name__ == "Block"
            for n, p in model.named_parameters():
                if n in values:
                    assert values[n][0] == id(p) and type(p) is nn.Parameter and torch.equal(values[n][1], p)
            fully_shard(model) if name != "float8" else None
        return str(error.value)

    assert len(set(st.simulate(2, body))) == 1


def test_a_mesh_of_three_axes() -> None:
    def body() -> None:
        model = net()
        with pytest.raises(LayoutError, match="one or two axes"):
            fully_shard(model, mesh=as_group())
        assert type(model) is Net

    st.simulate("a=1, b=1, c=2", body)


DISAGREEMENTS: dict[str, Callable[[Net, int], Any]] = {
    "shape": lambda m, rank: fully_shard(nn.Linear(2 + rank, 2)),
    "dtype": lambda m, rank: fully_shard(m.to(torch.float32 if rank else torch.float64)),
    "frozen": lambda m, rank: fully_shard(m.requires_grad_(rank == 0)),
    "reshard": lambda m, rank: fully_shard(m, reshard_after_forward=rank == 0),
    "precision": lambda m, rank: fully_shard(
        m, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if rank else None)
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement(name: str) -> None:
    def body() -> str:
        model = net()
        with pytest.raises(DisagreementError) as error:
            DISAGREEMENTS[name](model, as_group().rank)
        assert type(model) is Net
        return str(error.value)

    assert len(set(st.simulate(3, body))) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_a_list_of_modules(world: int) -> None:
    def body() -> None:
        dense = net()
        sharded = copy.deepcopy(dense)
        both = fully_shard([sharded.blocks[0], sharded.blocks[2]])
        assert both == [sharded.blocks[0], sharded.blocks[2]]
        assert isinstance(sharded.blocks[0], FSDPModule) and isinstance(sharded.blocks[2], FSDPModule)
        fully_shard([sharded.head, sharded.embed])
        fully_shard(sharded)
        train(dense, sharded, [torch.optim.Adam(m.parameters(), lr=0.1) for m in (dense, sharded)])
        for model in (dense, sharded):
            model.bfloat16().double()
        train(dense, sharded, [torch.optim.Adam(m.parameters(), lr=0.1) for m in (dense, sharded)])
        other = copy.deepcopy(sharded)
        other.load_state_dict(net(seed=2).state_dict(), assign=True)
        train(net(seed=2), other, [])

    st.simulate(world, body)


@pytest.mark.parametrize("world", WORLDS)
def test_parts_left_out(world: int) -> None:
    """Parameters of modules that nobody wrapped, and ignored ones, stay plain; one optimizer steps all."""

    def body() -> None:
        dense = net()
        sharded = copy.deepcopy(dense)
        fully_shard(sharded.blocks[0])
        fully_shard(sharded.blocks[1], ignored_params={sharded.blocks[1].norm.weight})
        assert type(sharded.head.weight) is nn.Parameter and type(sharded.blocks[1].norm.weight) is nn.Parameter
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (dense, sharded)]
        whole, _ = ids_of(0)  # the same batch on all ranks: what is not sharded has no one to average it
        for _ in range(3):
            for model, optimizer in zip((dense, sharded), optimizers, strict=True):
                loss_of(model(whole)).backward()
                optimizer.step()
                optimizer.zero_grad()
            same_values(dense, sharded)

    st.simulate(world, body)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "AdamW", "sharded SGD", "sharded Adagrad", "sharded AdamW"])
def test_an_optimizer_made_before(world: int, kind: str) -> None:
    def body() -> float:
        class Times(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.p = nn.Parameter(torch.ones(8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.p * x

        model = Times()
        cls = getattr(torch.optim, kind.removeprefix("sharded "))
        optimizer = st.ShardedOptimizer(model, cls, lr=0.1) if "sharded" in kind else cls(model.parameters(), lr=0.1)
        fully_shard(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            for _ in range(2):
                model(torch.ones(8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            return float(model(torch.ones(8))[0])

    plain = torch.ones(8, requires_grad=True)
    optimizer = getattr(torch.optim, kind.removeprefix("sharded "))([plain], lr=0.1)
    for _ in range(2):
        plain.grad = torch.ones(8)
        optimizer.step()
    assert st.simulate(world, body) == pytest.approx([float(plain[0].detach())] * world, abs=1e-6)


def test_an_optimizer_made_after_an_evaluation() -> None:
    def body() -> None:
        dense, sharded = twins()
        with torch.no_grad():
            sharded(ids_of(0)[1])
        train(dense, sharded, [torch.optim.SGD(m.parameters(), lr=0.1) for m in (dense, sharded)], 1)

    st.simulate(2, body)


def test_inference_first() -> None:
    def body() -> None:
        dense, sharded = twins()
        with torch.inference_mode():
            sharded(ids_of(0)[1])
        train(dense, sharded, [torch.optim.SGD(m.parameters(), lr=0.1) for m in (dense, sharded)], 1)

    st.simulate(2, body)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_from_before(world: int) -> None:
    def body() -> None:
        dense = net()
        loss_of(dense(ids_of(3)[0])).backward()
        sharded = copy.deepcopy(dense)
        for mine, other in zip(dense.parameters(), sharded.parameters(), strict=True):
            other.grad = mine.grad.clone()
        shard(sharded)
        backward(dense, sharded)

    st.simulate(world, body)


def _no_parameters() -> None:
    module = fully_shard(nn.Sequential(nn.ReLU()))
    x = torch.ones(2, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_a_module_without_parameters() -> None:
    st.simulate(2, _no_parameters)


def _dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    with pytest.raises(LayoutError, match="`weight` is sharded over the data ranks already"):
        fully_shard(model)
    assert type(model) is nn.Linear and type(model.bias) is nn.Parameter and type(model.weight) is DTensor


@pytest.mark.worlds("gloo")
def test_a_dtensor(world: Any) -> None:
    world(_dtensor, 2)


@pytest.mark.parametrize("mesh", ["rep*dp", "rep, dp", ("rep", "dp"), ["rep", "dp"]])
def test_two_axes_are_named_in_any_usual_way(mesh):
    def body():
        unit = st.fully_shard(nn.Linear(4, 6), mesh=mesh)
        assert str(unit.weight.sharding_spec()).startswith("flat(dp, ")  # and not over rep
        with pytest.raises(st.LayoutError, match=r'(?s)no axis "xx".*"dp" or "rep\*dp"'):
            st.fully_shard(nn.Linear(4, 6), mesh="rep*xx")

    st.simulate("rep=2, dp=2", body)


def test_a_policy_leaves_modules_that_are_sharded_already() -> None:
    def body() -> None:
        dense = net()
        model = copy.deepcopy(dense)
        fully_shard(model.blocks[1])
        before = fully_shard.state(model.blocks[1])
        fully_shard(model, policy=lambda module: module in list(model.blocks))
        assert fully_shard.state(model.blocks[1]) is before
        assert all(isinstance(block, FSDPModule) for block in model.blocks)
        backward(dense, model)

    st.simulate(2, body)
