"""The layouts that an operation needs and returns, for given layouts of its operands. Integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import attrs

from shardtensor.layout.layout import CutLayout, DimCut, Layout, Shape, replicated
from shardtensor.layout.route import lacking
from shardtensor.mesh import Ranks
from shardtensor.rules.assign import Assignment, assignments, base_of
from shardtensor.rules.rule import Letters, Rule

EVERY = 8
"""On grids of up to this many ranks all ranks are counted; on larger ones, a sample of this many."""


@attrs.frozen
class Need:
    """The layout that an operation needs of one operand.

    Attributes:
        layout: the layout to redistribute it to.
        addend_axes: axes along which it is replicated and the work is sharded, so that its gradient must be summed.
        moves: whether it is a sharded or partial operand with another layout.
    """

    layout: CutLayout
    addend_axes: tuple[int, ...]
    moves: bool


@attrs.frozen
class Recipe:
    """The layouts that an operation needs of its operands, and the layout of its result.

    Attributes:
        output: of the local result; ``output.partial`` has the axes along which it is partial.
        settled: `output` once reduced.
    """

    needs: tuple[Need, ...]
    output: CutLayout
    settled: CutLayout


@lru_cache(maxsize=8192)
def propagate(
    rule: Rule, operands: tuple[Layout | Shape, ...], itemsizes: tuple[int, ...] | None = None
) -> Recipe | None:
    """Choose the layouts for one call: the cheapest that the rule allows.

    The cost is the bytes that a rank receives to redistribute the operands, and those of the all-reduce if the result
    is partial. Of equal costs, the choice that keeps the most of the largest operand's layout wins. Layouts that match
    are kept: no operand is gathered only to avoid a reduction, since then every rank would compute everything.

    Args:
        rule: the letters of the operation, one for each dim of each operand.
        operands: the layout of each operand, or the shape of a plain tensor (which is replicated).
        itemsizes: of each operand, in bytes; all equal if None.

    Returns:
        The layouts, the same on every rank; None if no operand has a layout.
    """
    layouts = [operand for operand in operands if isinstance(operand, Layout)]
    if not layouts:
        return None
    base = base_of(layouts)
    choices = assignments(rule, operands, base)
    if len(choices) == 1:
        return recipe_of(rule, operands, choices[0], base)
    best, fewest = choices[0], None
    for choice in choices:
        spent = cost(rule, operands, choice, base, itemsizes, fewest)
        if fewest is None or spent < fewest:  # the first of equals
            best, fewest = choice, spent
    return recipe_of(rule, operands, best, base)


def cost(
    rule: Rule,
    operands: Sequence[Layout | Shape],
    chosen: Assignment,
    base: Layout,
    itemsizes: tuple[int, ...] | None = None,
    enough: int | None = None,
) -> int:
    """Return the bytes that a rank receives if letters are cut as `chosen`; it may stop counting at `enough`."""
    itemsizes = itemsizes or (1,) * len(operands)
    total = 0
    lost = [axis for letter, cut in chosen.items() if letter not in rule.output for axis in cut.axes]
    if lost:
        part = 1
        sizes = _sizes(rule, operands)
        for letter in rule.output:
            cut = chosen.get(letter) if letter is not None else None
            size = 1 if letter is None else sizes[letter]
            part *= size if cut is None else -(-size // cut.pieces.count)
        count = math.prod(base.grid[axis] for axis in lost)
        total = max(itemsizes) * (2 * (count - 1) * part // count)  # of the all-reduce, by a ring
    for letters, operand, itemsize in zip(rule.inputs, operands, itemsizes, strict=True):
        if enough is not None and total >= enough:
            break
        if isinstance(operand, Layout) and not (operand.is_replicated and operand.ranks == base.ranks):
            total += itemsize * received(operand, _laid_out(letters, operand.shape, chosen, base))
    return total


@lru_cache(maxsize=8192)
def received(source: Layout, target: Layout) -> int:
    """Return the largest number of elements that a rank receives from `source` to `target`.

    The result is the same on every rank. It is exact on grids of up to eight ranks; on larger ones it is that of a
    sample of eight ranks.

    Example:
        >>> from shardtensor.layout.pieces import chunked
        >>> cut = DimCut((0,), chunked(8, 4))
        >>> rows = CutLayout(shape=(8, 8), ranks=range(4), grid=(4,), dims=(cut, None))
        >>> columns = CutLayout(shape=(8, 8), ranks=range(4), grid=(4,), dims=(None, cut))
        >>> received(rows, columns), received(rows, replicated((8, 8), range(4)))
        (12, 48)
    """
    return 0 if source == target else max(lacking(source, target, rank) for rank in _sampled_ranks(target.ranks))


@lru_cache(maxsize=64)
def _sampled_ranks(ranks: Ranks) -> Ranks:
    """Return all ranks, or the first, the last and six between them, spaced irregularly (by the golden ratio)."""
    count = len(ranks)
    if count <= EVERY:
        return ranks
    spread = ((k * 2654435769 % 2**32) * count >> 32 for k in range(1, EVERY - 1))
    return tuple(ranks[i] for i in sorted({0, count - 1, *spread}))


def _sizes(rule: Rule, operands: Sequence[Layout | Shape]) -> dict[str, int]:
    sizes: dict[str, int] = dict(rule.made)
    for letters, operand in zip(rule.inputs, operands, strict=True):
        shape = operand.shape if isinstance(operand, Layout) else operand
        sizes.update((letter, size) for letter, size in zip(letters, shape, strict=True) if letter is not None)
    return sizes


def recipe_of(rule: Rule, operands: Sequence[Layout | Shape], chosen: Assignment, base: Layout) -> Recipe:
    """Return the layouts of a call whose letters are cut as `chosen`, over the grid of `base`."""
    taken = {axis for cut in chosen.values() for axis in cut.axes}
    sizes = _sizes(rule, operands)
    needs = []
    for letters, operand in zip(rule.inputs, operands, strict=True):
        shape = operand.shape if isinstance(operand, Layout) else tuple(operand)
        layout = _laid_out(letters, shape, chosen, base)
        own = {axis for dim in layout.dims if dim is not None for axis in dim.axes}
        moves = isinstance(operand, Layout) and operand != layout and not operand.is_replicated
        if operand == layout:
            layout = operand  # the same object: callers compare by identity
        needs.append(Need(layout, tuple(sorted(taken - own)), moves))
    shape = tuple(1 if letter is None else sizes[letter] for letter in rule.output)
    settled = _laid_out(rule.output, shape, chosen, base)
    joins = dict(rule.joins)
    addends = ((letter, dim) for letter, dim in chosen.items() if letter not in rule.output)
    partial = sorted((axis, joins.get(letter, "sum")) for letter, dim in addends for axis in dim.axes)
    partial = [(axis, join) for axis, join in partial if join != "none"]
    output = attrs.evolve(settled, partial=tuple(partial)) if partial else settled
    return Recipe(tuple(needs), output, settled)


def _laid_out(letters: Letters, shape: Shape, chosen: Assignment, base: Layout) -> CutLayout:
    dims = tuple(chosen.get(letter) if letter is not None else None for letter in letters)
    return with_dims(base, shape, dims)


@lru_cache(maxsize=8192)
def with_dims(base: Layout, shape: Shape, dims: tuple[DimCut | None, ...]) -> CutLayout:
    """Return the layout of another shape over the grid of `base`, with these cuts."""
    if not any(dims):
        return replicated(shape, base.ranks, base.grid)
    return CutLayout(shape=shape, ranks=base.ranks, grid=base.grid, dims=dims, names=base.names)


@lru_cache(maxsize=8192)
def follow(layout: CutLayout, shape: Shape) -> CutLayout:
    """Return the layout of an operand of `shape` broadcast to a tensor with `layout`, which stays."""
    skip = len(layout.shape) - len(shape)
    dims = tuple(
        cut if size == full else None
        for size, full, cut in zip(shape, layout.shape[skip:], layout.dims[skip:], strict=True)
    )
    return with_dims(layout, tuple(shape), dims)
