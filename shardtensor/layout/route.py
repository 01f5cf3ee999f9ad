"""From one layout to another: the steps, made once for each pair and kept.

Addends are joined first, by a reduce-scatter where the result is cut along their axis anyway. Then one move brings
every rank exactly what it lacks: ranks that already hold it slice, equal parts of a cut that goes away are
all-gathered, everything else is one all-to-all among the ranks along the axes that differ. Last, addends are made.
"""

from __future__ import annotations

from functools import lru_cache

import attrs

from shardtensor.errors import LayoutError
from shardtensor.layout.layout import CutLayout, FlatLayout, Layout, same_boxes
from shardtensor.layout.steps import Step, is_even

Partial = tuple[tuple[int, str], ...]


def route(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the steps that turn `source` into `target`; none when both mean the same.

    Args:
        source, target: layouts of one shape, of any kinds, on any ranks.

    Raises:
        LayoutError: the shapes differ.

    Example:
        >>> from shardtensor.layout.layout import DimCut, replicated
        >>> from shardtensor.layout.pieces import chunked
        >>> cut = DimCut((0,), chunked(8, 4))
        >>> rows = CutLayout(shape=(8, 8), ranks=range(4), grid=(4,), dims=(cut, None))
        >>> columns = CutLayout(shape=(8, 8), ranks=range(4), grid=(4,), dims=(None, cut))
        >>> [(step.kind, step.received(0)) for step in route(rows, columns)]
        [('all_to_all', 12)]
        >>> [(step.kind, step.received(0)) for step in route(rows, replicated((8, 8), range(4)))]
        [('all_gather', 48)]
    """
    return _route(source, target, source.names, target.names)


@lru_cache(maxsize=4096)
def _route(source: Layout, target: Layout, *names: tuple[str, ...]) -> tuple[Step, ...]:
    """Layouts are equal whatever their axes are called, but messages say the names: so each has steps of its own."""
    if source.shape != target.shape:
        raise LayoutError(
            "a reshard keeps the shape of a tensor",
            {"from": " x ".join(map(str, source.shape)), "to": " x ".join(map(str, target.shape))},
            "reshape the tensor first",
        )
    shared = source.grid == target.grid and source.ranks == target.ranks
    stays: Partial = tuple(p for p in source.partial if shared and p in target.partial)
    steps: list[Step] = []
    here = source
    if len(stays) < len(source.partial):
        steps += _joining(source, target, stays, shared)
        here = steps[-1].target
    goal = target if target.partial == stays else attrs.evolve(target, partial=stays)
    if not same_boxes(here, goal):
        steps.append(_move(here, goal, shared))
    if goal is not target:
        steps.append(Step("split", goal, target))
    return tuple(steps)


def _joining(source: Layout, target: Layout, stays: Partial, shared: bool) -> list[Step]:
    """The steps after which only the addends of `stays` are left."""
    steps: list[Step] = []
    here = source
    leaving = [p for p in source.partial if p not in stays]
    if shared and isinstance(source, CutLayout) and isinstance(target, CutLayout):
        for dim, cut in enumerate(target.dims):
            if cut is None or source.dims[dim] is not None:
                continue
            if all((axis, "sum") in leaving for axis in cut.axes):
                dims = tuple(cut if d == dim else old for d, old in enumerate(here.dims))  # type: ignore[attr-defined]
                left = tuple(p for p in here.partial if p[0] not in cut.axes)
                there = attrs.evolve(here, dims=dims, partial=left)  # type: ignore[call-arg]
                steps.append(Step("reduce_scatter", here, there, tuple(sorted(cut.axes)), "sum"))
                here = there
        leaving = [p for p in here.partial if p not in stays]
    for op in dict.fromkeys(op for _, op in leaving):
        axes = tuple(sorted(axis for axis, other in leaving if other == op))
        there = attrs.evolve(here, partial=tuple(p for p in here.partial if p[0] not in axes))
        steps.append(Step("all_reduce", here, there, axes, op))
        here = there
    return steps


def _move(source: Layout, target: Layout, shared: bool) -> Step:
    """The one step between two layouts that have the same addends left, or none."""
    if not shared:
        if source.is_replicated and set(target.ranks) <= set(source.ranks):
            return Step("slice", source, target)
        kind = "all_to_all" if set(source.ranks) == set(target.ranks) else "send_recv"
        return Step(kind, source, target)
    axes = _differing(source, target)
    if _is_within(source, target):
        return Step("slice", source, target, axes)
    if isinstance(source, CutLayout) and axes is not None and _is_within(target, source) and is_even(source, axes):
        return Step("all_gather", source, target, axes)
    return Step("all_to_all", source, target, axes)


def _differing(source: Layout, target: Layout) -> tuple[int, ...] | None:
    """The axes along which elements have to go; None for all ranks."""
    cuts, flats = zip(_parts(source), _parts(target), strict=True)
    if cuts is None or None in cuts:
        return None
    axes: set[int] = set()
    for one, other in zip(*cuts, strict=True):
        if one != other:
            axes.update(*(cut.axes for cut in (one, other) if cut is not None))
    if flats[0] != flats[1]:
        axes.update(flats[0][0], flats[1][0])
    if axes and any(flat[0] for flat in flats) and cuts[0] != cuts[1]:  # ranges of other local tensors
        axes.update(source.parting_axes, target.parting_axes)
    return tuple(sorted(axes))


def _parts(layout: Layout) -> tuple:
    """The cuts of the dims and what is said of a flat range; None for boxes written out."""
    if isinstance(layout, CutLayout):
        return layout.dims, ((),)
    if isinstance(layout, FlatLayout):
        return layout.inner.dims, (layout.axes, layout.unit, layout.sizes)
    return None, ((),)


def _is_within(source: Layout, target: Layout) -> bool:
    """Whether every rank of `source` holds already what it shall hold under `target`, on the same grid."""
    if isinstance(source, CutLayout) and isinstance(target, FlatLayout):
        return _is_within(source, target.inner)
    if not isinstance(source, CutLayout):
        return False
    if not isinstance(target, CutLayout):
        return not source.cut_dims
    return all(old is None or old == new for old, new in zip(source.dims, target.dims, strict=True))
