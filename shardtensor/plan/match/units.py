"""Gather units: stored parameters gathered together, in flat buffers. The arithmetic is that of `fully_shard`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from shardtensor.layout.layout import Layout, has_equal_parts
from shardtensor.layout.ranges import Ranges, lay_out, lay_out_alone, name_order, parameter_groups
from shardtensor.plan.resolved import Placed, Resolved


@attrs.frozen(cache_hash=True)
class Flat:
    """Parameters of one unit in one flat buffer; a parameter with unequal shards has its own.

    Attributes:
        layouts: of the parameters in the computation, in their order in the buffer.
        units: the grain of each, in elements; 0 means a row of a rank's local tensor in the computation.
        axes: the numbers of the mesh axes over which the buffer is sharded, major first.
        ranks: the number of ranges.
        dtype: as torch spells it.
        trains: whether they require a gradient.
    """

    layouts: tuple[Layout, ...]
    units: tuple[int, ...]
    axes: tuple[int, ...]
    ranks: int
    dtype: str
    trains: bool

    def ranges(self, rank: int) -> Ranges:
        """Return the places of one rank's parameters in the buffer, and the range that each rank along `axes` holds."""
        lengths = [layout.numel(rank) for layout in self.layouts]
        grains = _grains(self.layouts, self.units, rank)
        if not has_equal_parts(self.layouts[0]):
            return lay_out_alone(lengths[0], self.ranks, grains[0])
        return lay_out(lengths, self.ranks, grains)


@attrs.frozen(eq=False)
class GatherUnit:
    """The parameters of one module that are gathered together.

    Attributes:
        path: of the module.
        flats: one for each dtype, separately for trained and frozen parameters.
        names: of the parameters of each flat.
        holds_units: whether other units are inside: then it stays gathered from forward to backward.
    """

    path: str
    flats: tuple[Flat, ...]
    names: tuple[tuple[str, ...], ...]
    holds_units: bool = False


def gather_units(resolved: Resolved) -> tuple[GatherUnit, ...]:
    """Return the gather units of a plan, parents first; none if no parameter has a store."""
    members: dict[str, list[Placed]] = {}
    for placed in own_tensors(resolved):
        if placed.stored is not None and not placed.tensor.is_buffer:
            members.setdefault(placed.unit or "", []).append(placed)
    found: dict[str, GatherUnit] = {}
    for path, own in members.items():
        holds = any(other != path and other.startswith(f"{path}." if path else "") for other in members)
        found[path] = _unit(resolved, path, own, holds)
    order = {path: i for i, path in enumerate(resolved.model.paths)}
    return tuple(unit for _, unit in sorted(found.items(), key=lambda item: order.get(item[0], 0)) if unit.flats)


def own_tensors(resolved: Resolved) -> list[Placed]:
    """Return the tensors of a plan, each once: tied ones under the name whose layout they take."""
    again = {name for names in resolved.model.tied for name in names[1:]}
    return [p for name, p in resolved.tensors.items() if name not in again and p.tied_to not in resolved.tensors]


def _unit(resolved: Resolved, path: str, group: Sequence[Placed], holds_units: bool) -> GatherUnit:
    mesh, axes_of = resolved.plan.axes.mesh, resolved.plan.axes.leaves
    placed = sorted(group, key=lambda placed: name_order(placed.tensor.name))
    stored = [each.stored.axes for each in placed if each.stored is not None]
    alone = ["" if has_equal_parts(each.layout) else each.tensor.name for each in placed]
    axes = tuple(mesh.names.index(leaf) for leaf in axes_of(stored[0]))
    ranks = math.prod(mesh.sizes[axis] for axis in axes)
    units = [_grain(each) for each in placed]
    layouts = [each.layout for each in placed]
    kinds = [(each.tensor.dtype, each.tensor.requires_grad, name) for each, name in zip(placed, alone, strict=True)]
    groups = parameter_groups(kinds)
    flats = [
        Flat(
            tuple(layouts[i] for i in members), tuple(units[i] for i in members), axes, ranks,
            placed[members[0]].tensor.dtype, placed[members[0]].tensor.requires_grad,
        )
        for members in groups
    ]  # fmt: skip
    names = tuple(tuple(placed[i].tensor.name for i in members) for members in groups)
    return GatherUnit(path, tuple(flats), names, holds_units)


def _grain(placed: Placed) -> int:
    assert placed.stored is not None
    return 0 if placed.stored.unit == "row" else int(placed.stored.unit)


def _grains(layouts: Sequence[Layout], units: Sequence[int], rank: int) -> list[int]:
    rows = (math.prod(layout.local_shape(rank)[1:]) for layout in layouts)
    return [unit or max(row, 1) for unit, row in zip(units, rows, strict=True)]
