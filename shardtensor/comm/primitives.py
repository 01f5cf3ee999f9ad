"""The calls that move data through a torch process group, and the only names that torch versions disagree on.

torch 2.13 renamed ``_allgather_base`` to ``all_gather_single`` and ``_reduce_scatter_base`` to
``reduce_scatter_single`` (the functional ones likewise) and deprecates the old names. Eager calls go to the process
group itself, at a quarter of the host cost of a functional collective; under ``torch.compile`` the functional
collective is what a graph can hold. Both show as collectives in a profile.

Tensors here are contiguous, of a dtype and on a device that the backend takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardtensor.comm.lost import told
from shardtensor.errors import RuleError

_dispatch_modes = torch._C._len_torch_dispatch_stack  # 0 in all but traces, counters and the like: 50 ns
_NEW_NAMES = hasattr(dist.ProcessGroup, "all_gather_single")
# Names, not unbound methods: a process group may be written in Python.
_GATHER_NAME = "all_gather_single" if _NEW_NAMES else "_allgather_base"
_SCATTER_NAME = "reduce_scatter_single" if _NEW_NAMES else "_reduce_scatter_base"
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
_GATHER_ASYNC = _options(AllgatherOptions, asyncOp=True)
_SCATTER = _options(dist.ReduceScatterOptions, reduceOp=dist.ReduceOp.SUM)
_SCATTER_ASYNC = _options(dist.ReduceScatterOptions, reduceOp=dist.ReduceOp.SUM, asyncOp=True)
_ALL_TO_ALL = _options(dist.AllToAllOptions)
_FUNCTIONAL_NAMES = {"prod": "product"}


def _wait(work: Any) -> None:
    if work is not None:  # NCCL in the current stream has nothing to wait for
        work.wait()


def _refuse_recording() -> None:
    """Refuse to be recorded call by call, as `make_fx` does: the graph would never wait for what it started.

    Raises:
        RuleError: such a recorder is at work.
    """
    if get_proxy_mode() is not None:
        raise RuleError(
            "a collective was met by make_fx, or an export through it, which would record its start and not its end",
            fix=["torch.compile(module) records both", "unshard_module(module) first"],
        )


def _graph_result(result: torch.Tensor) -> torch.Tensor:
    """A new tensor for what a functional collective returned.

    torch 2.11 loses the gradient, silently, of an autograd Function that returns a collective's result itself or a
    tensor it was copied into. The compiler folds this copy into what uses it.
    """
    return result.clone()


def all_reduce(process_group: Any, t: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce `t` in place and return it; in a compiled graph return an equal tensor instead (see `_graph_result`)."""
    if torch.compiler.is_compiling():
        result = _graph_result(functional.all_reduce(t, _FUNCTIONAL_NAMES.get(op, op), process_group))
        t.copy_(result)
        return result
    if _dispatch_modes():
        _refuse_recording()
    try:
        _wait(process_group.allreduce([t], _REDUCE[op]))
    except RuntimeError as error:
        raise _told(error, "all_reduce", t, process_group) from error
    return t


def all_reduce_async(process_group: Any, t: torch.Tensor, op: str) -> Any:
    """Start reducing `t` in place; return torch's handle, for `finish`."""
    if _dispatch_modes():
        _refuse_recording()
    return process_group.allreduce([t], _REDUCE_ASYNC[op])


def all_gather(process_group: Any, t: torch.Tensor) -> torch.Tensor:
    """Return every member's flat `t`, all of one size, one after the other."""
    if torch.compiler.is_compiling():
        return _graph_result(_functional_gather(t, 0, process_group))
    if _dispatch_modes():
        _refuse_recording()
    out = t.new_empty(process_group.size() * t.numel())
    try:
        _wait(getattr(process_group, _GATHER_NAME)(out, t, _GATHER))
    except RuntimeError as error:
        raise _told(error, "all_gather", t, process_group) from error
    return out


def reduce_scatter(process_group: Any, flat: torch.Tensor) -> torch.Tensor:
    """Return this member's equal part of the sum of `flat`."""
    if torch.compiler.is_compiling():
        return _graph_result(_functional_scatter(flat, "sum", 0, process_group))
    if _dispatch_modes():
        _refuse_recording()
    out = flat.new_empty(flat.numel() // process_group.size())
    try:
        _wait(getattr(process_group, _SCATTER_NAME)(out, flat, _SCATTER))
    except RuntimeError as error:
        raise _told(error, "reduce_scatter", flat, process_group) from error
    return out


def reduce_scatter_async(process_group: Any, flat: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Start `reduce_scatter`; return torch's handle, for `finish`, and where the result will be."""
    out = flat.new_empty(flat.numel() // process_group.size())
    return getattr(process_group, _SCATTER_NAME)(out, flat, _SCATTER_ASYNC), out


def all_gather_into(process_group: Any, out: torch.Tensor, t: torch.Tensor) -> Any:
    """Start `all_gather` into `out`; return torch's handle, or None: on cuda it runs in the current stream."""
    if _dispatch_modes():
        _refuse_recording()
    return getattr(process_group, _GATHER_NAME)(out, t, _GATHER if t.is_cuda else _GATHER_ASYNC)


def reduce_scatter_into(process_group: Any, out: torch.Tensor, flat: torch.Tensor) -> Any:
    """Start `reduce_scatter` into `out`; return torch's handle, or None: on cuda it runs in the current stream."""
    if _dispatch_modes():
        _refuse_recording()
    return getattr(process_group, _SCATTER_NAME)(out, flat, _SCATTER if flat.is_cuda else _SCATTER_ASYNC)


def all_to_all(
    process_group: Any,
    flat: torch.Tensor,
    recv_counts: Sequence[int],
    send_counts: Sequence[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exchange consecutive ranges of `flat`, into `out` where it is given; counts are elements."""
    sizes = list(recv_counts), list(send_counts)
    if torch.compiler.is_compiling():
        result = _graph_result(functional.all_to_all_single(flat, *sizes, process_group))
        return result if out is None else out.copy_(result)
    if _dispatch_modes():
        _refuse_recording()
    out = flat.new_empty(sum(recv_counts)) if out is None else out
    try:
        _wait(process_group.alltoall_base(out, flat, *sizes, _ALL_TO_ALL))
    except RuntimeError as error:
        raise _told(error, "all_to_all", flat, process_group) from error
    return out


def broadcast_async(process_group: Any, t: torch.Tensor, src_index: int) -> Any:
    """Start overwriting `t` with the source's; return torch's handle, for `finish`."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = src_index, 0  # a bare number is not taken by every backend
    return process_group.broadcast([t], options)


def finish(work: Any, operation: str, t: torch.Tensor, process_group: Any) -> None:
    """Wait for a collective that was started on `t`."""
    try:
        work.wait()
    except RuntimeError as error:
        raise _told(error, operation, t, process_group) from error


def _told(error: RuntimeError, operation: str, t: torch.Tensor, process_group: Any) -> RuntimeError:
    return told(error, operation, t, dist.get_process_group_ranks(process_group))


_made: Counter[tuple[int, ...]] = Counter()


def timeout_of(process_group: Any) -> float:
    """The seconds after which a process group gives up on a collective; torch's default where it does not say."""
    for kind in ("cuda", "cpu"):
        try:
            return process_group._get_backend(torch.device(kind)).options._timeout.total_seconds()
        except (RuntimeError, AttributeError):  # no such backend, or one without a timeout
            continue
    return dist.default_pg_timeout.total_seconds()


def new_group(ranks: tuple[int, ...], timeout_s: float, options: Any = None) -> Any:
    """Make a process group of `ranks`, ascending global ranks; only they call it.

    torch names such a group with a number that counts other groups too, and that ranks with other memberships count
    differently (pytorch/pytorch#189073); ranks that look for each other under different names wait for ever. So for
    this call the name is made of the ranks and of how many groups of these same ranks there were. Ranks that are
    threads of one process share that count and torch's module, so there torch names it.
    """
    if dist.get_backend() == "threaded":
        return dist.new_group(ranks, timedelta(seconds=timeout_s), pg_options=options, use_local_synchronization=True)
    _made[ranks] += 1
    name = f"shardtensor_{sha256(repr(ranks).encode()).hexdigest()[:16]}_{_made[ranks]}"
    torch_name = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *args, **kwargs: name  # type: ignore[assignment]
    try:
        return dist.new_group(ranks, timedelta(seconds=timeout_s), pg_options=options, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = torch_name
