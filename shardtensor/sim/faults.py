"""Error texts for ranks of a simulated world whose calls do not match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardtensor.errors import DisagreementError
from shardtensor.sim.channel import Call

ORDER = "make the same calls in the same order on every rank of the group"


class RankStopped(BaseException):
    """Ends a rank that waits for a rank that has failed. User code should not catch it."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 0, 2 and 3`` or ``ranks 0-7``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def describe_call(call: Call, group: str, site: str) -> str:
    """Return a call with its group, and on a second line the place in the user's code."""
    return f"{call} over {group}\n  {site}"


def different_calls(group: str, calls: Mapping[int, tuple[Call, str]]) -> str:
    """Return the error text for two ranks whose calls do not match."""
    (first, (one, _)), (second, (other, _)) = calls.items()
    what = "collectives" if one.name != other.name else f"calls of {one.name}"
    facts = {f"rank {rank}": describe_call(call, group, site) for rank, (call, site) in calls.items()}
    return str(
        DisagreementError(f"ranks {first} and {second} are in different {what}; nothing was moved", facts, ORDER)
    )


def unmatched_counts(fault: str, group: str, calls: Mapping[int, tuple[Call, str]]) -> str:
    """Return the error text for calls of one collective whose counts do not match."""
    facts = {f"rank {rank}": describe_call(call, group, site) for rank, (call, site) in calls.items()}
    return str(DisagreementError(f"{fault}; nothing was moved", facts, ORDER))


def deadlock(waits: Mapping[int, str], finished: Sequence[int]) -> str:
    """Return the error text for ranks that wait for each other, or for ranks that have returned."""
    facts = {f"rank {rank}": text for rank, text in waits.items()}
    if finished:
        facts[name_ranks(finished)] = "returned" if len(finished) == 1 else "have returned"
    whom = "a rank that has returned" if finished else "each other"
    return str(DisagreementError(f"deadlock: {name_ranks(list(waits))} would wait for {whom} for ever", facts, ORDER))
