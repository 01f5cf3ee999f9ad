"""Hooks of std/hugging_face.shard: what Hugging Face's plans ask of modules, and no layout can say."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from shardtensor.comm.collectives import sum_gradient
from shardtensor.comm.group import Group
from shardtensor.sharding.hooks import Site, register_hook
from shardtensor.tensor.sharded_tensor import ShardedTensor


@register_hook("hf_sum_rope_gradient")
def sum_rope_gradient(site: Site, ax: Any, rope: int) -> Any:
    """Sum the gradient of the last `rope` features of what the module gives, over the ranks along `ax`.

    In latent attention one product makes what is cut into heads later, by a product that sums the gradient of its
    input itself, and beside it `rope` features that all heads use as they are: of those the gradient is one rank's
    addend. Costs one all_reduce of their size in backward.
    """

    def apply() -> Any:
        team = site.team(ax)

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            latent, shared = output.split([output.shape[-1] - rope, rope], dim=-1)
            return torch.cat([latent, sum_gradient(shared, team)], dim=-1)

        return site.module.register_forward_hook(hook)

    return apply


@register_hook("hf_share_of")
def share_of(site: Site, ax: Any) -> Any:
    """Divide what enters the module by the number of ranks along `ax`: its result is summed over them further up."""

    def apply() -> Any:
        team: Group = site.team(ax)

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0] / team.size, *args[1:])

        return site.module.register_forward_pre_hook(hook)

    return apply


@register_hook("hf_local_params")
def local_params(site: Site) -> Any:
    """Let the module's own forward compute with its rank's slices of its own parameters, as plain tensors.

    For code that multiplies by its parameters itself: stacked experts, the sinks of attention.
    """
    module, forward = site.module, site.module.forward

    @functools.wraps(forward)
    def locally(*args: Any, **kwargs: Any) -> Any:
        parameters: dict[str, Any] = module._parameters
        own = {name: p for name, p in parameters.items() if isinstance(p, ShardedTensor)}
        parameters.update({name: p._local for name, p in own.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            parameters.update(own)

    def apply() -> Any:
        vars(module)["forward"] = locally
        return _Undo(module)

    return apply


class _Undo:
    """Gives a module its own forward back."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def remove(self) -> None:
        vars(self.module).pop("forward", None)
