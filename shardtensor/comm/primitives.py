"""The five calls that move data through a torch process group, and the only names that torch versions disagree on.

torch 2.13 renamed ``_allgather_base`` to ``all_gather_single`` and ``_reduce_scatter_base`` to
``reduce_scatter_single`` (the functional ones likewise) and deprecates the old names. Eager calls go to the process
group itself, at a quarter of the host cost of a functional collective; under ``torch.compile`` the functional
collective is what a graph can hold. Both show as collectives in a profile.

Tensors here are contiguous, of a dtype and on a device that the backend takes; outputs are written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import AllgatherOptions

_NEW_NAMES = hasattr(dist.ProcessGroup, "all_gather_single")
_gather_call: Any = dist.ProcessGroup.all_gather_single if _NEW_NAMES else dist.ProcessGroup._allgather_base
_scatter_call: Any = dist.ProcessGroup.reduce_scatter_single if _NEW_NAMES else dist.ProcessGroup._reduce_scatter_base
_functional_gather: Any = functional.all_gather_single if _NEW_NAMES else functional.all_gather_tensor
_functional_scatter: Any = functional.reduce_scatter_single if _NEW_NAMES else functional.reduce_scatter_tensor


def _options(kind: Any, **fields: Any) -> Any:
    options = kind()
    for name, value in {"asyncOp": False, **fields}.items():
        setattr(options, name, value)
    return options


_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
# Made once: an options object costs as much as the host side of a call. With asyncOp NCCL runs beside the current
# stream and wait() joins the two; without it NCCL runs in that stream.
_REDUCE = {name: _options(dist.AllreduceOptions, reduceOp=op) for name, op in _REDUCE_OPS.items()}
_REDUCE_ASYNC = {name: _options(dist.AllreduceOptions, reduceOp=op, asyncOp=True) for name, op in _REDUCE_OPS.items()}
_GATHER = _options(AllgatherOptions)
_SCATTER = _options(dist.ReduceScatterOptions, reduceOp=dist.ReduceOp.SUM)
_ALL_TO_ALL = _options(dist.AllToAllOptions)
_FUNCTIONAL_NAMES = {"prod": "product"}


def all_reduce(process_group: Any, t: torch.Tensor, op: str) -> None:
    """Reduce `t` in place."""
    if torch.compiler.is_compiling():
        t.copy_(functional.all_reduce(t, _FUNCTIONAL_NAMES.get(op, op), process_group))
    else:
        process_group.allreduce([t], _REDUCE[op]).wait()


def all_reduce_async(process_group: Any, t: torch.Tensor, op: str) -> Any:
    """Start reducing `t` in place; return torch's handle."""
    return process_group.allreduce([t], _REDUCE_ASYNC[op])


def all_gather(process_group: Any, out: torch.Tensor, t: torch.Tensor) -> None:
    """Write every member's `t`, all of one size, to `out` one after the other."""
    if torch.compiler.is_compiling():
        out.copy_(_functional_gather(t, 0, process_group))
    else:
        _gather_call(process_group, out, t, _GATHER).wait()


def reduce_scatter(process_group: Any, out: torch.Tensor, flat: torch.Tensor) -> None:
    """Write this member's equal part of the sum of `flat` to `out`."""
    if torch.compiler.is_compiling():
        out.copy_(_functional_scatter(flat, "sum", 0, process_group))
    else:
        _scatter_call(process_group, out, flat, _SCATTER).wait()


def all_to_all(
    process_group: Any, out: torch.Tensor, flat: torch.Tensor, recv_counts: Sequence[int], send_counts: Sequence[int]
) -> None:
    """Exchange consecutive ranges of `flat`; counts are elements."""
    if torch.compiler.is_compiling():
        out.copy_(functional.all_to_all_single(flat, list(recv_counts), list(send_counts), process_group))
    else:
        process_group.alltoall_base(out, flat, recv_counts, send_counts, _ALL_TO_ALL).wait()


def broadcast_async(process_group: Any, t: torch.Tensor, src_index: int) -> Any:
    """Start overwriting `t` with the source's; return torch's handle."""
    return process_group.broadcast(t, src_index)
