"""Every row of the rule table, through every kind of layout: sharded equals dense, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
from harness import FULL, every_size
from harness.law import sweep
from makers import samples_of

from shardtensor.comm.process_group import as_group
from shardtensor.rules.table import Row, rows
from shardtensor.tensor.dispatch import resolve


def function_of(name: str) -> Any:
    """The torch function that a name of the table means; a property's getter for ``T`` and its kin."""
    found = resolve(name)
    if not found:
        return None
    return found[0] if callable(found[0]) else found[0].__get__


def held_to(row: int) -> list[str]:
    """What differs for a row; in worlds of two, where least can go wrong, every second row is tried."""
    return [] if as_group().size == 2 and row % 2 and not FULL else check_row(rows()[row])


def check_row(row: Row, most: int = 3) -> list[str]:
    """What differs in calls of a row's names; of a long list of names, each is called in every second world only."""
    failures = []
    for i, name in enumerate(row.names):
        bare = name.rpartition(".")[2]
        is_one_of_many = len(row.names) > 12 and i > 0
        if is_one_of_many and not FULL and (i + as_group().size) % 2:
            continue
        budget = 1 if is_one_of_many else most
        for k, sample in enumerate(samples_of(bare, row.section)):
            _, found = sweep(function_of(name), sample, budget, row.pattern is None, seed=100 * i + k)
            failures += [f"{name} {text}" for text in found]
    return failures


@every_size
@pytest.mark.worlds("sim")
@pytest.mark.parametrize("row", range(len(rows())), ids=lambda i: rows()[i].names[0])
def test_a_row_gives_the_dense_result(world, size, row):
    failures = world(held_to, size, row=row)
    assert not failures[0], "\n".join(failures[0][:6])
