"""``torch.autograd.Function.apply`` with sharded tensors: never cut off from autograd.

A Function ties its results to its arguments below the level that a subclass of Tensor can see: on ShardedTensors it
would tie the shells, whose leaves would have no history. It has no override hook, so importing this module replaces
``Function.apply`` once. A call without ShardedTensors pays about 0.2 microseconds; torch.compile knows ``apply`` by its
name and traces the Function itself.

* Sharded arguments are gathered, differentiably, and results of the first one's shape are laid out as it is.
* Reentrant checkpointing, and in torch 2.11 the Function by which the other kind keeps its inputs, get local tensors.
* Full backward hooks of modules are shown whole gradients: what they watch is gathered and stays whole.
* A Function that itself makes a ShardedTensor out of plain arguments is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import CheckpointFunction

from shardtensor.errors import RuleError
from shardtensor.tensor.dispatch import warn_of_gather
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of, wrap

SHELLS: set[type] = {ShardedTensor}
"""Classes of sharded tensors."""

Function = torch.autograd.Function
_SaveInputs = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)
_torch_apply: Any = vars(Function)["apply"]  # a classmethod in Python up to torch 2.13, in C from 2.14
_plain_apply: Callable[..., Any] = getattr(_torch_apply, "__func__", _torch_apply)


@classmethod  # type: ignore[misc]
@functools.wraps(_plain_apply)
def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if cls is CheckpointFunction:
        return _checkpoint(*args)
    for x in args:
        if isinstance(x, ShardedTensor):
            if cls is BackwardHookFunction:
                return _watched_whole(args)
            if cls is _SaveInputs:
                return _saved(args)
            return fall_back(_on_plain(cls), args, kwargs)
    if kwargs:
        if any(isinstance(x, ShardedTensor) for x in kwargs.values()):
            return fall_back(_on_plain(cls), args, kwargs)
        out = _plain_apply(cls, *args, **kwargs)
    else:
        out = _plain_apply(cls, *args)
    kind = type(out)
    if kind in SHELLS or (kind is tuple and not SHELLS.isdisjoint(map(type, out))):
        _refuse_cut_off(cls, out)
    return out


def _on_plain(cls: type[Function]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return _refuse_cut_off(cls, _plain_apply(cls, *args, **kwargs))

    function.__name__ = f"{cls.__name__}.apply"
    return function


def _refuse_cut_off(cls: type[Function], out: Any) -> Any:
    """Return the results, unless one is a ShardedTensor that autograd would follow if it were plain."""
    for x in out if isinstance(out, tuple) else (out,):
        if isinstance(x, ShardedTensor) and x.grad_fn is None and _has_history(x):
            raise RuleError(
                f"{cls.__name__} returns a ShardedTensor: its result would be cut off from autograd",
                {"result": f"{tuple(x.shape)} {x.dtype}"},
                ["return full_tensor() of it from forward", "return local_tensor() of it and wrap that outside"],
            )
    return out


def _has_history(x: ShardedTensor) -> bool:
    """Whether the C-level body was tied to a graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch._C.TensorBase.grad_fn.__get__(x) is not None  # type: ignore[union-attr]


def _checkpoint(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Reentrant checkpointing over local tensors: what goes in and out of the Function is plain."""
    kinds_in = [_kind(x) for x in args]
    kinds_out: list[Any] = []  # not the ShardedTensors: their leaves own the graph that owns this

    def on_locals(*locals_: Any) -> Any:
        out = run(*map(_dressed, locals_, kinds_in))
        kinds_out[:] = map(_kind, _as_tuple(out))
        bare = tuple(map(local_of, _as_tuple(out)))
        return bare if isinstance(out, tuple) else bare[0]

    out = _plain_apply(CheckpointFunction, on_locals, preserve_rng_state, *map(local_of, args))
    shown = tuple(map(_dressed, _as_tuple(out), kinds_out))
    return shown if isinstance(out, tuple) else shown[0]


def _saved(args: tuple[Any, ...]) -> Any:
    """The local tensors are saved, and are ShardedTensors again when checkpointing asks for its inputs."""
    saver = _plain_apply(_SaveInputs, *map(local_of, args))
    if saver.grad_fn is not None:
        kinds, get_args = [_kind(x) for x in args[1:]], saver.grad_fn.get_args  # the first is a dummy
        saver.grad_fn.get_args = lambda saved: list(map(_dressed, get_args(saved), kinds))
    return saver


def _watched_whole(tensors: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """What a module takes or returns, whole, with the node that its full backward hooks watch directly behind."""
    size = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, ShardedTensor))
    warn_of_gather(torch.nn.Module.register_full_backward_hook, size)
    wholes = (x.full_tensor() if isinstance(x, ShardedTensor) else x for x in tensors)
    return _plain_apply(BackwardHookFunction, *wholes)


def _kind(x: Any) -> Any:
    return (x._layout, x._spec, x._group) if isinstance(x, ShardedTensor) else None


def _dressed(local: Any, kind: Any) -> Any:
    return local if kind is None else wrap(local, *kind)


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


Function.apply = apply  # type: ignore[method-assign]
