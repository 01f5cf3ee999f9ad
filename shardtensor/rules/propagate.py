"""The layouts that an operation needs and returns, for given layouts of its operands: the choices, the cheapest one,
and the reason where operands do not match. Integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import attrs

from shardtensor.layout.layout import DimCut, Layout, MeshLayout, Shape, replicated
from shardtensor.layout.pieces import chunked
from shardtensor.layout.route import lacking
from shardtensor.mesh import Ranks
from shardtensor.rules.rule import Letters, Rule

Cut = tuple[str, DimCut]
Assignment = dict[str, DimCut]
"""The cut of each letter; letters that are missing are not cut."""

MOST = 64
"""The largest number of choices compared; only calls on many operands with many layouts have more."""


def base_of(layouts: Sequence[Layout]) -> Layout:
    """Return the layout whose grid the call uses: the most ranks first, then a sharded one, then the largest."""
    widest = max(len(layout.ranks) for layout in layouts)
    wide = [layout for layout in layouts if len(layout.ranks) == widest]
    return max(wide, key=lambda x: (not x.is_replicated, isinstance(x, MeshLayout), math.prod(x.shape)))


def assignments(rule: Rule, operands: Sequence[Layout | Shape], base: Layout) -> list[Assignment]:
    """Return the ways to cut letters over the grid of `base`; the first keeps the most of the largest operand's cuts.

    A cut that an operand has is kept unless another cut uses its axis or its letter. If it cannot be kept, because its
    letter must be whole or its operand is on another grid, its axes may cut another letter of that operand which the
    output has; so no new reduction is needed.
    """
    there, free = _existing_cuts(rule, operands, base)
    if not free and _agree(there):
        return [dict(there)]
    cuts = there + [cut for cut in _new_cuts(rule, operands, base, there, free) if cut not in there]
    rivals = [[j for j, other in enumerate(cuts) if j != i and _clash(cut, other)] for i, cut in enumerate(cuts)]
    found: list[Assignment] = []

    def choose(i: int, taken: tuple[int, ...]) -> None:
        if len(found) == MOST:
            return
        if i == len(cuts):
            left = (j for j in range(len(there)) if j not in taken)
            if all(any(k in taken for k in rivals[j]) for j in left):
                found.append(dict(cuts[j] for j in taken))
            return
        if not any(j in taken for j in rivals[i]):
            choose(i + 1, (*taken, i))
        if rivals[i] or i >= len(there):
            choose(i + 1, taken)

    choose(0, ())
    return found


def _existing_cuts(
    rule: Rule, operands: Sequence[Layout | Shape], base: Layout
) -> tuple[list[Cut], list[tuple[Letters, tuple[int, ...]]]]:
    """Return the cuts that can be kept, largest operands first, and the operand's letters and axes of the others."""
    there: list[Cut] = []
    free: list[tuple[Letters, tuple[int, ...]]] = []
    off_grid: list[tuple[Letters, tuple[int, ...]]] = []
    split = [
        (x, letters)
        for x, letters in zip(operands, rule.inputs, strict=True)
        if isinstance(x, Layout) and not x.is_replicated
    ]
    split.sort(key=lambda item: -math.prod(item[0].shape))
    for layout, letters in split:
        if not isinstance(layout, MeshLayout) or layout.ranks != base.ranks or layout.grid != base.grid:
            off_grid.append((letters, layout.sharding_axes if layout is base else tuple(range(len(base.grid)))))
            continue
        for letter, cut in zip(letters, layout.dims, strict=True):
            if cut is None:
                continue
            if letter is None or letter in rule.whole:
                free.append((letters, cut.axes))
            elif (letter, cut) not in there:
                there.append((letter, cut))
    return there, free + (off_grid if not there else [])


def _agree(cuts: list[Cut]) -> bool:
    axes = [axis for _, cut in cuts for axis in cut.axes]
    return len({letter for letter, _ in cuts}) == len(cuts) and len(set(axes)) == len(axes)


def _new_cuts(
    rule: Rule,
    operands: Sequence[Layout | Shape],
    base: Layout,
    there: list[Cut],
    free: list[tuple[Letters, tuple[int, ...]]],
) -> list[Cut]:
    """Return new cuts over free axes: of a letter by them alone, or by them after the axes that cut it already."""
    sizes: dict[str, int] = {}
    for letters, operand in zip(rule.inputs, operands, strict=True):
        shape = operand.shape if isinstance(operand, Layout) else operand
        sizes.update((letter, size) for letter, size in zip(letters, shape, strict=True) if letter is not None)
    found: dict[Cut, None] = {}
    for letters, axes in free:
        for letter in letters:
            if letter is None or letter in rule.whole or letter not in rule.output:
                continue
            kept = [cut.axes for other, cut in there if other == letter and not set(cut.axes) & set(axes)]
            for over in [axes, *(more + axes for more in kept)]:
                count = math.prod(base.grid[axis] for axis in over)
                found[letter, DimCut(over, chunked(sizes[letter], count))] = None
    return list(found)


def _clash(a: Cut, b: Cut) -> bool:
    return a[0] == b[0] or not set(a[1].axes).isdisjoint(b[1].axes)


EVERY = 8
"""On grids of up to this many ranks all ranks are counted; on larger ones, a sample of this many."""


@attrs.frozen
class OperandLayout:
    """The layout that an operation needs of one operand.

    Attributes:
        layout: the layout to redistribute it to.
        grad_partial_axes: axes along which it is replicated and the work is sharded, so that its gradient must be
        summed.
        moves: whether it is a sharded or partial operand with another layout.
    """

    layout: MeshLayout
    grad_partial_axes: tuple[int, ...]
    moves: bool


@attrs.frozen
class OpSharding:
    """The layouts that an operation needs of its operands, and the layout of its result.

    Attributes:
        output: of the local result; ``output.partial`` has the axes along which it is partial.
        reduced: `output` once reduced.
    """

    needs: tuple[OperandLayout, ...]
    output: MeshLayout
    reduced: MeshLayout


@lru_cache(maxsize=8192)
def propagate(
    rule: Rule, operands: tuple[Layout | Shape, ...], itemsizes: tuple[int, ...] | None = None
) -> OpSharding | None:
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
        return sharding_of(rule, operands, choices[0], base)
    best, fewest = choices[0], None
    for choice in choices:
        spent = cost(rule, operands, choice, base, itemsizes, fewest)
        if fewest is None or spent < fewest:  # the first of equals
            best, fewest = choice, spent
    return sharding_of(rule, operands, best, base)


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
    reduced = [axis for letter, cut in chosen.items() if letter not in rule.output for axis in cut.axes]
    if reduced:
        part = 1
        sizes = _sizes(rule, operands)
        for letter in rule.output:
            cut = chosen.get(letter) if letter is not None else None
            size = 1 if letter is None else sizes[letter]
            part *= size if cut is None else -(-size // cut.pieces.count)
        count = math.prod(base.grid[axis] for axis in reduced)
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
        >>> rows = MeshLayout(shape=(8, 8), ranks=range(4), grid=(4,), dims=(cut, None))
        >>> columns = MeshLayout(shape=(8, 8), ranks=range(4), grid=(4,), dims=(None, cut))
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


def sharding_of(rule: Rule, operands: Sequence[Layout | Shape], chosen: Assignment, base: Layout) -> OpSharding:
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
        needs.append(OperandLayout(layout, tuple(sorted(taken - own)), moves))
    shape = tuple(1 if letter is None else sizes[letter] for letter in rule.output)
    reduced = _laid_out(rule.output, shape, chosen, base)
    combine = dict(rule.combine)
    partials = ((letter, dim) for letter, dim in chosen.items() if letter not in rule.output)
    partial = sorted((axis, combine.get(letter, "sum")) for letter, dim in partials for axis in dim.axes)
    partial = [(axis, how) for axis, how in partial if how != "none"]
    output = attrs.evolve(reduced, partial=tuple(partial)) if partial else reduced
    return OpSharding(tuple(needs), output, reduced)


def _laid_out(letters: Letters, shape: Shape, chosen: Assignment, base: Layout) -> MeshLayout:
    dims = tuple(chosen.get(letter) if letter is not None else None for letter in letters)
    return with_dims(base, shape, dims)


@lru_cache(maxsize=8192)
def with_dims(base: Layout, shape: Shape, dims: tuple[DimCut | None, ...]) -> MeshLayout:
    """Return the layout of another shape over the grid of `base`, with these cuts."""
    if not any(dims):
        return replicated(shape, base.ranks, base.grid)
    return MeshLayout(shape=shape, ranks=base.ranks, grid=base.grid, dims=dims, names=base.names)


# -- errors for operands that do not match ----------------------------------------------------------------------------

WAYS = 3
"""The largest number of fixes that a message shows."""


def fault_in(rule: Rule, operands: Sequence[Layout | Shape], names: Sequence[str]) -> str:
    """Return in one line why the operation cannot use the operands' layouts.

    Example:
        >>> from shardtensor.layout.pieces import chunked
        >>> cut = DimCut((0,), chunked(8, 4))
        >>> rows, columns = (
        ...     MeshLayout(shape=(8, 8), ranks=range(4), grid=(4,), names=("tp",), dims=dims)
        ...     for dims in ((cut, None), (None, cut))
        ... )
        >>> fault_in(Rule((("b", "k"), ("n", "k")), ("b", "n")), (columns, rows), ("input", "weight"))
        'axis "tp" splits k in the input but n in the weight'
    """
    layouts = [operand for operand in operands if isinstance(operand, Layout)]
    base = base_of(layouts)
    seen: list[tuple[str, str, DimCut]] = []
    for name, operand, letters in zip(names, operands, rule.inputs, strict=True):
        if not isinstance(operand, Layout) or operand.is_replicated:
            continue
        if operand.ranks != base.ranks or operand.grid != base.grid:
            other = next(n for n, x in zip(names, operands, strict=True) if x is base)
            return f"the {name} and the {other} are on different ranks or grids"
        if not isinstance(operand, MeshLayout):
            return f"the {name} is not sharded along its dims"
        for letter, cut in zip(letters, operand.dims, strict=True):
            if cut is None:
                continue
            if letter is None:
                return f"{_axes(operand, cut)} splits a dim of the {name} that is broadcast"
            if letter in rule.whole:
                return f"{_axes(operand, cut)} splits {letter} in the {name}, which must be whole"
            for first, other_letter, other_cut in seen:
                if other_letter == letter and cut.axes != other_cut.axes:
                    one, two = _axes(base, other_cut), _axes(base, cut)
                    return f"{letter} is split by {one} in the {first} but by {two} in the {name}"
                if other_letter == letter and cut != other_cut:
                    return f"{_axes(base, cut)} splits {letter} at other places in the {first} than in the {name}"
                if other_letter != letter and not set(cut.axes).isdisjoint(other_cut.axes):
                    return f"{_axes(base, cut)} splits {other_letter} in the {first} but {letter} in the {name}"
            seen.append((name, letter, cut))
    return "the operands must be redistributed"


class Way(NamedTuple):
    """One way to redistribute the operands: their new layouts by number, and the result's layout (maybe partial)."""

    moves: tuple[tuple[int, MeshLayout], ...]
    output: MeshLayout


def ways_out(rule: Rule, operands: Sequence[Layout | Shape], itemsizes: tuple[int, ...]) -> list[Way]:
    """Return the ways to redistribute the operands, the cheapest first."""
    base = base_of([operand for operand in operands if isinstance(operand, Layout)])
    choices = assignments(rule, operands, base)
    choices.sort(key=lambda choice: cost(rule, operands, choice, base, itemsizes))  # stable
    shardings = (sharding_of(rule, operands, choice, base) for choice in choices[:WAYS])
    return [
        Way(tuple((i, need.layout) for i, need in enumerate(sharding.needs) if need.moves), sharding.output)
        for sharding in shardings
    ]


def _axes(layout: Layout, cut: DimCut) -> str:
    names = [f'"{layout.axis_name(axis)}"' for axis in cut.axes]
    return f"axis {names[0]}" if len(names) == 1 else f"axes {' * '.join(names)}"
