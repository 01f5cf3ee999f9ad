"""``use dispatch(ep, top_k=2)``: experts that are dealt over ranks get the tokens that chose them."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
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


_TOKENS, _WIDTH, _HIDDEN = 6, 4, 3
_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_HOOK = "write a hook of your own with @register_hook around shardtensor.dispatch_tokens"


class _Scaled(nn.Module):
    """Stands for an expert that is a module."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.factor


def listed_twin(block: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    """A block like `block`, whose experts are stand-ins and whose router has values of its own; and hidden states."""
    generator = torch.Generator().manual_seed(0)
    gate = copy.deepcopy(block._modules["gate"])
    assert gate is not None
    gate.to_empty(device="cpu").float()
    for tensor in (*gate.parameters(), *gate.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor.data
    width = next((p.shape[-1] for p in gate.parameters() if p.dim() == 2), _WIDTH)
    experts: Any = block._modules["experts"]
    count = len(experts)
    twin = _shallow(block)
    if isinstance(experts, nn.ModuleDict):
        stood: nn.Module = nn.ModuleDict({name: _Scaled((i + 1) / count) for i, name in enumerate(experts)})
    else:
        stood = nn.ModuleList(_Scaled((i + 1) / count) for i in range(count))
    twin._modules |= {"gate": gate, "experts": stood}
    return twin, torch.randn(2, _TOKENS // 2, width, generator=generator) * width**-0.5


def stacked_twin(experts: nn.Module, names: tuple[str, str], top_k: int) -> tuple[nn.Module, _Inputs]:
    """Experts like `experts` with two small stacked tensors; and tokens, their experts and the weights of those."""
    generator = torch.Generator().manual_seed(0)
    count = experts.get_parameter(names[0]).shape[0]
    twin = _shallow(experts)
    shapes = (count, 2 * _HIDDEN, _WIDTH), (count, _WIDTH, _HIDDEN)
    for name, shape in zip(names, shapes, strict=True):
        twin._parameters[name] = nn.Parameter(torch.randn(shape, generator=generator))
    config: Any = getattr(experts, "config", None)
    if hasattr(config, "_experts_implementation"):  # of transformers: the one that multiplies matrices of any size
        vars(twin)["config"] = config = copy.copy(config)
        config._experts_implementation = "eager"
    chances = torch.rand(_TOKENS, count, generator=generator)
    weights, ids = chances.topk(min(top_k, count), -1)
    return twin, (torch.randn(_TOKENS, _WIDTH, generator=generator), ids, weights)


def _shallow(module: nn.Module) -> nn.Module:
    """A copy of a module that shares what it holds, and may be given other tensors and children."""
    twin = copy.copy(module)
    for kind in ("_modules", "_parameters", "_buffers"):
        vars(twin)[kind] = dict(getattr(module, kind))
    vars(twin).pop("forward", None)
    return twin


def refuse_another_result(
    site: Site,
    own: Callable[[], Any],
    asked: str,
    ways: Mapping[str, Callable[[], Any]],
) -> None:
    """Raise unless the module's own forward gives what the dispatch gives that is asked for.

    Args:
        site: where the hook stands.
        own: the module's own forward on its twin.
        asked: the key of `ways` that the plan asks for.
        ways: from how a dispatch is written to what it gives on the twin.

    Raises:
        PlanError: it gives something else, the same on every rank; the fix is another of the ways, if one gives it.
    """
    with torch.no_grad(), torch.device("cpu"):
        given = ways[asked]()
        try:
            found = own()
        except Exception as error:
            raise _refused(site, f"{type(error).__name__}: {error}", given, _HOOK) from error
        if _is_alike(found, given):
            return
        fits = next((way for way, call in ways.items() if _is_alike(found, call())), None)
    raise _refused(site, _said(found), given, _HOOK if fits is None else f"write `use {fits}`", _far(found, given))


def _refused(site: Site, own: str, given: Any, fix: str, more: dict[str, str] | None = None) -> PlanError:
    facts = {"module": type(site.module).__name__, "its own forward": own, "dispatch": _said(given)}
    return site.refused("`use dispatch(...)` would not do what this block does", facts | (more or {}), fix)


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) or isinstance(other, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(_is_alike, one, other))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return False
    return torch.allclose(one.float(), other.float(), rtol=1e-4, atol=1e-5)


def _said(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor {tuple(result.shape)}"
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of {', '.join(map(_said, result)) or 'nothing'}"
    return f"a {type(result).__name__}"


def _far(one: Any, other: Any) -> dict[str, str]:
    """How far apart two results are that look alike."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list) and len(one) == len(other):
        return next(filter(None, map(_far, one, other)), {})
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return {}
    apart = float((one.float() - other.float()).abs().max())
    return {} if apart < 1e-5 else {"apart by": f"{apart:.2g} of {float(one.abs().max()):.2g}"}
