"""``use dispatch(ep, top_k=2)`` sends tokens to their experts, which are sharded over ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardtensor.comm.group import Group, SingleRankGroup
from shardtensor.errors import PlanError
from shardtensor.parallel.experts import UNCOMPILED, chosen, combined, place, stacked
from shardtensor.parallel.hooks import NewForward, Site, Use, register_hook
from shardtensor.parallel.tokens import dispatch, experts_per_rank, find_fault
from shardtensor.tensor.sharded_tensor import local_of

_STACKS = ("gate_up_proj", "down_proj")
_HOOK = "write a hook of your own with @register_hook around shardtensor.dispatch_tokens"
_ANOTHER = "`use dispatch(...)` would not do what this block does"

Forward = Callable[..., Any]


@register_hook("dispatch")
def dispatch_to_experts(
    site: Site, axis: str | tuple[str, ...], top_k: int, normalize: bool | None = None, logits: bool = True
) -> Use:
    """Send each token to the ranks along `axis` that hold its experts, and its results back.

    It is for the blocks of two kinds of modules, and replaces their forward:

    * experts in two stacked tensors, ``gate_up_proj`` (experts, 2 * hidden, embed) and ``down_proj`` (experts, embed,
      hidden), called with tokens (n, d), the numbers of their experts (n, k) and weights (n, k). Other axes may shard
      the experts inside: the plan's ``in`` and ``out`` then declare the results as partial sums;
    * a block with a router ``gate`` and modules ``experts.0``, ``experts.1``, ..., called with hidden states alone: the
      ``top_k`` most likely experts of each token are weighted by their probabilities, which are normalized to a sum of
      one if `normalize` (None: the module's ``norm_topk_prob``, or True without one). It returns a tuple, hidden states
      and the router's logits, as Hugging Face's blocks do; without `logits` only the states.

    Every expert of a rank is called, even with no rows, so that its collectives match on all ranks.

    Raises:
        PlanError: there are no experts; or the module's own forward returns something else. One run of both on a few
            tokens, with small replacements for the experts, checks this before anything changes.
    """
    module = site.module
    axes = (axis,) if isinstance(axis, str) else axis
    if site.group.mesh is not None:
        site.group.mesh.refuse_unknown(axes, PlanError)
    call = f"dispatch({', '.join(axes)}, top_k={top_k}"
    if all(name in module._parameters for name in _STACKS):
        forward = _stacked_forward(getattr(module, "act_fn", None) or getattr(module, "activation", None))
        _refuse_another_forward(site, *_stacked_sample(module, top_k), f"{call})", {f"{call})": forward})
        return Use(lambda: NewForward(module, forward))
    experts, gate = module._modules.get("experts"), module._modules.get("gate")
    if gate is None or not isinstance(experts, nn.ModuleList | nn.ModuleDict) or not len(experts):
        raise site.refused(
            "`use dispatch(...)` finds no experts",
            {"module": type(module).__name__, "needed": "gate_up_proj and down_proj, or `gate` and a list `experts`"},
            "write it in the block of the experts' module",
        )
    handled = ("gate", "experts")
    others = [name for name, child in module.named_children() if name not in handled and list(child.parameters())]
    others += [name for name in ("jitter_noise", "router_jitter_noise") if getattr(module, name, 0)]
    own_k = getattr(module, "top_k", top_k)
    if others or own_k != top_k:
        raise site.refused(
            _ANOTHER,
            {"it has also": ", ".join(others) or "nothing", "top_k": f"{top_k}, and the module's is {own_k}"},
            _HOOK,
        )
    count, alone = len(experts), SingleRankGroup()
    normalize = bool(getattr(module, "norm_topk_prob", True)) if normalize is None else normalize
    forwards = {
        f"{call}, normalize={str(n).lower()}, logits={str(g).lower()})": _listed_forward(alone, count, top_k, n, g)
        for n, g in itertools.product((True, False), repeat=2)
    }
    requested = f"{call}, normalize={str(normalize).lower()}, logits={str(logits).lower()})"
    _refuse_another_forward(site, *_listed_sample(module), requested, forwards)
    return Use(lambda: NewForward(module, _listed_forward(site.group_along(axes), count, top_k, normalize, logits)))


def _stacked_forward(activation: Any) -> Forward:
    """Return the forward of experts in two stacked tensors."""

    @torch.compiler.disable(reason=UNCOMPILED)
    def forward(
        self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        stacks = [self._parameters[name] for name in _STACKS]
        subgroup, held, _ = place(*stacks)  # the plan's `in` and `out` handle shards inside experts
        fault = find_fault(hidden_states, top_k_index, top_k_weights)
        sent = dispatch(hidden_states, top_k_index, held, subgroup, fault)
        gate_up, down = map(local_of, stacks)
        return sent.combine(stacked(sent, gate_up, down, activation or nn.functional.silu), top_k_weights)

    return forward


def _listed_forward(subgroup: Group, count: int, top_k: int, normalize: bool, logits: bool) -> Forward:
    """Return the forward of a router and `count` experts that are modules, sharded over the ranks of `subgroup`."""
    held = experts_per_rank(count, subgroup.size)
    start = sum(held[: subgroup.index])
    numbers = range(start, start + held[subgroup.index])

    @torch.compiler.disable(reason=UNCOMPILED)
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        experts = list(self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts)
        tokens = hidden_states.flatten(0, -2)
        scores = self.gate(tokens)
        ids, weights = chosen(scores, top_k, normalize)
        weights = weights.to(tokens.dtype)
        if len(numbers) < count and torch.is_grad_enabled():  # experts of other ranks get (empty) gradients, too
            others = (p for i, expert in enumerate(experts) if i not in numbers for p in expert.parameters())
            weights = weights + torch.cat([local_of(p).reshape(-1) for p in others] + [weights.new_empty(0)]).sum()
        sent = dispatch(tokens, ids, held, subgroup, find_fault(tokens, ids, weights))
        out = combined(sent, [(number, experts[number]) for number in numbers], weights).view(hidden_states.shape)
        return (out, scores) if logits else out

    return forward


# -- whether the module's own forward does the same -----------------------------------------------------------------

_TOKENS, _WIDTH, _HIDDEN = 6, 4, 3


class _Scaled(nn.Module):
    """A small replacement for an expert that is a module."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.factor


def _listed_sample(block: nn.Module) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return a block like `block`, with small experts and new values in its router; and hidden states."""
    generator = torch.Generator().manual_seed(0)
    copied, experts = _shallow(block), block._modules["experts"]
    gate: Any = copied._modules["gate"]
    gate.to_empty(device="cpu").float()
    for tensor in (*gate.parameters(), *gate.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor.data
    width = next((p.shape[-1] for p in gate.parameters() if p.dim() == 2), _WIDTH)
    count = len(experts)  # type: ignore[arg-type]
    scaled = {name: _Scaled((i + 1) / count) for i, name in enumerate(experts._modules)}  # type: ignore[union-attr]
    is_dict = isinstance(experts, nn.ModuleDict)
    copied._modules["experts"] = nn.ModuleDict(scaled) if is_dict else nn.ModuleList(scaled.values())
    return copied, (torch.randn(2, _TOKENS // 2, width, generator=generator) * width**-0.5,)


def _stacked_sample(experts: nn.Module, top_k: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return experts like `experts` with two small stacked tensors; and tokens, their experts and weights."""
    generator = torch.Generator().manual_seed(0)
    count = experts.get_parameter(_STACKS[0]).shape[0]
    copied = _shallow(experts)
    for name, shape in zip(_STACKS, ((count, 2 * _HIDDEN, _WIDTH), (count, _WIDTH, _HIDDEN)), strict=True):
        copied._parameters[name] = nn.Parameter(torch.randn(shape, generator=generator))
    config: Any = getattr(experts, "config", None)
    if hasattr(config, "_experts_implementation"):  # of transformers: the one that multiplies matrices of any size
        vars(copied)["config"] = config = copy.copy(config)
        config._experts_implementation = "eager"
    weights, ids = torch.rand(_TOKENS, count, generator=generator).topk(min(top_k, count), -1)
    return copied, (torch.randn(_TOKENS, _WIDTH, generator=generator), ids, weights)


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy of a module, with copied children except experts, whose tensors can be replaced."""
    copied = copy.copy(module)
    vars(copied)["_parameters"] = dict(module._parameters)
    vars(copied)["_modules"] = {n: m if n == "experts" else copy.deepcopy(m) for n, m in module._modules.items()}
    vars(copied).pop("forward", None)
    return copied


def _refuse_another_forward(
    site: Site, copied: nn.Module, inputs: tuple[torch.Tensor, ...], requested: str, forwards: Mapping[str, Forward]
) -> None:
    """Raise unless a module's own forward returns the same as the requested dispatch, in training and evaluation.

    `forwards` has the forwards by the text of their dispatch: the fix names the one that agrees with the module's own.
    """
    with torch.no_grad(), torch.device("cpu"):
        for is_training in (True, False):
            copied.train(is_training)
            given, own, fix = forwards[requested](copied, *inputs), None, _HOOK
            try:
                found = copied(*inputs)
                own, difference = _kind(found), _difference(found, given)
                if difference is None:
                    continue
            except Exception as error:
                own, difference, found = f"{type(error).__name__}: {error}", {}, None
            for text, forward in forwards.items() if found is not None else ():
                if _difference(found, forward(copied, *inputs)) is None:
                    fix = f"write `use {text}`"
            facts = {"module": type(site.module).__name__, "its own forward": own, "dispatch": _kind(given)}
            raise site.refused(_ANOTHER, facts | difference, fix)


def _kind(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor {tuple(result.shape)}"
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of {', '.join(map(_kind, result)) or 'nothing'}"
    return f"a {type(result).__name__}"


def _difference(one: Any, other: Any) -> dict[str, str] | None:
    """Return None if two results are equal; else their difference if they are of one kind, or an empty dict."""
    if _kind(one) != _kind(other):
        return {}
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
        if not torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5):
            return {"apart by": f"{(a.float() - b.float()).abs().max():.2g} of {a.float().abs().max():.2g}"}
    return None
