"""The spec of a layout in mesh axes: the inverse of `bind`."""

from __future__ import annotations

import math

from shardtensor.layout.layout import CutLayout, FlatLayout, Layout
from shardtensor.layout.pieces import Balanced, Blocked, Pieces, Stepped
from shardtensor.spec.nodes import Cut, Replicate, Spec


def axis_form(layout: CutLayout | FlatLayout) -> Spec:
    """Return the spec of a layout in mesh axes. Axes without a name are called ``axis0``, ``axis1``, ...

    Shard sizes that no modifier describes are written out. Blocks that are cut neither evenly nor `balanced` become
    `balanced`, so bind the spec to check that it gives the same layout.
    """
    if isinstance(layout, FlatLayout):
        names = _names(layout)
        axes = (names[axis] for axis in layout.axes)
        spec = axis_form(layout.inner).flat(*axes, unit=layout.unit or "row", sizes=layout.sizes)
        return _with_partial(spec, layout)
    cuts = [None if cut is None else _cut(layout, cut.axes, cut.pieces) for cut in layout.dims]
    return _with_partial(Spec(*cuts) if layout.cut_dims else Replicate(), layout)


def _with_partial(spec: Spec, layout: Layout) -> Spec:
    for axis, op in layout.partial:
        spec = spec.partial(_names(layout)[axis], op=op)
    return spec


def _names(layout: Layout) -> tuple[str, ...]:
    named = layout.names and "*" not in layout.names
    return layout.names if named else tuple(f"axis{i}" for i in range(len(layout.grid)))


def _cut(layout: CutLayout, axes: tuple[int, ...], pieces: Pieces) -> Cut:
    names = tuple(_names(layout)[axis] for axis in axes)
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
