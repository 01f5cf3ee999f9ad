"""Other dtypes, other devices, another process group: ``to`` and its short forms.

Each is what torch does to the leaf, so it is differentiable where torch's is, and returns the same object where torch
does. Nothing is sent, but a partial tensor is reduced before its dtype changes: sums of rounded addends differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError
from shardtensor.tensor.dispatch import HANDLERS, implements
from shardtensor.tensor.placing import moved
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled, wrap


def converted(tensor: ShardedTensor, change: Callable[[torch.Tensor], torch.Tensor], group: Group) -> ShardedTensor:
    """Return `tensor` with ``change(leaf)`` as its leaf, on `group`; itself when neither differs.

    A move to another kind of device rewrites the placements of the spec; `change` must keep the leaf's shape.
    """
    local = change(tensor._local)
    if tensor._layout.partial and local.dtype != tensor.dtype:
        tensor = settled(tensor)
        local = change(tensor._local)
    if local is tensor._local and group is tensor._group:
        return tensor
    if group is not tensor._group:
        _check_members(tensor, group)
    stays = local.device == tensor.device
    spec = tensor._spec if stays else moved(tensor._spec, tensor._layout, local.device)
    return wrap(local, tensor._layout, spec, group)


def _check_members(tensor: ShardedTensor, group: Group) -> None:
    absent = [rank for rank in tensor._layout.ranks if rank not in group.ranks]
    if absent and group.index >= 0:
        raise LayoutError(
            "the new process group lacks ranks that hold shards",
            {"absent ranks": ", ".join(map(str, absent[:8])), "the group": f"{group.size} ranks"},
            "pass a group of all ranks that hold the tensor",
        )


def to(tensor: torch.Tensor, *args: Any, process_group: Any = None, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to`` in all its forms, and ``process_group=``. Either tensor of ``to(other)`` may be sharded."""
    args = tuple(_example(x) for x in args)
    if "other" in kwargs:
        kwargs["other"] = _example(kwargs["other"])
    if not isinstance(tensor, ShardedTensor):
        return tensor.to(*args, **kwargs)
    _check_memory_format(kwargs.get("memory_format"))
    group = tensor._group if process_group is None else as_group(process_group)
    return converted(tensor, lambda local: local.to(*args, **kwargs), group)


def _example(value: Any) -> Any:
    """A plain empty tensor of the dtype and device of a sharded one; other values as they are."""
    if isinstance(value, ShardedTensor):
        return torch.empty(0, dtype=value.dtype, device=value.device)
    return value


def cpu(tensor: ShardedTensor, memory_format: Any = None, process_group: Any = None) -> ShardedTensor:
    """``Tensor.cpu``, and ``process_group=``: itself when it is there already."""
    _check_memory_format(memory_format)
    group = tensor._group if process_group is None else as_group(process_group)
    return converted(tensor, lambda local: local.cpu(), group)


def cuda(
    tensor: ShardedTensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    process_group: Any = None,
) -> ShardedTensor:
    """``Tensor.cuda``, and ``process_group=``. As from torch's ShardedTensor a new object, over the same leaf when
    that is on the device already."""
    _check_memory_format(memory_format)
    group = tensor._group if process_group is None else as_group(process_group)
    found = converted(tensor, lambda local: local.cuda(device, non_blocking=non_blocking), group)
    return wrap(found._local, found._layout, found._spec, group) if found is tensor else found


def _check_memory_format(memory_format: Any) -> None:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError("Only `torch.contiguous_format` or `torch.preserve_format` is supported!")


for name, handler in (("to", to), ("cpu", cpu), ("cuda", cuda)):
    HANDLERS[getattr(torch.Tensor, name)] = handler
    setattr(ShardedTensor, name, handler)  # torch's own methods take no process_group=


def _short_form(function: Any) -> Callable[..., ShardedTensor]:
    def handler(tensor: ShardedTensor, *args: Any, memory_format: Any = None, **kwargs: Any) -> ShardedTensor:
        _check_memory_format(memory_format)
        return converted(tensor, lambda local: function(local, *args, **kwargs), tensor._group)

    return handler


SHORT_FORMS = """
half float double bfloat16 cfloat cdouble chalf byte char short int long bool pin_memory
"""
for _name in SHORT_FORMS.split():
    if hasattr(torch.Tensor, _name):
        HANDLERS[getattr(torch.Tensor, _name)] = _short_form(getattr(torch.Tensor, _name))


@implements(torch.Tensor.type)
def type_(tensor: ShardedTensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """``Tensor.type``: the name of the tensor type, or a conversion."""
    if dtype is None:
        return tensor._local.type()
    return converted(tensor, lambda local: local.type(dtype, non_blocking=non_blocking), tensor._group)


@implements(torch.Tensor.type_as)
def type_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``Tensor.type_as``: to the dtype and device of `other`."""
    return to(tensor, dtype=other.dtype, device=other.device)
