"""The ways in which the axes of a grid can shard the letters of one call; `propagate` compares their costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardtensor.layout.layout import CutLayout, DimCut, Layout, Shape
from shardtensor.layout.pieces import chunked
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
    return max(wide, key=lambda x: (not x.is_replicated, isinstance(x, CutLayout), math.prod(x.shape)))


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
    split = [(x, letters) for x, letters in zip(operands, rule.inputs, strict=True) if _is_split(x)]
    split.sort(key=lambda item: -math.prod(item[0].shape))  # type: ignore[union-attr]
    for layout, letters in split:
        assert isinstance(layout, Layout)
        if not isinstance(layout, CutLayout) or layout.ranks != base.ranks or layout.grid != base.grid:
            off_grid.append((letters, layout.parting_axes if layout is base else tuple(range(len(base.grid)))))
            continue
        for letter, cut in zip(letters, layout.dims, strict=True):
            if cut is None:
                continue
            if letter is None or letter in rule.whole:
                free.append((letters, cut.axes))
            elif (letter, cut) not in there:
                there.append((letter, cut))
    return there, free + (off_grid if not there else [])


def _is_split(operand: Layout | Shape) -> bool:
    return isinstance(operand, Layout) and not operand.is_replicated


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
