"""``use dispatch(ep, top_k=2)``: experts that are dealt over ranks get the tokens that chose them."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group, SingleRankGroup
from shardtensor.errors import PlanError
from shardtensor.parallel.experts import UNCOMPILED, Activation, combined, place, stacked
from shardtensor.parallel.moe import chosen
from shardtensor.parallel.tokens import dealt, dispatch, find_fault
from shardtensor.sharding.hooks import Site, Use, register_hook
from shardtensor.sharding.own_forward import listed_twin, refuse_another_result, stacked_twin
from shardtensor.tensor.sharded_tensor import local_of

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

    Raises:
        PlanError: there are no experts; or the module's own forward gives something else, which one run of both on a
            few tokens and small stand-ins for the experts shows, before anything changes.
    """
    module = site.module
    axes = (axis,) if isinstance(axis, str) else axis
    if all(name in module._parameters for name in _STACKS):
        activation = getattr(module, "act_fn", None) or getattr(module, "activation", None) or nn.functional.silu
        count = int(module.get_parameter(_STACKS[0]).shape[0])
        twin, called = stacked_twin(module, _STACKS, top_k)
        gate_up, down = (twin.get_parameter(name) for name in _STACKS)
        asked = f"dispatch({', '.join(axes)}, top_k={top_k})"
        ways = {asked: lambda: _through_stacks(called, (gate_up, down), (count,), SingleRankGroup(), activation)}
        refuse_another_result(site, lambda: twin(*called), asked, ways)
        return Use(
            lambda: _dispatching(module, StackedExperts, Dispatch(site.team(axes), count, activation=activation))
        )
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
    normalize = bool(getattr(module, "norm_topk_prob", True)) if normalize is None else normalize
    _refuse_another_forward(site, axes, count, top_k, normalize, logits)
    return Use(lambda: _dispatching(module, ListedExperts, Dispatch(site.team(axes), count, top_k, normalize, logits)))


def _refuse_another_forward(
    site: Site, axes: tuple[str, ...], count: int, top_k: int, normalize: bool, logits: bool
) -> None:
    """Raise unless the forward of a block with a router gives what these options give, in training and evaluation."""
    twin, states = listed_twin(site.module)

    def given(normalize: bool, logits: bool) -> Any:
        handle = _dispatching(twin, ListedExperts, Dispatch(SingleRankGroup(), count, top_k, normalize, logits))
        try:
            return twin(states)
        finally:
            handle.remove()

    ways = {}
    for options in itertools.product((True, False), repeat=2):
        words = f"normalize={str(options[0]).lower()}, logits={str(options[1]).lower()}"
        ways[f"dispatch({', '.join(axes)}, top_k={top_k}, {words})"] = functools.partial(given, *options)
        if options == (normalize, logits):
            asked = list(ways)[-1]
    for is_training in (True, False):
        twin.train(is_training)
        refuse_another_result(site, lambda: twin(states), asked, ways)


@attrs.frozen(eq=False)
class Dispatch:
    """What a module whose experts are dealt knows; one object for all copies of it.

    Attributes:
        team: the ranks that hold the experts.
        count: of all experts.
        top_k, normalize, logits: of a block with a router.
        activation: of stacked experts.
    """

    team: Group
    count: int
    top_k: int = 0
    normalize: bool = True
    logits: bool = False
    activation: Activation = nn.functional.silu

    @property
    def held(self) -> tuple[int, ...]:
        """How many experts each rank holds."""
        return dealt(self.count, self.team.size)

    @property
    def numbers(self) -> range:
        """The experts of this rank."""
        start = sum(self.held[: self.team.index])
        return range(start, start + self.held[self.team.index])

    def __deepcopy__(self, memo: Any) -> Dispatch:
        return self


class StackedExperts:
    """The forward of experts in two stacked tensors."""

    _dealing: Dispatch
    _parameters: dict[str, Any]

    @torch.compiler.disable(reason=UNCOMPILED)
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        gate_up, down = self._parameters[_STACKS[0]], self._parameters[_STACKS[1]]
        team, held, _ = place(gate_up, down)  # a cut inside of experts is for the plan's `in` and `out`
        inputs, stacks = (hidden_states, top_k_index, top_k_weights), (local_of(gate_up), local_of(down))
        return _through_stacks(inputs, stacks, held, team, self._dealing.activation)


def _through_stacks(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    stacks: tuple[torch.Tensor, torch.Tensor],
    held: tuple[int, ...],
    team: Group,
    activation: Activation,
) -> torch.Tensor:
    """Send tokens to the ranks of their experts, through this rank's two stacks, and back."""
    tokens, ids, weights = inputs
    sent = dispatch(tokens, ids, held, team, find_fault(tokens, ids, weights))
    return sent.combine(stacked(sent, *stacks, activation), weights)


class ListedExperts:
    """The forward of a router and experts that are modules."""

    _dealing: Dispatch
    gate: nn.Module
    experts: Any

    @torch.compiler.disable(reason=UNCOMPILED)
    def forward(self, hidden_states: torch.Tensor) -> Any:
        said, tokens = self._dealing, hidden_states.flatten(0, -2)
        scores = self.gate(tokens)
        ids, weights = chosen(scores, said.top_k, said.normalize)
        weights = self._touching(weights.to(tokens.dtype))
        sent = dispatch(tokens, ids, said.held, said.team, find_fault(tokens, ids, weights))
        out = combined(sent, [(number, self._expert(number)) for number in said.numbers], weights)
        out = out.view(hidden_states.shape)
        return (out, scores) if said.logits else out

    def _expert(self, number: int) -> nn.Module:
        return self.experts[number if isinstance(self.experts, nn.ModuleList) else str(number)]

    def _touching(self, weights: torch.Tensor) -> torch.Tensor:
        """The same, by way of the experts of other ranks, of which nothing is here: so they get gradients."""
        elsewhere = [number for number in range(self._dealing.count) if number not in self._dealing.numbers]
        if not elsewhere or not torch.is_grad_enabled():
            return weights
        parts = (local_of(p).reshape(-1) for number in elsewhere for p in self._expert(number).parameters())
        return weights + torch.cat([*parts, weights.new_empty(0)]).sum()


class _Dispatching:
    """The handle of a module whose forward is another; ``remove()`` gives it its own back."""

    def __init__(self, module: nn.Module, kind: type[nn.Module]) -> None:
        self.module, self.kind = module, kind

    def remove(self) -> None:
        self.module.__class__ = self.kind
        vars(self.module).pop("_dealing", None)


_CLASSES: dict[tuple[type, type], Any] = {}


def _dispatching(module: nn.Module, forward: type, said: Dispatch) -> _Dispatching:
    """Give a module the class of its own kind with another forward."""
    kind = type(module)
    if (forward, kind) not in _CLASSES:
        _CLASSES[forward, kind] = type(f"{forward.__name__}{kind.__name__}", (forward, kind), {})
    vars(module)["_dealing"] = said
    module.__class__ = _CLASSES[forward, kind]
    return _Dispatching(module, kind)
