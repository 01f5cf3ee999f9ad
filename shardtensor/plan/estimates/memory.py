"""The bytes that a rank of a plan holds through training, and which ranks hold the least and the most.

They are the bytes of the tensors; an allocator rounds each up (CUDA's to 512). Temporary memory of a step, mainly
activations, is not included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import attrs

from shardtensor.errors import PlanError
from shardtensor.layout.layout import Layout, ListedLayout, MeshLayout
from shardtensor.layout.partition import Param, Partition, held_bytes
from shardtensor.layout.ranges import REDUCE_BUFFERS, SMALL_BYTES, aligned_bytes, gather_buffers
from shardtensor.mesh import Mesh, index_along
from shardtensor.plan.match.units import Flat, GatherUnit, gather_units, own_tensors
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.resolved import Resolved

OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0, "none": 0}
"""The number of state tensors for each parameter, by the name of the optimizer; ``momentum`` is SGD with momentum."""


ZERO: dict[str, tuple[Partition, bool]] = {
    "owners": ("owners", False),
    "ranges": ("ranges", False),
    "gradients": ("ranges", True),
}
"""How a `ZeroRedundancyOptimizer` steps parameters in parts: its partition, and whether it reduces gradients."""


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


@attrs.frozen
class _Zero:
    """The parameters of a `ZeroRedundancyOptimizer`, which data ranks step in parts."""

    params: tuple[Param, ...]
    axes: tuple[int, ...]
    mode: str

    def on(self, rank: int, mesh: Mesh, optimizer: _Optimizer) -> RankBytes:
        ranks = math.prod(mesh.sizes[axis] for axis in self.axes)
        partition, is_reduced = ZERO[self.mode]
        held = held_bytes(self.params, ranks, _index_along(self.axes, mesh, rank), partition, is_reduced=is_reduced)
        return RankBytes(
            *(held.parameters, held.gradients, optimizer.states * held.state),
            gathered=held.buffers,
            tensors=(2 + optimizer.states) * len(self.params),
        )


@attrs.frozen(eq=False)
class _Held:
    """What ranks hold of a plan, each kind with its number: layers are alike.

    Attributes:
        tensors: stored as in the computation: the layout, the dtype, whether it is trained, and whether it is a buffer.
        flats: parameters of which a rank holds a range.
    """

    mesh: Mesh
    units: tuple[GatherUnit, ...]
    tensors: Counter[tuple[Layout, str, bool, bool]]
    flats: Counter[Flat]
    zero: _Zero | None

    def on(self, rank: int, optimizer: _Optimizer) -> RankBytes:
        """Return the bytes of one rank."""
        found = RankBytes(gathered=self._gathered(rank))
        if self.zero is not None:
            found = found.plus(self.zero.on(rank, self.mesh, optimizer))
        for (layout, dtype, trains, is_buffer), times in self.tensors.items():
            size = layout.numel(rank) * BYTES[dtype]
            each = RankBytes(buffers=size, tensors=1) if is_buffer else RankBytes(parameters=size, tensors=1)
            if trains and not is_buffer:
                each = RankBytes(size, size, tensors=2).plus(optimizer.held(layout.numel(rank), dtype))
            found = found.plus(each, times)
        for flat, times in self.flats.items():
            ranges = flat.ranges(rank)
            size = stepped = ranges.chunk
            if len(flat.layouts) == 1:  # the optimizer steps the only parameter, not the padding after it
                start, stop = ranges.piece(0, _index_along(flat.axes, self.mesh, rank))
                stepped = stop - start
            size *= BYTES[flat.dtype]
            each = RankBytes(parameters=size, tensors=1)
            if flat.trains:
                each = RankBytes(size, size, tensors=2).plus(optimizer.held(stepped, flat.dtype))
            found = found.plus(each, times)
        return found

    def _gathered(self, rank: int) -> int:
        """Return the memory for gathered units (those that stay gathered have their own, the others take turns) and
        for reductions."""
        packed, modules = 0, []
        for unit in self.units:
            sizes = [(flat.ranges(rank).total * BYTES[flat.dtype], flat.trains) for flat in unit.flats]
            packed = max([packed, *(size for size, trains in sizes if trains)])
            stays = unit.holds_units or sum(size for size, _ in sizes) <= SMALL_BYTES
            modules.append((sum(aligned_bytes(size) for size, _ in sizes), stays))
        return sum(buffer.size_bytes for buffer in gather_buffers(modules)) + REDUCE_BUFFERS * packed

    def ranks(self) -> Iterator[int]:
        """Yield ranks, among them one of each amount that ranks hold; along axes without a difference, the first."""
        mesh = self.mesh
        places: dict[int, set[int]] = {axis: {0} for axis in range(len(mesh.sizes))}
        for axis in self.zero.axes if self.zero is not None else ():
            places[axis] |= {*range(mesh.sizes[axis])}
        layouts = {layout for layout, *_ in self.tensors}.union(*(flat.layouts for flat in self.flats))
        for axis in {axis for layout in layouts for axis in _uneven_axes(layout, mesh)}:
            places[axis] |= {*range(mesh.sizes[axis])}
        for flat in self.flats:
            ranges = flat.ranges(mesh.ranks[0])
            if len(flat.layouts) > 1 or not flat.trains or not (ranges.waste or _uneven_axes(flat.layouts[0], mesh)):
                continue
            if len(flat.axes) > 1 or _uneven_axes(flat.layouts[0], mesh):
                for axis in flat.axes:
                    places[axis] |= {*range(mesh.sizes[axis])}
            else:  # full ranges, the last one with elements, and those without
                last = ranges.lengths[0] // ranges.chunk
                places[flat.axes[0]] |= {place for place in (last, last + 1) if place < ranges.ranks}
        yield from (mesh.rank_at(place) for place in product(*(sorted(each) for each in places.values())))


def rank_bytes(
    resolved: Resolved, rank: int, *, optimizer: str = "adamw", zero: str | None = None, master_weights: bool = False
) -> RankBytes:
    """Return the bytes that one rank holds.

    Args:
        rank: of the world.
        optimizer: one of `OPTIMIZERS`.
        zero: one of `ZERO`: data ranks step whole parameters or ranges, and hold all gradients or those that they step.
        master_weights: the optimizer holds a float32 copy of each parameter of a shorter dtype that it steps, and has
            its state in float32; not with `zero`.

    Raises:
        PlanError: the optimizer is not known, the plan has no such rank, or `zero` does not fit the plan.
    """
    mesh = resolved.plan.axes.mesh
    if rank not in mesh.ranks:
        raise PlanError(f"the plan has no rank {rank}", {"ranks": f"{mesh.ranks[0]} to {mesh.ranks[-1]}"})
    return _held(resolved, zero).on(rank, _optimizer(optimizer, master_weights))


def plan_bytes(
    resolved: Resolved, *, optimizer: str = "adamw", zero: str | None = None, master_weights: bool = False
) -> PlanBytes:
    """Return the least and the most that any rank holds. The time grows with the number of different ranks, mostly one.

    Args:
        optimizer, zero, master_weights: as for `rank_bytes`.

    Raises:
        PlanError: the optimizer is not known, or `zero` does not fit the plan.
    """
    held, stepped = _held(resolved, zero), _optimizer(optimizer, master_weights)
    each = [(held.on(rank, stepped), rank) for rank in held.ranks()]
    least, most = (choose(each, key=lambda pair: pair[0].total) for choose in (min, max))
    return PlanBytes(*least, *most)


def _held(resolved: Resolved, zero: str | None) -> _Held:
    units, own = gather_units(resolved), own_tensors(resolved)
    parts = _of_zero(resolved, zero) if zero is not None else None
    tensors = Counter(
        (placed.layout, placed.tensor.dtype, placed.tensor.requires_grad, placed.tensor.is_buffer)
        for placed in own if placed.tensor.is_buffer or (placed.stored is None and parts is None)
    )  # fmt: skip
    flats = Counter(flat for unit in units for flat in unit.flats)
    return _Held(resolved.plan.axes.mesh, units, tensors, flats, parts)


def _of_zero(resolved: Resolved, mode: str) -> _Zero:
    placed = [each for each in own_tensors(resolved) if not each.tensor.is_buffer]
    sharded = [each.tensor.name for each in placed if each.stored is not None or each.layout.sharding_axes]
    if sharded:
        raise PlanError(
            "ZeroRedundancyOptimizer steps parameters that every rank holds whole, and the plan shards some",
            {"sharded": ", ".join(sharded[:8])},
            "leave --zero out: sharded parameters have sharded state",
        )
    axes = resolved.plan.axes
    items = [(each.tensor.dtype, each.tensor.requires_grad, math.prod(each.tensor.shape)) for each in placed]
    params = tuple(Param(length, BYTES[dtype], trains, dtype) for dtype, trains, length in items)
    return _Zero(params, tuple(axes.mesh.names.index(leaf) for leaf in axes.leaves(axes.data)), mode)


def _index_along(axes: tuple[int, ...], mesh: Mesh, rank: int) -> int:
    """Return the number of a rank among those along some axes of the mesh."""
    here = mesh.coordinate(rank)
    assert here is not None, "a rank of the mesh"
    return index_along(axes, mesh.sizes, here)


def _optimizer(name: str, master_weights: bool) -> _Optimizer:
    if name not in OPTIMIZERS:
        raise PlanError(f'no optimizer is called "{name}"', {"known": ", ".join(OPTIMIZERS)})
    return _Optimizer(OPTIMIZERS[name], master_weights)


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
