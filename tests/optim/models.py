"""Parameters and gradients for optimizer tests: dense, and under layouts that split unevenly or not at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import device

import shardtensor as st

LAYOUTS = {
    "rows": ((5, 3), 'chunk(dim=0, placements=["RANKS"])'),
    "columns": ((2, 7), "[-, tp balanced]"),
    "one_row": ((1, 3), 'chunk(dim=0, placements=["RANKS"])'),  # empty on all ranks but one
    "copied": ((3, 3), "replicate"),
    "flat": ((3, 5), "flat(tp)"),
    "tall_flat": ((7, 3), "flat(tp)"),  # Muon transposes what has more rows than columns
    "vector": ((12,), "[tp]"),
    "plain": ((4, 2), None),
    "number": ((), None),
}


def shard(full: torch.Tensor, spec: str | None, **options: Any) -> torch.Tensor:
    """A leaf parameter of the values of `full`: sharded, or plain without a spec."""
    full = full.to(device())
    if spec is None:
        return torch.nn.Parameter(full.detach().clone())
    spec = spec.replace("RANKS", f"rank:0-{dist.get_world_size() - 1}/{device().type}")
    return st.distribute(full, spec, requires_grad=True, **options)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def dense(seed: int = 0, names: Any = LAYOUTS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(LAYOUTS[name][0], generator=generator).to(device())) for name in names}


def sharded(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: shard(param, LAYOUTS[name][1]) for name, param in params.items()}


def set_grads(step: int, *models: dict[str, torch.Tensor]) -> None:
    """The same random gradients for the same names."""
    for i, name in enumerate(models[0]):
        generator = torch.Generator().manual_seed(1000 * step + i)
        grad = torch.randn(models[0][name].shape, generator=generator).to(device())
        for model in models:
            model[name].grad = grad.to(model[name].dtype, copy=True)


def assert_equal(
    model: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor], why: Any = "", **close: float
) -> None:
    """Equal values under every name: bit for bit, or as `close` says."""
    for name, want in oracle.items():
        same(model[name], want, f"{why} {name}", **close)


def same(x: torch.Tensor, want: torch.Tensor, why: str = "", **close: float) -> None:
    got, want = whole(x).detach(), whole(want).detach()
    is_same = torch.allclose(got, want, **close) if close else torch.equal(got, want)
    assert is_same, f"{why}: {got} is not {want}"
