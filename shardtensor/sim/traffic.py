"""`count_bytes`: the bytes that one rank of a world of any size would send and receive, by place in the code; and the
`Group` that sends nothing and counts them."""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from shardtensor.comm import process_group
from shardtensor.comm.call_site import call_site
from shardtensor.comm.group import Counts, Group, SingleRankGroup, check_reduction
from shardtensor.comm.process_group import reduce_group
from shardtensor.errors import LayoutError
from shardtensor.layout.explain import bytes_text
from shardtensor.mesh import Mesh, Ranks, as_ranks, name_group, read_mesh
from shardtensor.sim.world import ProcessState

Count = Callable[[str, Ranks, int, int], None]
"""Called with a collective's name, its group, and the bytes that this rank sends and receives."""


class CountingGroup(Group):
    """One rank of a group whose other members do not exist.

    A gather returns zeros for them, and a reduction returns this rank's values. Shapes and dtypes are right; meta
    tensors can be used. The bytes are those that a rank sends and receives if gathers and reductions are rings,
    without a backend's padding of uneven parts.
    """

    def __init__(self, rank: int, ranks: Ranks, count: Count, device_type: str = "cpu") -> None:
        super().__init__()
        self.rank, self.ranks, self.count, self.device_type = rank, ranks, count, device_type
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.process_group: Any = self  # `as_group` accepts it
        self.mesh: Mesh | None = None

    def all_reduce(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        check_reduction(op, t.dtype)
        moved = -(-2 * t.nbytes * (self.size - 1) // self.size)
        self.count("all_reduce", self.ranks, moved, moved)
        return t

    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        counts = [t.numel()] * self.size if counts is None else counts
        assert counts[self.index] == t.numel(), "this rank's count is not its number of elements"
        received = (sum(counts) - t.numel()) * t.element_size()
        self.count("all_gather", self.ranks, t.nbytes * (self.size - 1), received)
        return self._with_own(t, counts)

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        check_reduction("sum", flat.dtype)
        counts = [flat.numel() // self.size] * self.size if counts is None else counts
        assert sum(counts) == flat.numel(), "counts must add up to the elements given"
        own = self._own(flat, counts)
        self.count("reduce_scatter", self.ranks, flat.nbytes - own.nbytes, own.nbytes * (self.size - 1))
        return own.clone()

    def all_to_all(self, flat: Tensor, send_counts: Counts, recv_counts: Counts, out: Tensor | None = None) -> Tensor:
        assert sum(send_counts) == flat.numel(), "counts must add up to the elements given"
        self._count_route("all_to_all", flat, send_counts, recv_counts)
        result = self._with_own(self._own(flat, send_counts), recv_counts)
        return result if out is None else out.copy_(result)

    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        is_source = self.index == src_index
        self.count("broadcast", self.ranks, t.nbytes if is_source else 0, 0 if is_source else t.nbytes)
        return t

    def exchange(self, blob: bytes) -> list[bytes]:
        moved = len(blob) * (self.size - 1)
        self.count("exchange", self.ranks, moved, moved)
        return [blob] * self.size

    def exchange_objects(self, value: Any) -> list[Any]:
        blob = pickle.dumps(value)
        moved = len(blob) * (self.size - 1)
        self.count("exchange_objects", self.ranks, moved, moved)
        return [pickle.loads(blob) for _ in range(self.size)]

    def barrier(self) -> None:
        self.count("barrier", self.ranks, 0, 0)

    def _make_subgroup(self, ranks: tuple[int, ...]) -> Group:
        return CountingGroup(self.rank, as_ranks(ranks), self.count, self.device_type)

    def _own(self, flat: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return flat.detach().reshape(-1).narrow(0, sum(counts[: self.index]), counts[self.index])

    def _with_own(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return this rank's elements in their range, and zeros for the other members."""
        whole = own.new_zeros(sum(counts))
        self._own(whole, counts).copy_(own.detach().reshape(-1))
        return whole

    def _count_route(self, name: str, like: torch.Tensor, send: Sequence[int], recv: Sequence[int]) -> None:
        size, i = like.element_size(), self.index
        self.count(name, self.ranks, (sum(send) - send[i]) * size, (sum(recv) - recv[i]) * size)

    def __repr__(self) -> str:
        return f"CountingGroup(rank={self.rank}, size={self.size})"


copyreg.pickle(CountingGroup, reduce_group)


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
