"""The steps from one layout to another, computed once for each pair and cached.

First partial axes are reduced: by a reduce-scatter if the target shards a dim over them, else by an all-reduce. Then
one step sends each rank the elements that it lacks: a slice if it holds them all, an all-gather if even shards become
replicas, else one all-to-all among the ranks along the axes that change. Last, the value is split along new partial
axes.
"""

from __future__ import annotations

from functools import lru_cache

import attrs

from shardtensor.errors import LayoutError
from shardtensor.layout.layout import CutLayout, FlatLayout, Layout, same_boxes
from shardtensor.layout.steps import Step, is_even

Partial = tuple[tuple[int, str], ...]


def route(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the steps from `source` to `target`; none if they are the same.

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
    """`names` is part of the cache key: equal layouts may have other axis names, which the steps show in messages."""
    if source.shape != target.shape:
        raise LayoutError(
            "a reshard keeps the shape of a tensor",
            {"from": " x ".join(map(str, source.shape)), "to": " x ".join(map(str, target.shape))},
            "reshape the tensor first",
        )
    shared = source.grid == target.grid and source.ranks == target.ranks
    kept: Partial = tuple(p for p in source.partial if shared and p in target.partial)
    steps: list[Step] = []
    here = source
    if len(kept) < len(source.partial):
        steps += _reductions(source, target, kept, shared)
        here = steps[-1].target
    goal = target if target.partial == kept else attrs.evolve(target, partial=kept)
    if not same_boxes(here, goal):
        steps.append(_move(here, goal, shared))
    if goal is not target:
        steps.append(Step("split", goal, target))
    return tuple(steps)


def _reductions(source: Layout, target: Layout, kept: Partial, shared: bool) -> list[Step]:
    """Return the steps that reduce all partial axes but those of `kept`."""
    steps: list[Step] = []
    here = source
    reduced = [p for p in source.partial if p not in kept]
    if shared and isinstance(source, CutLayout) and isinstance(target, CutLayout):
        for dim, cut in enumerate(target.dims):
            if cut is None or source.dims[dim] is not None:
                continue
            if all((axis, "sum") in reduced for axis in cut.axes):
                dims = tuple(cut if d == dim else old for d, old in enumerate(here.dims))  # type: ignore[attr-defined]
                left = tuple(p for p in here.partial if p[0] not in cut.axes)
                there = attrs.evolve(here, dims=dims, partial=left)  # type: ignore[call-arg]
                steps.append(Step("reduce_scatter", here, there, tuple(sorted(cut.axes)), "sum"))
                here = there
        reduced = [p for p in here.partial if p not in kept]
    for op in dict.fromkeys(op for _, op in reduced):
        axes = tuple(sorted(axis for axis, other in reduced if other == op))
        there = attrs.evolve(here, partial=tuple(p for p in here.partial if p[0] not in axes))
        steps.append(Step("all_reduce", here, there, axes, op))
        here = there
    return steps


def _move(source: Layout, target: Layout, shared: bool) -> Step:
    """Return the step between two layouts with the same partial axes."""
    if not shared:
        if source.is_replicated and set(target.ranks) <= set(source.ranks):
            return Step("slice", source, target)
        kind = "all_to_all" if set(source.ranks) == set(target.ranks) else "send_recv"
        return Step(kind, source, target)
    axes = _changed_axes(source, target)
    if _is_slice(source, target):
        return Step("slice", source, target, axes)
    if axes is None:
        return Step("all_to_all", source, target)
    if isinstance(source, CutLayout) and _is_slice(target, source) and is_even(source, axes):
        return Step("all_gather", source, target, axes)
    return Step("all_to_all", source, target, axes)


def _changed_axes(source: Layout, target: Layout) -> tuple[int, ...] | None:
    """Return the axes along which ranks must exchange elements; None for all ranks."""
    cuts, flats = zip(_parts(source), _parts(target), strict=True)
    if cuts is None or None in cuts:
        return None
    axes: set[int] = set()
    for one, other in zip(*cuts, strict=True):
        if one != other:
            axes.update(*(cut.axes for cut in (one, other) if cut is not None))
    if flats[0] != flats[1]:
        axes.update(flats[0][0], flats[1][0])
    if axes and any(flat[0] for flat in flats) and cuts[0] != cuts[1]:  # the flattened local tensors differ
        axes.update(source.parting_axes, target.parting_axes)
    return tuple(sorted(axes))


def _parts(layout: Layout) -> tuple:
    """Return the cuts of the dims, and the arguments of the flat cut; None as cuts for listed boxes."""
    if isinstance(layout, CutLayout):
        return layout.dims, ((),)
    if isinstance(layout, FlatLayout):
        return layout.inner.dims, (layout.axes, layout.unit, layout.sizes)
    return None, ((),)


def _is_slice(source: Layout, target: Layout) -> bool:
    """Whether every rank holds under `source` all elements that it holds under `target`, on the same grid."""
    if isinstance(source, CutLayout) and isinstance(target, FlatLayout):
        return _is_slice(source, target.inner)
    if not isinstance(source, CutLayout):
        return False
    if not isinstance(target, CutLayout):
        return not source.cut_dims
    return all(old is None or old == new for old, new in zip(source.dims, target.dims, strict=True))
