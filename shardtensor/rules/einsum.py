"""The rule of einsum."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from shardtensor.layout.layout import Shape
from shardtensor.rules.rule import Rule


@lru_cache(maxsize=4096)
def einsum_rule(equation: str, shapes: tuple[Shape, ...]) -> Rule | None:
    """Return the rule of an equation for operands of `shapes`; None if it does not fit them (torch then raises).

    An ellipsis becomes one letter for each of its dims. A letter that is twice in one operand (a diagonal) must be
    whole.

    Example:
        >>> str(einsum_rule("bik,bkj->bij", ((2, 3, 4), (2, 4, 5))))
        'b i k, b k j -> b i j'
        >>> str(einsum_rule("ii", ((3, 3),)))
        '!i !i -> ()'
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    sides = left.split(",")
    if len(sides) != len(shapes):
        return None
    broadcast = max(len(s) - len(side.replace("...", "")) for side, s in zip(sides, shapes, strict=True))
    dots = [f"...{i}" for i in range(broadcast)]
    inputs = []
    for side, shape in zip(sides, shapes, strict=True):
        head, ellipsis, tail = side.partition("...")
        room = len(shape) - len(head) - len(tail)
        if room < 0 or (room and not ellipsis):
            return None
        inputs.append([*head, *dots[broadcast - room :], *tail] if room else [*head, *tail])
    counts = Counter(letter for letters in inputs for letter in letters)
    if arrow:
        head, ellipsis, tail = right.partition("...")
        output = [*head, *(dots if ellipsis else ()), *tail]
    else:
        output = dots + sorted(x for x, n in counts.items() if n == 1 and not x.startswith("..."))
    if any(letter not in counts for letter in output) or len(set(output)) != len(output):
        return None
    sizes: dict[str, int] = {}
    for letters, shape in zip(inputs, shapes, strict=True):
        if len(set(zip(letters, shape, strict=True))) != len(set(letters)):
            return None  # a diagonal of two sizes
        for letter, size in zip(letters, shape, strict=True):
            if sizes.get(letter, 1) == 1:
                sizes[letter] = size
            elif size not in (1, sizes[letter]):
                return None
    whole = frozenset(x for letters in inputs for x, n in Counter(letters).items() if n > 1)
    named = tuple(
        tuple(None if size == 1 and sizes[letter] != 1 else letter for letter, size in zip(letters, shape, strict=True))
        for letters, shape in zip(inputs, shapes, strict=True)
    )
    return Rule(named, tuple(output), whole)
