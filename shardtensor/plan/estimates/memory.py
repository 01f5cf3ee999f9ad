"""The bytes that a rank of a plan holds through training, and which ranks hold the least and the most.

They are the bytes of the tensors; an allocator rounds each up (CUDA's to 512). Temporary memory of a step, mainly
activations, is not included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any, Protocol

import attrs

from shardtensor.errors import PlanError
from shardtensor.layout.layout import Layout, ListedLayout, MeshLayout
from shardtensor.layout.ranges import REDUCE_BUFFERS, SMALL_BYTES, aligned_bytes, gather_buffers
from shardtensor.mesh import Mesh
from shardtensor.plan.match.units import Flat, GatherUnit, gather_units, own_tensors
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.resolved import Resolved

OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0, "none": 0}
"""The number of state tensors for each parameter, by the name of the optimizer; ``momentum`` is SGD with momentum."""


@attrs.frozen
class RankBytes:
    """The bytes that one rank holds.

    Attributes:
        parameters: as they are stored, with the padding of ranges.
        gradients: of trained parameters, in their dtype.
        optimizer: its state, without step counts.
        master_weights: float32 copies of parameters, which the optimizer steps.
        buffers: those that are saved with the model.
        gathered: memory that gathered units and packed gradients use in turns.
        tensors: the number of all these tensors: an allocator may round up each.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    gathered: int = 0
    tensors: int = 0
    master_weights: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        stepped = self.parameters + self.gradients + self.optimizer + self.master_weights
        return stepped + self.buffers + self.gathered

    def plus(self, other: RankBytes, times: int = 1) -> RankBytes:
        """Return the sum of this and `times` times another."""
        mine, theirs = attrs.astuple(self), attrs.astuple(other)
        return RankBytes(*(a + times * b for a, b in zip(mine, theirs, strict=True)))


@attrs.frozen
class PlanBytes:
    """The least and the most that a rank of a plan holds, and the first ranks that hold these."""

    least: RankBytes
    least_rank: int
    most: RankBytes
    most_rank: int


@attrs.frozen
class _Optimizer:
    """The number of state tensors for each parameter, and whether it steps float32 copies of shorter parameters."""

    states: int
    master_weights: bool

    def held(self, elements: int, dtype: str) -> RankBytes:
        """Return the bytes of the state for some elements."""
        if not self.master_weights or BYTES[dtype] >= BYTES["float32"]:
            return RankBytes(optimizer=self.states * elements * BYTES[dtype], tensors=self.states)
        size = elements * BYTES["float32"]
        return RankBytes(optimizer=self.states * size, tensors=self.states + 1, master_weights=size)


class _Load(Protocol):
    """The bytes of some tensors on each rank."""

    def along(self, mesh: Mesh) -> dict[int, Sequence[int]]:
        """Return the mesh axes along which it differs, each with the coordinates from which on it may."""
        ...

    def on(self, rank: int, mesh: Mesh, optimizer: _Optimizer) -> RankBytes: ...


@attrs.frozen(cache_hash=True)
class _Tensor:
    """A tensor that is stored as in the computation."""

    layout: Layout
    dtype: str
    trains: bool
    is_buffer: bool

    def along(self, mesh: Mesh) -> dict[int, Sequence[int]]:
        return {axis: range(mesh.sizes[axis]) for axis in _uneven_axes(self.layout, mesh)}

    def on(self, rank: int, mesh: Mesh, optimizer: _Optimizer) -> RankBytes:
        size = self.layout.numel(rank) * BYTES[self.dtype]
        if self.is_buffer:
            return RankBytes(buffers=size, tensors=1)
        if not self.trains:
            return RankBytes(parameters=size, tensors=1)
        return RankBytes(size, size, tensors=2).plus(optimizer.held(self.layout.numel(rank), self.dtype))


@attrs.frozen(cache_hash=True)
class _Range:
    """A rank's range of parameters that are gathered together."""

    flat: Flat

    def along(self, mesh: Mesh) -> dict[int, Sequence[int]]:
        inner = {axis for layout in self.flat.layouts for axis in _uneven_axes(layout, mesh)}
        found: dict[int, Sequence[int]] = {axis: range(mesh.sizes[axis]) for axis in inner}
        ranges = self.flat.ranges(mesh.ranks[0])
        if len(self.flat.layouts) > 1 or not self.flat.trains or not (inner or ranges.waste):
            return found
        # The optimizer steps the only parameter, not the padding after it.
        if inner or len(self.flat.axes) > 1:
            return found | {axis: range(mesh.sizes[axis]) for axis in self.flat.axes}
        last = ranges.lengths[0] // ranges.chunk
        return {self.flat.axes[0]: [place for place in (0, last, last + 1) if place < ranges.ranks]}

    def on(self, rank: int, mesh: Mesh, optimizer: _Optimizer) -> RankBytes:
        ranges, item = self.flat.ranges(rank), BYTES[self.flat.dtype]
        if not self.flat.trains:
            return RankBytes(parameters=ranges.chunk * item, tensors=1)
        stepped = ranges.chunk
        if len(self.flat.layouts) == 1:
            start, stop = ranges.piece(0, place_along(mesh, self.flat.axes, rank))
            stepped = stop - start
        size = ranges.chunk * item
        return RankBytes(size, size, tensors=2).plus(optimizer.held(stepped, self.flat.dtype))


@attrs.frozen(eq=False)
class _Lent:
    """Memory for gathered units (those that stay gathered have their own, the others take turns) and reductions."""

    units: tuple[GatherUnit, ...]

    def along(self, mesh: Mesh) -> dict[int, Sequence[int]]:
        layouts = {layout for unit in self.units for flat in unit.flats for layout in flat.layouts}
        return {axis: range(mesh.sizes[axis]) for layout in layouts for axis in _uneven_axes(layout, mesh)}

    def on(self, rank: int, mesh: Mesh, optimizer: _Optimizer) -> RankBytes:
        packed, modules = 0, []
        for unit in self.units:
            sizes = [(flat.ranges(rank).total * BYTES[flat.dtype], flat.trains) for flat in unit.flats]
            packed = max([packed, *(size for size, trains in sizes if trains)])
            stays = unit.holds_units or sum(size for size, _ in sizes) <= SMALL_BYTES
            modules.append((sum(aligned_bytes(size) for size, _ in sizes), stays))
        gathered = sum(buffer.size_bytes for buffer in gather_buffers(modules))
        return RankBytes(gathered=gathered + REDUCE_BUFFERS * packed)


def rank_bytes(resolved: Resolved, rank: int, *, optimizer: str = "adamw", master_weights: bool = False) -> RankBytes:
    """Return the bytes that one rank holds.

    Args:
        rank: of the world.
        optimizer: one of `OPTIMIZERS`.
        master_weights: the optimizer holds a float32 copy of each parameter of a shorter dtype that it steps, and has
            its state in float32.

    Raises:
        PlanError: the optimizer is not known, or the plan has no such rank.
    """
    stepped = _optimizer(optimizer, master_weights)
    mesh = resolved.plan.axes.mesh
    if rank not in mesh.ranks:
        raise PlanError(f"the plan has no rank {rank}", {"ranks": f"{mesh.ranks[0]} to {mesh.ranks[-1]}"})
    units = gather_units(resolved)
    found = RankBytes()
    for load, times in _loads(resolved, units).items():
        found = found.plus(load.on(rank, mesh, stepped), times)
    return found


def plan_bytes(resolved: Resolved, *, optimizer: str = "adamw", master_weights: bool = False) -> PlanBytes:
    """Return the least and the most that any rank holds. The time grows with the number of different ranks, mostly one.

    Args:
        optimizer, master_weights: as for `rank_bytes`.

    Raises:
        PlanError: the optimizer is not known.
    """
    stepped = _optimizer(optimizer, master_weights)
    mesh, units = resolved.plan.axes.mesh, gather_units(resolved)
    first = mesh.ranks[0]
    same = RankBytes()
    differing: list[tuple[_Load, int, tuple[int, ...]]] = []
    places: dict[int, set[int]] = {}
    for load, times in _loads(resolved, units).items():
        along = load.along(mesh)
        if along:
            differing.append((load, times, tuple(along)))
        else:
            same = same.plus(load.on(first, mesh, stepped), times)
        for axis, each in along.items():
            places.setdefault(axis, set()).update(each)
    union = sorted(places)
    cached: dict[tuple[int, tuple[int, ...]], RankBytes] = {}
    least = most = None
    for place in product(*(sorted(places[axis]) for axis in union)):
        at = dict(zip(union, place, strict=True))
        rank = mesh.rank_at([at.get(axis, 0) for axis in range(len(mesh.sizes))])
        here = same
        for i, (load, times, axes) in enumerate(differing):
            key = (i, tuple(at[axis] for axis in axes))
            if key not in cached:
                cached[key] = load.on(rank, mesh, stepped)
            here = here.plus(cached[key], times)
        if least is None or here.total < least[0].total:
            least = here, rank
        if most is None or here.total > most[0].total:
            most = here, rank
    assert least is not None and most is not None, "a mesh has a rank"
    return PlanBytes(*least, *most)


def place_along(mesh: Mesh, axes: tuple[int, ...], rank: int) -> int:
    """Return the index of a rank among those along some axes, major first."""
    here = mesh.coordinate(rank)
    assert here is not None, "a rank of the mesh"
    place = 0
    for axis in axes:
        place = place * mesh.sizes[axis] + here[axis]
    return place


def _optimizer(name: str, master_weights: bool) -> _Optimizer:
    if name not in OPTIMIZERS:
        raise PlanError(f'no optimizer is called "{name}"', {"known": ", ".join(OPTIMIZERS)})
    return _Optimizer(OPTIMIZERS[name], master_weights)


def _loads(resolved: Resolved, units: tuple[GatherUnit, ...]) -> Counter[_Load]:
    """Return each kind of load and its number: layers are alike."""
    found: Counter[_Load] = Counter([_Lent(units), *(_Range(flat) for unit in units for flat in unit.flats)])
    for placed in own_tensors(resolved):
        tensor = placed.tensor
        if placed.stored is None or tensor.is_buffer:
            found[_Tensor(placed.layout, tensor.dtype, tensor.requires_grad, tensor.is_buffer)] += 1
    return found


def _uneven_axes(layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Return the axes of the mesh along which ranks hold different numbers of elements."""
    everything = tuple(range(len(mesh.sizes)))
    if len(layout.grid) != len(mesh.sizes) or isinstance(layout, ListedLayout):
        return everything  # one that names ranks
    only = {axis for axis in everything if layout.grid[axis] != mesh.sizes[axis]}  # on one coordinate of these
    if isinstance(layout, MeshLayout):
        cuts: list[Any] = [cut for cut in layout.dims if cut is not None]
        return tuple(sorted(only.union(*(cut.axes for cut in cuts if not cut.pieces.is_even))))
    return tuple(sorted({*only, *layout.sharding_axes}))
