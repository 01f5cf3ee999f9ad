"""Bind a spec to a mesh and a shape, and raise if they do not fit, before any data moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, singledispatch
from itertools import product

import attrs

from shardtensor.errors import LayoutError
from shardtensor.layout.box import Box, check_tiling
from shardtensor.layout.cutting import check_sum, dim_cuts, does_not_fit, pieces_of
from shardtensor.layout.layout import DimCut, FlatLayout, Layout, ListedLayout, MeshLayout, Shape, replicated
from shardtensor.layout.pieces import Pieces, Stepped, chunked, listed
from shardtensor.mesh import Mesh, Ranks, as_ranks
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec
from shardtensor.spec.nodes import Replicate, ShardingSpec, Spec
from shardtensor.spec.placement import Placement


def bind(spec: ShardingSpec, shape: Shape, mesh: Mesh, dim_names: tuple[str, ...] | None = None) -> Layout:
    """Return the layout of a tensor of `shape` with `spec` on the ranks of `mesh`; `dim_names` for ``[out: tp]``.

    The time does not depend on the number of ranks, except for specs that list boxes.

    Raises:
        LayoutError: the spec does not fit; the message says which number is wrong and what would fit.
    """
    if type(spec).__hash__ is None:  # a user's own spec may be mutable
        return _bind(spec, shape, mesh, dim_names)
    return _cached(spec, shape, mesh, dim_names)


@singledispatch
def _bind(spec: ShardingSpec, shape: Shape, mesh: Mesh, dim_names: tuple[str, ...] | None) -> Layout:
    metadata = spec.build_metadata(shape, None)  # of a user's own class of specs
    boxes = [(s.placement, Box(tuple(s.shard_offsets), tuple(s.shard_sizes))) for s in metadata.shards_metadata]
    return _listed(boxes, shape, mesh, spec)


_cached = lru_cache(maxsize=8192)(_bind)


@_bind.register
def _(spec: ChunkShardingSpec, shape: Shape, mesh: Mesh, dim_names: tuple[str, ...] | None) -> Layout:
    ranks = _ranks(spec, mesh)
    ndim = len(shape)
    if not -ndim <= spec.dim < ndim:
        fault = f"Invalid sharding dim: {spec.dim} for a tensor of {ndim} dims"
        fix = f"use a dim from {-ndim} to {ndim - 1}" if ndim else "a scalar cannot be cut: keep it whole"
        raise does_not_fit("E202", fault, spec, shape, fix)
    dim = spec.dim % ndim
    length, count = shape[dim], len(ranks)
    if spec.sizes is None:
        pieces: Pieces = chunked(length, count)
    else:
        pieces = listed(check_sum(spec.sizes, length, spec, shape))
    if not isinstance(ranks, range) and len(set(ranks)) < count:  # a rank named twice holds two boxes
        owned = []
        for i, rank in enumerate(ranks):
            (start, stop) = pieces.intervals(i)[0]
            offsets = tuple(start if d == dim else 0 for d in range(ndim))
            owned.append((rank, Box(offsets, tuple(stop - start if d == dim else n for d, n in enumerate(shape)))))
        return ListedLayout(shape=shape, ranks=tuple(sorted(set(ranks))), grid=(len(set(ranks)),), owned=tuple(owned))
    dims = tuple(DimCut((0,), pieces) if d == dim else None for d in range(ndim))
    return MeshLayout(shape=shape, ranks=ranks, grid=(count,), dims=dims)


@_bind.register
def _(spec: GridShardingSpec, shape: Shape, mesh: Mesh, dim_names: tuple[str, ...] | None) -> Layout:
    ranks = _ranks(spec, mesh)
    if len(spec.splits) != len(shape):
        raise does_not_fit(
            "E202",
            f"the grid has {len(spec.splits)} splits, the tensor has {len(shape)} dims",
            spec,
            shape,
            "give one split for each dim, 1 for a dim that stays whole",
        )
    if len(set(ranks)) != len(ranks):
        fix = "name each rank once, or list the boxes with enum(...)"
        raise does_not_fit("E501", "a rank has two places in the grid", spec, shape, fix)
    # A grid of one shard cuts dim 0, as a chunk spec with one rank does: else it would be equal to a replicated layout.
    is_one = math.prod(spec.splits) == 1
    dims = tuple(
        DimCut((axis,), chunked(length, splits)) if splits > 1 or (is_one and not axis) else None
        for axis, (length, splits) in enumerate(zip(shape, spec.splits, strict=True))
    )
    return MeshLayout(shape=shape, ranks=ranks, grid=tuple(spec.splits), dims=dims)


@_bind.register
def _(spec: EnumerableShardingSpec, shape: Shape, mesh: Mesh, dim_names: tuple[str, ...] | None) -> Layout:
    return _listed([(box.placement, Box(box.offsets, box.sizes)) for box in spec.boxes], shape, mesh, spec)


@_bind.register
def _(spec: Replicate, shape: Shape, mesh: Mesh, dim_names: tuple[str, ...] | None) -> Layout:
    return replicated(shape, mesh.ranks, mesh.sizes)


@_bind.register
def _(spec: Spec, shape: Shape, mesh: Mesh, dim_names: tuple[str, ...] | None) -> Layout:
    mesh = _named(spec, mesh)
    names = mesh.names
    axis_of = {name: i for i, name in enumerate(names)}

    def axes(requested: Sequence[str]) -> tuple[int, ...]:
        unknown = next((name for name in requested if name not in axis_of), None)
        if unknown is not None:
            fix = f"use one of {', '.join(names)}"
            raise does_not_fit("E201", f"no mesh axis is called `{unknown}`", spec, shape, fix, mesh, name=unknown)
        return tuple(axis_of[name] for name in requested)

    cuts = dim_cuts(spec, shape, dim_names)
    dims: list[DimCut | None] = []
    for dim, cut in enumerate(cuts):
        if cut is None:
            dims.append(None)
            continue
        numbers = axes(cut.axes)
        count = math.prod(mesh.sizes[i] for i in numbers)
        dims.append(DimCut(numbers, pieces_of(cut, shape[dim], count, dim, spec, shape, mesh)))
    layout: Layout = MeshLayout(shape=shape, ranks=mesh.ranks, grid=mesh.sizes, dims=tuple(dims), names=names)
    if spec.flat_part is not None:
        part = spec.flat_part
        assert isinstance(layout, MeshLayout)
        unit = 0 if part.unit == "row" else int(part.unit)
        layout = FlatLayout(
            shape=shape, ranks=mesh.ranks, grid=mesh.sizes, names=names, inner=layout, axes=axes(part.axes),
            unit=unit, sizes=part.sizes,
        )  # fmt: skip
        _check_flat_sizes(layout, spec, mesh)
    if spec.only_part is not None:
        (axis,) = axes((spec.only_part.axis,))
        if spec.only_part.index >= mesh.sizes[axis]:
            raise does_not_fit(
                "E201", f"axis `{names[axis]}` has no coordinate {spec.only_part.index}", spec, shape,
                f"use 0 to {mesh.sizes[axis] - 1}", mesh,
            )  # fmt: skip
        layout = _only(layout, axis, spec.only_part.index, mesh)
    if spec.partial_parts:
        partial = tuple((i, part.op) for part in spec.partial_parts for i in axes(part.axes))
        layout = attrs.evolve(layout, partial=partial)
    return layout


def _named(spec: Spec, mesh: Mesh) -> Mesh:
    """Name the axis of an unnamed mesh with the one name that the spec uses."""
    if not mesh.is_unnamed:
        return mesh
    names = spec.axis_names
    if len(names) > 1:
        raise LayoutError(
            f"the spec names the axes {', '.join(sorted(names))}, but this is one process group with no named axes",
            {"spec": str(spec), "ranks": len(mesh.ranks)},
            "pass a DeviceMesh with these mesh_dim_names as process_group",
        )
    return _unnamed_as(mesh, next(iter(names))) if names else mesh


@lru_cache(maxsize=1024)
def _unnamed_as(mesh: Mesh, name: str) -> Mesh:
    return Mesh(((name, mesh.size),), mesh.ranks)


def _check_flat_sizes(layout: FlatLayout, spec: Spec, mesh: Mesh) -> None:
    if layout.sizes is None:
        return
    count = math.prod(layout.grid[axis] for axis in layout.axes)
    total = layout.inner.numel(layout.ranks[0])
    if layout.inner.cut_dims and any(layout.inner.numel(rank) != total for rank in layout.ranks):
        raise does_not_fit(
            "E208", "flat has one list of sizes, but the dims leave different numbers of elements on the ranks", spec,
            layout.shape, "drop sizes=(...), or cut the dims evenly", mesh,
        )  # fmt: skip
    if len(layout.sizes) != count or sum(layout.sizes) != total:
        raise does_not_fit(
            "E208", f"flat has {len(layout.sizes)} sizes that add up to {sum(layout.sizes)}", spec, layout.shape,
            f"give {count} sizes that add up to {total}", mesh,
        )  # fmt: skip


def _only(layout: Layout, axis: int, index: int, mesh: Mesh) -> Layout:
    """Return the layout on the ranks at one coordinate of an axis, whose size is then 1; other ranks hold nothing."""
    ranks = _ranks_at(mesh, axis, index)
    if not layout.shape:
        owned = tuple((rank, box) for rank in ranks for box in layout.boxes(rank))
        return ListedLayout(shape=(), ranks=ranks, grid=(len(ranks),), owned=owned)
    grid = tuple(1 if i == axis else size for i, size in enumerate(layout.grid))
    if isinstance(layout, FlatLayout):
        inner = attrs.evolve(layout.inner, ranks=ranks, grid=grid, names=())
        return attrs.evolve(layout, inner=inner, ranks=ranks, grid=grid, names=())
    assert isinstance(layout, MeshLayout)
    dims = layout.dims
    if not layout.cut_dims:  # one shard of dim 0: the layout must differ from one that is replicated on all ranks
        length = layout.shape[0]
        dims = (DimCut((axis,), Stepped(length, 1, length)), *dims[1:])
    return attrs.evolve(layout, ranks=ranks, grid=grid, names=(), dims=dims)


@lru_cache(maxsize=1024)
def _ranks_at(mesh: Mesh, axis: int, index: int) -> Ranks:
    """Return the ranks at one coordinate of an axis, row-major."""
    inner = math.prod(mesh.sizes[axis + 1 :])
    starts = range(index * inner, mesh.size, inner * mesh.sizes[axis])
    return as_ranks([rank for start in starts for rank in mesh.ranks[start : start + inner]])


def _ranks(spec: ChunkShardingSpec | GridShardingSpec, mesh: Mesh) -> range | tuple[int, ...]:
    """Return the ranks that the placements name; raise LayoutError if one is not in the mesh."""
    ranks = spec.placements.ranks
    if isinstance(ranks, range):
        missing = next((rank for rank in (ranks[0], ranks[-1]) if rank not in mesh.ranks), None)
        if missing is None and not isinstance(mesh.ranks, range):
            missing = next((rank for rank in ranks if rank not in mesh.ranks), None)
    else:
        if None in ranks:
            raise LayoutError(
                "a placement names no rank",
                {"spec": str(spec)},
                'write the rank too, as in "rank:0/cuda:0"',
                code="E501",
            )
        members = mesh.ranks if isinstance(mesh.ranks, range) else set(mesh.ranks)
        missing = next((rank for rank in ranks if rank not in members), None)
    if missing is not None:
        raise no_such_rank(missing, mesh, spec)
    return ranks  # type: ignore[return-value]


def no_such_rank(rank: int, mesh: Mesh, spec: ShardingSpec | None = None) -> LayoutError:
    """Return the error for a placement on a rank outside of the process group."""
    ranks = mesh.ranks
    shown = f"{ranks[0]} to {ranks[-1]}" if isinstance(ranks, range) else ", ".join(map(str, ranks))
    facts: dict[str, object] = {"ranks": shown} if spec is None else {"spec": str(spec), "ranks": shown}
    return LayoutError(
        f"Global rank {rank} does not exist in input process group",
        facts,
        "name ranks of the process group, or pass the group that has this rank",
        code="E501",
        about={"rank": rank},
    )


def _listed(boxes: Sequence[tuple[Placement | None, Box]], shape: Shape, mesh: Mesh, spec: ShardingSpec) -> Layout:
    owned = []
    for placement, box in boxes:
        rank = placement.rank() if placement is not None else None
        if rank is None:
            raise LayoutError(
                "a shard has no rank",
                {"spec": str(spec)},
                'give each shard a placement such as "rank:0/cuda:0"',
                code="E501",
            )
        if rank not in mesh.ranks:
            raise no_such_rank(rank, mesh, spec)
        owned.append((rank, box))
    check_tiling(owned, shape)
    return listed_layout(tuple(owned), shape)


def listed_layout(owned: tuple[tuple[int, Box], ...], shape: Shape) -> Layout:
    """Return the layout of boxes, each with its rank, that tile `shape`."""
    ranks = tuple(dict.fromkeys(rank for rank, _ in owned))
    if len(ranks) == len(owned):
        grid = _as_grid(owned, shape)
        if grid is not None:
            return grid
    return ListedLayout(shape=shape, ranks=ranks, grid=(len(ranks),), owned=owned)


def _as_grid(owned: tuple[tuple[int, Box], ...], shape: Shape) -> MeshLayout | None:
    intervals = [  # of two with one start, the empty one is last
        sorted(
            {(box.offsets[dim], box.sizes[dim]) for _, box in owned}, key=lambda interval: (interval[0], -interval[1])
        )
        for dim in range(len(shape))
    ]
    grid = tuple(len(choices) for choices in intervals)
    if math.prod(grid) != len(owned) or any(
        _end(choices) != size for choices, size in zip(intervals, shape, strict=True)
    ):
        return None
    holder = {box: rank for rank, box in owned}
    order = []
    for choice in product(*intervals):
        rank = holder.get(Box(tuple(start for start, _ in choice), tuple(size for _, size in choice)))
        if rank is None:
            return None
        order.append(rank)
    dims = tuple(
        DimCut((axis,), listed(tuple(size for _, size in choices))) if len(choices) > 1 else None
        for axis, choices in enumerate(intervals)
    )
    cut = [axis for axis, size in enumerate(grid) if size > 1]
    if shape and not cut:  # one box is a shard of dim 0: the layout must differ from a replicated one
        dims = (DimCut((0,), listed(shape[:1])), *dims[1:])
        grid = (1,)
    if len(cut) == 1:  # one cut dim: the same layout as a chunk spec gives
        dims = tuple(DimCut((0,), cut_dim.pieces) if cut_dim is not None else None for cut_dim in dims)
        grid = (grid[cut[0]],)
    return MeshLayout(shape=shape, ranks=as_ranks(order), grid=grid or (1,), dims=dims)


def _end(choices: list[tuple[int, int]]) -> int | None:
    """Return the end of consecutive intervals, or None if they leave a gap or overlap."""
    end = 0
    for start, size in choices:
        if start != end:
            return None
        end += size
    return end
