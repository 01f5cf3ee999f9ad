"""Convert specs to cuts of dims, and layouts back to specs: dim names, ``...`` and shard sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardtensor.errors import LayoutError
from shardtensor.layout.layout import FlatLayout, Layout, MeshLayout, Shape
from shardtensor.layout.pieces import Balanced, Blocked, Pieces, Stepped, balanced, listed, padded
from shardtensor.mesh import Mesh
from shardtensor.spec.nodes import Cut, Replicate, ShardingSpec, Spec


def positional(spec: Spec, shape: Shape, dim_names: tuple[str, ...] | None = None) -> Spec:
    """Return `spec` with one entry for each dim of a tensor, without dim names and ``...``.

    Raises:
        LayoutError: the tensor does not have these dims.
    """
    cuts = dim_cuts(spec, shape, dim_names)
    dims = tuple(cuts) if any(cuts) else ()
    if (dims, ()) == (spec.dims, spec.named):
        return spec
    return Spec.of(dims, (), spec.flat_part, spec.only_part, spec.partial_parts)


def dim_cuts(spec: Spec, shape: Shape, dim_names: tuple[str, ...] | None) -> list[Cut | None]:
    """Return the cut of each dim of the tensor; None for a dim that is not cut."""
    ndim = len(shape)
    if spec.named:
        if dim_names is None:
            raise does_not_fit(
                "E203", "the spec names dims, but the dims of this tensor have no names", spec, shape,
                "write the cut by position, such as `[tp, -]`",
            )  # fmt: skip
        cuts: list[Cut | None] = [None] * ndim
        for name, cut in spec.named:
            if name not in dim_names:
                raise does_not_fit(
                    "E203", f"no dim is called `{name}`", spec, shape, f"the dims are {', '.join(dim_names)}", name=name
                )
            cuts[dim_names.index(name)] = cut
        return cuts
    given = list(spec.dims)
    if not given:  # the spec has only a suffix, such as flat(dp)
        return [None] * ndim
    if ... in given:
        at = given.index(...)
        filler = ndim - (len(given) - 1)
        if filler < 0:
            raise does_not_fit(
                "E202", f"the spec has at least {len(given) - 1} dims, the tensor has {ndim}", spec, shape,
                "write fewer dims", least=len(given) - 1,
            )  # fmt: skip
        given[at : at + 1] = [None] * filler
    if len(given) != ndim:
        hint = "[" + ", ".join("-" for _ in shape) + "]"
        raise does_not_fit(
            "E202", f"the spec has {len(given)} dims, the tensor has {ndim}", spec, shape,
            f"write one entry for each dim, as in `{hint}`, or `...` for the dims that stay whole", given=len(given),
        )  # fmt: skip
    return [None if cut is ... else cut for cut in given]


def pieces_of(cut: Cut, length: int, count: int, dim: int, spec: ShardingSpec, shape: Shape, mesh: Mesh) -> Pieces:
    """Return the intervals of `count` shards of dim `dim`, which has `length` elements, for the cut `cut`."""
    axes = "*".join(cut.axes)
    about: dict[str, Any] = {"dim": dim, "length": length, "count": count, "cut": cut}
    uneven = "sizes" if cut.sizes is not None else "balanced" if cut.balanced else None
    clash = uneven if cut.pad is not None else "blocks" if cut.sizes is not None and cut.blocks != 1 else None
    if clash is not None:
        other = "pad" if cut.pad is not None else "sizes"
        raise does_not_fit(
            "E208", f"dim {dim} is cut by {other} and by {clash}, which say different sizes", spec, shape,
            "keep one of the two", clash=(other, clash), **about,
        )  # fmt: skip

    def cut_one(length: int) -> Pieces:
        here = {**about, "length": length}
        if cut.pad is not None:
            return padded(length, count, cut.pad, cut.unit)
        if cut.unit > 1 and length % cut.unit:
            raise does_not_fit(
                "E207", f"dim {dim} has {length} elements, not a multiple of its unit {cut.unit}", spec, shape,
                "choose a unit that divides the dim, or write pad(n)", mesh, **here,
            )  # fmt: skip
        if cut.balanced:
            return balanced(length, count, cut.unit)
        if length % (count * cut.unit):
            units = f"{length // cut.unit} units of {cut.unit}" if cut.unit > 1 else f"{length} elements"
            raise does_not_fit(
                "E205", f"{units} of dim {dim} cannot be cut evenly over {axes}={count}", spec, shape,
                ["write `balanced` or `sizes(...)` or `pad(n)` after the axis", "choose another axis"], mesh, **here,
            )  # fmt: skip
        return Stepped(length, count, length // count)

    if cut.sizes is not None:
        if len(cut.sizes) != count:
            raise does_not_fit(
                "E208", f"{len(cut.sizes)} sizes are given for {axes}={count} pieces", spec, shape,
                "give one size for each piece", mesh, **about,
            )  # fmt: skip
        if any(size % cut.unit for size in cut.sizes):
            raise does_not_fit(
                "E208", f"a size is not a multiple of the unit {cut.unit}", spec, shape, "give sizes in whole units",
                mesh, **about,
            )  # fmt: skip
        return listed(check_sum(cut.sizes, length, spec, shape, dim=dim, count=count, cut=cut))
    shares = (1,) * cut.blocks if isinstance(cut.blocks, int) else cut.blocks
    if len(shares) == 1:
        return cut_one(length)
    if length % sum(shares):
        raise does_not_fit(
            "E206", f"dim {dim} has {length} elements, not a multiple of its {sum(shares)} block shares", spec, shape,
            "give block shares whose sum divides the dim", mesh, shares=shares, **about,
        )  # fmt: skip
    whole = sum(shares)
    return Blocked(tuple(cut_one(length * share // whole) for share in shares))


def check_sum(sizes: Sequence[int], length: int, spec: ShardingSpec, shape: Shape, **about: Any) -> tuple[int, ...]:
    """Return `sizes` as a tuple; raise LayoutError if they do not add up to `length`."""
    if sum(sizes) != length:
        raise does_not_fit(
            "E208", f"the sizes add up to {sum(sizes)}, the dim has {length} elements", spec, shape,
            "give sizes that add up", **about,
        )  # fmt: skip
    return tuple(sizes)


def does_not_fit(
    code: str,
    fault: str,
    spec: ShardingSpec,
    shape: Shape,
    fix: str | list[str],
    mesh: Mesh | None = None,
    **about: Any,
) -> LayoutError:
    """Return the error for a spec that does not fit a shape; `about` holds the numbers in it."""
    facts: dict[str, object] = {"spec": str(spec), "shape": " x ".join(map(str, shape)) or "scalar"}
    if mesh is not None:
        facts["mesh"] = str(mesh)
    return LayoutError(fault, facts, fix, code=code, about=about)


def axis_form(layout: MeshLayout | FlatLayout) -> Spec:
    """Return the spec of a layout in mesh axes. Axes without a name are called ``axis0``, ``axis1``, ...

    Shard sizes that no modifier describes are written out. Blocks that are cut neither evenly nor `balanced` become
    `balanced`, so bind the spec to check that it gives the same layout.
    """
    if isinstance(layout, FlatLayout):
        names = axis_names(layout)
        axes = (names[axis] for axis in layout.axes)
        spec = axis_form(layout.inner).flat(*axes, unit=layout.unit or "row", sizes=layout.sizes)
        return _with_partial(spec, layout)
    cuts = [None if cut is None else _cut(layout, cut.axes, cut.pieces) for cut in layout.dims]
    return _with_partial(Spec(*cuts) if layout.cut_dims else Replicate(), layout)


def _with_partial(spec: Spec, layout: Layout) -> Spec:
    for axis, op in layout.partial:
        spec = spec.partial(axis_names(layout)[axis], op=op)
    return spec


def axis_names(layout: Layout) -> tuple[str, ...]:
    """Return the names of the axes of a layout's grid; ``axis0``, ``axis1``, ... if they have none."""
    named = layout.names and "*" not in layout.names
    return layout.names if named else tuple(f"axis{i}" for i in range(len(layout.grid)))


def _cut(layout: MeshLayout, axes: tuple[int, ...], pieces: Pieces) -> Cut:
    names = tuple(axis_names(layout)[axis] for axis in axes)
    if isinstance(pieces, Stepped) and pieces.step * pieces.count == pieces.length:
        return Cut(names)
    if isinstance(pieces, Balanced):
        return Cut(names, balanced=True, unit=pieces.unit)
    if isinstance(pieces, Blocked):
        lengths = [block.length for block in pieces.blocks]
        grain = math.gcd(*lengths)
        even = all(isinstance(b, Stepped) for b in pieces.blocks)
        shares = len(lengths) if len(set(lengths)) == 1 else tuple(length // grain for length in lengths)
        return Cut(names, blocks=shares, balanced=not even)
    return Cut(names, sizes=tuple(pieces.size(i) for i in range(pieces.count)))
