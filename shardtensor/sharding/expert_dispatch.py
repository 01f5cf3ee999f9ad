"""``use dispatch(ep, top_k=2)``: experts that are dealt over ranks get the tokens that chose them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import PlanError
from shardtensor.parallel.experts import UNCOMPILED, combined, stacked
from shardtensor.parallel.tokens import dealt, dispatch, find_fault
from shardtensor.sharding.hooks import Site, Use, register_hook
from shardtensor.tensor.sharded_tensor import ShardedTensor

_STACKS = ("gate_up_proj", "down_proj")


@register_hook("dispatch")
def dispatch_to_experts(
    site: Site, axis: str | tuple[str, ...], top_k: int, normalize: bool | None = None, logits: bool = True
) -> Use:
    """Send each token to the ranks along `axis` that hold its experts, and its results back.

    It stands in the block of one of two kinds of modules, and takes the place of its forward:

    * experts in two stacked tensors, ``gate_up_proj`` (experts, 2 * hidden, embed) and ``down_proj`` (experts, embed,
      hidden), called with tokens (n, d), the numbers of their experts (n, k) and weights (n, k). Other axes may cut
      the experts inside: the plan's ``in`` and ``out`` then say that results are addends;
    * a block with a router ``gate`` and modules ``experts.0``, ``experts.1``, ..., called with hidden states alone: the
      ``top_k`` most likely experts of each token are weighed by their chances, which are made to add up to one where
      `normalize` (if it is not said: as the module's ``norm_topk_prob`` says, and without one they are). It gives a
      tuple, hidden states and the router's logits, as Hugging Face's blocks do; without `logits` the states alone.

    Every expert of a rank is called, also with no rows, so that its collectives meet.
    """
    module = site.module
    axes = (axis,) if isinstance(axis, str) else axis
    if all(name in module._parameters for name in _STACKS):
        return Use(lambda: _Forward(module, _of_stacks(module, site.team(axes))))
    experts, gate = module._modules.get("experts"), module._modules.get("gate")
    if gate is None or not isinstance(experts, nn.ModuleList | nn.ModuleDict) or not len(experts):
        raise site.refused(
            "`use dispatch(...)` finds no experts",
            {"module": type(module).__name__, "needed": "gate_up_proj and down_proj, or `gate` and a list `experts`"},
            "write it in the block of the experts' module",
        )
    if site.group.mesh is not None:
        site.group.mesh.refuse_unknown(axes, PlanError)
    known = ("gate", "experts")
    others = [name for name, child in module.named_children() if name not in known and list(child.parameters())]
    others += [name for name in ("jitter_noise", "router_jitter_noise") if getattr(module, name, 0)]
    own_k = getattr(module, "top_k", top_k)
    if others or own_k != top_k:
        raise site.refused(
            "`use dispatch(...)` would not do what this block does",
            {"it has also": ", ".join(others) or "nothing", "top_k": f"{top_k}, and the module's is {own_k}"},
            "write a hook of your own with @register_hook around shardtensor.dispatch_tokens",
        )
    count = len(experts)
    normalize = getattr(module, "norm_topk_prob", True) if normalize is None else normalize
    return Use(lambda: _Forward(module, _of_modules(module, site.team(axes), count, top_k, normalize, logits)))


class _Forward:
    """Another forward of one module; ``remove()`` gives it its own back."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        vars(module)["forward"] = forward

    def remove(self) -> None:
        vars(self.module).pop("forward", None)

    def __deepcopy__(self, memo: Any) -> _Forward:
        return self


def _of_stacks(module: Any, team: Group) -> Callable[..., Any]:
    activation = getattr(module, "act_fn", None) or getattr(module, "activation", None) or nn.functional.silu

    @torch.compiler.disable(reason=UNCOMPILED)
    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        gate_up, down = (_local(module._parameters[name]) for name in _STACKS)
        count = module._parameters[_STACKS[0]].shape[0]
        fault = find_fault(hidden_states, top_k_index, top_k_weights)
        sent = dispatch(hidden_states, top_k_index, dealt(count, team.size), team, fault)
        return sent.combine(stacked(sent, gate_up, down, activation), top_k_weights)

    return forward


def _of_modules(module: Any, team: Group, count: int, top_k: int, normalize: bool, logits: bool) -> Callable[..., Any]:
    held = dealt(count, team.size)
    start = sum(held[: team.index])
    numbers = range(start, start + held[team.index])
    elsewhere = [number for number in range(count) if number not in numbers]

    @torch.compiler.disable(reason=UNCOMPILED)
    def forward(hidden_states: torch.Tensor) -> Any:
        tokens = hidden_states.flatten(0, -2)
        scores = module.gate(tokens)
        chances = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, ids = chances.topk(top_k, -1)
        if normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(tokens.dtype)
        if elsewhere and torch.is_grad_enabled():  # nothing, but by way of the parameters, so that they get gradients
            parts = (_local(p).reshape(-1) for number in elsewhere for p in module.experts[number].parameters())
            weights = weights + torch.cat([*parts, weights.new_empty(0)]).sum()
        sent = dispatch(tokens, ids, held, team, find_fault(tokens, ids, weights))
        out = combined(sent, [(number, module.experts[number]) for number in numbers], weights)
        out = out.view(hidden_states.shape)
        return (out, scores) if logits else out

    return forward


def _local(param: torch.Tensor) -> torch.Tensor:
    return param._local if isinstance(param, ShardedTensor) else param
