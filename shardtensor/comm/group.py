"""The base class of groups, the group of a single rank, and the group that this process is not a member of.

Other folders communicate only through `Group`, which torch.distributed, the simulator and a counter of bytes
implement. Its methods are collective: every member calls them, in the same order. They have no gradients;
`collectives` adds these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from shardtensor.errors import LayoutError, RuleError, ShardTensorError
from shardtensor.mesh import Mesh, Ranks, as_ranks

Counts = Sequence[int]
REDUCTIONS = ("sum", "avg", "max", "min", "prod")


class Pending:
    """A started collective. This base class is for one that is done already."""

    __slots__ = ("result",)

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result

    def wait(self) -> torch.Tensor:
        """Wait until the collective is done (on cuda: make the current stream wait), and return the result."""
        return self.result


class Group(ABC):
    """Ranks that call collectives together.

    Tensors may have any dtype, device and strides; results are on the device of the argument. `counts` holds a number
    of elements for each member, in group order; None means that all have the same number.

    Attributes:
        ranks: global ranks of the members, in group order; `size` is their number, `rank` this process's own.
        index: the position of this process in `ranks`; -1 if it is not a member.
        device_type: ``"cuda"`` or ``"cpu"``: the device whose tensors the backend sends without a copy.
        process_group: the torch process group, or None.
        mesh: the mesh of the group's ranks if it was made from a DeviceMesh of two or more axes, else None.
    """

    size: int
    rank: int
    ranks: Ranks
    index: int
    device_type: str
    process_group: Any
    mesh: Mesh | None = None

    def __init__(self) -> None:
        self._axes: dict[tuple[str, ...], Group] = {}
        self._subgroups: dict[tuple[int, ...], Group] = {}

    @abstractmethod
    def all_reduce(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce `t` over the group in place and return it. `op` is one of ``sum avg max min prod``. Use the
        returned tensor: in a compiled graph it is another tensor with the same values."""

    def all_reduce_async(self, t: torch.Tensor, op: str = "sum") -> Pending:
        """Start `all_reduce`; do not use `t` before ``wait()`` returns it."""
        return Pending(self.all_reduce(t, op))

    @abstractmethod
    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Return every member's elements as one flat tensor, in group order (a view of `t` in a group of one)."""

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Sum `flat` over the group and return this member's range of it, flat, of ``counts[index]`` elements."""

    def reduce_scatter_async(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        """Start `reduce_scatter`; do not use `flat` before ``wait()`` returns this member's range."""
        return Pending(self.reduce_scatter(flat, counts))

    def all_gather_into(self, out: torch.Tensor, part: torch.Tensor) -> Pending:
        """Start to gather every member's flat `part`, all of one size, into the flat `out`, which may contain
        `part`. On cuda it runs in the current stream. Some backends count a write of `out`, others do not."""
        return Pending(overwrite(out, self.all_gather(part)))

    def reduce_scatter_into(self, out: torch.Tensor, flat: torch.Tensor, op: str = "sum") -> Pending:
        """Start to reduce `flat` over the group and write this member's range of it, all of one size, into the flat
        `out`; `op` is ``sum`` or ``avg``, which may change `flat`. On cuda it runs in the current stream, and `out`
        may be that range of `flat`."""
        overwrite(out, self.reduce_scatter(flat))
        if op == "avg":
            out.data.div_(self.size)
        return Pending(out)

    @abstractmethod
    def all_to_all(self, flat: Tensor, send_counts: Counts, recv_counts: Counts, out: Tensor | None = None) -> Tensor:
        """Send consecutive ranges of `flat` to the members and return the ranges received, flat, in group order. The
        result is written into `out` if given: a flat tensor of the same dtype that shares no memory with `flat`."""

    @abstractmethod
    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        """Overwrite `t` with the source's `t` and return it; all have the same number of elements."""

    def broadcast_async(self, t: torch.Tensor, src_index: int = 0) -> Pending:
        """Start `broadcast`; do not use `t` before ``wait()`` returns it."""
        return Pending(self.broadcast(t, src_index))

    @abstractmethod
    def exchange(self, blob: bytes) -> list[bytes]:
        """Return every member's blob; all must have the same length."""

    @abstractmethod
    def exchange_objects(self, value: Any) -> list[Any]:
        """Return every member's value; sends pickles. For the texts of errors, not for data."""

    def barrier(self) -> None:
        """Return when every member has called it."""
        self.exchange(b"\0")

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """Return the group of some members, by global rank. Its members call it; others may, and get a group of index
        -1."""
        key = tuple(sorted(ranks))  # torch orders a new group by rank
        assert set(key) <= set(self.ranks), "a subgroup is made of members"
        if key not in self._subgroups:
            made: Group
            if len(key) == self.size:
                made = self
            elif self.rank not in key:
                made = NonMemberGroup(self.rank, key)
            else:
                is_alone = len(key) == 1
                made = SingleRankGroup(self.rank, None, self.device_type) if is_alone else self._make_subgroup(key)
            # A group of all ranks is this one; a subgroup has no mesh.
            self._subgroups[key] = made if made.mesh is None else made.on_mesh(None, {})
        return self._subgroups[key]

    def _make_subgroup(self, ranks: tuple[int, ...]) -> Group:
        """Make the group of some members, in ascending order: two or more, this rank among them, and not all."""
        raise NotImplementedError

    def with_new_communicator(self) -> Group:
        """Return a group of the same ranks with a communicator of its own; all its members call it.

        Each group has its own order of calls. On cuda the members must still call the collectives of both groups in one
        order if one waits for another.
        """
        return self  # in one process there is no communicator to separate

    def for_other_thread(self) -> Group | None:
        """Return a group of the same ranks for tensors on the CPU, whose collectives another thread of each rank may
        call at any time; None if this group has none. All its members call it."""
        return None

    def on_mesh(self, mesh: Mesh | None, axes: dict[tuple[str, ...], Group]) -> Self:
        """Return a view of this group with a mesh, on the same communicators and subgroups; sends nothing. `axes` are
        existing groups along some axes."""
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        view.mesh, view._axes = mesh, axes
        for group in axes.values():
            self._subgroups.setdefault(tuple(sorted(group.ranks)), group)
        return view

    def axis(self, *names: str) -> Group:
        """Return the group of the ranks that differ from this one only along these axes of `mesh`."""
        if names not in self._axes:
            assert self.mesh is not None, "this group has no named axes"
            axes = [self.mesh.names.index(name) for name in names]
            self._axes[names] = self.subgroup(self.mesh.ranks_along(self.rank, axes))
        return self._axes[names]


def group_along(group: Group, names: Iterable[str], error: type[ShardTensorError] = LayoutError) -> Group:
    """Return the group of the ranks that differ from this one only along these axes; `group` itself without a mesh.

    The first call for some axes makes their group, so all its members call it; later calls send nothing.

    Raises:
        LayoutError: (or `error`) the mesh has no such axis.
    """
    if group.mesh is None:
        return group
    requested = tuple(names)
    group.mesh.refuse_unknown(requested, error)
    return group.axis(*(n for n in group.mesh.names if n in requested))  # in mesh order: one group for each set


def group_on_mesh(group: Group, mesh: Mesh) -> Group:
    """Return the view of a group with this mesh; equal meshes give the same object. Sends nothing. Views of one
    group use the same subgroups."""
    cached: dict[Mesh, Group] = vars(group).setdefault("_on_meshes", {})
    if mesh not in cached:
        cached[mesh] = group.on_mesh(mesh, {})
    return cached[mesh]


class SingleRankGroup(Group):
    """A group of one rank: collectives send nothing and return their argument."""

    size = 1
    index = 0

    def __init__(self, rank: int = 0, process_group: Any = None, device_type: str = "cpu") -> None:
        super().__init__()
        self.rank = rank
        self.process_group = process_group
        self.device_type = device_type
        self.ranks: Ranks = range(rank, rank + 1)

    def all_reduce(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        check_reduction(op, t.dtype)
        return t

    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        return t.reshape(-1)

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        return flat.reshape(-1)

    def all_to_all(self, flat: Tensor, send_counts: Counts, recv_counts: Counts, out: Tensor | None = None) -> Tensor:
        return flat.reshape(-1) if out is None else out.copy_(flat.reshape(-1))

    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        return t

    def exchange(self, blob: bytes) -> list[bytes]:
        return [blob]

    def exchange_objects(self, value: Any) -> list[Any]:
        return [value]

    def for_other_thread(self) -> Group:
        return self

    def axis(self, *names: str) -> Group:
        return self if self.mesh is None else super().axis(*names)

    def __repr__(self) -> str:
        return f"SingleRankGroup(rank={self.rank})"


class NonMemberGroup(Group):
    """A group that this process is not a member of: it has ranks, and its collectives raise."""

    index = -1
    device_type = "cpu"
    process_group = None

    def __init__(self, rank: int, ranks: Sequence[int] = ()) -> None:
        super().__init__()
        self.rank = rank
        self.ranks: Ranks = as_ranks(ranks)
        self.size = len(self.ranks)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        members = f" of ranks {list(self.ranks)}" if len(self.ranks) else ""
        raise RuntimeError(f"rank {self.rank} is not a member of the group{members}, so it cannot take part in it")

    all_reduce = all_reduce_async = all_gather = reduce_scatter = reduce_scatter_async = _refuse
    all_gather_into = reduce_scatter_into = all_to_all = broadcast = broadcast_async = _refuse
    exchange = exchange_objects = barrier = subgroup = axis = with_new_communicator = _refuse

    def __repr__(self) -> str:
        return f"NonMemberGroup(rank={self.rank}, ranks={self.ranks})"


def overwrite(out: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copy `values` into `out`, without an entry in the autograd graph. No copy if they are the same memory."""
    if out.data_ptr() != values.data_ptr():
        out.data.copy_(values)
    return out


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise RuleError if the reduction is undefined for the dtype, as torch's own reductions do. A sum of bools is
    "any", a product "all"."""
    if op not in REDUCTIONS:
        raise RuleError(f'no reduction is called "{op}"', {"reductions": ", ".join(REDUCTIONS)})
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise RuleError(f"the average of {dtype} values is not {dtype}", fix="sum them, or convert to a float dtype")
    if op in ("max", "min") and dtype.is_complex:
        raise RuleError(f"{dtype} values have no {op}", fix="reduce their absolute values")
    if op in ("max", "min") and dtype == torch.uint64:
        raise RuleError(f"no backend has {op} of {dtype} values", fix="convert to torch.int64")
