"""Error texts for operands whose layouts do not match: the reason, and the cheapest redistributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardtensor.layout.layout import CutLayout, DimCut, Layout, Shape
from shardtensor.rules.assign import assignments, base_of
from shardtensor.rules.propagate import cost, recipe_of
from shardtensor.rules.rule import Rule

WAYS = 3
"""The largest number of ways out that a message shows."""


def fault_in(rule: Rule, operands: Sequence[Layout | Shape], names: Sequence[str]) -> str:
    """Return in one line why the operation cannot use the operands' layouts.

    Example:
        >>> from shardtensor.layout.pieces import chunked
        >>> cut = DimCut((0,), chunked(8, 4))
        >>> rows, columns = (
        ...     CutLayout(shape=(8, 8), ranks=range(4), grid=(4,), names=("tp",), dims=dims)
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
        if not isinstance(operand, CutLayout):
            return f"the {name} is not sharded along its dims"
        for letter, cut in zip(letters, operand.dims, strict=True):
            if cut is None:
                continue
            if letter is None:
                return f"{_axes(operand, cut)} splits a dim of the {name} that is broadcast"
            if letter in rule.whole:
                return f"{_axes(operand, cut)} splits {letter} in the {name}, which must be whole"
            for first, known, other_cut in seen:
                if known == letter and cut.axes != other_cut.axes:
                    one, two = _axes(base, other_cut), _axes(base, cut)
                    return f"{letter} is split by {one} in the {first} but by {two} in the {name}"
                if known == letter and cut != other_cut:
                    return f"{_axes(base, cut)} splits {letter} at other places in the {first} than in the {name}"
                if known != letter and not set(cut.axes).isdisjoint(other_cut.axes):
                    return f"{_axes(base, cut)} splits {known} in the {first} but {letter} in the {name}"
            seen.append((name, letter, cut))
    return "the operands must be redistributed"


class Way(NamedTuple):
    """One way to redistribute the operands: their new layouts by number, and the result's layout (maybe partial)."""

    moves: tuple[tuple[int, CutLayout], ...]
    output: CutLayout


def ways_out(rule: Rule, operands: Sequence[Layout | Shape], itemsizes: tuple[int, ...]) -> list[Way]:
    """Return the ways to redistribute the operands, the cheapest first."""
    base = base_of([operand for operand in operands if isinstance(operand, Layout)])
    choices = assignments(rule, operands, base)
    choices.sort(key=lambda choice: cost(rule, operands, choice, base, itemsizes))  # stable
    recipes = (recipe_of(rule, operands, choice, base) for choice in choices[:WAYS])
    return [
        Way(tuple((i, need.layout) for i, need in enumerate(recipe.needs) if need.moves), recipe.output)
        for recipe in recipes
    ]


def _axes(layout: Layout, cut: DimCut) -> str:
    names = [f'"{layout.axis_name(axis)}"' for axis in cut.axes]
    return f"axis {names[0]}" if len(names) == 1 else f"axes {' * '.join(names)}"
