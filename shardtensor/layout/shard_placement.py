"""How a parameter is to be cut over data ranks, as `shard_placement_fn` asks; and its elements in stored order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from shardtensor.errors import LayoutError
from shardtensor.spec.nodes import Cut, Replicate, Spec
from shardtensor.spec.parse import as_spec

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@attrs.frozen
class ShardPlacement:
    """A parameter in a group. Ranges are of its elements in row-major order, or of those with `dim` brought to front.

    No range ends inside `unit` elements, or inside a row; `dim`, not the first, is cut in whole slices; data rank
    `owner` holds all of it. `axis` is what the user calls the data axis; None where nothing was asked for.
    """

    unit: int | Literal["row"] = 1
    dim: int | None = None
    owner: int | None = None
    axis: str | None = None

    @classmethod
    def of(cls, asked: Any, name: str, shape: Shape, axis: str, is_named: bool, ranks: int) -> ShardPlacement:
        """Read what `shard_placement_fn` returned for a parameter: None; ``flat(dp)``, ``flat(dp, unit=row)``,
        ``flat(dp, unit=16)`` or ``only(dp, 1)``, as a spec or text; or torch's ``Shard(dim)``.

        `axis`, `is_named` and `ranks` are the data axis, whether the mesh gave it this name, and its size.
        """
        if asked is None:
            return ANYWHERE
        if type(asked).__name__ == "Shard" and isinstance(getattr(asked, "dim", None), int):
            return cls._along(asked.dim, name, shape)
        spec = as_spec(asked)
        flat, only = getattr(spec, "flat_part", None), getattr(spec, "only_part", None)
        is_cut = not isinstance(spec, Spec) or spec.dims or spec.named or spec.partial_parts
        if is_cut or (flat is None) == (only is None) or (flat is not None and flat.sizes is not None):
            raise _refusal(asked, name)
        axes = flat.axes if flat is not None else (only.axis,)  # type: ignore[union-attr]
        if len(axes) != 1 or (is_named and axes[0] != axis):
            raise LayoutError(
                f"shard_placement_fn cuts `{name}` over {'*'.join(axes)}, but the data axis is {axis}",
                {"spec": str(spec)},
                f"write flat({axis}), or pass a mesh whose last axis is the one to cut over",
            )
        if flat is not None:
            return cls(unit=flat.unit, axis=axes[0])
        assert only is not None
        if only.index >= ranks:
            raise LayoutError(
                f"shard_placement_fn gives `{name}` to data rank {only.index}, and there are {ranks}",
                {"spec": str(spec)},
                f"use 0 to {ranks - 1}",
            )
        return cls(owner=only.index, axis=axes[0]) if shape else cls(axis=axes[0])

    @classmethod
    def _along(cls, dim: int, name: str, shape: Shape) -> ShardPlacement:
        if not -len(shape) <= dim < len(shape):
            raise LayoutError(
                f"shard_placement_fn cuts dim {dim} of `{name}`, which has {len(shape)} dims",
                {"shape": shape},
                "return None to let its ranges end anywhere",
            )
        dim %= len(shape)
        return cls(dim=dim) if dim else cls(unit="row")

    def grain(self, shape: Shape) -> int:
        """So many stored elements of a parameter of this shape lie on one rank."""
        if self.owner is not None:
            return max(math.prod(shape), 1)
        if self.dim is not None:
            return max(math.prod(shape) // max(shape[self.dim], 1), 1)
        return max(math.prod(shape[1:]), 1) if self.unit == "row" else self.unit

    def stored(self, param: torch.Tensor) -> torch.Tensor:
        """The elements of a parameter in the order in which they are stored."""
        return (param if self.dim is None else param.movedim(self.dim, 0)).reshape(-1)

    def as_param(self, stored: torch.Tensor, shape: Shape) -> torch.Tensor:
        """A parameter of this shape, or a part of it, over its stored elements."""
        if self.dim is None:
            return stored.view(shape)
        front = (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])
        return stored.view(front).movedim(0, self.dim)

    def spec(self, inner: Spec | None, shape: Shape, axis: str, sizes: Sequence[int] | None) -> Spec:
        """Return the spec of a parameter: `inner`, where the data ranks hold a part of it each, cut over the data axis.

        `shape` is what is cut over the data ranks, and `sizes` how many stored elements each of them holds; None where
        ranges are as `flat` has them unsaid.
        """
        axis = axis if self.axis is None else self.axis
        base = Replicate() if inner is None else inner
        if self.owner is not None:
            return base.only(axis, self.owner)
        if self.dim is None:
            return base.flat(axis, unit=self.unit, sizes=sizes)
        grain = self.grain(shape)
        counts = tuple(size // grain for size in sizes or ())
        dims: list[Any] = [None] * len(shape) if inner is None else list(inner.dims) or [None] * len(shape)
        dims[self.dim] = Cut(axis) if len(set(counts)) == 1 else Cut(axis, sizes=counts)
        return Spec(*dims)


ANYWHERE = ShardPlacement()
"""Ranges end anywhere in a parameter."""


def _refusal(asked: Any, name: str) -> LayoutError:
    return LayoutError(
        f"shard_placement_fn says of `{name}` what fully_shard cannot do",
        {"it returned": str(asked)},
        [
            "return None or flat(dp), and ranges end anywhere; flat(dp, unit=row), and rows stay whole;"
            " flat(dp, unit=16), and stretches of 16 elements do",
            "return only(dp, 1), and data rank 1 holds all of it",
            "return torch's Shard(dim)",
        ],
    )
