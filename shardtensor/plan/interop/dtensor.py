"""DTensor's placements <-> specs. A placement is recognized by its class name, so reading needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.layout.cutting import axis_form
from shardtensor.layout.layout import Layout, same_boxes
from shardtensor.layout.nested import Axis, CutDim, Partials, nearest_nested, nested_axes, nested_layout
from shardtensor.mesh import Mesh, read_mesh
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.spec.parts import REDUCTIONS


def spec_from_placements(placements: Sequence[Any], mesh: Any, shape: Sequence[int]) -> Spec:
    """Return the spec of a DTensor's placements. Sends nothing and reads no tensor.

    Args:
        placements: of a DTensor: ``Shard(d)``, ``Replicate()``, ``Partial(op)``, ``_StridedShard(d, split_factor=n)``;
            one for each axis of the mesh.
        mesh: a DeviceMesh, a `Mesh` or text such as ``"dp=2, tp=4"``.
        shape: global. Placements chunk as torch.chunk does, axis after axis, so uneven shards depend on it; the spec
            then has their sizes.

    Raises:
        LayoutError: a placement has no meaning here, or no spec in axes describes them.

    Example:
        >>> from torch.distributed.tensor import Partial, Replicate, Shard
        >>> print(spec_from_placements([Shard(0), Shard(1)], "dp=2, tp=4", (8, 8)))
        [dp, tp]
        >>> print(spec_from_placements([Shard(0), Shard(0)], "dp=2, tp=4", (8, 8)))
        [dp*tp, -]
        >>> print(spec_from_placements([Replicate(), Partial()], "dp=2, tp=4", (8, 8)))
        replicate partial(tp)
        >>> print(spec_from_placements([Replicate(), Shard(0)], "dp=2, tp=4", (10, 8)))
        [tp sizes(3, 3, 3, 1), -]
    """
    mesh, shape = as_mesh(mesh), tuple(shape)
    if len(placements) != len(mesh.axes):
        raise LayoutError(
            f"there are {len(placements)} placements for {len(mesh.axes)} axes",
            _facts(placements, shape) | {"mesh": str(mesh)},
            "give one placement for each axis of the mesh, in its order",
        )
    layout = nested_layout(read_placements(placements, shape), shape, mesh)
    spec = axis_form(layout)
    if any(layout.is_blocked(dim) for dim in range(len(shape))) and not _has_layout(spec, layout, mesh):
        raise LayoutError(
            "no spec in axes says these placements for this shape",
            _facts(placements, shape) | {"mesh": str(mesh)},
            "from_dtensor(dtensor) lists the boxes; or redistribute it first to placements without _StridedShard",
        )
    return spec


def placements_from_spec(
    spec: ShardingSpec | str, mesh: Any, shape: Sequence[int], *, dims: tuple[str, ...] | None = None
) -> tuple[Any, ...]:
    """Return DTensor's placements for a spec, one for each axis of the mesh. Needs torch.

    Args:
        spec: in axes of the mesh.
        mesh: a DeviceMesh, a `Mesh` or text such as ``"dp=2, tp=4"``.
        shape: global.
        dims: names of the tensor's dims, for specs such as ``[out: tp]``.

    Raises:
        LayoutError: DTensor has no placements for it; the message has the nearest spec that has.

    Example:
        >>> placements_from_spec("[dp, tp]", "dp=2, tp=4", (8, 8))
        (Shard(dim=0), Shard(dim=1))
        >>> placements_from_spec("[tp*dp, -]", "dp=2, tp=4", (8, 8))
        (_StridedShard(dim=0, sf=4), Shard(dim=0))
        >>> placements_from_spec("[tp balanced, -]", "tp=4", (10, 8))
        Traceback (most recent call last):
        shardtensor.errors.LayoutError: DTensor cannot say this layout
          spec   [tp balanced, -]
          shape  10 x 8
          mesh   (tp=4)
          fix    `[tp sizes(3, 3, 3, 1), -]` is the nearest that it can
    """
    spec, mesh, shape = as_spec(spec), as_mesh(mesh), tuple(shape)
    layout = bind(spec, shape, mesh, dims)
    axes = nested_axes(layout, mesh)
    if axes is None:
        facts = {"spec": str(spec), "shape": _sizes(shape), "mesh": str(mesh)}
        raise no_placements_error(layout, mesh, facts, "`{}` is the nearest that it can")
    return make_placements(axes)


def as_mesh(mesh: Any) -> Mesh:
    """Return the mesh of a DeviceMesh (unnamed axes are ``dim_0``, ``dim_1``, ...), of a `Mesh` or of a text."""
    if isinstance(mesh, Mesh | str | int):
        return read_mesh(mesh)
    names = mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(mesh.ndim))
    return Mesh(tuple(zip(names, mesh.mesh.shape, strict=True)), mesh.mesh.flatten().tolist())


def read_placements(placements: Sequence[Any], shape: Sequence[int]) -> tuple[Axis, ...]:
    """Return placements in this library's form, axis by axis."""

    def read(placement: Any) -> Axis:
        kind = type(placement).__name__
        if kind == "Replicate":
            return None
        if kind in ("Shard", "_StridedShard"):
            ndim = len(shape)
            if not -ndim <= placement.dim < ndim:
                raise LayoutError(
                    f"{placement!r} names a dim that the tensor does not have",
                    _facts(placements, shape),
                    f"dims are 0 to {ndim - 1}" if ndim else "a tensor without dims is not cut",
                )
            return CutDim(placement.dim % ndim, int(placement.split_factor) if kind == "_StridedShard" else 1)
        if kind == "Partial" and placement.reduce_op in REDUCTIONS:
            return Partials(placement.reduce_op)
        raise LayoutError(
            f"the placement {placement!r} has no meaning outside of DTensor",
            _facts(placements, shape),
            "redistribute it first: dtensor.redistribute(placements=[Replicate(), ...])",
        )

    return tuple(map(read, placements))


def make_placements(axes: tuple[Axis, ...]) -> tuple[Any, ...]:
    """Return torch's placements, axis by axis."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def make(axis: Axis) -> Any:
        if axis is None:
            return Replicate()
        if isinstance(axis, Partials):
            return Partial(axis.op)
        return Shard(axis.dim) if axis.blocks == 1 else _StridedShard(axis.dim, split_factor=axis.blocks)

    return tuple(map(make, axes))


def no_placements_error(layout: Layout, mesh: Mesh, facts: Mapping[str, object], fix: str) -> LayoutError:
    """Return the error for a layout without placements; ``{}`` in `fix` is replaced by the nearest layout with some."""
    return LayoutError("DTensor cannot say this layout", facts, fix.format(axis_form(nearest_nested(layout, mesh))))


def _has_layout(spec: Spec, layout: Layout, mesh: Mesh) -> bool:
    try:
        return same_boxes(bind(spec, layout.shape, mesh), layout)
    except LayoutError:
        return False


def _facts(placements: Sequence[Any], shape: Sequence[int]) -> dict[str, object]:
    return {"placements": ", ".join(map(repr, placements)), "shape": _sizes(shape)}


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "()"
