"""Who gives the tensors of a module their first values, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from shardtensor.errors import PlanError
from shardtensor.sharding.meta_tensors import MetaTensor, owned

Init = Callable[[nn.Module], Any]
"""A user's function that gives one module its values."""

Call = tuple[nn.Module, Callable[[], Any]]
"""A module, and what sets its values."""

RESETS = ("reset_parameters", "_reset_parameters")
"""How modules call what gives them their first values; the second is that of ``nn.MultiheadAttention``."""

FIXES = (
    "materialize(module, init=function), which is called with each submodule and sets its tensors",
    "give the module's class a reset_parameters() that sets them",
    "build the module's buffers outside torch.device('meta'): they keep their values",
)


def built_order(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterable[nn.Module]:
    """A module and all below it, each once, after what it holds."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from built_order(child, seen)
    yield module


def calls_of_init(module: nn.Module, init: Init) -> list[Call]:
    """The calls of a user's function: for every module with meta tensors in it or below."""
    wanted = [m for m in built_order(module) if any(t.is_meta for below in m.modules() for _, t in owned(below))]
    return [(each, lambda each=each: init(each)) for each in wanted]  # type: ignore[misc]


def calls_of_resets(module: nn.Module, found: Sequence[MetaTensor]) -> list[Call]:
    """The calls of the modules' own methods: each tensor's nearest one, in its module or above."""
    paths = {owner: path for path, owner in module.named_modules()}
    wanted: set[nn.Module] = set()
    nobody: dict[str, list[str]] = {}
    for each in found:
        for owner, name in each.homes:
            nearest = next((m for m in _upwards(module, paths[owner]) if _reset_of(m) is not None), None)
            if nearest is None:
                nobody.setdefault(f"{paths[owner] or 'the module'} ({type(owner).__name__})", []).append(name)
            else:
                wanted.add(nearest)
    if nobody:
        raise PlanError(
            "modules hold tensors without values and have no reset_parameters()",
            {who: ", ".join(names) for who, names in nobody.items()},
            FIXES,
        )
    return [(m, reset) for m in built_order(module) if m in wanted and (reset := _reset_of(m)) is not None]


def _upwards(module: nn.Module, path: str) -> Iterable[nn.Module]:
    while True:
        yield module.get_submodule(path)
        if not path:
            return
        path = path.rpartition(".")[0]


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((method for name in RESETS if callable(method := getattr(module, name, None))), None)
