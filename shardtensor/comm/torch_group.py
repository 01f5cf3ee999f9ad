"""`Group` over a torch process group, of any backend."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from ctypes import string_at
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtensor.comm import primitives
from shardtensor.comm.backend_support import BackendSupport
from shardtensor.comm.group import Counts, Group, Pending, check_reduction
from shardtensor.mesh import Mesh, Ranks, as_ranks


class TorchGroup(Group):
    """A torch process group of two or more ranks, in its order; make one with `as_group`. Tensors that the backend
    does not support are converted by `support`; the usual tensor costs one look-up."""

    def __init__(self, process_group: Any) -> None:
        super().__init__()
        self.process_group = process_group
        self.ranks: Ranks = as_ranks(dist.get_process_group_ranks(process_group))
        self.size: int = process_group.size()
        self.index: int = process_group.rank()
        self.rank: int = self.ranks[self.index]
        self.mesh: Mesh | None = None
        self._separate: TorchGroup | None = None
        self._for_other_thread: TorchGroup | None = None
        self.support = BackendSupport.of_backends(dist.get_backend_config(process_group), process_group.bound_device_id)
        self.device_type = self.support.device_type

    def all_reduce(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if (t.is_cuda, t.dtype, op) in self.support.reduced_as_is and t.is_contiguous():
            return primitives.all_reduce(self.process_group, t, op)
        check_reduction(op, t.dtype)
        if op == "prod" and t.dtype.is_complex:  # no backend multiplies complex numbers
            t.detach().copy_(self.all_gather(t).view(self.size, *t.shape).prod(0))
            return t
        sent = primitives.all_reduce(
            self.process_group, self.support.to_reduce(t), op if op in self.support.ops else "sum"
        )
        result = self._finish_reduce(sent, t, op)
        return result if torch.compiler.is_compiling() else t

    def all_reduce_async(self, t: torch.Tensor, op: str = "sum") -> Pending:
        if torch.compiler.is_compiling():  # the compiler schedules the overlap
            return Pending(self.all_reduce(t, op))
        if (t.is_cuda, t.dtype, op) in self.support.reduced_as_is and t.is_contiguous():
            return Started(primitives.all_reduce_async(self.process_group, t, op), t, self.process_group)
        check_reduction(op, t.dtype)
        sent = self.support.to_reduce(t)
        work = primitives.all_reduce_async(self.process_group, sent, op if op in self.support.ops else "sum")
        return Started(work, t, self.process_group, lambda: self._finish_reduce(sent, t, op))

    def _finish_reduce(self, sent: torch.Tensor, t: torch.Tensor, op: str) -> torch.Tensor:
        if op not in self.support.ops:
            sent.div_(self.size)  # an average, by a backend that has only sums
        result = self.support.from_reduce(sent, t).view(t.shape)
        t.detach().copy_(result)
        return result

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        if counts is None and (flat.is_cuda, flat.dtype, "sum") in self.support.reduced_as_is and flat.is_contiguous():
            assert flat.numel() % self.size == 0, "an uneven split needs its counts"
            return primitives.reduce_scatter(self.process_group, flat.view(-1))
        check_reduction("sum", flat.dtype)
        sent = self.support.to_reduce(flat)
        assert counts is not None or flat.numel() % self.size == 0, "an uneven split needs its counts"
        assert counts is None or sum(counts) == flat.numel(), "counts must add up to the elements given"
        widest, total = _widest(counts, flat.numel(), self.size, 2 if flat.dtype.is_complex else 1)
        if widest * self.size == total:
            return self.support.from_reduce(primitives.reduce_scatter(self.process_group, sent), flat)
        assert counts is not None
        scale = total // flat.numel()
        padded = sent.new_zeros(self.size * widest)
        for i, part in enumerate(sent.split([count * scale for count in counts])):
            padded[i * widest : i * widest + part.numel()] = part
        out = primitives.reduce_scatter(self.process_group, padded)
        return self.support.from_reduce(out[: counts[self.index] * scale].clone(), flat)

    def reduce_scatter_async(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        as_is = (flat.is_cuda, flat.dtype, "sum") in self.support.reduced_as_is and flat.is_contiguous()
        if counts is not None or not as_is or torch.compiler.is_compiling():
            return super().reduce_scatter_async(flat, counts)
        work, out = primitives.reduce_scatter_async(self.process_group, flat.detach().view(-1))
        return Started(work, out, self.process_group, call="reduce_scatter", source=flat)

    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        if counts is None and (t.is_cuda, t.dtype) in self.support.moved_as_is and t.is_contiguous():
            return primitives.all_gather(self.process_group, t.view(-1))
        sent = self.support.to_move(t)
        assert counts is None or counts[self.index] == t.numel(), "this rank's count is not its number of elements"
        scale = self.support.elements_per_item(t.dtype)
        widest, total = _widest(counts, t.numel() * self.size, self.size, scale)
        if widest * self.size == total:
            return self.support.from_move(primitives.all_gather(self.process_group, sent), t)
        assert counts is not None
        sizes = [count * scale for count in counts]
        padded = sent.new_zeros(widest)
        padded[: sent.numel()] = sent
        rows = primitives.all_gather(self.process_group, padded).view(self.size, widest)
        # A concatenation, not a slice of the padded buffer, which the result would keep alive.
        out = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
        return self.support.from_move(out, t)

    def all_gather_into(self, out: torch.Tensor, part: torch.Tensor) -> Pending:
        if (part.is_cuda, part.dtype) not in self.support.moved_as_is:
            return super().all_gather_into(out, part)
        work = primitives.all_gather_into(self.process_group, out, part)
        return Started(work, out, self.process_group, call="all_gather", source=part)

    def reduce_scatter_into(self, out: torch.Tensor, flat: torch.Tensor, op: str = "sum") -> Pending:
        if (flat.is_cuda, flat.dtype, op) in self.support.reduced_as_is:
            work = primitives.reduce_scatter_into(self.process_group, out, flat, op)
            return Started(work, out, self.process_group, call="reduce_scatter", source=flat)
        if op == "sum" or (flat.is_cuda, flat.dtype, "sum") not in self.support.reduced_as_is:
            return super().reduce_scatter_into(out, flat, op)
        if flat.dtype == torch.float16:  # its sum may be too large
            flat.data.div_(self.size)
        work = primitives.reduce_scatter_into(self.process_group, out, flat)
        finish = None if flat.dtype == torch.float16 else lambda: out.data.div_(self.size)
        return Started(work, out, self.process_group, finish, "reduce_scatter", flat)

    def all_to_all(self, flat: Tensor, send_counts: Counts, recv_counts: Counts, out: Tensor | None = None) -> Tensor:
        assert sum(send_counts) == flat.numel(), "counts must add up to the elements given"
        assert out is None or out.dtype == flat.dtype, "`out` has the dtype of `flat`"
        sent = self.support.to_move(flat)
        scale = self.support.elements_per_item(flat.dtype)
        if scale != 1:
            send_counts = [count * scale for count in send_counts]
            recv_counts = [count * scale for count in recv_counts]
        is_direct = out is not None and (out.is_cuda, out.dtype) in self.support.moved_as_is
        received = primitives.all_to_all(self.process_group, sent, recv_counts, send_counts, out if is_direct else None)
        if is_direct:
            return received
        result = self.support.from_move(received, flat)
        return result if out is None else out.copy_(result)

    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        return self.broadcast_async(t, src_index).wait()

    def broadcast_async(self, t: torch.Tensor, src_index: int = 0) -> Pending:
        sent = self.support.to_move(t)
        work = primitives.broadcast_async(self.process_group, sent, src_index)
        if sent.data_ptr() == t.data_ptr():
            return Started(work, t, self.process_group, call="broadcast")

        def finish() -> None:
            t.detach().copy_(self.support.from_move(sent, t).view(t.shape))

        return Started(work, t, self.process_group, finish, "broadcast", sent)

    def exchange(self, blob: bytes) -> list[bytes]:
        assert blob, "an exchange carries at least one byte"
        sent = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        data = bytes_of(self.all_gather(sent))
        return [data[i : i + len(blob)] for i in range(0, len(data), len(blob))]

    def exchange_objects(self, value: Any) -> list[Any]:
        blob = pickle.dumps(value)
        counts = [int.from_bytes(count, "little") for count in self.exchange(len(blob).to_bytes(8, "little"))]
        data = bytes_of(self.all_gather(torch.frombuffer(bytearray(blob), dtype=torch.uint8), counts))
        ends = list(accumulate(counts, initial=0))
        return [pickle.loads(data[start:end]) for start, end in pairwise(ends)]

    def _make_subgroup(self, ranks: tuple[int, ...]) -> Group:
        return TorchGroup(primitives.new_group(ranks, primitives.timeout_of(self.process_group)))

    def with_new_communicator(self) -> Group:
        ranks = tuple(self.ranks)
        is_real = set(self.support.backends.values()) <= {"gloo", "nccl"}  # others run in one process
        if not is_real or list(ranks) != sorted(ranks):  # torch sorts the ranks of a new group
            return self
        if self._separate is None:
            self._separate = TorchGroup(primitives.new_group(ranks, primitives.timeout_of(self.process_group)))
        return self._separate

    def for_other_thread(self) -> Group | None:
        ranks = tuple(self.ranks)
        if not set(self.support.backends.values()) <= {"gloo", "nccl"} or list(ranks) != sorted(ranks):
            return None
        if self._for_other_thread is None:
            timeout_s = primitives.timeout_of(self.process_group)
            self._for_other_thread = TorchGroup(primitives.new_group(ranks, timeout_s, backend="gloo"))
        return self._for_other_thread

    def __repr__(self) -> str:
        return f"TorchGroup(ranks={self.ranks}, index={self.index}, {self.support.backends})"


class Started(Pending):
    """A collective that torch runs; `source`, the tensor that it reads, is kept alive until the wait. After the wait
    `finish` copies the result into `t` if a converted tensor was sent."""

    __slots__ = ("call", "finish", "process_group", "source", "work")

    def __init__(
        self,
        work: Any,
        t: torch.Tensor,
        process_group: Any,
        finish: Any = None,
        call: str = "all_reduce",
        source: torch.Tensor | None = None,
    ) -> None:
        self.work, self.result, self.process_group, self.finish, self.call = work, t, process_group, finish, call
        self.source = source

    def wait(self) -> torch.Tensor:
        primitives.finish(self.work, self.call, self.result, self.process_group)
        self.work = self.source = None
        if self.finish is not None:
            finish, self.finish = self.finish, None  # a second wait does nothing
            finish()
        return self.result


def _widest(counts: Sequence[int] | None, numel: int, size: int, scale: int) -> tuple[int, int]:
    """Return the largest count and the sum of all, in elements as they are sent."""
    if counts is None:
        return numel // size * scale, numel * scale
    assert len(counts) == size, "one count for each member"
    return max(counts) * scale, sum(counts) * scale


def bytes_of(t: torch.Tensor) -> bytes:
    """Return the memory of a contiguous tensor of bytes."""
    t = t.cpu()
    return string_at(t.data_ptr(), t.numel())
