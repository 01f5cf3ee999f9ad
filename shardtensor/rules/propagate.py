"""From the layouts that operands have to the layouts an operation needs and gives. Integers only."""

from __future__ import annotations

import math
from functools import lru_cache

import attrs

from shardtensor.layout.layout import CutLayout, DimCut, Layout, Shape, replicated
from shardtensor.rules.rule import Letters, Rule


@attrs.frozen
class Need:
    """What one operand must be before the local computation.

    Attributes:
        layout: the layout to bring it to.
        addend_axes: axes along which it is a copy that meets cut values, so that its gradient must be summed.
        moves: whether an operand that is cut already must be laid out anew.
    """

    layout: CutLayout
    addend_axes: tuple[int, ...]
    moves: bool


@attrs.frozen
class Recipe:
    """What every operand needs, and what the local computation then gives.

    Attributes:
        output: of the local computation; ``output.partial`` has the axes along which the local results are addends.
        settled: `output` with the addends joined.
    """

    needs: tuple[Need, ...]
    output: CutLayout
    settled: CutLayout


@lru_cache(maxsize=8192)
def propagate(rule: Rule, operands: tuple[Layout | Shape, ...]) -> Recipe | None:
    """Choose the layouts for one call: the largest operands keep theirs, the others follow.

    Args:
        rule: the letters of the operation, one per dim of each operand.
        operands: for each, its layout, or the shape of a plain tensor (a copy on every rank).

    Returns:
        The recipe, or None when no operand is cut over a grid (boxes written out, flat ranges).
    """
    cut = [(i, layout) for i, layout in enumerate(operands) if isinstance(layout, CutLayout)]
    if not cut:
        return None
    cut.sort(key=lambda item: (item[1].is_replicated, -math.prod(item[1].shape)))
    base = cut[0][1]
    chosen: dict[str, DimCut] = {}
    taken: set[int] = set()
    for i, layout in cut:
        if layout.grid != base.grid or layout.ranks != base.ranks:
            continue
        for letter, dim in zip(rule.inputs[i], layout.dims, strict=True):
            if dim is None or letter is None or letter in rule.whole or letter in chosen:
                continue
            if taken.isdisjoint(dim.axes):
                chosen[letter] = dim
                taken.update(dim.axes)
    sizes: dict[str, int] = dict(rule.made)
    needs = []
    for letters, operand in zip(rule.inputs, operands, strict=True):
        shape = operand.shape if isinstance(operand, Layout) else tuple(operand)
        sizes.update((letter, size) for letter, size in zip(letters, shape, strict=True) if letter is not None)
        layout = _laid_out(letters, shape, chosen, base)
        own = {axis for dim in layout.dims if dim is not None for axis in dim.axes}
        moves = isinstance(operand, Layout) and operand != layout and not operand.is_replicated
        needs.append(Need(layout, tuple(sorted(taken - own)), moves))
    shape = tuple(1 if letter is None else sizes[letter] for letter in rule.output)
    settled = _laid_out(rule.output, shape, chosen, base)
    lost = tuple(sorted(axis for letter, dim in chosen.items() if letter not in rule.output for axis in dim.axes))
    output = attrs.evolve(settled, partial=tuple((axis, "sum") for axis in lost)) if lost else settled
    return Recipe(tuple(needs), output, settled)


def _laid_out(letters: Letters, shape: Shape, chosen: dict[str, DimCut], base: CutLayout) -> CutLayout:
    dims = tuple(chosen.get(letter) if letter is not None else None for letter in letters)
    return with_dims(base, shape, dims)


@lru_cache(maxsize=8192)
def with_dims(base: CutLayout, shape: Shape, dims: tuple[DimCut | None, ...]) -> CutLayout:
    """A layout over the grid of `base` of another shape, cut as `dims` say."""
    if not any(dims):
        return replicated(shape, base.ranks, base.grid)
    return CutLayout(shape=shape, ranks=base.ranks, grid=base.grid, dims=dims, names=base.names)


@lru_cache(maxsize=8192)
def follow(layout: CutLayout, shape: Shape) -> CutLayout:
    """The layout of an operand of `shape` that is broadcast against a tensor of `layout`, which keeps its own."""
    skip = len(layout.shape) - len(shape)
    dims = tuple(
        cut if size == full else None
        for size, full, cut in zip(shape, layout.shape[skip:], layout.dims[skip:], strict=True)
    )
    return with_dims(layout, tuple(shape), dims)
