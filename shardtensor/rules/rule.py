"""What an operation does to layouts, as letters: ``b k, n k -> b n``.

Each dim of an operand has a letter. A letter that several operands share must be cut alike in all of them; a letter
that the output keeps is cut there too; a letter it lacks is contracted, and what is cut along it is left to reduce.
An operand without the letter that an axis cuts is a copy along that axis, and its gradient there is an addend.
This is einsum's notation (as in einops and in Shardy's sharding rules) with two marks of our own:

* ``!k``: dim k must be whole (softmax over it, a sort along it);
* ``1``: a dim of size 1 that broadcasts: whole, and no letter.

A `Rule` is for operands of a certain number of dims; `shardtensor.rules.pattern` makes one from a row of the table.
"""

from __future__ import annotations

from functools import lru_cache

import attrs

Letters = tuple[str | None, ...]


@attrs.frozen(cache_hash=True)
class Rule:
    """Letters of every operand and of the output, and the letters that must be whole.

    Attributes:
        made: letters that only the output has, with their sizes (the dim that `cat` fills, a reduced dim that stays).
        joins: for letters that the output lacks, what joins the ranks' results where it is not their sum; "none" where
            nothing does, as each has the whole result.
    """

    inputs: tuple[Letters, ...]
    output: Letters
    whole: frozenset[str] = frozenset()
    made: tuple[tuple[str, int], ...] = ()
    joins: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        def side(letters: Letters) -> str:
            return " ".join("1" if x is None else f"!{x}" if x in self.whole else x for x in letters) or "()"

        return f"{', '.join(map(side, self.inputs))} -> {side(self.output)}"


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> Rule:
    """Read what a rule prints as.

    Example:
        >>> rule = parse_rule("b k, n k -> b n")
        >>> rule.inputs, rule.output
        ((('b', 'k'), ('n', 'k')), ('b', 'n'))
        >>> parse_rule("b !k -> b !k").whole
        frozenset({'k'})
    """
    left, _, right = text.partition("->")
    whole: set[str] = set()

    def letters(side: str) -> Letters:
        found: list[str | None] = []
        for word in side.split():
            if word.startswith("!"):
                whole.add(word[1:])
            if word != "()":
                found.append(None if word == "1" else word.lstrip("!"))
        return tuple(found)

    inputs = tuple(letters(side) for side in left.split(","))
    return Rule(inputs, letters(right), frozenset(whole))
