"""Collectives on a torch process group.

torch 2.13 renamed ``_allgather_base`` to ``all_gather_single`` and ``_reduce_scatter_base`` to
``reduce_scatter_single`` (the functional ones likewise) and deprecates the old names. Eager code calls the process
group itself, at a quarter of the host cost of a functional collective; under ``torch.compile`` a graph needs the
functional collective. A profile shows both as collectives.

Tensors here are contiguous, with a dtype and a device that the backend supports.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardtensor.comm.agree import name_ranks
from shardtensor.comm.call_site import call_site, user_call
from shardtensor.errors import AbsentRankError, RuleError
from shardtensor.layout.explain import dtype_name

_dispatch_modes = torch._C._len_torch_dispatch_stack  # takes 50 ns; 0 unless a trace or a counter is active
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
# Made once: an options object costs as much as the host side of a call. With asyncOp NCCL runs in a stream of its own,
# and wait() makes the current stream wait for it; without it NCCL runs in the current stream.
_REDUCE = {name: _options(dist.AllreduceOptions, reduceOp=op) for name, op in _REDUCE_OPS.items()}
_REDUCE_ASYNC = {name: _options(dist.AllreduceOptions, reduceOp=op, asyncOp=True) for name, op in _REDUCE_OPS.items()}
_GATHER = _options(AllgatherOptions)
_GATHER_ASYNC = _options(AllgatherOptions, asyncOp=True)
_SCATTER_OP = {op: _options(dist.ReduceScatterOptions, reduceOp=_REDUCE_OPS[op]) for op in ("sum", "avg")}
_SCATTER_OP_ASYNC = {
    op: _options(dist.ReduceScatterOptions, reduceOp=_REDUCE_OPS[op], asyncOp=True) for op in ("sum", "avg")
}
_SCATTER, _SCATTER_ASYNC = _SCATTER_OP["sum"], _SCATTER_OP_ASYNC["sum"]
_ALL_TO_ALL = _options(dist.AllToAllOptions)
_FUNCTIONAL_NAMES = {"prod": "product"}


def _refuse_recording() -> None:
    """Raise RuleError under `make_fx`, which records the start of a collective and not the wait for it."""
    if get_proxy_mode() is not None:
        raise RuleError(
            "make_fx, or an export through it, records the start of a collective and not its end",
            fix=["torch.compile(module) records both", "unshard_module(module) first"],
        )


def _graph_result(result: torch.Tensor) -> torch.Tensor:
    """Copy the result of a functional collective: torch 2.11 silently loses the gradient of an autograd Function that
    returns it, or a tensor that it was copied into. The compiler fuses this copy with the next operation.
    """
    return result.clone()


def _start(process_group: Any, name: str, *args: Any) -> Any:
    """Start a collective of the process group and return torch's handle; None from NCCL in the current stream."""
    if _dispatch_modes():
        _refuse_recording()
    return getattr(process_group, name)(*args)


def finish(work: Any, operation: str, t: torch.Tensor, process_group: Any) -> None:
    """Wait for a collective started on `t`; an error about missing ranks names the user's call."""
    if work is None:
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise _explained(error, operation, t, process_group) from error


def _run(process_group: Any, name: str, operation: str, t: torch.Tensor, *args: Any) -> None:
    """Run a collective on `t` to its end."""
    if _dispatch_modes():
        _refuse_recording()
    try:
        work = getattr(process_group, name)(*args)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise _explained(error, operation, t, process_group) from error


def all_reduce(process_group: Any, t: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce `t` in place and return it; in a compiled graph return an equal tensor instead (see `_graph_result`)."""
    if torch.compiler.is_compiling():
        result = _graph_result(functional.all_reduce(t, _FUNCTIONAL_NAMES.get(op, op), process_group))
        t.copy_(result)
        return result
    _run(process_group, "allreduce", "all_reduce", t, [t], _REDUCE[op])
    return t


def all_reduce_async(process_group: Any, t: torch.Tensor, op: str) -> Any:
    """Start reducing `t` in place; return torch's handle, for `finish`."""
    return _start(process_group, "allreduce", [t], _REDUCE_ASYNC[op])


def all_gather(process_group: Any, t: torch.Tensor) -> torch.Tensor:
    """Return the concatenation of every member's flat `t`; all have one size."""
    if torch.compiler.is_compiling():
        return _graph_result(_functional_gather(t, 0, process_group))
    out = t.new_empty(process_group.size() * t.numel())
    _run(process_group, _GATHER_NAME, "all_gather", t, out, t, _GATHER)
    return out


def reduce_scatter(process_group: Any, flat: torch.Tensor) -> torch.Tensor:
    """Return this member's range of the sum of `flat`; all have one size."""
    if torch.compiler.is_compiling():
        return _graph_result(_functional_scatter(flat, "sum", 0, process_group))
    out = flat.new_empty(flat.numel() // process_group.size())
    _run(process_group, _SCATTER_NAME, "reduce_scatter", flat, out, flat, _SCATTER)
    return out


def reduce_scatter_async(process_group: Any, flat: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Start `reduce_scatter`; return torch's handle, for `finish`, and the tensor that receives the result."""
    out = flat.new_empty(flat.numel() // process_group.size())
    return _start(process_group, _SCATTER_NAME, out, flat, _SCATTER_ASYNC), out


def all_gather_into(process_group: Any, out: torch.Tensor, t: torch.Tensor) -> Any:
    """Start `all_gather` into `out`; return torch's handle, or None: on cuda it runs in the current stream."""
    if _dispatch_modes():
        _refuse_recording()
    return getattr(process_group, _GATHER_NAME)(out, t, _GATHER if t.is_cuda else _GATHER_ASYNC)


def reduce_scatter_into(process_group: Any, out: torch.Tensor, flat: torch.Tensor, op: str = "sum") -> Any:
    """Start `reduce_scatter` into `out`; return torch's handle, or None: on cuda it runs in the current stream."""
    if _dispatch_modes():
        _refuse_recording()
    return getattr(process_group, _SCATTER_NAME)(out, flat, (_SCATTER_OP if flat.is_cuda else _SCATTER_OP_ASYNC)[op])


def all_to_all(
    process_group: Any,
    flat: torch.Tensor,
    recv_counts: Sequence[int],
    send_counts: Sequence[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exchange consecutive ranges of `flat`, into `out` if given; counts are elements."""
    sizes = list(recv_counts), list(send_counts)
    if torch.compiler.is_compiling():
        result = _graph_result(functional.all_to_all_single(flat, *sizes, process_group))
        return result if out is None else out.copy_(result)
    out = flat.new_empty(sum(recv_counts)) if out is None else out
    _run(process_group, "alltoall_base", "all_to_all", flat, out, flat, *sizes, _ALL_TO_ALL)
    return out


def broadcast_async(process_group: Any, t: torch.Tensor, src_index: int) -> Any:
    """Start overwriting `t` with the source's; return torch's handle, for `finish`."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = src_index, 0  # not every backend accepts a bare number
    return process_group.broadcast([t], options)


def becomes_true(condition: Callable[[], bool], limit_s: float = 1.0) -> bool:
    """Return whether `condition` returns True within `limit_s`.

    A backend's thread may refer to a tensor for a moment after its collective has ended, which its wait does not show.
    """
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


# Texts in the errors of gloo and NCCL about missing ranks.
_SIGNS = (
    *("Timed out waiting", "timeout", "Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("Connection refused", "remote process exited", "communicator was aborted"),
)


def _explained(error: RuntimeError, operation: str, t: torch.Tensor, process_group: Any) -> RuntimeError:
    """Return an error that names the user's call and the ranks if a backend's error is about missing ranks."""
    text = str(error)
    if isinstance(error, AbsentRankError) or not any(sign in text for sign in _SIGNS):
        return error
    frame = sys._getframe(1)
    return AbsentRankError(
        f"{user_call(frame) or operation}: other ranks of the group did not join, or were lost",
        {
            "call": f"{operation} of {t.numel()} {dtype_name(t.dtype)}\n{call_site(frame)}",
            "ranks": name_ranks(dist.get_process_group_ranks(process_group)).removeprefix("ranks "),
            "backend": text,
        },
        "call it on every rank of the group; SHARDTENSOR_CHECK=collectives tells which ranks are where",
    )


_made: Counter[tuple[int, ...]] = Counter()


def timeout_of(process_group: Any) -> float:
    """Return the timeout of a process group in seconds; torch's default if its backend has none."""
    for kind in ("cuda", "cpu"):
        try:
            return process_group._get_backend(torch.device(kind)).options._timeout.total_seconds()
        except (RuntimeError, AttributeError):  # no such backend, or one without a timeout
            continue
    return dist.default_pg_timeout.total_seconds()


def new_group(ranks: tuple[int, ...], timeout_s: float, options: Any = None, backend: str | None = None) -> Any:
    """Make a process group of `ranks`, ascending global ranks; only they call it.

    torch names such a group by a counter of all groups that this process has made (pytorch/pytorch#189073), so ranks of
    different groups would wait for ever under different names. This call makes the name from the ranks and the number
    of earlier groups of the same ranks; ranks that are threads of one process share both counters.
    """
    arguments = (ranks, timedelta(seconds=timeout_s), backend, options, True)  # True: only the members call it
    if dist.get_backend() == "threaded":
        return dist.new_group(*arguments)
    _made[ranks] += 1
    name = f"shardtensor_{sha256(repr(ranks).encode()).hexdigest()[:16]}_{_made[ranks]}"
    torch_name = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *args, **kwargs: name  # type: ignore[assignment]
    try:
        return dist.new_group(*arguments)
    finally:
        distributed_c10d._process_group_name = torch_name
