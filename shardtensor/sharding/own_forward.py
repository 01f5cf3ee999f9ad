"""Whether ``use dispatch(...)`` gives what a module's own forward gives: both run once, on a few tokens.

It costs next to nothing for experts of any size, and needs no values of theirs: small stand-ins take their places.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardtensor.errors import PlanError
from shardtensor.sharding.hooks import Site

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
