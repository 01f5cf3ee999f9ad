"""In-place operations other than elementwise ones: the operand keeps its layout, the others are redistributed to it.

A write goes into the local tensor, so views of a ShardedTensor that are views of its local tensor change too.
``transpose_`` and the like permute the local tensor and the layout and send nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.comm import collectives
from shardtensor.comm.redistribute import along
from shardtensor.layout.layout import MeshLayout, replicated
from shardtensor.ops.making import refuse_leaf
from shardtensor.ops.pointwise import refuse_expanded, unaliased, written_through
from shardtensor.ops.views import order_of
from shardtensor.rules.views import permuted
from shardtensor.tensor.copied import refuse_lost_write
from shardtensor.tensor.dispatch import implements, implements_each, name_of, refuse_partial_write, warn_of_gather
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.from_metadata import from_torch_sharded_tensor, is_torch_sharded
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, reduced


@implements(torch.Tensor.copy_)
def copy_(input: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy the values of `src`: each rank copies its part of a plain tensor, or of a redistributed one (collective).

    Raises:
        RuntimeError: `src` does not broadcast to the global shape.
    """
    if not isinstance(input, ShardedTensor):
        assert isinstance(src, ShardedTensor)
        return input.copy_(src.full_tensor(), non_blocking)
    if is_torch_sharded(src):
        src = from_torch_sharded_tensor(src)
    if written_through(input, "copy_", lambda row: row.copy_(src, non_blocking)):
        return input
    refuse_expanded(input)
    layout, group = input._layout, input._group
    if torch.broadcast_shapes(input.shape, src.shape) != input.shape:
        raise RuntimeError(
            f"output with shape {list(input.shape)} doesn't match the broadcast shape "
            f"{list(torch.broadcast_shapes(input.shape, src.shape))}"
        )
    whole = layout.reduced()
    if src.shape != input.shape:
        src = (src.full_tensor() if isinstance(src, ShardedTensor) else src).expand(input.shape)
    local = local_as(reduced(src) if isinstance(src, ShardedTensor) else src, whole, group)
    if layout.partial and local.requires_grad:  # the value's gradients from all partial sums add up
        local = collectives.sum_gradient(local, along(group, layout, layout.partial_axes))
    if layout.holds_full_value(group.rank):
        local = unaliased(local, input._local)
    else:  # zeros in the graph, because backward is collective
        local = local.masked_fill(local.new_ones((), dtype=torch.bool), 0)
    input._local.copy_(local, non_blocking)
    return input


@implements(torch.Tensor.fill_, torch.fill_)
def fill_(input: torch.Tensor, value: Any) -> Any:
    """Set every element to one value; of a partial sum, the first rank holds the value and the others 0."""
    if not isinstance(input, ShardedTensor):
        return fall_back(torch.Tensor.fill_, (input, value), {})
    if written_through(input, "fill_", lambda row: row.fill_(value)):
        return input
    value = value.full_tensor() if isinstance(value, ShardedTensor) else value
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return copy_(input, value.to(input.dtype))
    input._local.fill_(value if input._layout.holds_full_value(input._group.rank) else 0)
    return input


@implements(torch.Tensor.zero_, torch.zero_)
def zero_(input: ShardedTensor) -> ShardedTensor:
    """Set every element to zero."""
    return fill_(input, 0)


def _writes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of a method that writes into its tensor what its other form returns."""
    new = getattr(torch.Tensor, method.__name__.removesuffix("_"))

    def handler(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(x is input for x in (*args, *kwargs.values())):  # undefined in torch: an input aliases the output
            return fall_back(method, (input, *args), kwargs)
        if written_through(input, name_of(method), lambda row: method(row, *args, **kwargs)):
            return input
        if isinstance(input, ShardedTensor):
            refuse_partial_write(input, name_of(method))
            refuse_leaf(input)
        tensors = [x for x in (input, *args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        follows = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        out = new(input.clone() if follows else input, *args, **kwargs)  # backward may need the overwritten values
        if out.shape != input.shape:
            raise RuntimeError(f"{name_of(method)}: output with shape {list(input.shape)} cannot be {list(out.shape)}")
        return input.copy_(out)

    return handler


implements_each(
    "scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ index_reduce_ index_put_ "
    "cumsum_ cumprod_ addmm_ addmv_ addbmm_ baddbmm_ addr_ tril_ triu_",
    _writes,
)


# -- dims in another order ---------------------------------------------------------------------------------------------


def _transposes(func: Callable[..., Any]) -> Callable[..., ShardedTensor]:
    """Return the handler of the in-place form of a view; it permutes the layout's dims too."""
    new = getattr(torch.Tensor, func.__name__.removesuffix("_"))

    def handler(input: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        refuse_lost_write(input, func.__name__)
        order = order_of(new, input.dim(), (*args, *kwargs.values()))
        refuse_leaf(input)
        layout = input._layout
        if isinstance(layout, MeshLayout):
            func(input._local, *args, **kwargs)
            input._layout = permuted(layout, order)
        else:  # the layout of boxes and ranges cannot be permuted
            warn_of_gather(func, input.numel() * input.element_size())
            input._local = new(input.full_tensor(), *args, **kwargs)
            input._layout = replicated(tuple(input._local.shape), input._group.ranks)
        input._spec = None
        input._placements = None
        input._sync_body()
        return input

    return handler


implements_each("t_ transpose_ swapaxes_ swapdims_", _transposes)
