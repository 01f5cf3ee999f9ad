"""The gradient of a leaf as a ShardedTensor, hooks on leaves, and ``backward`` and ``grad``, which work on the leaves.

All ranks of the groups involved call these, as the graph may hold collectives. Hooks run on every rank. They live on
the leaf and must not keep the ShardedTensor alive: Python's collector does not see through a leaf's post-accumulate
hooks, so such a cycle would never be freed. They must not hold a weak reference to it either: torch refuses to swap a
tensor that has one. So the ShardedTensor owns a small `LeafOwner` that refers back to it, a cycle that the collector
frees, and the hook has a weak reference to the `LeafOwner`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardtensor.errors import RuleError
from shardtensor.tensor.bucket import flat_shard_of
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, local_of, reduced, wrap


def get_grad(tensor: ShardedTensor) -> ShardedTensor | None:
    """Return the gradient, in this tensor's layout; the same object as long as the leaf's gradient is the same."""
    cached, grad = tensor._grad_wrapper, tensor._local.grad
    if cached is not None and cached[0] is grad:
        return cached[1]
    if grad is None:
        return None
    wrapper = gradient_of(tensor, grad)
    tensor._grad_wrapper = (grad, wrapper)
    return wrapper


def set_grad(tensor: ShardedTensor, value: torch.Tensor | None) -> None:
    """Set the gradient to `value`, plain (whole on every rank) or sharded in any layout."""
    if value is None:
        tensor._local.grad = tensor._grad_wrapper = None
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
    tensor._grad_wrapper = (tensor._local.grad, value) if is_own else None  # type: ignore[assignment]


def gradient_of(tensor: ShardedTensor, grad: torch.Tensor) -> ShardedTensor:
    """Return the wrapper over the gradient of a tensor's leaf: in its layout, reduced. Raise
    RuleError for a tensor that is partial in another way than a sum: its leaf's gradient is not the tensor's."""
    layout = tensor._layout
    if not layout.partial:
        return wrap(grad, layout, tensor._spec, tensor._group)
    if any(op != "sum" for _, op in layout.partial):
        raise RuleError(
            "the gradient of a partial tensor is not kept by its partial sums", fix="reduce the tensor first"
        )
    return wrap(grad, layout.reduced(), None, tensor._group)


HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")


def grad_dtype_of(leaf: torch.Tensor) -> torch.dtype:
    """Return the dtype of a leaf's gradients; the leaf's if any is allowed (None) or torch has no such setting."""
    return getattr(leaf, "grad_dtype", None) or leaf.dtype


def keep_grad_dtype(tensor: torch.Tensor, replacement: torch.Tensor) -> None:
    """Set the ``grad_dtype`` that a user gave `tensor`, if any, on the leaf that takes its place."""
    if HAS_GRAD_DTYPE and tensor.is_leaf and tensor.grad_dtype != tensor.dtype:
        leaf: Any = replacement._local if isinstance(replacement, ShardedTensor) else replacement
        leaf.grad_dtype = tensor.grad_dtype


def _set_grad_dtype(tensor: Any, dtype: torch.dtype | None) -> None:
    tensor._local.grad_dtype = dtype
    if tensor._param_group is not None:
        tensor._param_group.set_grad_dtypes()
        tensor._record_change(is_replaced=False)


if HAS_GRAD_DTYPE:
    ShardedTensor.grad_dtype = property(  # type: ignore[assignment]
        lambda tensor: tensor._local.grad_dtype,
        _set_grad_dtype,
        doc="As of the dense tensor: the dtype of gradients; None allows any.",
    )
ShardedTensor.grad = property(get_grad, set_grad, doc=get_grad.__doc__)  # type: ignore[assignment]


@implements(torch.Tensor.register_hook)
def _register_hook(tensor: ShardedTensor, hook: Callable[[ShardedTensor], torch.Tensor | None]) -> Any:
    """Call ``hook(gradient)``, a ShardedTensor, whenever the gradient is computed; what it returns replaces it."""
    note_hook(tensor._local)
    return tensor._local.register_hook(_gradient_hook(tensor, hook))


def _gradient_hook(
    tensor: ShardedTensor, hook: Callable[[ShardedTensor], torch.Tensor | None]
) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
    """Return the hook for the leaf of `tensor`."""
    # It must not keep the tensor alive, so it refers to a wrapper over a meta tensor.
    proxy = torch.empty(tensor._local.shape, device="meta")
    like = wrap(proxy, tensor._layout, tensor._spec, tensor._group)

    def on_leaf(grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # torch also calls it if the graph computed no gradient
            return None
        shown = gradient_of(like, grad)
        changed = hook(shown)
        return None if changed is None else local_as(changed, shown._layout, shown._group)

    return on_leaf


class LeafOwner:
    """A reference to the ShardedTensor of a leaf; it lives as long as that."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: ShardedTensor) -> None:
        self.tensor = tensor


@implements(torch.Tensor.register_post_accumulate_grad_hook)
def register_post_accumulate_grad_hook(tensor: ShardedTensor, hook: Callable[[ShardedTensor], None]) -> Any:
    """Call ``hook(tensor)``, with this same object, after its gradient has been accumulated."""
    note_hook(tensor._local)
    return tensor._local.register_post_accumulate_grad_hook(_post_hook(tensor, hook))


def _post_hook(tensor: ShardedTensor, hook: Callable[[ShardedTensor], None]) -> Callable[[torch.Tensor], None]:
    """Return the hook for the leaf of `tensor`."""
    owner = vars(tensor).setdefault("_owner", LeafOwner(tensor))
    find = weakref.ref(owner)

    def on_leaf(_: torch.Tensor) -> None:
        owner = find()
        if owner is not None:
            hook(owner.tensor)

    return on_leaf


def note_hook(leaf: torch.Tensor) -> None:
    """Record on the `FlatShard` of `leaf`, if it has one, that there are hooks, since autograd does not run them."""
    found = flat_shard_of(leaf)
    if found is not None:
        found[0].has_hooks = True


Hooks = tuple[dict[int, Any] | None, dict[int, Any] | None]
"""The hooks of a tensor, on its gradient and after its accumulation, in the dicts that their handles refer to."""


def take_hooks(tensor: torch.Tensor) -> Hooks:
    """Remove the hooks of a plain tensor and return them."""
    on: Any = tensor
    hooks = on._backward_hooks, on._post_accumulate_grad_hooks
    if hooks[0]:
        on._backward_hooks = None
    if hooks[1]:
        on._post_accumulate_grad_hooks = None
    return hooks


def give_hooks(tensor: torch.Tensor, hooks: Hooks) -> None:
    """Set the hooks that a plain tensor had on `tensor`, sharded or plain; their handles still remove them."""
    before, after = hooks
    leaf: Any = tensor._local if isinstance(tensor, ShardedTensor) else tensor
    if before:
        if isinstance(tensor, ShardedTensor):
            before.update({key: _gradient_hook(tensor, hook) for key, hook in before.items()})
        leaf._backward_hooks = before
    if after:
        if isinstance(tensor, ShardedTensor):
            after.update({key: _post_hook(tensor, hook) for key, hook in after.items()})
        leaf._post_accumulate_grad_hooks = after
    if before or after:
        note_hook(leaf)


@implements(torch.Tensor.retain_grad)
def retain_grad(tensor: ShardedTensor) -> None:
    """Keep the gradient of a result; nothing changes for a leaf."""
    tensor._local.retain_grad()


@implements(torch.Tensor.backward)
def backward_of(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Run ``tensor.backward(gradient)``; the gradient may be sharded in any layout, or plain and whole."""
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
    """Return the gradients of `inputs`, each in the layout of its input; any of the tensors may be sharded."""
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
    """Return the tensor to differentiate; raise for a parameter of a fully sharded module, which is in no graph."""
    if getattr(x, "_param_group", None) is not None:
        raise RuleError(
            "autograd cannot be asked for the gradients of some parameters of a fully sharded module",
            {"parameter": tuple(x.shape)},
            "call loss.backward() without inputs=, and read param.grad; freeze others with requires_grad_(False)",
        )
    return local_of(x)


@implements(torch.Tensor.detach_)
def detach_(tensor: ShardedTensor) -> ShardedTensor:
    """Detach this object from the graph, in place."""
    tensor._local.detach_()
    return tensor.requires_grad_(False)


def _roots(tensors: Any, gradients: Any, batched: bool = False) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the local tensors to start from, and the local part of the gradient of each."""
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
        tensor = reduced(tensor)
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
