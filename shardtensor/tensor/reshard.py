"""New layouts: `reshard` makes a new tensor, ``tensor.reshard`` changes one, ``tensor.gather`` sends it to a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.comm.redistribute import common_group, redistribute, reduce_local
from shardtensor.errors import LayoutError, RuleError
from shardtensor.layout.box import whole
from shardtensor.layout.layout import Layout, ListedLayout
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.factories import distribute
from shardtensor.tensor.gradient import keep_grad_dtype
from shardtensor.tensor.placing import bind_named, device_for, mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    import torch.distributed as dist


def reshard(
    tensor: torch.Tensor, spec: ShardingSpec | str, process_group: dist.ProcessGroup | dist.DeviceMesh | Any = None
) -> ShardedTensor:
    """Return a new tensor of the same values in the layout `spec`. All ranks of both groups call it.

    Every rank receives exactly the elements it lacks; memory is bounded by what it held, what it gets, and one buffer.
    It is differentiable: the gradient is redistributed to the layout of `tensor`. The result never shares memory with
    `tensor`, whatever the layouts, so a write into one never changes the other.

    Args:
        tensor: of any global shape and layout, also a partial one; a plain one is replicated.
        spec: the layout of the result, any spec or its text; placements may name other devices.
        process_group: the ranks of the result; None: those of `tensor`. It may be another DeviceMesh over the same
            ranks, or other ranks: then one of the two groups must contain the other, or the default group must
            contain both.

    Raises:
        SpecError, LayoutError: the text is wrong or does not fit; nothing has been sent.
        RuleError: the tensor is a partial max or min and autograd records it.

    Example:
        >>> import torch, shardtensor as st
        >>> rows = st.distribute(torch.arange(6.0).view(2, 3), "[tp, -]")
        >>> st.reshard(rows, "[-, tp]").full_tensor().equal(rows.full_tensor())
        True
    """
    if not isinstance(tensor, ShardedTensor):
        return distribute(tensor, spec, process_group=process_group)
    spec = as_spec(spec)
    group = tensor._group if process_group is None else as_group(process_group)
    layout = bind_named(spec, tensor._layout.shape, mesh_of(group))
    local = _moved(tensor, spec, layout, group)
    if local.untyped_storage().data_ptr() == tensor._local.untyped_storage().data_ptr():
        local = local.clone(memory_format=torch.contiguous_format)
    return wrap(local, layout, spec, group)


def reshard_(tensor: ShardedTensor, spec: ShardingSpec | str) -> ShardedTensor:
    """Give this tensor the layout `spec`, in place, and return it. All ranks of the group call it.

    Every rank receives exactly the elements it lacks. A leaf stays a leaf, and its gradient is redistributed too;
    autograd records the change of a result. Tensors that were views of this one keep the old elements: later writes are
    not shared. `shardtensor.reshard` makes a new tensor instead.

    Raises:
        SpecError, LayoutError: the text is wrong, or does not fit the group; the tensor is as before.
        RuleError: the tensor is a copy of a result that is a view in the dense program.
    """
    spec = as_spec(spec)
    layout = bind_named(spec, tensor._layout.shape, mesh_of(tensor._group))
    if tensor._copied is not None:
        raise RuleError(
            "reshard: a copy that the dense program would have as a view keeps its layout",
            {"made by": tensor._copied.name},
            "shardtensor.reshard(tensor, spec) makes a new tensor",
        )
    return reshard_on(tensor, spec, layout, tensor._group)


def reshard_on(tensor: ShardedTensor, spec: ShardingSpec, layout: Layout, group: Group) -> ShardedTensor:
    """Give a tensor the layout of a spec on `group`, perhaps other ranks, as `reshard_` does. All ranks of both call
    it."""
    is_leaf = tensor._local.is_leaf
    grad = tensor._local.grad if is_leaf else None
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_leaf):
        local = _moved(tensor, spec, layout, group)
        if grad is not None:
            common = common_group(tensor._group, group)
            grad = redistribute(grad, tensor._layout.reduced(), layout.reduced(), common).to(local.device)
    if local is not tensor._local:
        if local.untyped_storage().nbytes() != local.numel() * local.element_size():
            local = local.clone(memory_format=torch.contiguous_format)  # a shard owns exactly its bytes
        if is_leaf:
            local = local.detach().requires_grad_(tensor._local.requires_grad)
            keep_grad_dtype(tensor, local)
            local.grad = grad
    old, old_layout, old_group = tensor._local, tensor._layout, tensor._group
    tensor._layout, tensor._spec, tensor._placements, tensor._remote = layout, spec, None, None
    tensor._group = group
    if local is not old and is_leaf and old.requires_grad:
        _forward_grad(old, old_layout, old_group, tensor)
    tensor._replace_local(local)
    return tensor


def _forward_grad(old: torch.Tensor, layout: Layout, group: Group, tensor: ShardedTensor) -> None:
    """Redistribute gradients that earlier graphs still give the old leaf, and add them to those of the current leaf."""

    @torch.no_grad()
    def move_grad(leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        local = tensor._local
        common = common_group(group, tensor._group)
        new = redistribute(grad, layout.reduced(), tensor._layout.reduced(), common).to(local.device)
        local.grad = new if local.grad is None else local.grad + new

    old.grad = None
    old.register_post_accumulate_grad_hook(move_grad)


def _moved(tensor: ShardedTensor, spec: ShardingSpec, layout: Layout, group: Group) -> torch.Tensor:
    local = redistribute(tensor._local, tensor._layout, layout, common_group(tensor._group, group))
    if tensor.is_meta:
        return local
    device = device_for(spec, group, like=local.device)
    return local if device == local.device else local.to(device)


ShardedTensor.reshard = reshard_


def _gather(
    tensor: ShardedTensor,
    dst: int = 0,
    out: torch.Tensor | None = None,
    enforce_dtype: bool = False,
    dtype: torch.dtype | None = None,
    **call: Any,
) -> Any:
    """Write the whole tensor into `out` on the group rank `dst`. No gradient. All ranks of the group call it.

    ``x.gather(dim, index)`` is `torch.gather` where the index has another dtype than the tensor; for an integer tensor
    call `torch.gather` itself. One small exchange comes first, so that all ranks raise the same error, or none.

    Args:
        dst: the group rank that receives the tensor.
        out: on `dst` a tensor of the global shape; None elsewhere.
        enforce_dtype: convert to ``out.dtype``; if False, the dtypes must be equal.
        dtype: send the elements as this dtype.
    """
    group, layout = tensor._group, tensor._layout
    if call:
        return torch.gather(tensor, **{"dim": dst, "index": out, **call})
    if out is not None and not enforce_dtype and out.dtype in (torch.int64, torch.int32) and out.dtype != tensor.dtype:
        agree(group, "gather", {"dim": str(dst), "index": str(tuple(out.shape))})
        return torch.gather(tensor, dst, out)
    if group.index < 0:
        return None
    fault = _fault(tensor, dst, out, None if enforce_dtype else dtype or tensor.dtype)
    agree(group, "gather", {"dst": str(dst), "dtype": str(dtype)}, fault)
    with torch.no_grad():
        local = reduce_local(tensor._local, layout, group)  # before it is rounded to another dtype
        there = ListedLayout(
            shape=layout.shape, ranks=(group.ranks[dst],), grid=(1,), owned=((group.ranks[dst], whole(layout.shape)),)
        )
        local = redistribute(local if dtype is None else local.to(dtype), layout.reduced(), there, group)
        if out is not None:
            out.copy_(local)
    return None


def _fault(tensor: ShardedTensor, dst: int, out: torch.Tensor | None, dtype: torch.dtype | None) -> LayoutError | None:
    """Return the error of this rank's call, or None; `dtype` is the one that `out` must have, None for any."""
    group = tensor._group
    if not 0 <= dst < group.size:
        return LayoutError(f"dst={dst} is not a rank of this group", {"group ranks": f"0 to {group.size - 1}"})
    if group.index != dst:
        if out is None:
            return None
        return LayoutError(
            "Argument ``dst_tensor`` must NOT be specified on non-destination ranks.",
            fix=f"pass out=None on every rank but {dst}",
        )
    if out is None:
        return LayoutError(
            f"Argument ``dst_tensor`` must be specified on destination rank {dst}",
            fix=f"pass out=torch.empty({tuple(tensor.shape)}) there",
        )
    if tuple(out.shape) != tuple(tensor.shape):
        return LayoutError(
            f"Argument ``dst_tensor`` have size {tuple(out.shape)},but should be {tuple(tensor.shape)}",
            fix=["pass a tensor of the global shape", "call torch.gather(tensor, dim, index) to pick elements"],
        )
    if dtype is not None and out.dtype != dtype:
        return LayoutError(f"out is {out.dtype}, what comes is {dtype}", fix="pass enforce_dtype=True to convert")
    return None


ShardedTensor.gather = _gather
