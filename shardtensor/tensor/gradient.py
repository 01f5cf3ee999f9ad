"""What shows of the gradient of a leaf: a ShardedTensor over it, the same as long as the leaf's gradient is.

Its dtype is the leaf's own, or the ``grad_dtype`` that a user set, where torch has such a setting.
"""

from __future__ import annotations

from sys import getrefcount
from typing import Any

import torch

from shardtensor.errors import RuleError
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, shell_over, wrap

_NOTHING = torch.empty(0)


def get_grad(tensor: ShardedTensor) -> ShardedTensor | None:
    """The gradient, of this tensor's layout; the same object as long as the leaf's gradient is."""
    cached = tensor._grad_shell
    if cached is not None and cached[0] is tensor._local.grad:
        return cached[1]
    return _shown(tensor)


def set_grad(tensor: ShardedTensor, value: torch.Tensor | None) -> None:
    """Make `value`, plain (whole on every rank) or sharded in any layout, the gradient."""
    if value is None:
        tensor._local.grad = None
        forget(tensor)
        return
    if tuple(value.shape) != tensor._layout.shape:
        raise RuntimeError(
            f"assigned grad has data of a different size: a gradient of shape {tuple(value.shape)} was assigned "
            f"to a tensor of shape {tensor._layout.shape}"
        )
    layout = tensor._layout.reduced() if tensor._layout.partial else tensor._layout
    local = local_as(value, layout, tensor._group)
    if not isinstance(value, ShardedTensor):
        local = local.clone(memory_format=torch.contiguous_format)  # else it keeps the whole in memory
    tensor._local.grad = local
    is_own = isinstance(value, ShardedTensor) and value._local is local
    tensor._grad_shell = (tensor._local.grad, value) if is_own else None  # type: ignore[assignment]


def _shown(tensor: ShardedTensor) -> ShardedTensor | None:
    """The gradient of `tensor`, of which another was shown before."""
    grad = tensor._local.grad
    if grad is None:
        return None
    shell = _idle(tensor, grad)
    if shell is None:
        shell = gradient_of(tensor, grad)
    tensor._grad_shell = (grad, shell)
    return shell


def gradient_of(tensor: ShardedTensor, grad: torch.Tensor) -> ShardedTensor:
    """Return the shell over the gradient of a tensor's leaf: of its layout, with nothing left to reduce.

    A tensor that is partial in another way than a sum has no such gradient: its leaf's is not the tensor's.
    """
    layout = tensor._layout
    if not layout.partial:
        return shell_over(grad, layout, tensor._spec, tensor._group)  # of its leaf's shape, as autograd saw to
    if any(op != "sum" for _, op in layout.partial):
        raise RuleError("the gradient of a partial tensor is not kept by its addends", fix="reduce the tensor first")
    return wrap(grad, layout.reduced(), None, tensor._group)


def forget(tensor: ShardedTensor) -> None:
    """Let go of the gradient's memory; the leaf's gradient was set to None."""
    cached, tensor._grad_shell = tensor._grad_shell, None
    if cached is None:
        return
    shell = cached[1]
    del cached
    if getrefcount(shell) == 2 and not tensor._layout.partial:  # held by this call alone
        tensor._idle_grad = (shell, tensor._layout, shell.dtype, shell.device)
        shell._local = _NOTHING


def _idle(tensor: ShardedTensor, grad: torch.Tensor) -> ShardedTensor | None:
    """The shell of the gradient before, over this one, if nobody has it any more: half the cost of a new one."""
    idle, tensor._idle_grad = tensor._idle_grad, None
    if idle is None or idle[1] is not tensor._layout or idle[2] is not grad.dtype or idle[3] != grad.device:
        return None
    idle[0]._local = grad
    return idle[0]


HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")


def grad_dtype_of(leaf: torch.Tensor) -> torch.dtype:
    """The dtype of a leaf's gradients; where any is allowed (None), or this torch has no such setting, the leaf's."""
    return getattr(leaf, "grad_dtype", None) or leaf.dtype


def keep_grad_dtype(tensor: torch.Tensor, successor: torch.Tensor) -> None:
    """Set the ``grad_dtype`` that a user gave `tensor`, if any, on the leaf that takes its place."""
    if HAS_GRAD_DTYPE and tensor.is_leaf and tensor.grad_dtype != tensor.dtype:
        leaf: Any = successor._local if isinstance(successor, ShardedTensor) else successor
        leaf.grad_dtype = tensor.grad_dtype


def _get_grad_dtype(tensor: Any) -> torch.dtype | None:
    return tensor._local.grad_dtype


def _set_grad_dtype(tensor: Any, dtype: torch.dtype | None) -> None:
    tensor._local.grad_dtype = dtype
    if tensor._flat is not None:
        tensor._flat.settle_grad_dtypes()
        tensor._tell_flat(is_replaced=False)


if HAS_GRAD_DTYPE:
    ShardedTensor.grad_dtype = property(  # type: ignore[assignment]
        _get_grad_dtype, _set_grad_dtype, doc="As of the dense tensor: the dtype of gradients; None allows any."
    )
ShardedTensor.grad = property(get_grad, set_grad, doc=get_grad.__doc__)  # type: ignore[assignment]
