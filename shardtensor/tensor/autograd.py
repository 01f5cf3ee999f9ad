"""``backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` on sharded tensors.

Autograd works on the leaves. All ranks of the groups involved call these, as the graph may hold collectives.
"""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.errors import RuleError
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.gradient import gradient_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, local_of, settled


@implements(torch.Tensor.backward)
def backward_of(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """``tensor.backward(gradient)``; the gradient may be sharded in any layout, or plain and whole."""
    backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


@implements(torch.autograd.backward)
def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Accumulate gradients into leaves; any of the tensors may be sharded."""
    if grad_tensors is None:
        grad_tensors = grad_variables
    outputs, gradients = _roots(tensors, grad_tensors)
    leaves = None if inputs is None else [_leaf_of(x) for x in _listed(inputs)]
    torch.autograd.backward(outputs, gradients, retain_graph, create_graph, inputs=leaves)


@implements(torch.autograd.grad)
def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the gradients of `inputs`, each laid out as its input is; any of the tensors may be sharded."""
    batched, inputs = kwargs.get("is_grads_batched", False), _listed(inputs)
    if batched and any(isinstance(x, ShardedTensor) for x in inputs):
        raise _batched_error()
    outputs, grad_outputs = _roots(outputs, grad_outputs, batched)
    found = torch.autograd.grad(outputs, [_leaf_of(x) for x in inputs], grad_outputs, *args, **kwargs)
    return tuple(
        gradient_of(x, g) if isinstance(x, ShardedTensor) and g is not None else g
        for x, g in zip(inputs, found, strict=True)
    )


def _leaf_of(x: Any) -> Any:
    """The tensor whose gradient is asked for.

    A parameter of a fully sharded module is in no graph: modules compute with what was gathered, and its gradient is
    summed over the ranks into ``.grad``.
    """
    if getattr(x, "_flat", None) is not None:
        raise RuleError(
            "autograd cannot be asked for the gradients of some parameters of a fully sharded module",
            {"parameter": tuple(x.shape)},
            "call loss.backward() without inputs=, and read param.grad; freeze others with requires_grad_(False)",
        )
    return local_of(x)


@implements(torch.Tensor.detach_)
def detach_(tensor: ShardedTensor) -> ShardedTensor:
    """Take this very object off the graph."""
    tensor._local.detach_()
    return tensor.requires_grad_(False)


def _roots(tensors: Any, gradients: Any, batched: bool = False) -> tuple[list[torch.Tensor], list[Any]]:
    """The local tensors to start from, and the local part of the gradient of each."""
    tensors = _listed(tensors)
    gradients = [None] * len(tensors) if gradients is None else _listed(gradients)
    roots, starts = [], []
    for i, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
        if not isinstance(tensor, ShardedTensor):
            roots.append(tensor)
            starts.append(gradient.full_tensor() if isinstance(gradient, ShardedTensor) else gradient)
            continue
        if type(gradient) is ShardedTensor and gradient._layout is tensor._layout and not tensor._layout.partial:
            roots.append(tensor._local)
            starts.append(gradient._local)
            continue
        if batched:
            raise _batched_error()
        tensor = settled(tensor)
        roots.append(tensor._local)
        if gradient is not None and tuple(gradient.shape) != tuple(tensor.shape):
            raise RuntimeError(
                f"Mismatch in shape: grad_output[{i}] has a shape of {gradient.shape} and output[{i}] has a shape of "
                f"{tensor.shape}."
            )
        if gradient is None:
            if tensor.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            starts.append(torch.ones_like(tensor._local))
        else:
            starts.append(local_as(gradient, tensor._layout, tensor._group))
    return roots, starts


def _batched_error() -> RuntimeError:
    return RuntimeError("is_grads_batched=True is not supported for ShardedTensor!")


def _listed(x: Any) -> list[Any]:
    return [x] if isinstance(x, torch.Tensor | torch.autograd.graph.GradientEdge) else list(x)
