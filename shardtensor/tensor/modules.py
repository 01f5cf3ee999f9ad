"""What torch's modules ask of sharded parameters: other memory, loads, flat RNN weights, DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardtensor.errors import RuleError
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.sharded_tensor import ShardedTensor


def set_(tensor: torch.Tensor, source: Any = None, *place: Any) -> ShardedTensor:
    """Make `tensor` share the bytes of another ShardedTensor of its layout; this object and its leaf stay.

    Any other source, a storage or a plain tensor, would be one shard's.
    """
    if (
        not isinstance(tensor, ShardedTensor)
        or not isinstance(source, ShardedTensor)
        or source._layout != tensor._layout
        or place
    ):
        raise RuleError(
            "set_ needs two ShardedTensors of one layout",
            {"this": type(tensor).__name__, "source": type(source).__name__},
            "use copy_(source) to take its values",
        )
    tensor._local.set_(source._local)  # type: ignore[call-overload]
    tensor._sync_body()
    tensor._tell_flat()
    return tensor


ShardedTensor.set_ = set_  # type: ignore[method-assign,assignment]  # torch asks no override for it


@implements(torch.Tensor.module_load)
def module_load(tensor: torch.Tensor, other: torch.Tensor, assign: bool = False) -> torch.Tensor:
    """The tensor that takes the place of `tensor` in a module that loads `other`: see torch's ``module_load``."""
    return other.detach() if assign else tensor.copy_(other).detach()


@implements(torch._has_compatible_shallow_copy_type)
def has_compatible_shallow_copy_type(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a.data = b`` will do; modules ask it before they convert a parameter in place."""
    if not isinstance(a, ShardedTensor) or not isinstance(b, ShardedTensor) or a._layout != b._layout:
        return False
    return torch._has_compatible_shallow_copy_type(a._local, b._local)


def drop_weak_references(module: nn.Module, params: Iterable[torch.Tensor]) -> None:
    """Drop the weak references that each LSTM, GRU and RNN in `module` keeps to some of `params`, to shard these.

    It makes them anew in its next forward. It no longer moves its parameters into one piece of memory, which cuDNN
    wants and sharded parameters cannot have.
    """
    ids = set(map(id, params))
    for owner in module.modules():
        if isinstance(owner, nn.RNNBase) and any(id(p) in ids for p in owner._parameters.values()):
            owner._flat_weight_refs = [
                ref and weakref.ref(nn.Parameter(torch.empty(0))) for ref in owner._flat_weight_refs
            ]
            owner.flatten_parameters = _stay_apart  # type: ignore[method-assign]


def _stay_apart() -> None:
    """What ``flatten_parameters`` of a sharded module does."""


def flatten_again(module: nn.Module) -> None:
    """Give each LSTM, GRU and RNN in `module` whose parameters are plain its ``flatten_parameters`` back.

    In its next forward it notices that its weak references are gone, makes them anew, and flattens.
    """
    for owner in module.modules():
        is_sharded = any(isinstance(p, ShardedTensor) for p in owner._parameters.values())
        if not is_sharded and vars(owner).get("flatten_parameters") is _stay_apart:
            del owner.flatten_parameters


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
