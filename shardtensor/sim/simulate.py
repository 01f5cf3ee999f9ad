"""`Group` over the ranks of a simulated world."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardtensor.comm import process_group
from shardtensor.comm.backend_support import dtype_of_sums
from shardtensor.comm.group import Counts, Group, Pending, SingleRankGroup, check_reduction, overwrite
from shardtensor.comm.process_group import reduce_group
from shardtensor.layout.explain import dtype_name
from shardtensor.mesh import Mesh, Ranks, as_ranks, read_mesh
from shardtensor.sim.channel import Call, Slot
from shardtensor.sim.world import Member, World

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


class SimGroup(Group):
    """Two or more ranks of a simulated world; inside `simulate`, `as_group()` returns it.

    It behaves as a `TorchGroup`: results are new tensors, and the version counter of a tensor that is reduced in place
    does not change. Sums are computed in group order.
    """

    device_type = "cpu"

    def __init__(self, world: World, member: Member, ranks: Ranks, communicator: int = 0) -> None:
        super().__init__()
        self._communicator = communicator
        self.world, self.member = world, member
        self.process_group: Any = self  # `as_group` accepts it
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = member.rank
        self.index = ranks.index(member.rank)
        self.mesh: Mesh | None = None
        self._separate: SimGroup | None = None

    def _post(
        self, name: str, text: str, signature: tuple[Any, ...], data: Any, combine: Any, check: Any = None
    ) -> Slot:
        call = Call(name, text, (name, *signature), data, combine, check)
        return self.world.post(self.member, self.ranks, call, self._communicator)

    def _post_and_wait(self, *args: Any) -> Any:
        return self.world.wait(self.member, self._post(*args))

    # -- reductions ---------------------------------------------------------------------------------------------

    def all_reduce(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self.all_reduce_async(t, op).wait()

    def all_reduce_async(self, t: torch.Tensor, op: str = "sum") -> Pending:
        check_reduction(op, t.dtype)
        slot = self._post(
            *("all_reduce", f"{op} of {_elements(t)}", (op, t.numel(), t.dtype)),
            *(_flat(t), lambda terms: _reduced(terms, op)),
        )
        return _Started(self, slot, lambda total: _overwrite(t, total))

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        return self.reduce_scatter_async(flat, counts).wait()

    def reduce_scatter_async(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> _Started:
        check_reduction("sum", flat.dtype)
        assert counts is not None or flat.numel() % self.size == 0, "an uneven split needs its counts"
        counts = [flat.numel() // self.size] * self.size if counts is None else list(counts)
        assert sum(counts) == flat.numel(), "counts must add up to the elements given"
        slot = self._post(
            *("reduce_scatter", f"{_elements(flat)} as {_counts(counts)}", (tuple(counts), flat.dtype)),
            *(_flat(flat), lambda terms: _reduced(terms, "sum")),
        )
        return _Started(self, slot, lambda total: _range(total, counts, self.index).clone().to(flat.device))

    def reduce_scatter_into(self, out: torch.Tensor, flat: torch.Tensor, op: str = "sum") -> Pending:
        divides_first = op == "avg" and flat.dtype == torch.float16  # its sum may be too large
        started = self.reduce_scatter_async(flat / self.size if divides_first else flat)
        return started.into(out, divisor=self.size if op == "avg" and not divides_first else 1)

    # -- data movement ------------------------------------------------------------------------------------------

    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        return self._start_all_gather(t, counts).wait()

    def all_gather_into(self, out: torch.Tensor, part: torch.Tensor) -> Pending:
        return self._start_all_gather(part, None).into(out)

    def _start_all_gather(self, t: torch.Tensor, counts: Sequence[int] | None) -> _Started:
        counts = [t.numel()] * self.size if counts is None else list(counts)
        assert counts[self.index] == t.numel(), "this rank's count is not its number of elements"
        slot = self._post(
            *("all_gather", f"{_counts(counts)} of {dtype_name(t.dtype)}", (tuple(counts), t.dtype)),
            *(_flat(t), _concatenated),
        )
        return _Started(self, slot, lambda full: full.clone().to(t.device))

    def all_to_all(self, flat: Tensor, send_counts: Counts, recv_counts: Counts, out: Tensor | None = None) -> Tensor:
        assert sum(send_counts) == flat.numel(), "counts must add up to the elements given"
        text = f"send {_counts(send_counts)}, receive {_counts(recv_counts)} of {dtype_name(flat.dtype)}"
        data = (_flat(flat), list(send_counts), list(recv_counts))
        sent = self._post_and_wait("all_to_all", text, (flat.dtype,), data, _copied, self._unmatched)
        result = _concatenated([_range(data, counts, self.index) for data, counts in sent]).to(flat.device)
        return result if out is None else out.copy_(result)

    def _unmatched(self, calls: Sequence[Call]) -> str:
        """Describe the first pair of members where one sends more or fewer elements than the other expects."""
        for i, sender in enumerate(calls):
            for j, receiver in enumerate(calls):
                sends, expects = sender.data[1][j], receiver.data[2][i]
                if sends != expects:
                    return f"rank {self.ranks[i]} sends {sends} elements where rank {self.ranks[j]} expects {expects}"
        return ""

    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        sent = self._post_and_wait(
            *("broadcast", f"{_elements(t)} from rank {self.ranks[src_index]}", (src_index, t.numel(), t.dtype)),
            *(_flat(t), lambda all_sent: all_sent[src_index].clone()),
        )
        return t if self.index == src_index else _overwrite(t, sent)

    # -- small exchanges ----------------------------------------------------------------------------------------

    def exchange(self, blob: bytes) -> list[bytes]:
        assert blob, "an exchange carries at least one byte"
        return list(self._post_and_wait("exchange", f"{len(blob)} bytes", (len(blob),), blob, list))

    def exchange_objects(self, value: Any) -> list[Any]:
        pickled = self._post_and_wait("exchange_objects", "", (), pickle.dumps(value), list)
        return [pickle.loads(blob) for blob in pickled]

    def barrier(self) -> None:
        self._post_and_wait("barrier", "", (), None, list)

    # -- other groups -------------------------------------------------------------------------------------------

    def _make_subgroup(self, ranks: tuple[int, ...]) -> Group:
        return SimGroup(self.world, self.member, as_ranks(ranks))

    def with_new_communicator(self) -> Group:
        if self._separate is None:
            self._separate = SimGroup(self.world, self.member, self.ranks, self._communicator + 1)
        return self._separate

    def __repr__(self) -> str:
        return f"SimGroup(ranks={self.ranks}, index={self.index})"


class _Started(Pending):
    """A started collective; `finish` makes this rank's result from the common one."""

    __slots__ = ("finish", "found", "group", "slot")

    def __init__(self, group: SimGroup, slot: Slot, finish: Callable[[Any], torch.Tensor]) -> None:
        self.group, self.slot, self.finish = group, slot, finish
        self.found: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.found is None:
            self.found = self.finish(self.group.world.wait(self.group.member, self.slot))
        return self.found

    def into(self, out: torch.Tensor, divisor: int = 1) -> Pending:
        """Write the result, divided, into `out`, which is then the result."""
        first = self.finish

        def finish(common: Any) -> torch.Tensor:
            overwrite(out, first(common))
            if divisor != 1:
                out.data.div_(divisor)
            return out

        self.finish = finish
        return self


def _flat(t: torch.Tensor) -> torch.Tensor:
    return t.detach().resolve_conj().resolve_neg().reshape(-1)


def _overwrite(t: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    t.data.copy_(flat.view(t.shape))  # as a backend writes: without a change of the version counter
    return t


def _reduced(terms: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    dtype = terms[0].dtype
    wide = dtype_of_sums(dtype)
    total = terms[0].to(wide, copy=True)
    for term in terms[1:]:
        total = _REDUCE[op](total, term.to(total.device, wide))
    return (total.div_(len(terms)) if op == "avg" else total).to(dtype)


def _concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.to(parts[0].device) for part in parts])


def _copied(data: Sequence[tuple[torch.Tensor, list[int], list[int]]]) -> list[tuple[torch.Tensor, list[int]]]:
    return [(sent.clone(), counts) for sent, counts, _ in data]


def _range(flat: torch.Tensor, counts: Sequence[int], index: int) -> torch.Tensor:
    return flat.narrow(0, sum(counts[:index]), counts[index])


def _elements(t: torch.Tensor) -> str:
    return f"{t.numel()} {dtype_name(t.dtype)}"


def _counts(counts: Sequence[int]) -> str:
    if len(set(counts)) == 1:
        return f"{len(counts)} x {counts[0]}"
    shown = "+".join(map(str, counts[:16]))
    return shown if len(counts) <= 16 else f"{shown}+... ({len(counts)} parts)"


copyreg.pickle(SimGroup, reduce_group)


def simulate(mesh: str | int | Mesh, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` as every rank of a world in this process and return the results, by rank.

    Inside `fn`, None as a process group means this world: tensors made from a spec are sharded over its ranks, and
    ``as_group()`` has ``rank``, ``size`` and, with two axes or more, ``mesh``. Forward, backward, optimizers and hooks
    do the same as on as many processes. One rank runs at a time, until it waits in a collective; then the next in rank
    order runs, so a run is deterministic. Each rank has its own default generators of torch and Python, which start
    with the caller's state: it draws the same numbers as a process would. The caller's generators do not change.

    The ranks share everything else in the process, such as module-level variables and the arguments. So `fn` should
    make its own model.

    Args:
        mesh: the axes and their sizes, ``"tp=4"`` or ``"dp=2, tp=2"``, major first; or a number of ranks.
        fn: the function that each rank runs.
        args, kwargs: its arguments.

    Returns:
        The results, one for each rank.

    Raises:
        DisagreementError: (a ValueError, raised on the ranks) their collectives do not match, or they would wait for
            ever; it names the calls, their group, and their places in the code.
        Exception: the first exception that `fn` raised, with a note that names its rank and how the others ended.

    Example:
        >>> import torch
        >>> import shardtensor as st
        >>> def total():
        ...     x = st.distribute(torch.arange(6.0), "[tp]")
        ...     return x.local_tensor().tolist(), x.sum().item()
        >>> simulate("tp=3", total)
        [([0.0, 1.0], 15.0), ([2.0, 3.0], 15.0), ([4.0, 5.0], 15.0)]
    """
    axes = read_mesh(mesh)
    world = World(axes)

    def enter(rank: int) -> None:
        process_group.simulated.set(_group_of(world, rank))

    return world.run(lambda rank: fn(*args, **kwargs), enter)


def _group_of(world: World, rank: int) -> Group:
    mesh = world.mesh
    if mesh.size == 1:
        group: Group = SingleRankGroup(0)
    else:
        group = SimGroup(world, world.members[rank], mesh.ranks)
    return group.on_mesh(mesh, {}) if len(mesh.axes) > 1 else group
