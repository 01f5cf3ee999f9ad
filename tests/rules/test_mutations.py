"""The property test of a row is worth something: wherever a row is made wrong, it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
from test_table import check_row

from shardtensor.rules.pattern import parse_pattern
from shardtensor.rules.table import ROWS, Row


def rule(text: str, combine: str = ""):
    """The row with another rule."""
    return lambda row: attrs.evolve(row, pattern=parse_pattern(text, combine))


def unjoined(row: Row) -> Row:
    """The row with nothing that combines the ranks' results."""
    return attrs.evolve(row, pattern=attrs.evolve(row.pattern, combine=()))


MUTATIONS = {
    "sort without !": ("sort", rule("... [d] -> ... [d]")),
    "tril with one ! less": ("tril", rule("... r !c -> ... r c")),
    "attention over cut keys": (
        "scaled_dot_product_attention",
        rule("... !l !e, ... s !e, ... s !f, ... l/1 s/1 -> ... l f", "s sum"),
    ),
    "two letters of the output swapped": ("bmm", rule("b m k, b k n -> b n m", "k sum")),
    "two letters of an operand swapped": ("linear", rule("... k, k n, + n -> ... n", "k sum")),
    "partial sums not joined": ("mm", unjoined),
    "a sum joined as a mean": ("sum", rule("... [d] -> ...", "d avg")),
    "a maximum joined as a minimum": ("amax", rule("... [d] -> ...", "d min")),
    "a contracted letter kept": ("mv", rule("m k, k -> k", "m sum")),
    "a bias added by every rank": ("linear", rule("... k, n k, n -> ... n", "k sum")),
    "rows of a table looked up without the others": ("embedding", rule("i..., v d -> i... d", "v max")),
    "softmax of each part": ("softmax", rule("... [d] -> ... [d]")),
    "classes that are not joined": ("cross_entropy", unjoined),
    "groups of channels cut apart": ("group_norm", rule("n c !s..., c, c -> n c s...")),
}
"""By what is wrong: the name of a row, and what makes it so."""


@contextmanager
def mutated(name: str, change) -> Iterator[Row]:
    """The table with one row replaced."""
    right = ROWS[name]
    names = [key for key, row in ROWS.items() if row is right]
    wrong = change(right)
    ROWS.update(dict.fromkeys(names, wrong))
    try:
        yield wrong
    finally:
        ROWS.update(dict.fromkeys(names, right))


def held_to(name: str) -> list[str]:
    return check_row(ROWS[name], most=8)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_wrong_row_is_found(world, fault):
    name, change = MUTATIONS[fault]
    with mutated(name, change):
        try:
            found = world(held_to, 3, name=name)
        except Exception as error:
            found = [[str(error)]]
    assert any(found), f"{fault}: nothing noticed"
    assert not any(world(held_to, 3, name=name)), f"{name} differs as it is"
