"""A `Group` that sends nothing and counts the bytes, for worlds of any size."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardtensor.comm.group import Counts, Group, check_reduction, scatter_route
from shardtensor.comm.process_group import reduce_group
from shardtensor.mesh import Mesh, Ranks, as_ranks

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

    def scatter(self, parts: Sequence[Tensor] | None, count: int, src_index: int, like: Tensor) -> Tensor:
        flat, send, recv = scatter_route(self, parts, count, src_index, like)
        self._count_route("scatter", like, send, recv)
        return self._own(flat, send).clone() if self.index == src_index else like.new_zeros(count)

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

    def on_mesh(self, mesh: Mesh, axes: dict[tuple[str, ...], Group]) -> Group:
        group = CountingGroup(self.rank, self.ranks, self.count, self.device_type)
        group._share_subgroups(self, mesh, axes)
        return group

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
