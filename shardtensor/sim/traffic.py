"""`count_bytes`: the bytes that one rank of a world of any size would send and receive, by place in the code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from shardtensor.comm import process_group
from shardtensor.comm.call_site import call_site
from shardtensor.comm.group import Group, SingleRankGroup
from shardtensor.errors import LayoutError
from shardtensor.layout.explain import bytes_text
from shardtensor.mesh import Mesh, Ranks, name_group, read_mesh
from shardtensor.sim.counting_group import CountingGroup
from shardtensor.sim.world import ProcessState


@attrs.frozen
class Line:
    """The calls of one collective over one group from one place in the code."""

    collective: str
    group: str
    site: str
    calls: int
    sent_bytes: int
    received_bytes: int


@attrs.frozen
class Traffic:
    """The bytes that one rank sends and receives; ``print`` shows a table, with the largest lines first.

    Attributes:
        mesh, rank: the rank.
        lines: one for each collective, group and place in the code.
        result: the return value of the function. Its shapes are right, its values are not.
    """

    mesh: Mesh
    rank: int
    lines: tuple[Line, ...]
    result: Any

    @property
    def calls(self) -> int:
        return sum(line.calls for line in self.lines)

    @property
    def sent_bytes(self) -> int:
        return sum(line.sent_bytes for line in self.lines)

    @property
    def received_bytes(self) -> int:
        return sum(line.received_bytes for line in self.lines)

    def __str__(self) -> str:
        total = ("total", "", str(self.calls), bytes_text(self.sent_bytes, 2), bytes_text(self.received_bytes, 2), "")
        head = ("collective", "over", "calls", "sent", "received", "from")
        rows = [head, *(_cells(line) for line in self.lines), total]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [f"traffic of rank {self.rank} of {self.mesh}"]
        for row in rows:
            cells = (
                f"{text:>{w}}" if i in (2, 3, 4) else f"{text:<{w}}"
                for i, (text, w) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def count_bytes(
    mesh: str | int | Mesh,
    fn: Callable[..., Any],
    *args: Any,
    rank: int = 0,
    device_type: str = "cpu",
    **kwargs: Any,
) -> Traffic:
    """Run ``fn(*args, **kwargs)`` as one rank of a world without its other ranks, and count the bytes of collectives.

    Nothing is sent, so a world of 16,384 ranks takes the time of one process; tensors on ``torch.device("meta")`` take
    no memory. Collectives return wrong values of the right shapes, so a function that branches on values may take
    another branch than in a real run.

    Args:
        mesh: the axes and their sizes, ``"dp=64, tp=256"``, or a number of ranks.
        fn: the function, such as one training step. Inside it, None as a process group means this world.
        rank: the rank to run.
        device_type: ``"cuda"`` for a world of GPUs: sharded tensors are then copied to the current one, as with NCCL.
        args, kwargs: the arguments of `fn`.

    Returns:
        The bytes by collective, group and place in the code; ``print`` shows them as a table.

    Raises:
        LayoutError: (a ValueError) the mesh has no such rank.

    Example:
        >>> import torch
        >>> import shardtensor as st
        >>> def step():
        ...     with torch.device("meta"):
        ...         weight = st.empty("[tp, -]", 4096, 4096, requires_grad=True)
        ...         x = torch.empty(64, 4096, requires_grad=True)
        ...     torch.nn.functional.linear(x, weight).backward(torch.empty(64, 4096, device="meta"))
        >>> traffic = count_bytes("dp=64, tp=256", step)
        >>> traffic.lines[0].collective, traffic.lines[0].group, traffic.sent_bytes == 2 * 64 * 4096 * 4 * 255 // 256
        ('all_reduce', 'tp=256', True)
    """
    axes = read_mesh(mesh)
    if axes.coordinate(rank) is None:
        raise LayoutError(f"the mesh has no rank {rank}", {"mesh": axes, "ranks": f"0 to {axes.size - 1}"})
    tally = _Tally(axes)
    if axes.size == 1:
        group: Group = SingleRankGroup(rank, device_type=device_type)
    else:
        group = CountingGroup(rank, axes.ranks, tally.count, device_type)
    if len(axes.axes) > 1:
        group = group.on_mesh(axes, {})
    with counting_world(group):
        result = fn(*args, **kwargs)
    return Traffic(axes, rank, tally.lines(), result)


@contextmanager
def counting_world(group: Group) -> Iterator[None]:
    """Make a counting group the default group; afterwards restore it and the `ProcessState`."""
    before = ProcessState.capture()
    token = process_group.simulated.set(group)
    try:
        yield
    finally:
        process_group.simulated.reset(token)
        before.restore()


class _Tally:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sums: dict[tuple[str, str, str], list[int]] = {}
        self.names: dict[Ranks, str] = {}

    def count(self, collective: str, ranks: Ranks, sent_bytes: int, received_bytes: int) -> None:
        if ranks not in self.names:
            self.names[ranks] = name_group(self.mesh, ranks).split(" (")[0]
        sums = self.sums.setdefault((collective, self.names[ranks], call_site(sys._getframe(1))), [0, 0, 0])
        for i, value in enumerate((1, sent_bytes, received_bytes)):
            sums[i] += value

    def lines(self) -> tuple[Line, ...]:
        lines = (Line(*key, *sums) for key, sums in self.sums.items())
        return tuple(sorted(lines, key=lambda line: -(line.sent_bytes + line.received_bytes)))


def _cells(line: Line) -> tuple[str, ...]:
    sizes = bytes_text(line.sent_bytes, 2), bytes_text(line.received_bytes, 2)
    return line.collective, line.group, str(line.calls), *sizes, line.site
