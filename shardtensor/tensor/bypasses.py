"""What works below ``__torch_function__``, where a ShardedTensor has no elements: told apart, refused with the way out.

Transforms of functions, tracers and wrappers of modules handle tensors in C++. Nothing here costs a call that does not
fail, but for a look at each module that is put into another.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.tensor.dispatch import implements, name_of
from shardtensor.tensor.sharded_tensor import ShardedTensor


def tell_of_bypass(error: Exception, func: Any) -> None:
    """Raise in place of `error`, from an operation on ShardedTensors, where a transform or a tracer is its cause.

    Raises:
        RuleError: one is active.
    """
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
def _refuse_fake(tensor: ShardedTensor) -> NoReturn:
    """Torch asks this of what it is about to make a fake tensor of."""
    raise RuleError(
        "a fake tensor of a ShardedTensor would not know how it is sharded",
        {"usual causes": "torch.export, FakeTensorMode"},
        "unshard_module(module) first",
    )


def _refuse_ddp(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Refuse a DistributedDataParallel that would hold sharded parameters: when it takes its module, before it sends.

    Its C++ part would reduce bodies without elements, and where no first broadcast is asked for, it would say nothing.
    """
    if name != "module" or not isinstance(parent, DistributedDataParallel):
        return
    delayed = {id(param) for param in parent._delay_all_reduce_params}
    held = [
        key
        for key, value in (*module.named_parameters(), *module.named_buffers())
        if isinstance(value, ShardedTensor) and (key not in parent.parameters_to_ignore or id(value) in delayed)
    ]
    if held:
        shown = ", ".join(held[:6]) + (f" and {len(held) - 6} more" if len(held) > 6 else "")
        raise RuleError(
            "DistributedDataParallel cannot hold sharded parameters; nothing was sent",
            {"sharded": shown},
            [
                'shardtensor.data_parallel(module, "dp", mesh) averages gradients over the data ranks of a mesh',
                "before it is made: DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(\n"
                "    module, names)",
            ],
        )


register_module_module_registration_hook(_refuse_ddp)
