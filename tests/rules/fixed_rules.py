"""Rules for operands of fixed numbers of dims, from text."""

from __future__ import annotations

from shardtensor.rules.rule import Letters, Rule


def parse_rule(text: str) -> Rule:
    """The rule that a text in fixed letters states: ``b !k, n k -> b n``."""
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
