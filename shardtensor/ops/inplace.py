"""Operations in place: the operand keeps its layout, what meets it is brought there.

A write goes into the local tensor, so views of a ShardedTensor that are views of its local see it. ``transpose_`` and
its kin turn the local tensor and the layout; nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.comm import collectives
from shardtensor.layout.layout import CutLayout, replicated
from shardtensor.ops.engine import bring, group_of
from shardtensor.ops.pointwise import ELEMENTWISE, NUMBERS, beside
from shardtensor.ops.random import refuse_leaf
from shardtensor.ops.views import order_of
from shardtensor.rules.propagate import Need, follow
from shardtensor.rules.views import permuted
from shardtensor.tensor.copied import wrote
from shardtensor.tensor.dispatch import (
    HANDLERS,
    fall_back,
    implements,
    name_of,
    refuse_lost_write,
    refuse_partial_write,
    spellings,
    warn_of_gather,
)
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, settled
from shardtensor.tensor.teams import along
from shardtensor.tensor.torch_sharded import from_torch_sharded_tensor, is_torch_sharded


def in_place(func: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of an elementwise function that writes into its first operand."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        return write(func, args, kwargs)

    return handler


def write(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do `func`, elementwise, in place on its first operand."""
    x = args[0]
    if not isinstance(x, ShardedTensor):
        return fall_back(func, args, kwargs)
    if written_through(x, lambda row: func(row, *args[1:], **kwargs)):
        return x
    refuse_lost_write(x, name_of(func))
    refuse_partial_write(x, name_of(func))
    _refuse_expanded(x)
    _write(func, x, args, kwargs)
    wrote(x)
    return x


def _write(func: Callable[..., Any], x: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) == 1 or (len(args) == 2 and type(args[1]) in NUMBERS):
        func(x._local, *args[1:], **kwargs)
        return
    if len(args) == 2 and not kwargs and isinstance(args[1], ShardedTensor):
        y = args[1]
        if y._layout == x._layout and y._group is x._group:
            func(x._local, apart(y._local, x._local))
            return
    others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.Tensor)]
    group_of(name_of(func), [x, *others])
    shape = torch.broadcast_shapes(x.shape, *(other.shape for other in others))
    if shape != x.shape:
        raise RuntimeError(
            f"output with shape {list(x.shape)} doesn't match the broadcast shape {list(shape)} of {name_of(func)}"
        )
    filled = [_meets(name_of(func), value, x) if isinstance(value, torch.Tensor) else value for value in args[1:]]
    named = {k: _meets(name_of(func), v, x) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    func(x._local, *filled, **named)


def _refuse_expanded(x: ShardedTensor) -> None:
    """Torch's error for writing what `expand` made, on ranks too where the part of `x` is empty and torch writes."""
    steps = x._local.stride()
    if 0 in steps and any(n > 1 and not step for n, step in zip(x._layout.shape, steps, strict=False)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def apart(local: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """`local`, copied where it shows the memory of the local tensor `written` in another way.

    Torch refuses to write what it reads elsewhere, but only where it can tell, and that depends on a part's shape.
    """
    if local is written or not (local._is_view() or written._is_view()):
        return local
    is_same = local.storage_offset() == written.storage_offset() and local.stride() == written.stride()
    shares = local.untyped_storage().data_ptr() == written.untyped_storage().data_ptr()
    return local.clone() if shares and not is_same else local


def _meets(name: str, other: torch.Tensor, x: ShardedTensor) -> torch.Tensor:
    """The local tensor of `other` that meets the local tensor of `x`."""
    if isinstance(other, ShardedTensor):
        other = settled(other)
        if other._layout == x._layout:
            return apart(other._local, x._local)
    layout = x._layout
    if not isinstance(layout, CutLayout):
        return beside(name, other, x)
    target = follow(layout, other.shape)
    moves = isinstance(other, ShardedTensor) and other._layout != target and not other._layout.is_replicated
    return bring(name, other, Need(target, tuple(sorted({*layout.cut_axes} - {*target.cut_axes})), moves), x._group)


@implements(torch.Tensor.copy_)
def copy_(input: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Take the values of `src`: each rank its part of a plain tensor, or of a sharded one laid out anew (collective).

    Raises:
        RuntimeError: `src` does not broadcast to the global shape.
    """
    if not isinstance(input, ShardedTensor):
        assert isinstance(src, ShardedTensor)
        return input.copy_(src.full_tensor(), non_blocking)
    if is_torch_sharded(src):
        src = from_torch_sharded_tensor(src)
    if written_through(input, lambda row: row.copy_(src, non_blocking)):
        return input
    refuse_lost_write(input, "copy_")
    _refuse_expanded(input)
    layout, group = input._layout, input._group
    if torch.broadcast_shapes(input.shape, src.shape) != input.shape:
        raise RuntimeError(
            f"output with shape {list(input.shape)} doesn't match the broadcast shape "
            f"{list(torch.broadcast_shapes(input.shape, src.shape))}"
        )
    whole = layout.reduced()
    if src.shape != input.shape:
        src = (src.full_tensor() if isinstance(src, ShardedTensor) else src).expand(input.shape)
    local = local_as(settled(src) if isinstance(src, ShardedTensor) else src, whole, group)
    if layout.partial and local.requires_grad:  # what each addend asks of the value adds up
        local = collectives.sum_gradient(local, along(group, layout, layout.partial_axes))
    if layout.brings_value(group.rank):
        local = apart(local, input._local)
    else:  # zeros that stay in the graph, for its backward is collective
        local = local.masked_fill(local.new_ones((), dtype=torch.bool), 0)
    input._local.copy_(local, non_blocking)
    wrote(input)
    return input


@implements(torch.Tensor.fill_, torch.fill_)
def fill_(input: torch.Tensor, value: Any) -> Any:
    """Set every element to one value; of a sum, the first rank brings it."""
    if not isinstance(input, ShardedTensor):
        return fall_back(torch.Tensor.fill_, (input, value), {})
    if written_through(input, lambda row: row.fill_(value)):
        return input
    refuse_lost_write(input, "fill_")
    value = value.full_tensor() if isinstance(value, ShardedTensor) else value
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return copy_(input, value.to(input.dtype))
    input._local.fill_(value if input._layout.brings_value(input._group.rank) else 0)
    wrote(input)
    return input


@implements(torch.Tensor.zero_, torch.zero_)
def zero_(input: ShardedTensor) -> ShardedTensor:
    """Set every element to zero."""
    if written_through(input, lambda row: row.zero_()):
        return input
    refuse_lost_write(input, "zero_")
    input._local.zero_()
    wrote(input)
    return input


def written_through(input: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> bool:
    """Write into what `input` is a copy of; False where it is none, or no copy of indexed or transposed values.

    ``x[0] += 1`` and ``weight[padding_idx].fill_(0)`` on rows that other ranks hold, ``x.T.div_(2)`` of a flat layout:
    the values are read anew, changed and written back. All ranks of the group call it.
    """
    if not isinstance(input, ShardedTensor) or input._origin is None or input._source is None:
        return False
    read, write = input._source
    changed = read().clone()
    change(changed)
    write(changed)
    return True


for _name in ELEMENTWISE:
    for _func in spellings(f"{_name}_"):
        HANDLERS[_func] = in_place(_func)
for _name in "iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split():
    if hasattr(torch.Tensor, f"__{_name}__"):
        HANDLERS[getattr(torch.Tensor, f"__{_name}__")] = in_place(getattr(torch.Tensor, f"__{_name}__"))


def _writes(method: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a method that writes into its tensor what `new` returns."""

    def handler(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(x is input for x in (*args, *kwargs.values())):  # what is read while it is written is torch's secret
            return fall_back(method, (input, *args), kwargs)
        if written_through(input, lambda row: method(row, *args, **kwargs)):
            return input
        if isinstance(input, ShardedTensor):
            refuse_lost_write(input, name_of(method))
            refuse_partial_write(input, name_of(method))
            refuse_leaf(input)
        tensors = [x for x in (input, *args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        follows = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        out = new(input.clone() if follows else input, *args, **kwargs)  # backward may need what is written over
        if out.shape != input.shape:
            raise RuntimeError(f"{name_of(method)}: output with shape {list(input.shape)} cannot be {list(out.shape)}")
        return input.copy_(out)

    return handler


COMPOSED = """
scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce index_put masked_scatter cumsum cumprod
addmm addmv addbmm baddbmm addr tril triu
"""
"""Methods whose form in place is the other form and a copy of its result."""

for _name in COMPOSED.split():
    _func = getattr(torch.Tensor, f"{_name}_")
    HANDLERS[_func] = _writes(_func, getattr(torch.Tensor, _name))


# -- dims in another order ---------------------------------------------------------------------------------------------


def _transposes(func: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., ShardedTensor]:
    """The handler of `func`, which does in place what `new` does in a view; the layout's dims change places too."""

    def handler(input: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        refuse_lost_write(input, func.__name__)
        order = order_of(new, input.dim(), (*args, *kwargs.values()))
        refuse_leaf(input)
        layout = input._layout
        if isinstance(layout, CutLayout):
            func(input._local, *args, **kwargs)
            input._layout = permuted(layout, order)
        else:  # boxes and ranges have no other order of dims
            warn_of_gather(func, input.numel() * input.element_size())
            input._local = new(input.full_tensor(), *args, **kwargs)
            input._layout = replicated(tuple(input._local.shape), input._group.ranks)
        input._spec = None
        input._placements = None
        input._sync_body()
        return input

    return handler


for _name in ("t", "transpose", "swapaxes", "swapdims"):
    _func = getattr(torch.Tensor, f"{_name}_")
    HANDLERS[_func] = _transposes(_func, getattr(torch.Tensor, _name))
