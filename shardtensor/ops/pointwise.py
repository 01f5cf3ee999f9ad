"""Elementwise operations, with broadcasting, and the same in place: ``d0 d1, d1, d0 1 -> d0 d1``.

An operand that is whole along a dim that another one shards is sliced there. Operands of one layout, whatever it is,
and Python numbers need no redistribution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from shardtensor.comm import collectives
from shardtensor.comm.redistribute import along, part
from shardtensor.layout.layout import MeshLayout
from shardtensor.ops.by_rule import by_rule
from shardtensor.ops.engine import group_of, refuse_to_move
from shardtensor.rules.table import ROWS
from shardtensor.tensor.copied import refuse_lost_write, version_of
from shardtensor.tensor.dispatch import implements_each, name_of, refuse_partial_write
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, reduced, wrap

ELEMENTWISE = tuple(name for name, row in ROWS.items() if row.section.startswith("elementwise:"))
NUMBERS = frozenset((int, float, bool, complex))


def elementwise(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the handler of an elementwise function of any operands, by the row of `name`."""
    ruled = by_rule(func, name)

    def handler(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], ShardedTensor):
            x = args[0]
            layout = x._layout
            if not layout.partial and not layout.is_replicated:
                local = _fast(func, x, args, kwargs)
                if local is not None:
                    return wrap(local, layout, x._spec, x._group)
        return write_elementwise(func, args, kwargs) if kwargs.get("inplace") else ruled(*args, **kwargs)

    return handler


def _fast(func: Any, x: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the local result if nothing must be sliced or moved, in a few microseconds; None for all other calls."""
    if kwargs:
        if len(args) > 1 or kwargs.get("inplace") or any(isinstance(v, torch.Tensor) for v in kwargs.values()):
            return None
        return func(x._local, **kwargs)
    if len(args) == 1:
        return func(x._local)
    if len(args) > 2:
        return None
    y = args[1]
    if type(y) in NUMBERS:
        return func(x._local, y)
    if isinstance(y, ShardedTensor):
        if y._layout == x._layout and y._group is x._group:
            return func(x._local, y._local)
        return None
    if isinstance(y, torch.Tensor) and isinstance(x._layout, MeshLayout):
        axes = _gradient_axes(x._layout, y.shape)
        if axes is not None:
            return func(
                x._local, collectives.sum_gradient(y, along(x._group, x._layout, axes)) if y.requires_grad else y
            )
    return None


@lru_cache(maxsize=4096)
def _gradient_axes(layout: MeshLayout, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the axes along which the gradient of an unsliced plain operand is a partial sum; None if it is sliced."""
    skip = len(layout.shape) - len(shape)
    if skip < 0:
        return None
    for n, full, cut in zip(shape, layout.shape[skip:], layout.dims[skip:], strict=True):
        if n != 1 and (cut is not None or n != full):
            return None
    return layout.sharding_axes


# -- in place ----------------------------------------------------------------------------------------------------------


def in_place(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of an elementwise function that writes into its first operand."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        return write_elementwise(func, args, kwargs)

    return handler


def write_elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, elementwise, in place on its first operand."""
    x = args[0]
    if not isinstance(x, ShardedTensor):
        return fall_back(func, args, kwargs)
    if written_through(x, name_of(func), lambda row: func(row, *args[1:], **kwargs)):
        return x
    refuse_partial_write(x, name_of(func))
    refuse_expanded(x)
    _write(func, x, args, kwargs)
    return x


def _write(func: Callable[..., Any], x: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) == 1 or (len(args) == 2 and type(args[1]) in NUMBERS):
        func(x._local, *args[1:], **kwargs)
        return
    if len(args) == 2 and not kwargs and isinstance(args[1], ShardedTensor):
        y = args[1]
        if y._layout == x._layout and y._group is x._group:
            func(x._local, unaliased(y._local, x._local))
            return
    others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.Tensor)]
    group_of(name_of(func), [x, *others])
    shape = torch.broadcast_shapes(x.shape, *(other.shape for other in others))
    if shape != x.shape:
        raise RuntimeError(
            f"output with shape {list(x.shape)} doesn't match the broadcast shape {list(shape)} of {name_of(func)}"
        )
    filled = [_aligned(name_of(func), value, x) if isinstance(value, torch.Tensor) else value for value in args[1:]]
    named = {k: _aligned(name_of(func), v, x) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    func(x._local, *filled, **named)


def refuse_expanded(x: ShardedTensor) -> None:
    """Raise torch's error for writing to an expanded tensor, also on ranks where `x` is empty and torch writes."""
    steps = x._local.stride()
    if 0 in steps and any(n > 1 and not step for n, step in zip(x._layout.shape, steps, strict=False)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def unaliased(local: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Return `local`, cloned if it is another view of the memory of the local tensor `written`.

    Torch refuses to write to memory that it also reads, but only where it detects it, which depends on the shape.
    """
    if local is written or not (local._is_view() or written._is_view()):
        return local
    is_same = local.storage_offset() == written.storage_offset() and local.stride() == written.stride()
    shares = local.untyped_storage().data_ptr() == written.untyped_storage().data_ptr()
    return local.clone() if shares and not is_same else local


def _aligned(name: str, other: torch.Tensor, x: ShardedTensor) -> torch.Tensor:
    """Return the local tensor of `other`, broadcast to `x`, in the layout of `x`; scalars stay scalars."""
    layout, group = x._layout, x._group
    if isinstance(other, ShardedTensor):
        other = reduced(other)
        if other._layout == layout:
            return unaliased(other._local, x._local)
        if not other._layout.is_replicated:
            refuse_to_move(name, other, layout)
        if tuple(other.shape) == layout.shape:
            return local_as(other, layout, group)
        other = other.full_tensor()
    if other.dim():
        return part(other.expand(layout.shape), layout, group)
    axes = layout.sharding_axes
    return collectives.sum_gradient(other, along(group, layout, axes)) if axes and other.requires_grad else other


def written_through(input: torch.Tensor, name: str, change: Callable[[torch.Tensor], Any]) -> bool:
    """Write into the source of `input`, a copy of indexed or transposed values; return False if it is no copy. Raise
    RuleError for other copies, at operation `name`.

    ``x[0] += 1`` and ``weight[padding_idx].fill_(0)`` on rows that other ranks hold, ``x.T.div_(2)`` of a flat layout:
    this reads the values again, changes them and writes them back. All ranks of the group call it.
    """
    copied = input._copied if isinstance(input, ShardedTensor) else None
    if copied is None:
        return False
    if copied.again is None:
        refuse_lost_write(input, name)
    assert copied.again is not None
    read, write = copied.again
    changed = read().clone()
    change(changed)
    write(changed)
    assert isinstance(input, ShardedTensor)
    local = local_as(changed, input._layout, input._group)  # the copy now has the values it wrote
    input._copied = copied._replace(local=local, version=version_of(copied.source))
    return True


# -- registered --------------------------------------------------------------------------------------------------------

for _name in ELEMENTWISE:
    implements_each(_name, partial(elementwise, name=_name))
    implements_each(f"{_name}_", in_place)
implements_each("iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor ilshift irshift", in_place)


def _where(func: Any) -> Any:
    """Return the handler of ``where``, which with one argument is ``nonzero``."""
    chosen = elementwise(func, "where")

    def handler(*args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) == 1:
            return torch.nonzero(*args, *kwargs.values(), as_tuple=True)
        return chosen(*args, **kwargs)

    return handler


implements_each("where", _where)
