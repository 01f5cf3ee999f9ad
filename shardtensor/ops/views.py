"""Views: a view of a ShardedTensor is a view of its local tensor, so a write into one is visible in the other.

If elements must be sent, a view gathers (the fallback) and the result is a *copy* (`tensor.copied`): in-place writes
to it raise, because the dense program would write into the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from shardtensor.layout.layout import Layout, MeshLayout, replicated
from shardtensor.ops.engine import on_grid
from shardtensor.ops.local_call import LocalCall, cached_call, wrapped
from shardtensor.rules.rule import one_dim
from shardtensor.rules.views import expanded, permuted, repeated, reshaped
from shardtensor.tensor.dispatch import bare_name, implements, implements_each, name_of
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, copy_of, reduced, view_of, wrap


def view(x: ShardedTensor, local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a view of `x`, over a view of its local tensor; plain if every rank has the whole."""
    if layout.is_whole_on_all(x._group.size) and x._copied is None:
        return local
    return view_of(x, local, layout)


def local_view(call: Callable[..., Any], x: ShardedTensor, layout: Layout) -> LocalCall:
    """Return the `LocalCall` that views the local tensor, for any `x` of this layout."""
    return LocalCall(call, None if layout.is_whole_on_all(x._group.size) else layout, is_view=True)


def copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view of the first argument by the fallback, and mark the results as copies."""
    if not isinstance(args[0], ShardedTensor):
        return fall_back(func, args, kwargs)

    there = None if isinstance(args[0]._layout, MeshLayout) else on_grid(name_of(func), args[0])
    result = fall_back(func, args, kwargs) if there is None else func(there, *args[1:], **kwargs)
    if isinstance(result, tuple | list):
        return type(result)(copy_of(part.clone(), args[0], name_of(func)) for part in result)
    return copy_of(result, args[0], name_of(func)) if isinstance(result, torch.Tensor) else result


def to_view(x: ShardedTensor) -> ShardedTensor:
    """Return `x`, for a view of it; a partial `x` is reduced first and marked as a copy."""
    return copy_of(reduced(x), x, "a view of a tensor that is still to be reduced") if x._layout.partial else x


# -- dims in another order ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def order_of(func: Any, ndim: int, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the source of each dim of `func`, read from the strides of a meta tensor; errors are torch's."""
    probe = torch.empty_strided((2,) * ndim, tuple(range(1, ndim + 1)), device="meta")
    return tuple(
        stride - 1 for stride in func(probe, *(list(a) if isinstance(a, tuple) else a for a in arguments)).stride()
    )


def _permuting(func: Any) -> Callable[..., Any]:
    names = ("dim0", "dim1", "axis0", "axis1", "source", "destination", "dims")

    def order(x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
        values = [*args, *(kwargs[name] for name in names if name in kwargs)]
        return order_of(func, x.dim(), tuple(tuple(v) if isinstance(v, list | torch.Size) else v for v in values))

    def handler(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, ShardedTensor):
            return fall_back(func, (input, *args), kwargs)
        x = to_view(input)
        if isinstance(x._layout, MeshLayout):
            return view(x, func(x._local, *args, **kwargs), permuted(x._layout, order(x, args, kwargs)))
        there, result = order(x, args, kwargs), copied(func, (input, *args), kwargs)
        back = sorted(range(x.dim()), key=there.__getitem__)
        again = (lambda: func(input, *args, **kwargs), lambda changed: input.copy_(changed.permute(back)))
        result._copied = result._copied._replace(again=again)
        return result

    def decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
        x = args[0] if args else None
        if kwargs or not isinstance(x, ShardedTensor) or x._layout.partial or not isinstance(x._layout, MeshLayout):
            return None
        return local_view(func, x, permuted(x._layout, order(x, args[1:], {})))

    return cached_call(func, decide, handler)


implements_each("transpose swapaxes swapdims movedim moveaxis permute t adjoint T mT H mH", _permuting)


# -- other shapes, the same elements -----------------------------------------------------------------------------------


def _to_shape(x: ShardedTensor, shape: tuple[int, ...]) -> tuple[Callable[..., torch.Tensor], Layout] | None:
    """Return a view of local tensors, and its layout, for a view of another global shape; None if it must gather."""
    layout = x._layout
    if layout.shape == shape:
        return lambda local, *_: local.view_as(local), layout
    if not isinstance(layout, MeshLayout):
        return None
    if 0 in shape and len(layout.ranks) == x._group.size:  # no rank holds an element
        return lambda local, *_: local.reshape(shape), replicated(shape, layout.ranks, layout.grid)
    found = reshaped(layout, shape)
    if found is None:
        return None
    sizes = found.local_shape(x._group.rank)
    return lambda local, *_: local.reshape(sizes), found


@lru_cache(maxsize=4096)
def _target(func: Any, shape: tuple[int, ...], arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape that `func` gives a contiguous tensor of `shape`; errors are torch's."""
    probe = torch.empty(shape, device="meta")
    return tuple(func(probe, *(list(a) if isinstance(a, tuple) else a for a in arguments)).shape)


def _reshaping(func: Any) -> Callable[..., Any]:
    def handler(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        values = tuple(tuple(v) if isinstance(v, list | tuple) else v for v in (*args, *kwargs.values()))
        if not isinstance(input, ShardedTensor) or any(isinstance(v, torch.Tensor | torch.dtype) for v in values):
            return copied(func, (input, *args), kwargs)
        if kwargs:
            shape = tuple(func(torch.empty(input.shape, device="meta"), *args, **kwargs).shape)
        else:
            shape = _target(func, tuple(input.shape), values)
        x = to_view(input)
        found = _to_shape(x, shape)
        return copied(torch.reshape, (input, shape), {}) if found is None else view(x, found[0](x._local), found[1])

    def decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
        x = args[0] if args else None
        values = tuple(tuple(v) if isinstance(v, list | tuple) else v for v in args[1:])
        if kwargs or not isinstance(x, ShardedTensor) or x._layout.partial:
            return None
        if any(isinstance(v, torch.Tensor | torch.dtype) for v in values):
            return None
        found = _to_shape(x, _target(func, tuple(x.shape), values))
        return None if found is None else local_view(found[0], x, found[1])

    return cached_call(func, decide, handler)


implements_each("view reshape flatten unflatten ravel squeeze unsqueeze", _reshaping)


@implements(torch.Tensor.view_as, torch.Tensor.reshape_as)
def view_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a view of `input` of the shape of `other`."""
    return input.reshape(other.shape)


# -- broadcast views and copies ----------------------------------------------------------------------------------------


@implements(torch.Tensor.expand, torch.broadcast_to, torch.Tensor.broadcast_to)
def expand(input: ShardedTensor, *sizes: Any, size: Any = None, implicit: bool = False) -> torch.Tensor:
    """Repeat dims of size 1, and new ones in front, without copying."""
    sizes = (size,) if size is not None else sizes
    requested = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)
    x = to_view(input)
    shape = _target(torch.Tensor.expand, tuple(x.shape), (requested,))
    layout = expanded(x._layout, shape) if isinstance(x._layout, MeshLayout) else None
    if layout is None:
        return copied(torch.Tensor.expand, (input, requested), {})
    return view(x, x._local.expand(layout.local_shape(x._group.rank)), layout)


@implements(torch.Tensor.expand_as)
def expand_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `input` expanded to the shape of `other`."""
    return input.expand(other.shape)


@implements(torch.clone, torch.Tensor.clone)
def clone(input: ShardedTensor, **kwargs: Any) -> ShardedTensor:
    """Copy each local tensor; the copy has the same layout."""
    return wrap(input._local.clone(**kwargs), input._layout, input._spec, input._group)


@implements(torch.detach, torch.Tensor.detach)
def detach(input: ShardedTensor) -> ShardedTensor:
    """Return a tensor on the same memory, without the graph."""
    return view_of(input, input._local.detach(), input._layout, input._spec)


@implements(torch.Tensor.contiguous)
def contiguous(input: ShardedTensor, memory_format: torch.memory_format = torch.contiguous_format) -> ShardedTensor:
    """Return the same object if the local tensor is contiguous, else a copy."""
    local = input._local.contiguous(memory_format=memory_format)
    return input if local is input._local else wrap(local, input._layout, input._spec, input._group)


def _part_of_complex(func: Any) -> Callable[..., Any]:
    def handler(input: ShardedTensor) -> torch.Tensor:
        if bare_name(func) == "real" and not input.is_complex():
            return input
        x = to_view(input)
        return view(x, func(x._local), x._layout)

    return handler


implements_each("real imag", _part_of_complex)
implements_each(
    "tensor_split hsplit vsplit dsplit view_as_real view_as_complex as_strided squeeze_copy diagonal Tensor.unfold",
    lambda func: lambda *args, **kwargs: copied(func, args, kwargs),
)


# -- repeats -----------------------------------------------------------------------------------------------------------


@implements(torch.Tensor.repeat)
def repeat(input: ShardedTensor, *times: Any, **kwargs: Any) -> torch.Tensor:
    """Repeat dims, with new ones in front; a sharded dim that is repeated gathers."""
    counts = next(iter(kwargs.values())) if kwargs else times
    counts = tuple(counts[0]) if len(counts) == 1 and not isinstance(counts[0], int) else tuple(counts)
    torch.empty(input.shape, device="meta").repeat(counts)  # torch's errors
    x = reduced(input)
    layout = repeated(x._layout, counts) if isinstance(x._layout, MeshLayout) else None
    if layout is None or (layout.is_replicated and not layout.is_whole_on_all(x._group.size)):
        return fall_back(torch.Tensor.repeat, (input, *counts), {})
    return wrapped(x._local.repeat(counts), None if layout.is_replicated else layout, x._group)


@implements(torch.repeat_interleave, torch.Tensor.repeat_interleave)
def repeat_interleave(
    input: torch.Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor:
    """Repeat every index of a dim by one number, without communication."""
    if dim is None or isinstance(repeats, torch.Tensor) or not input.dim() or repeats < 1:
        return fall_back(torch.repeat_interleave, (input, repeats, dim), {"output_size": output_size})
    d, shape = one_dim(input.dim(), dim), list(input.shape)
    shape.insert(d + 1, repeats)
    # A copy, as in torch: the result for one element would be a view.
    return input.unsqueeze(d + 1).expand(shape).clone(memory_format=torch.contiguous_format).flatten(d, d + 1)
