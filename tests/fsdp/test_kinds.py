"""Parameters and modules of every kind in one unit: the dense model's losses, gradients and values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp.twins import WORLDS, same_gradients, same_values
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard


class Odd(nn.Module):
    """Parameters that are not contiguous, of no dims, of no elements, smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.strided = nn.Parameter(torch.randn(4, 12)[:, ::2])
        self.number = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.two = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.turned + self.strided.sum(0) * self.number
        return y * self.two.sum() + self.nothing.sum()


class Complex(nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.phase).abs().pow(2) * self.scale


class Mixed(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 4, dtype=torch.float64)
        self.narrow = nn.Linear(4, 4, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).float()).double()


class Recurrent(nn.Module):
    """A layer that keeps a list of its parameters, and weak references to them."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 3, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x.unsqueeze(0).expand(3, -1, -1))[0])


class Attention(nn.Module):
    """It reads a parameter of an inner module without calling that."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(0)
        return self.attention(x, x, x)[0]


class Normed(nn.Module):
    """Buffers that are written in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.norm.register_forward_hook(_count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([x, x * 2]))


def _count(module: nn.Module, args: Any, output: Any) -> None:
    assert module.num_batches_tracked.device.type == "cpu"


def _parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 3)), parametrizations.orthogonal(nn.Linear(3, 3)), nn.Tanh()
    )


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).t()


def _symmetric() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def _embedding() -> nn.Module:
    return nn.Sequential(_Ids(), nn.EmbeddingBag(9, 3, mode="sum"))


class _Ids(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.abs() * 10).long() % 9


MODULES: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "complex": Complex,
    "mixed": Mixed,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "transformer": lambda: _Batch(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
    "decoder": lambda: _Pair(nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
    "batch norm": Normed,
    "parametrized": _parametrized,
    "symmetric": _symmetric,
    "convolutions": lambda: _Batch(nn.Sequential(nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4), nn.ConvTranspose1d(4, 2, 3))),
    "embedding bag": _embedding,
    "bilinear": lambda: _Twice(nn.Bilinear(4, 4, 3)),
    "prelu": lambda: nn.Sequential(nn.Linear(4, 1), nn.PReLU()),
    "lists": lambda: _Lists(),
}


class _Batch(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.unsqueeze(0))


class _Pair(_Batch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.unsqueeze(0), x.unsqueeze(0))


class _Twice(_Batch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x)


class _Lists(nn.Module):
    """Parameters in ParameterList and ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList([torch.randn(4, 4), torch.randn(4)])
        self.named = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.some[0] + self.some[1]) * self.named["a"] + self.named["b"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", MODULES)
def test_kinds(world: int, name: str) -> None:
    def body() -> None:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        dense = MODULES[name]()
        sharded = fully_shard(copy.deepcopy(dense))
        optimizers = [
            torch.optim.Adam(dense.parameters(), lr=0.01),
            st.ShardedOptimizer(sharded, torch.optim.Adam, lr=0.01),
        ]
        for step in range(3):
            if step == 2:
                _check_copies(dense, sharded)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            for model in (dense, sharded):
                model(x).pow(2).mean().backward()
            same_gradients(dense, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            same_values(dense, sharded)
            same_buffers(dense, sharded)
        for model in (dense.eval(), sharded.eval()):
            model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(sharded(x), dense(x))
        sharded.load_state_dict(dense.state_dict())
        same_values(dense, sharded, 0.0)

    dtype = torch.get_default_dtype()
    try:
        st.simulate(world, body)
    finally:
        torch.set_default_dtype(dtype)


def _check_copies(dense: nn.Module, sharded: nn.Module) -> None:
    same_values(dense, copy.deepcopy(sharded))
    state = sharded.state_dict()
    assert list(state) == list(dense.state_dict())


def same_buffers(dense: nn.Module, sharded: nn.Module) -> None:
    """Demand equal buffers under equal names."""
    for (name, one), (other_name, other) in zip(dense.named_buffers(), sharded.named_buffers(), strict=True):
        assert name == other_name
        torch.testing.assert_close(one, other)


def test_a_parametrization_added_later() -> None:
    def body() -> None:
        model = fully_shard(nn.Linear(4, 4))
        parametrize.register_parametrization(model, "weight", Symmetric())
        with pytest.raises(RuntimeError, match="taken out of a fully sharded module"):
            model(torch.ones(1, 4))

    st.simulate(2, body)


def test_buffers_stay_shared() -> None:
    def body() -> None:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        model[1].running_mean = model[0].running_mean
        fully_shard(model)
        assert model[1].running_mean is model[0].running_mean
        assert as_group().size == 2

    st.simulate(2, body)
