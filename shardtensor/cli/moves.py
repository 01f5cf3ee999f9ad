"""Who sends which box to whom in one step of a reshard, for the ranks of one team; the others do the same."""

from __future__ import annotations

from functools import lru_cache

import attrs

from shardtensor.layout.box import Box
from shardtensor.layout.route import Step
from shardtensor.layout.transfer import moved

MAX_MESSAGES = 64

_MAX_PAIRS = 1 << 16  # of ranks that are asked what one sends to the other


@attrs.frozen
class Message:
    """A box that goes from one rank to another; an addend of it, where the step joins addends."""

    giver: int
    taker: int
    box: Box


@attrs.frozen(eq=False)
class Team:
    """The messages of a step within the team of its first rank.

    Attributes:
        members: the ranks that exchange with one another.
        teams: how many such teams there are.
        takers: for whom all messages are listed: all members, or the first few where there would be too many.
        messages: in the order of takers; no algorithm: a collective may send them on from rank to rank.
    """

    members: tuple[int, ...]
    teams: int
    takers: tuple[int, ...]
    messages: tuple[Message, ...]

    @property
    def is_all(self) -> bool:
        """Whether every message of the team is listed."""
        return self.takers == self.members


@lru_cache(maxsize=64)
def team_of(step: Step, limit: int = MAX_MESSAGES) -> Team:
    """The messages of a step.

    Example:
        >>> from shardtensor.layout.bind import bind
        >>> from shardtensor.layout.route import route
        >>> from shardtensor.mesh import read_mesh
        >>> from shardtensor.spec.parse import parse_spec
        >>> rows, columns = (bind(parse_spec(text), (4, 4), read_mesh("tp=2")) for text in ("[tp, -]", "[-, tp]"))
        >>> [(m.giver, m.taker, str(m.box)) for m in team_of(route(rows, columns)[0]).messages]
        [(1, 0, '[2:4, 0:2]'), (0, 1, '[0:2, 2:4]')]
    """
    first = step.source.ranks[0]
    members = step.members(first)
    world = len({*step.source.ranks, *step.target.ranks})
    found: list[Message] = []
    takers: list[int] = []
    for rank in members[: max(_MAX_PAIRS // len(members), 1)]:
        messages = [Message(giver, rank, box) for giver, box in _coming(step, rank)]
        if found and len(found) + len(messages) > limit:
            break
        found += messages[:limit]
        if len(messages) > limit:
            break
        takers.append(rank)
    return Team(tuple(members), max(world // len(members), 1), tuple(takers), tuple(found))


def _coming(step: Step, rank: int) -> tuple[tuple[int, Box], ...]:
    if step.kind in ("slice", "split"):
        return ()
    members = step.members(rank)
    if step.op:
        return tuple((giver, box) for giver in members if giver != rank for box in step.target.boxes(rank))
    return moved(step.source, step.target, rank, members)
