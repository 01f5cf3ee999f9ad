"""One collective of a step: what it is, over which ranks, how many bytes, where and why."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from shardtensor.layout.explain import say_bytes

Phase = Literal["forward", "backward", "optimizer"]


@attrs.frozen
class Collective:
    """One collective that a rank takes part in.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, or ``exchange``: a few bytes that
            ranks tell each other.
        phase: when: ``forward``, ``backward``, or ``optimizer``, between the two and the next step.
        axes: that the ranks lie along, as the plan calls them.
        group_size: how many ranks take part.
        bytes: of the message: of what is reduced, before it is scattered; of what is gathered, all of it.
        sent_bytes, received_bytes: by this rank, when reductions and gathers run as rings.
        dtype: of its elements.
        where: the path of a module or the name of a parameter, numbers of alike ones as ``*``.
        why: what it is for.
        count: how often it is called in a step.
    """

    kind: str
    phase: Phase
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    sent_bytes: int
    received_bytes: int
    dtype: str
    where: str
    why: str
    count: int = 1

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        over = f"{'*'.join(self.axes)}={self.group_size}"
        return f"{times}{self.kind} over {over} of {say_bytes(self.bytes)} {self.dtype}: {self.where}: {self.why}"


def all_reduce(phase: Phase, axes: tuple[str, ...], size: int, numel: int, item: int, **said: Any) -> Collective:
    """One of so many elements of `item` bytes."""
    moved = -(-2 * numel * item * (size - 1) // size)
    return Collective("all_reduce", phase, axes, size, numel * item, moved, moved, **said)


def all_gather(
    phase: Phase, axes: tuple[str, ...], size: int, own: int, whole: int, item: int, **said: Any
) -> Collective:
    """One to which this rank brings `own` of the `whole` elements."""
    return Collective(
        "all_gather", phase, axes, size, whole * item, own * item * (size - 1), (whole - own) * item, **said
    )


def reduce_scatter(
    phase: Phase, axes: tuple[str, ...], size: int, own: int, whole: int, item: int, **said: Any
) -> Collective:
    """One that leaves this rank `own` of the `whole` elements."""
    return Collective(
        "reduce_scatter", phase, axes, size, whole * item, (whole - own) * item, own * item * (size - 1), **said
    )
