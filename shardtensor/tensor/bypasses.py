"""Errors for what works below ``__torch_function__``, where a ShardedTensor has no elements, and for DTensors.

Transforms of functions and tracers handle tensors in C++. Nothing here costs a call that does not fail.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.tensor.dispatch import implements, is_dtensor, name_of


def explain(error: Exception, func: Any, operands: Any) -> None:
    """Raise RuleError in place of `error`, where its cause is known: a transform or a tracer at work, or a DTensor."""
    found = next((x for x in tree_leaves(operands) if is_dtensor(x)), None)
    if found is not None:
        raise RuleError(
            f"{name_of(func)}: a DTensor beside a ShardedTensor",
            {"DTensor": f"{' x '.join(map(str, found.shape))} as {', '.join(map(repr, found.placements))}"},
            [
                "shardtensor.from_dtensor(dtensor) is a ShardedTensor on the same memory",
                "tensor.to_dtensor(dtensor.device_mesh) is a DTensor on the same memory",
            ],
        ) from error
    known = None if isinstance(error, ShardTensorError) else _at_work()
    if known is not None:
        what, fix = known
        raise RuleError(f"{name_of(func)}: {what} does not see through ShardedTensors", fix=fix) from error


def refusal_below(func: Any) -> RuleError:
    """The error for an operation that reached a ShardedTensor where it has no elements."""
    known = _at_work()  # within a transform torch hides it, so that it is one of the usual causes too
    cause = {"cause": known[0]} if known else {"usual causes": "\n".join(_USUAL_CAUSES)}
    fix = known[1] if known else ["call full_tensor() first and work on the plain tensor", _UNSHARD]
    return RuleError(f"{func} reached a ShardedTensor below the level where operations are sharded", cause, fix)


_USUAL_CAUSES = (
    "torch.func transforms (grad, vjp, jvp, vmap, ...) over sharded operands,",
    "torch.compile over sharded operands, wrappers of modules that broadcast or flatten parameters,",
    "a sharded gradient for a plain tensor: y.backward(gradient) needs gradient.full_tensor(),",
    "code that disables __torch_function__",
)
_UNSHARD = "unshard_module(module) makes its parameters plain"


def _at_work() -> tuple[str, list[str]] | None:
    """What transforms or records at this moment, and what to do instead."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform (grad, vjp, jvp, vmap, functionalize, ...)", [
            "unshard_module(module), or full_tensor(), and transform the function of plain tensors",
            "torch.autograd.grad and torch.autograd.functional (vectorize=False) take sharded parameters",
        ]
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation", [
            "unshard_module(module), or full_tensor(), and differentiate the function of plain tensors",
            "torch.autograd.functional.jvp differentiates backward twice and takes sharded parameters",
        ]
    if torch.compiler.is_exporting():
        return "torch.export", ["unshard_module(module) first; shard what is loaded again"]
    if torch.jit.is_tracing():
        return "torch.jit.trace", ["unshard_module(module) first"]
    return None


@implements(torch.Tensor._is_view)
def _refuse_fake(tensor: torch.Tensor) -> NoReturn:
    """Torch asks this of what it is about to make a fake tensor of."""
    raise RuleError(
        "a fake tensor of a ShardedTensor would not know how it is sharded",
        {"usual causes": "torch.export, FakeTensorMode"},
        "unshard_module(module) first",
    )
