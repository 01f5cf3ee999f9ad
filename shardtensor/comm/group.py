"""What a group of ranks can do, and the world of one.

Everything right of this folder talks to other ranks only through `Group`, so that torch.distributed, the simulator
and a counter of bytes can stand in for one another. All methods but the questions are collective: every member
calls them, in the same order. They move values and know nothing of autograd; `collectives` adds the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from shardtensor.errors import LayoutError, RuleError, ShardTensorError
from shardtensor.mesh import Mesh, Ranks

REDUCTIONS = ("sum", "avg", "max", "min", "prod")


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self) -> torch.Tensor:
        """Return the result, once it is there (on cuda: once the current stream would see it)."""


@runtime_checkable
class Group(Protocol):
    """Ranks that call collectives together.

    Tensors may be of any dtype, device and strides; results stand on the device of the tensor given. `counts` holds
    a number of elements for each member, in group order; None means that all bring as many.

    Attributes:
        size: number of members.
        rank: global rank of this process.
        ranks: global ranks of the members, in group order.
        index: this process's place in `ranks`; -1 when it is not a member.
        device_type: where tensors are moved without a detour: ``"cuda"`` or ``"cpu"``.
        process_group: the torch process group, or None.
        mesh: the grid over the group's ranks when it came from a DeviceMesh of two or more axes, else None.
    """

    size: int
    rank: int
    ranks: Ranks
    index: int
    device_type: str
    process_group: Any
    mesh: Mesh | None

    def all_reduce(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce `t` over the group in place and return it. `op` is one of ``sum avg max min prod``.

        Use what is returned: in a compiled graph it is another tensor of the same values.
        """

    def all_reduce_async(self, t: torch.Tensor, op: str = "sum") -> Pending:
        """Start `all_reduce`; `t` must be left alone until ``wait()`` returns it."""

    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Return every member's elements as one flat tensor, in group order (may be `t` itself in a world of one)."""

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Sum `flat` over the group and return this member's range of it, flat; `counts` cuts it up."""

    def reduce_scatter_async(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        """Start `reduce_scatter`; `flat` must be left alone until ``wait()`` returns this member's range."""

    def all_gather_into(self, out: torch.Tensor, part: torch.Tensor) -> Pending:
        """Start to gather everyone's flat `part`, all of one size, into the flat `out`, which may hold `part`.

        On cuda it runs in the current stream. Nothing is counted as a write into `out`.
        """

    def reduce_scatter_into(self, out: torch.Tensor, flat: torch.Tensor) -> Pending:
        """Start to sum the flat `flat` and write this member's equal range of it into the flat `out`.

        On cuda it runs in the current stream, and `out` may be that range of `flat`.
        """

    def all_to_all(
        self,
        flat: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send consecutive ranges of `flat` to the members and return what they sent here, flat, in group order.

        `out`, a flat tensor of the dtype of `flat` that shares nothing with it, takes it where given.
        """

    def scatter(
        self, parts: Sequence[torch.Tensor] | None, count: int, src_index: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Return this member's part, flat, of `count` elements; `parts` is read on the source only.

        `like` gives dtype and device of the result on every member.
        """

    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        """Overwrite `t` with the source's and return it; all bring as many elements."""

    def exchange(self, blob: bytes) -> list[bytes]:
        """Return every member's blob; all must be of one length."""

    def exchange_objects(self, value: Any) -> list[Any]:
        """Return every member's value, pickled on the way. For the texts of errors, not for data."""

    def barrier(self) -> None:
        """Return when every member has called it."""

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """Return the group of some members, by global rank. Its members call it; others may, and get index -1."""

    def twin(self) -> Group:
        """Return a group of the same ranks whose collectives can run beside this one's; all its members call it.

        Each of the two meets in an order of its own. On cuda the twin has a communicator of its own, and the members
        still call both groups' collectives in one order where one waits for another.
        """

    def on_mesh(self, mesh: Mesh, axes: dict[tuple[str, ...], Group]) -> Group:
        """Return this group seen as a grid; sends nothing. `axes` are the groups along some axes, if made already."""

    def axis(self, *names: str) -> Group:
        """Return the group of the ranks that differ from this one only along these axes of `mesh`."""


def team_along(group: Group, names: Iterable[str], error: type[ShardTensorError] = LayoutError) -> Group:
    """Return the ranks that differ from this one along these axes only; a group without a mesh is one axis of any name.

    Sends nothing, but that the first use of some axes together makes their group.

    Raises:
        LayoutError: (or `error`) the mesh has no such axis.
    """
    if group.mesh is None:
        return group
    wanted = tuple(names)
    group.mesh.refuse_unknown(wanted, error)
    return group.axis(*(name for name in group.mesh.names if name in wanted))  # one group for each set of axes


def seen_on(group: Group, mesh: Mesh) -> Group:
    """Return a group seen as a grid; one object for each grid of a group. Sends nothing.

    Groups along axes that the two grids share are shared.
    """
    known: dict[Mesh, Group] = vars(group).setdefault("_seen_on", {})
    if mesh not in known:
        known[mesh] = group.on_mesh(mesh, {})
    return known[mesh]


class LoneGroup:
    """A world of one: nothing is sent, and every collective returns what it was given."""

    size = 1
    index = 0
    mesh: Mesh | None = None

    def __init__(self, rank: int = 0, process_group: Any = None, device_type: str = "cpu") -> None:
        self.rank = rank
        self.process_group = process_group
        self.device_type = device_type
        self.ranks: Ranks = range(rank, rank + 1)

    def all_reduce(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        check_reduction(op, t.dtype)
        return t

    def all_reduce_async(self, t: torch.Tensor, op: str = "sum") -> Pending:
        return Done(self.all_reduce(t, op))

    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        return t.reshape(-1)

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        return flat.reshape(-1)

    def reduce_scatter_async(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        return Done(self.reduce_scatter(flat, counts))

    def all_gather_into(self, out: torch.Tensor, part: torch.Tensor) -> Pending:
        return Done(overwrite(out, part))

    def reduce_scatter_into(self, out: torch.Tensor, flat: torch.Tensor) -> Pending:
        return Done(overwrite(out, flat))

    def all_to_all(
        self,
        flat: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return flat.reshape(-1) if out is None else out.copy_(flat.reshape(-1))

    def scatter(
        self, parts: Sequence[torch.Tensor] | None, count: int, src_index: int, like: torch.Tensor
    ) -> torch.Tensor:
        assert parts is not None, "the source brings the parts"
        return parts[0].reshape(-1).to(like.device, like.dtype)

    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        return t

    def exchange(self, blob: bytes) -> list[bytes]:
        return [blob]

    def exchange_objects(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None

    def subgroup(self, ranks: Sequence[int]) -> Group:
        assert list(ranks) == [self.rank], "a world of one has one subgroup"
        return self.axis()

    def twin(self) -> Group:
        return self

    def on_mesh(self, mesh: Mesh, axes: dict[tuple[str, ...], Group]) -> Group:
        alone = LoneGroup(self.rank, self.process_group, self.device_type)
        alone.mesh = mesh
        return alone

    def axis(self, *names: str) -> Group:
        return self if self.mesh is None else LoneGroup(self.rank, self.process_group, self.device_type)

    def __repr__(self) -> str:
        return f"LoneGroup(rank={self.rank})"


class Done:
    """A `Pending` that had nothing to wait for."""

    __slots__ = ("result",)

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result

    def wait(self) -> torch.Tensor:
        return self.result


def overwrite(out: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Give `out` the values as a backend writes them, without counting a version; nothing where it holds them."""
    if out.data_ptr() != values.data_ptr():
        out.data.copy_(values)
    return out


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Refuse a reduction that has no meaning for the dtype, as torch's own reductions do.

    Bools add up as "any" and multiply as "all".

    Raises:
        RuleError: averages of integers, and an order (max, min) of complex numbers.
    """
    if op not in REDUCTIONS:
        raise RuleError(f'no reduction is called "{op}"', {"reductions": ", ".join(REDUCTIONS)})
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise RuleError(f"the average of {dtype} values is not {dtype}", fix="sum them, or convert to a float dtype")
    if op in ("max", "min") and dtype.is_complex:
        raise RuleError(f"{dtype} values have no {op}", fix="reduce their absolute values")
    if op in ("max", "min") and dtype == torch.uint64:
        raise RuleError(f"no backend orders {dtype} values", fix="convert to torch.int64")
