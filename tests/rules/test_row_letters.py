"""Every row of the rule table in one process: operands cut along a letter give that part of the result, or a partial
sum."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from harness.law import Sample, as_tuple, same, values
from makers import samples_of
from test_letters import along
from test_table import function_of

from shardtensor.ops.binding import BoundCall, row_keyword
from shardtensor.rules.pattern import Pattern
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import Row, rows

BY_HAND = {
    "gather": "ranks read the indices that are theirs",
    "index_select": "ranks read the indices that are theirs",
    "scatter": "ranks write the indices that are theirs",
    "index_add": "ranks write the indices that are theirs",
    "linalg.cross": "without a dim torch.cross takes the first of size 3, which another part may not have",
    "F.one_hot": "without a number of classes the result is as wide as the largest value",
    "zeros_like": "random numbers among them",
    "Tensor.fill_": "random numbers among them",
}
"""By a name of the row: why its calls on parts are not the calls on the whole."""

LETTERED = [row for row in rows() if row.pattern is not None and not {*row.names} & {*BY_HAND}]
JOINED = {
    "sum": lambda parts: sum(parts),
    "max": lambda parts: torch.stack(parts).amax(0),
    "min": lambda parts: torch.stack(parts).amin(0),
    "prod": lambda parts: math.prod(parts),
}


def calls(name: str, row: Row, sample: Sample) -> Iterator[tuple[BoundCall, Any]]:
    """The calls that a sample makes, bound as their row says, with what they give."""
    found = []
    func = function_of(name)
    if func is None:
        return
    options = {"reduction": "none"} if row.section.startswith("losses") else {}

    def noted(*args: Any, **kwargs: Any) -> Any:
        kwargs |= options
        result = func(*args, **kwargs)
        call = BoundCall.of(func, name, row, args, {row_keyword(key, row.call): value for key, value in kwargs.items()})
        if call is not None:
            found.append((call, result))
        return result

    kinds = sample.kinds or ("int",) * len(sample.shapes)
    sample.call(
        noted, *(values(kind, shape, i) for i, (kind, shape) in enumerate(zip(kinds, sample.shapes, strict=True)))
    )
    yield from found


def check(call: BoundCall, result: Any, pattern: Pattern, exact: bool | float) -> set[str]:
    """Hold a call to its rule, letter by letter; return the letters that were cut."""
    rule = pattern.bind(call.shapes, call.dims, call.keepdim)
    if rule is None:
        return set()
    want = as_tuple(result)
    sizes: dict[str, int] = {}
    for letters, x in zip(rule.inputs, call.present, strict=True):
        for letter, size in zip(letters, x.shape, strict=True):
            assert (letter is None and size == 1) or sizes.setdefault(letter, size) == size
    made = dict(rule.made)
    for y in want:
        assert y.dim() == len(rule.output), (rule, y.shape)
        for letter, size in zip(rule.output, y.shape, strict=True):
            assert letter in made or size == (1 if letter is None else sizes[letter]), (rule, y.shape)
    assert set(made) <= rule.whole
    tried = set()
    for letter in sizes.keys() - rule.whole:
        combiner = pattern.combiner_of(letter)
        if sizes[letter] > 1 and not (combiner or "").startswith("@"):
            parts = [as_tuple(part(call, rule, letter, half, sizes[letter])) for half in (0, 1)]
            for k, y in enumerate(want):
                found = joined(rule, letter, sizes[letter], combiner, [each[k] for each in parts])
                same(found, y, exact, f"{rule} cut along {letter}")
            tried.add(letter)
    return tried


def part(call: BoundCall, rule: Rule, letter: str, half: int, size: int) -> Any:
    """The call on the first or the second part of the operands along a letter."""
    start, stop = (0, size // 2) if half == 0 else (size // 2, size)
    parts = [along(x, letters, letter, start, stop) for letters, x in zip(rule.inputs, call.present, strict=True)]
    if half and letter not in rule.output:  # what is added is added once
        added = [side.added for side, x in zip(call.sides, call.operands, strict=False) if x is not None]
        added = [it or name == "bias" for it, name in zip(added, call.present_names, strict=False)]
        parts = [x * 0 if it else x for it, x in zip(added, parts, strict=False)]
    return call.compute(*parts)


def joined(rule: Rule, letter: str, size: int, combiner: str | None, parts: list[torch.Tensor]) -> torch.Tensor:
    """The result that the parts are of."""
    if letter in rule.output:
        return torch.cat(parts, rule.output.index(letter))
    assert combiner is not None, f"nothing combines {letter}"
    if combiner == "avg":
        return (parts[0] * (size // 2) + parts[1] * (size - size // 2)) / size
    return JOINED[combiner](parts)


WHOLE = {"grouped_query_attention", "grouped_conv1d", "grouped_conv2d", "grouped_conv3d"}
WHOLE |= {"F.unfold", "F.fold", "padded"}
"""Rows whose calls here have handlers of their own, or no letter that could be cut and is longer than one."""


def test_parts_along_a_letter_are_parts_of_the_result():
    failures = []
    held = Counter({row.names[0]: 0 for row in LETTERED})
    warnings.simplefilter("ignore")
    for row in LETTERED:
        for name in row.names:
            for sample in samples_of(name.rpartition(".")[2], row.section):
                try:
                    for call, result in calls(name, row, sample):
                        held[row.names[0]] += len(check(call, result, row.pattern, sample.exact))
                except Exception as error:
                    failures.append(f"{name} of {sample.shapes}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} differ\n" + "\n".join(failures[:8])
    assert {name for name, count in held.items() if not count} == WHOLE
