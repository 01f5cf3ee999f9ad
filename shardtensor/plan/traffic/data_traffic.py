"""What parameters send along the axes of the data: gathers of units, sums of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs

from shardtensor.layout.layout import Layout
from shardtensor.layout.ranges import SMALL_BYTES
from shardtensor.plan.flows.modules import Modules, Names, is_inside
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.match.units import Flat, GatherUnit, gather_units, own_tensors
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.plan.traffic.collective import Collective, all_gather, all_reduce, reduce_scatter

BUCKET_BYTES = 25 << 20
"""What a bucket of gradients holds at least."""

FIRST_BUCKET_BYTES = 1 << 20
"""What the first one holds at least: it is small, so that the wire is busy early."""

_SLOTS = 2  # units gathered at a time
_FLAG = 2  # numbers by which ranks see whether they used the same parameters


@attrs.frozen(eq=False)
class _Gradient:
    """A parameter whose gradient is averaged, and the axes along which others hold copies of it."""

    numel: int
    dtype: str
    axes: Names


class DataTraffic:
    """The collectives of parameters, for one rank."""

    def __init__(self, resolved: Resolved, modules: Modules, rank: int) -> None:
        self._resolved, self._modules, self._rank = resolved, modules, rank
        self._mesh = resolved.plan.axes.mesh
        self._sizes = dict(self._mesh.axes)
        self._gradients: dict[tuple[Layout, str], _Gradient] = {}
        self._units = [unit for unit in gather_units(resolved) if self._ranks(unit.flats[0]) > 1 or modules.data]
        self._companies = [[unit] for unit in self._units]

    # -- stored parameters --------------------------------------------------------------------------------------------

    def forward(self) -> Iterator[Collective]:
        """Units are gathered just before they run."""
        for units in self._companies:
            yield from self._gathers(units, "forward")

    def backward(self) -> Iterator[Collective]:
        """Units are gathered again, gradients of units are summed and dealt out, those of other parameters averaged."""
        again = self._gathered_again()
        for units in reversed(self._companies):
            if any(units[0] is other for other in again):
                yield from self._gathers(units, "backward")
            yield from self._reductions(units)
        yield from self._flags()
        yield from self._averages()

    def clipping(self) -> Iterator[Collective]:
        """The norm of all gradients: for each group of ranks they lie on, one number, of what each rank counts."""
        size, names, data = self._mesh.size, self._mesh.names, self._modules.leaves(self._modules.data)
        groups: dict[Names, None] = {}
        for placed in own_tensors(self._resolved):
            is_whole = placed.layout.is_whole_on_all(size)
            if placed.tensor.requires_grad and not (is_whole and placed.stored is None):
                axes = data if is_whole else names
                groups[tuple(axis for axis in names if axis in axes and self._sizes[axis] > 1)] = None
        for axes in groups:
            if axes:
                yield all_reduce(
                    "optimizer", self._shown(axes), self._size(axes), 1, BYTES["float64"],
                    dtype="float64", where="", why="the norm of gradients",
                )  # fmt: skip

    def _gathers(self, units: Sequence[GatherUnit], phase: str) -> Iterator[Collective]:
        for flats in _messages(units):
            flat, size, own = flats[0], self._ranks(flats[0]), self._own(flats)
            if size > 1:
                yield all_gather(
                    phase, self._axes(flat), size, own, own * size, BYTES[flat.dtype],  # type: ignore[arg-type]
                    dtype=flat.dtype, where=_paths(units),
                    why=f"{_whose(units)} parameters are gathered" + (" again" if phase == "backward" else ""),
                )  # fmt: skip

    def _own(self, flats: Sequence[Flat]) -> int:
        """How many elements of them a rank holds, padding included."""
        return sum(flat.ranges(self._rank).chunk for flat in flats)

    def _gathered_again(self) -> list[GatherUnit]:
        """Those whose memory others took since their forward."""
        slots: dict[int, GatherUnit] = {}
        turns = [unit for unit in self._units if not self._stays(unit)]
        place = {id(unit): i % _SLOTS for i, unit in enumerate(turns)}
        for unit in turns:
            slots[place[id(unit)]] = unit
        found = []
        for unit in reversed(turns):
            if not any(flat.trains for flat in unit.flats):
                continue  # its backward does not read it
            if slots[place[id(unit)]] is not unit:
                slots[place[id(unit)]] = unit
                found.append(unit)
        return found

    def _stays(self, unit: GatherUnit) -> bool:
        whole = sum(flat.ranges(self._rank).total * BYTES[flat.dtype] for flat in unit.flats)
        return unit.holds_units or whole <= SMALL_BYTES

    def _reductions(self, units: Sequence[GatherUnit]) -> Iterator[Collective]:
        trained = [unit for unit in units if any(flat.trains for flat in unit.flats)]
        for flats in _messages(trained):
            flats = [flat for flat in flats if flat.trains]
            if not flats:
                continue
            flat, size, own, item = flats[0], self._ranks(flats[0]), self._own(flats), BYTES[flats[0].dtype]
            if size > 1:
                yield reduce_scatter(
                    "backward", self._axes(flat), size, own, own * size, item, dtype=flat.dtype,
                    where=_paths(trained), why=f"{_whose(trained)} gradients are summed, each rank keeps its range",
                )  # fmt: skip
            rest = self._copies(flat)
            for each in flats if rest else ():
                yield all_reduce(
                    "backward", self._shown(rest), self._size(rest), self._own([each]), item, dtype=each.dtype,
                    where=_paths(trained), why="a range of gradients is summed over the copies",
                )  # fmt: skip

    def _flags(self) -> Iterator[Collective]:
        """Two numbers, by which ranks see whether they used the same parameters; once for each set of axes."""
        if not self._units:
            return
        flat = self._units[0].flats[0]
        for axes in (self._names(flat), self._copies(flat)):
            if axes and self._size(axes) > 1:
                yield all_reduce(
                    "backward", self._shown(axes), self._size(axes), _FLAG, BYTES["int64"],
                    dtype="int64", where="", why="whether all ranks used the same parameters",
                )  # fmt: skip

    def _ranks(self, flat: Flat) -> int:
        return flat.ranks

    def _names(self, flat: Flat) -> Names:
        return self._modules.leaves(self._mesh.names[i] for i in flat.axes)

    def _axes(self, flat: Flat) -> Names:
        return self._shown(self._names(flat))

    def _copies(self, flat: Flat) -> Names:
        """The axes of the data along which ranks hold the same ranges."""
        return tuple(axis for axis in self._modules.data if axis not in self._names(flat))

    # -- other parameters ---------------------------------------------------------------------------------------------

    def _averages(self) -> Iterator[Collective]:
        """Gradients of parameters that are kept as they compute, in buckets, the last parameters first."""
        if not self._modules.data:
            return
        rest = [
            placed for placed in own_tensors(self._resolved)
            if not placed.tensor.is_buffer and placed.stored is None and placed.tensor.requires_grad
        ]  # fmt: skip
        for owner, placed in self._owners(rest).items():
            gradients = [self._gradient(each.layout, each.tensor.dtype) for each in placed]
            for bucket, flags in buckets([g for g in gradients if g.axes]):
                first = bucket[0]
                numel = sum(gradient.numel for gradient in bucket) + flags
                yield all_reduce(
                    "backward", self._shown(first.axes), self._size(first.axes), numel, BYTES[first.dtype],
                    dtype=first.dtype, where=owner, why=f"gradients of {len(bucket)} parameters are averaged",
                )  # fmt: skip

    def _gradient(self, layout: Layout, dtype: str) -> _Gradient:
        if (layout, dtype) in self._gradients:
            return self._gradients[layout, dtype]
        cut = set()
        if len(layout.grid) == len(self._mesh.sizes):
            cut = {self._mesh.names[i] for i in layout.parting_axes}
            cut |= {name for i, name in enumerate(self._mesh.names) if layout.grid[i] != self._mesh.sizes[i]}
        axes = tuple(axis for axis in self._modules.data if axis not in cut)
        self._gradients[layout, dtype] = found = _Gradient(layout.numel(self._rank), dtype, axes)
        return found

    def _owners(self, rest: Sequence[Placed]) -> dict[str, list[Placed]]:
        """The outermost modules all of whose parameters are kept as they compute, with these; the root if all are."""
        if not self._units:
            return {"": list(rest)} if rest else {}
        stored = {name for unit in self._units for names in unit.names for name in names}
        found: dict[str, list[Placed]] = {}
        for placed in rest:
            segments = placed.tensor.name.split(".")[:-1]
            for i in range(len(segments) + 1):
                path = ".".join(segments[:i])
                if not any(is_inside(name, path) for name in stored) and not self._is_list(path):
                    found.setdefault(path, []).append(placed)
                    break
        return found

    def _is_list(self, path: str) -> bool:
        """Whether a module is a list of others, which is never called: its children are numbers."""
        start = f"{path}." if path else ""
        children = {name[len(start) :].split(".")[0] for name in self._resolved.tensors if name.startswith(start)}
        return bool(children) and all(child.isdecimal() for child in children)

    def _size(self, axes: Names) -> int:
        return math.prod(self._sizes[axis] for axis in axes)

    def _shown(self, axes: Names) -> Names:
        return tuple(self._modules.named(self._modules.leaves(axes)).split("*"))


def _messages(units: Sequence[GatherUnit]) -> list[list[Flat]]:
    """What units send: each flat of one by itself, the flats of several together."""
    if len(units) == 1:
        return [[flat] for flat in units[0].flats]
    return [[flat for unit in units for flat in unit.flats]]


def _paths(units: Sequence[GatherUnit]) -> str:
    return ", ".join(dict.fromkeys(starred(unit.path) for unit in units))


def _whose(units: Sequence[GatherUnit]) -> str:
    return "its" if len(units) == 1 else f"{len(units)} small units'"


def buckets(gradients: Sequence[_Gradient]) -> list[tuple[list[_Gradient], int]]:
    """Deal gradients to buckets as `data_parallel` does, with how many flags each carries.

    Each kind fills buckets of its own; the last of a kind ends with a flag for each gradient of it.
    """
    counts: dict[tuple[Names, str], int] = {}
    open_: dict[tuple[Names, str], list[_Gradient]] = {}
    sizes: dict[tuple[Names, str], int] = {}
    filled: list[list[_Gradient]] = []
    for gradient in reversed(gradients):
        kind = gradient.axes, gradient.dtype
        counts[kind] = counts.get(kind, 0) + 1
        open_.setdefault(kind, []).append(gradient)
        sizes[kind] = sizes.get(kind, 0) + gradient.numel * BYTES[gradient.dtype]
        if sizes[kind] >= (BUCKET_BYTES if filled else FIRST_BUCKET_BYTES):
            filled.append(open_.pop(kind))
            sizes[kind] = 0
    filled += open_.values()
    last = {(bucket[0].axes, bucket[0].dtype): i for i, bucket in enumerate(filled)}
    return [
        (bucket, counts[kind] if last[kind] == i else 0)
        for i, bucket in enumerate(filled)
        for kind in [(bucket[0].axes, bucket[0].dtype)]
    ]
