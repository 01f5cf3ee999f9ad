"""Flat buffers: the places of parameters in one buffer, and the range of it that each rank holds. Integers only.

All ranges have one size, so that an all-gather or a reduce-scatter of the buffer is one collective without copies.
A range must not end inside a grain of a parameter. If it would, the ranges become larger or padding is added between
parameters, whichever wastes less. A parameter whose shards have different sizes on the tensor-parallel ranks gets a
buffer of its own (`lay_out_alone`). Ranges of different sizes would need no padding, but NCCL has no collective for
them: it broadcasts each in turn. `ShardPlacement` describes how the user shards a parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import attrs

from shardtensor.errors import LayoutError
from shardtensor.spec.nodes import Cut, Replicate, Spec
from shardtensor.spec.parse import as_spec

ALIGNMENT = 16
"""In elements; every parameter starts at a multiple, for vectorised kernels."""

SMALL_BYTES = 1 << 16
"""Up to this size a module's parameters stay gathered from forward to backward: a second gather would cost more."""

GATHER_BUFFERS = 2
"""How many modules are gathered at a time: the one that computes, and the next."""

REDUCE_BUFFERS = 2
"""How many reductions of gradients are pending at a time."""

_LINE = 512  # bytes; in memory that holds several flat buffers, each begins at a multiple
_TRIES = 64
_WASTE = 8  # a layout that wastes less than 1 / 8 is good enough


@attrs.frozen
class Ranges:
    """Parameters of `lengths` elements from `starts` on, cut into one range of `chunk` elements for each rank. The
    elements between parameters, and after the last, are padding."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    chunk: int
    ranks: int

    @property
    def total(self) -> int:
        """The number of elements of the buffer, with padding."""
        return self.chunk * self.ranks

    @property
    def waste(self) -> int:
        """The number of elements of padding."""
        return self.total - sum(self.lengths)

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """Return the range of a parameter's elements that a rank holds; it may be empty."""
        start, length = self.starts[index], self.lengths[index]
        low, high = rank * self.chunk - start, (rank + 1) * self.chunk - start
        return min(max(low, 0), length), min(max(high, 0), length)

    def sizes(self, index: int) -> tuple[int, ...]:
        """Return how many elements of a parameter each rank holds."""
        pieces = (self.piece(index, rank) for rank in range(self.ranks))
        return tuple(stop - start for start, stop in pieces)

    def cuts(self, rank: int) -> list[int]:
        """Return sizes that split a range into padding and parameters in turn: padding before each, and at the end."""
        found, end = [], 0
        for index, start in enumerate(self.starts):
            place = min(max(start - rank * self.chunk, end), self.chunk)
            low, high = self.piece(index, rank)
            found += [place - end, high - low]
            end = place + high - low
        return [*found, self.chunk - end]

    def all_cuts(self) -> list[int]:
        """Return the same sizes for the whole buffer."""
        return attrs.evolve(self, chunk=self.total, ranks=1).cuts(0)


def lay_out(lengths: Sequence[int], ranks: int, units: Sequence[int] | None = None) -> Ranges:
    """Lay parameters of these lengths one after the other and cut them into `ranks` equal ranges.

    A range that ends inside a parameter ends at a multiple of `units` (its grain) of its elements; a parameter that is
    not longer than its grain is in one range. None: ranges may end anywhere.

    Example:
        >>> lay_out([40, 8], 2).starts, lay_out([96, 40], 2, [24, 1]).sizes(0), lay_out([96, 40], 2, [96, 1]).sizes(0)
        ((0, 48), (72, 24), (96, 0))
    """
    return _lay_out(tuple(lengths), ranks, tuple(units) if units is not None else (1,) * len(lengths))


@lru_cache(maxsize=4096)
def _lay_out(lengths: tuple[int, ...], ranks: int, units: tuple[int, ...]) -> Ranges:
    """Return the smallest layout found; of nearly equal ones, the one with aligned ranges."""
    aligned = _smallest(lengths, ranks, units, ALIGNMENT)
    if aligned.waste * _WASTE <= sum(lengths) or all(unit == 1 for unit in units):
        return aligned
    other = _smallest(lengths, ranks, units, 1)
    return other if other.total * _WASTE < aligned.total * (_WASTE - 1) else aligned


def _smallest(lengths: tuple[int, ...], ranks: int, units: tuple[int, ...], step: int) -> Ranges:
    """Return the layout with the smallest range, a multiple of `step`, among those tried."""
    found: Ranges | None = None
    undivided = [length for length, unit in zip(lengths, units, strict=True) if unit >= length]
    least = max(-(-sum(lengths) // ranks), *undivided, 1)
    for grain in _grains(lengths, units, step):
        for chunk in _chunks(_up(least, grain), grain):
            if found is not None and chunk >= found.chunk:
                break
            starts = _place(lengths, units, chunk, ranks)
            if starts is not None:
                found = Ranges(lengths, tuple(starts), chunk, ranks)
                break
    assert found is not None, "a range that holds everything is tried"
    return found


def _grains(lengths: Sequence[int], units: Sequence[int], step: int) -> list[int]:
    """Return common multiples of the longest parameters' grains: candidates for a divisor of the range size."""
    divided = sorted(((n, unit) for n, unit in zip(lengths, units, strict=True) if unit < n), reverse=True)
    grains, common, limit = {step}, step, sum(lengths)
    for unit in list(dict.fromkeys(unit for _, unit in divided))[:_TRIES]:
        common = math.lcm(common, unit) if math.lcm(common, unit) <= limit else common
        grains |= {common, math.lcm(step, unit)}
    return sorted(grains, reverse=True)


def _chunks(first: int, grain: int) -> Iterator[int]:
    """Yield multiples of `grain`: consecutive ones, then with growing steps, without end."""
    for i in range(_TRIES):
        yield first + i * grain
    chunk = first + _TRIES * grain
    while True:
        yield chunk
        chunk += _up(chunk // _TRIES, grain)


def _place(lengths: Sequence[int], units: Sequence[int], chunk: int, ranks: int) -> list[int] | None:
    """Return the start of each parameter if ranges have `chunk` elements; None if they do not fit."""
    starts, end = [], 0
    for length, unit in zip(lengths, units, strict=True):
        start = _up(end, ALIGNMENT)
        if unit > 1:
            placed = _start(start, length, unit, chunk)
            if placed is None:
                return None
            start = placed
        starts.append(start)
        end = start + length
    return starts if end <= chunk * ranks else None


def _start(least: int, length: int, unit: int, chunk: int) -> int | None:
    """Return the first aligned start, from `least` on, for which no range ends inside a grain of the parameter."""
    boundary = (least // chunk + 1) * chunk
    for _ in range(2 + ALIGNMENT):
        if least + length <= boundary:
            return least
        if unit < length:
            start = _congruent(least, boundary, unit)
            if start is not None and start < boundary and (start + length <= boundary + chunk or not chunk % unit):
                return start
        least = _up(boundary, ALIGNMENT)
        boundary = (least // chunk + 1) * chunk
    return None


def _congruent(least: int, boundary: int, unit: int) -> int | None:
    """Return the first aligned start, from `least` on, that is a multiple of `unit` before `boundary`."""
    common = math.gcd(ALIGNMENT, unit)
    if boundary % common:
        return None
    period = unit // common
    remainder = boundary // common * pow(ALIGNMENT // common, -1, period) % period
    turn = -(-least // ALIGNMENT)
    return (turn + (remainder - turn) % period) * ALIGNMENT


def lay_out_alone(length: int, ranks: int, unit: int = 1) -> Ranges:
    """Lay out one parameter in a buffer of its own, in the ranges of a `FlatLayout` without sizes. If its shards
    differ in size between groups, each group has other ranges; this layout describes them all."""
    units = -(-length // unit)
    return Ranges((length,), (0,), max(-(-units // ranks) * unit, 1), ranks)


def lay_out_whole(lengths: Sequence[int]) -> Ranges:
    """Lay parameters end to end, without padding, in a buffer that every rank holds whole."""
    *starts, total = accumulate(lengths, initial=0)
    return Ranges(tuple(lengths), tuple(starts), total, 1)


def lay_out_owned(lengths: Sequence[int], ranks: int, owners: Sequence[int]) -> Ranges:
    """Lay each parameter into the range of its owner; `owners` must not decrease."""
    ends, starts = [0] * ranks, []
    for length, owner in zip(lengths, owners, strict=True):
        starts.append(ends[owner])
        ends[owner] = _up(ends[owner] + length, ALIGNMENT)
    chunk = max(*ends, ALIGNMENT)
    places = [start + owner * chunk for start, owner in zip(starts, owners, strict=True)]
    return Ranges(tuple(lengths), tuple(places), chunk, ranks)


def name_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key of dotted names that compares numbers in them as numbers: parameters in a buffer use it.

    Example:
        >>> sorted(["layers.10.w", "layers.9.w"], key=name_order)
        ['layers.9.w', 'layers.10.w']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def parameter_groups(kinds: Sequence[Hashable]) -> list[list[int]]:
    """Return the numbers of parameters that are gathered together, in the order of their places in the buffer.
    A group has one kind."""
    alike: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(i)
    return list(alike.values())


@attrs.frozen
class BufferPlan:
    """Memory that modules are gathered into in turns: its bytes, and the numbers of the modules."""

    size_bytes: int
    users: tuple[int, ...]


def aligned_bytes(size: int) -> int:
    """Return the bytes that a flat buffer of `size` bytes takes in memory that holds several."""
    return _up(size, _LINE)


def gather_buffers(modules: Sequence[tuple[int, bool]], count: int = GATHER_BUFFERS) -> list[BufferPlan]:
    """Return the buffers for modules in their order: a ring of `count` in turns, and one for each that stays
    gathered. `modules` holds the bytes of each, and whether it stays gathered."""
    turns = [number for number, (_, stays) in enumerate(modules) if not stays]
    users = [turns[i::count] for i in range(count)] + [[i] for i, (_, stays) in enumerate(modules) if stays]
    return [BufferPlan(max((modules[i][0] for i in each), default=0), tuple(each)) for each in users]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@attrs.frozen
class ShardPlacement:
    """How a parameter is sharded into ranges of its elements, in row-major order or with `dim` moved to the front.

    No range ends inside `unit` elements, or inside a row; `dim`, not the first, is sharded in whole slices. `axis` is
    the user's name of the data axis; None if the user gave none.
    """

    unit: int | Literal["row"] = 1
    dim: int | None = None
    axis: str | None = None

    @classmethod
    def of(cls, result: Any, name: str, shape: Shape, axis: str, is_named: bool) -> ShardPlacement:
        """Parse the result of `shard_placement_fn` for a parameter: None; ``flat(dp)``, ``flat(dp, unit=row)`` or
        ``flat(dp, unit=16)``, as a spec or text; or torch's ``Shard(dim)``.

        `axis` is the data axis; `is_named` is whether the mesh gave it this name.
        """
        if result is None:
            return ANYWHERE
        if type(result).__name__ == "Shard" and isinstance(getattr(result, "dim", None), int):
            return cls._along(result.dim, name, shape)
        spec = as_spec(result)
        if not isinstance(spec, Spec) or spec.dims or spec.named or spec.partial_parts or spec.only_part:
            raise _refusal(result, name)
        flat = spec.flat_part
        if flat is None or flat.sizes is not None:
            raise _refusal(result, name)
        if len(flat.axes) != 1 or (is_named and flat.axes[0] != axis):
            raise LayoutError(
                f"shard_placement_fn cuts `{name}` over {'*'.join(flat.axes)}, but the data axis is {axis}",
                {"spec": str(spec)},
                f"write flat({axis}), or pass a mesh whose last axis is the one to cut over",
            )
        return cls(unit=flat.unit, axis=flat.axes[0])

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
        """Return the number of consecutive stored elements, of a parameter of this shape, that no range splits."""
        if self.dim is not None:
            return max(math.prod(shape) // max(shape[self.dim], 1), 1)
        return max(math.prod(shape[1:]), 1) if self.unit == "row" else self.unit

    def stored(self, param: torch.Tensor) -> torch.Tensor:
        """Return the elements of a parameter in the order in which they are stored."""
        return (param if self.dim is None else param.movedim(self.dim, 0)).reshape(-1)

    def as_param(self, stored: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Return stored elements as a parameter of this shape, or as a part of one."""
        if self.dim is None:
            return stored.view(shape)
        front = (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])
        return stored.view(front).movedim(0, self.dim)

    def spec(self, inner: Spec | None, shape: Shape, axis: str, sizes: Sequence[int] | None) -> Spec:
        """Return the spec of a parameter with spec `inner` that is also sharded over the data axis.

        `shape` is the shape that is sharded over the data ranks; `sizes` are the stored elements of each, None for the
        ranges of `flat` without sizes.
        """
        axis = axis if self.axis is None else self.axis
        base = Replicate() if inner is None else inner
        if self.dim is None:
            return base.flat(axis, unit=self.unit, sizes=sizes)
        grain = self.grain(shape)
        counts = tuple(size // grain for size in sizes or ())
        dims: list[Any] = [None] * len(shape) if inner is None else list(inner.dims) or [None] * len(shape)
        dims[self.dim] = Cut(axis) if len(set(counts)) == 1 else Cut(axis, sizes=counts)
        return Spec(*dims)


ANYWHERE = ShardPlacement()
"""Ranges end anywhere in a parameter."""


def _refusal(result: Any, name: str) -> LayoutError:
    return LayoutError(
        f"shard_placement_fn says of `{name}` what fully_shard cannot do",
        {"it returned": str(result)},
        [
            "return None or flat(dp), and ranges end anywhere; flat(dp, unit=row), and rows stay whole;"
            " flat(dp, unit=16), and ranges of 16 elements do",
            "return torch's Shard(dim)",
        ],
    )
