"""A check that all ranks make the same call: either it returns on all of them, or all raise the same error.

If one rank alone raises before a collective, the others wait for it. `agree` compares the calls of all ranks in one
exchange of 33 bytes, and sends an error that one rank found to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from shardtensor import errors
from shardtensor.comm.group import Group
from shardtensor.errors import DisagreementError, ShardTensorError
from shardtensor.mesh import ranks_text

_SHOWN_VALUES = 8  # how many values of a fact an error prints
_SHOWN_FACTS = 8  # how many facts that differ it prints
_Report = tuple[str, dict[str, str], tuple[list[str], str] | None]


def agree(group: Group, call: str, facts: Mapping[str, str], fault: ShardTensorError | None = None) -> None:
    """Return if all ranks make this call with equal facts; costs one small exchange.

    Every member of the group calls it, before any data moves. A rank that found a fault passes it as `fault` instead
    of raising it. `call` is the user's, for messages: ``shard_parameter("fc.weight")``; `facts`, such as specs, shapes
    and dtypes as text, must be equal on every rank.

    Raises:
        ShardTensorError: on every rank, with the type of `fault` and one text, if a rank passed a fault.
        DisagreementError: on every rank, with one text that lists which ranks hold which value of which fact.
    """
    if group.size == 1:
        if fault is not None:
            raise fault
        return
    digest = sha256(repr((call, sorted(facts.items()))).encode()).digest() + bytes([fault is not None])
    if fault is None and group.exchange(digest).count(digest) == group.size:
        return
    if fault is not None:
        group.exchange(digest)
    report: _Report = (
        call,
        dict(facts),
        None if fault is None else ([cls.__name__ for cls in type(fault).__mro__], str(fault)),
    )
    reports: Sequence[_Report] = group.exchange_objects(report)
    raise (_shared_fault(group, reports) or _disagreement(group, reports)) from fault


def agree_in_groups(
    groups: Iterable[Group | None], call: str, facts: Mapping[str, str], fault: ShardTensorError | None
) -> None:
    """Run `agree` in each of these groups that this rank is in; if it is in none, raise the fault."""
    members = [group for group in dict.fromkeys(groups) if group is not None and group.index >= 0]
    if fault is not None and not members:
        raise fault
    for group in members:
        agree(group, call, facts, fault)


def call_text(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return a call as text, for a fact of `agree`: tensors by shape and dtype, so that no device is read.

    Example:
        >>> call_text(dict, (0.1,), {"momentum": 0.9})
        'dict(0.1, momentum=0.9)'
    """
    name = getattr(getattr(function, "func", function), "__name__", "")
    words = [_text(value) for value in args] + [f"{key}={_text(value)}" for key, value in sorted(kwargs.items())]
    return f"{name}({', '.join(words)})"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, int | float | str | complex | None) else type(value).__name__


def _shared_fault(group: Group, reports: Sequence[_Report]) -> ShardTensorError | None:
    """Return the error with the faults of all ranks, or None if there are none."""
    found = {rank: report for rank, report in zip(group.ranks, reports, strict=True) if report[2] is not None}
    if not found:
        return None
    call, _, first = next(iter(found.values()))
    assert first is not None
    names, text = first
    error_type = next(getattr(errors, name) for name in names if hasattr(errors, name))
    by_text = ranks_by_value({rank: fault[1] for rank, (_, _, fault) in found.items() if fault is not None})
    if len(found) == group.size and len(by_text) == 1:
        return error_type(text)
    who = name_ranks(found)
    verb = "have" if len(found) > 1 else "has"
    facts = {name_ranks(ranks): text for text, ranks in by_text.items()}
    return error_type(f"{call}: {who} {verb} a fault, so nothing was done on any rank", facts)


def _disagreement(group: Group, reports: Sequence[_Report]) -> DisagreementError:
    calls = ranks_by_value(dict(zip(group.ranks, (call for call, _, _ in reports), strict=True)))
    if len(calls) > 1:
        fix = "make the same calls in the same order on every rank of the group"
        return DisagreementError("ranks are in different calls; nothing was moved", {"call": _table(calls)}, fix)
    names = dict.fromkeys(name for _, facts, _ in reports for name in facts)
    held = {
        name: ranks_by_value(
            {r: facts.get(name, "(none)") for r, (_, facts, _) in zip(group.ranks, reports, strict=True)}
        )
        for name in names
    }
    differing = {name: _table(values) for name, values in held.items() if len(values) > 1}
    left = len(differing) - _SHOWN_FACTS
    if left > 0:  # a plan for a thousand layers may differ in all of them
        differing = dict(list(differing.items())[:_SHOWN_FACTS])
    shown = [*differing, *([f"{left} more"] if left > 0 else [])]
    what = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
    name = next(iter(differing))
    first, other = (ranks[0] for ranks in list(held[name].values())[:2])
    fault = f"{next(iter(calls))}: {name} of rank {first} does not match with {name} of rank {other}; nothing was moved"
    return DisagreementError(fault, differing, f"give every rank of the group the same {what}")


def ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that hold each value, in the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _table(values: Mapping[str, Sequence[int]]) -> str:
    """Return one line for each value: the ranks that hold it, and the value."""
    rows = [(name_ranks(ranks), value) for value, ranks in list(values.items())[:_SHOWN_VALUES]]
    width = max(len(who) for who, _ in rows)
    indent = "\n" + " " * (width + 2)
    lines = [f"{who:<{width}}  " + indent.join(value.splitlines() or [""]) for who, value in rows]
    if len(values) > len(rows):
        lines.append(f"and {len(values) - len(rows)} more values")
    return "\n".join(lines)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the names of ranks, with ranges of consecutive ones: ``ranks 0-2, 5``, ``rank 3``."""
    text = ranks_text(ranks)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"
