"""Training runs of whole numbers, sharded in many ways, whose steps are exact: those of one dense run, bit for bit.

A *kind* is how a run is sharded: the layouts of its parameters, and which class steps them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh

BATCH = 3
Run = tuple[nn.Module, Any]


def whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def integers(shape: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=generator).to(device(), torch.float64)


class Net(nn.Module):
    """Two layers, a scale without dims, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.tensor(0))
        self.to(device(), torch.float64)
        self.count = self.count.to(torch.int64)
        for i, param in enumerate(self.parameters()):
            param.data = integers(param.shape, seed + i)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.last(torch.relu(self.first(x))) * self.scale


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    """A step of the same batch on every rank: gradients, and averages of them, are the dense ones."""
    optimizer.zero_grad()
    out = whole(model(integers((BATCH, 6), 10 + number)))
    (out * integers(out.shape, 20 + number)).sum().backward()
    optimizer.step()


def boxes(shape: tuple[int, ...], size: int) -> st.EnumerableShardingSpec:
    """The first row on the last rank, the others on the first two, cut along the last dim."""
    tail = (0,) * (len(shape) - 1)
    shards = [((0, *tail), (1, *shape[1:]), size - 1)]
    rest = (shape[0] - 1, *shape[1:])
    half = rest[-1] // 2
    shards.append(((1, *tail), (*rest[:-1], half), 0))
    last = (1, *tail)
    shards.append(((*last[:-1], last[-1] + half), (*rest[:-1], rest[-1] - half), size // 2))
    return st.EnumerableShardingSpec([st.ShardMetadata(list(a), list(b), f"rank:{r}/cpu") for a, b, r in shards])


def planned(plan: Callable[[int], dict[str, Any]], ours: bool) -> Callable[[int, str], Run]:
    def make(seed: int, cls: str) -> Run:
        model = Net(seed)
        rules = plan(as_group().size)
        st.shard_module(model, {name: spec for name, spec in rules.items() if isinstance(spec, str)})
        for name, spec in rules.items():
            if not isinstance(spec, str):
                st.shard_parameter(model, name, spec)
        options = CLASSES[cls]
        make_inner = getattr(torch.optim, cls)
        if ours:
            return model, st.ShardedOptimizer(model, make_inner, **options)
        return model, make_inner(model.parameters(), **options)

    return make


def gridded(seed: int, cls: str) -> Run:
    """Matrices over a grid of two axes."""
    size = as_group().size
    group = as_group().on_mesh(Mesh((("a", 2), ("b", size // 2))), {})
    model = Net(seed)
    rules = {"*.weight": "[a balanced, b balanced]", "first.bias": "[b*a balanced]", "scale": "replicate"}
    st.shard_module(model, rules, process_group=group)
    return model, st.ShardedOptimizer(model, getattr(torch.optim, cls), **CLASSES[cls])


def fully_sharded(seed: int, cls: str) -> Run:
    model = Net(seed)
    st.fully_shard(model.first)
    st.fully_shard(model)
    return model, getattr(torch.optim, cls)(model.parameters(), **CLASSES[cls])


def over_tensor_parallel(seed: int, cls: str, on_mesh: bool = True) -> Run:
    """Layers that are tensor-parallel on pairs of ranks, then fully sharded over the others.

    Args:
        on_mesh: all parameters have a layout on the whole mesh; else each rank of a pair shards plain ones with its own
            data ranks.
    """
    mesh = as_group().on_mesh(Mesh((("dp", as_group().size // 2), ("tp", 2))), {})
    model = Net(seed)
    rules = {"first": "[tp, ...]", "last.weight": "[-, tp]", "last.bias": "replicate", "scale": "replicate"}
    st.shard_module(model, rules if on_mesh else {"first": rules["first"]}, process_group=mesh)
    st.fully_shard(model.first, mesh=mesh.axis("dp"))
    st.fully_shard(model, mesh=mesh.axis("dp"))
    return model, getattr(torch.optim, cls)(model.parameters(), **CLASSES[cls])


def zero(**options: Any) -> Callable[[int, str], Run]:
    def make(seed: int, cls: str) -> Run:
        model = Net(seed)
        inner = getattr(torch.optim, cls)
        return model, st.ZeroRedundancyOptimizer(model.parameters(), inner, **options, **CLASSES[cls])

    return make


CLASSES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.5, "momentum": 0.5},
    "AdamW": {"lr": 0.25},
    "Adagrad": {"lr": 0.25},
}


@attrs.frozen
class Kind:
    """Attributes: `worlds` are those of `SIZES` in which it makes sense."""

    make: Callable[[int, str], Run]
    worlds: tuple[int, ...] = (1, 2, 3, 4, 8)


def uneven(length: int, size: int) -> str:
    return f"tp sizes({', '.join(map(str, [1, *[0] * (size - 2), length - 1][-size:] if size > 1 else [length]))})"


KINDS: dict[str, Kind] = {
    "plain": Kind(planned(lambda n: {}, ours=False)),
    "rows": Kind(planned(lambda n: {"first": "[tp balanced, ...]", "last.weight": "[tp balanced, -]"}, ours=False)),
    "columns": Kind(planned(lambda n: {"*.weight": "[-, tp balanced]", "last.bias": "[tp balanced]"}, ours=True)),
    "uneven": Kind(
        planned(lambda n: {"first.weight": f"[{uneven(8, n)}, -]", "last.weight": f"[-, {uneven(8, n)}]"}, ours=True),
        (2, 3, 4, 8),
    ),
    "flat": Kind(planned(lambda n: {"*.weight": "flat(tp)", "last.bias": "flat(tp, unit=2)"}, ours=True)),
    "blocks": Kind(
        planned(lambda n: {"first.weight": "[tp balanced blocks(2), -]", "first.bias": "[tp pad(16)]"}, ours=True)
    ),
    "boxes": Kind(planned(lambda n: {"first.weight": boxes((8, 6), n), "last.weight": boxes((5, 8), n)}, ours=True)),
    "replicated": Kind(planned(lambda n: {"**": "replicate"}, ours=True)),
    "grid": Kind(gridded, (2, 4, 8)),
    "fully_shard": Kind(fully_sharded),
    "fully_shard over tp": Kind(over_tensor_parallel, (2, 4, 8)),
    "ZeRO owners": Kind(zero()),
    "ZeRO ranges": Kind(zero(partition="ranges")),
}
SIZES = (1, 2, 3, 4, 8)
BESIDE_TP = "fully_shard beside tp"
KINDS[BESIDE_TP] = Kind(lambda seed, cls: over_tensor_parallel(seed, cls, on_mesh=False), ())
RUNS = [(name, size) for name, kind in KINDS.items() for size in SIZES if size in kind.worlds]
"""Each kind in each world."""


def run_of(kind: str, seed: int = 0, cls: str = "SGD") -> Run:
    return KINDS[kind].make(seed, cls)


def dense(seed: int = 0, cls: str = "SGD") -> Run:
    model = Net(seed)
    return model, getattr(torch.optim, cls)(model.parameters(), **CLASSES[cls])


def values(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Every tensor of the model and of the state of its optimizer by name, whole; and the options of groups."""
    found = {name: whole(x).detach().clone() for name, x in model.state_dict().items()}
    named = st.optim_state_dict(model, optimizer)
    for name, state in named["state"].items():
        found |= {f"{name}/{key}": whole(x).clone() for key, x in state.items() if isinstance(x, torch.Tensor)}
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], **close: float) -> None:
    """Equal names, dtypes and bits; or values within rounding."""
    assert sorted(found) == sorted(expected)
    for name, want in expected.items():
        got = found[name]
        assert got.dtype == want.dtype, f"{name}: {got.dtype} is not {want.dtype}"
        is_same = torch.allclose(got, want, **close) if close else torch.equal(got, want)
        assert is_same, f"{name}: {got} is not {want}"


COLUMNS = {"first": "[tp balanced, ...]", "last.weight": "[-, tp balanced]"}
ROWS = {"first.weight": "[-, tp balanced]", "last": "[tp balanced, ...]"}


def adamw(model: nn.Module) -> Any:
    return st.ShardedOptimizer(model, torch.optim.AdamW, lr=0.25)


def save_columns(path: str, layout: str = "whole") -> dict[str, torch.Tensor]:
    model = st.shard_module(Net(), COLUMNS)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    st.save(path, model=model, optimizer=optimizer, layout=layout)
    return values(model, optimizer)


# -- random values, any class ------------------------------------------------------------------------------------------


class Matrices(nn.Module):
    """Two matrices: Muon steps nothing else."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (("up", (8, 6)), ("down", (5, 8))):
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(device())
            self.register_parameter(name, nn.Parameter(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.up.T) @ self.down.T


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(device())


def train(model: nn.Module, optimizer: Any, numbers: range) -> None:
    for number in numbers:

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = whole(model(batch(number).to(next(model.parameters()).dtype))).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def map_whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(x).detach().clone() for name, x in model.state_dict().items()}
