"""Hooks that a plan names: ``use cross_entropy()``. Python that does to a module what no layout can say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import attrs
from torch import nn

from shardtensor.comm.group import Group, group_along
from shardtensor.errors import PlanError
from shardtensor.plan.flows.gradients import Flows
from shardtensor.plan.line import Hook

_HOOKS: dict[str, Callable[..., Any]] = {}


@attrs.frozen(eq=False)
class Site:
    """Where a hook is used.

    Attributes:
        path, module: of the module in whose block it stands.
        root: the module that is sharded.
        group: all ranks, with the axes of the plan.
        flows: how values pass modules, and how the parameters of layers lie.
        modules: by their paths, as the flows have them.
    """

    path: str
    module: nn.Module
    root: nn.Module
    group: Group
    flows: Flows
    modules: Mapping[str, nn.Module]

    def team(self, axes: str | Iterable[str]) -> Group:
        """The ranks along some axes of the plan. All ranks ask for it, and only when the hook is applied."""
        return group_along(self.group, (axes,) if isinstance(axes, str) else axes, PlanError)

    def refused(
        self, fault: str, facts: Mapping[str, object] | None = None, fix: str | Iterable[str] = ()
    ) -> PlanError:
        """The error for a hook that cannot be used here."""
        return PlanError(f"{self.path or type(self.root).__name__}: {fault}", facts, fix)


@attrs.frozen(eq=False)
class Use:
    """What a hook is going to do.

    Attributes:
        apply: does it, once the module is sharded; all ranks call it. It may return something with a ``remove()`` that
            undoes it, or several.
        takes: modules whose results it takes, so that they may leave cut and reach no module that expects them so.
    """

    apply: Callable[[], Any]
    takes: tuple[str, ...] = ()


def register_hook(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the hook of a name, for ``use NAME(...)`` in plans.

    The function is called before anything changes, with a `Site` and the arguments of the plan: numbers, booleans, and
    axes by name. It may raise PlanError. It returns what is to be done once the module is sharded: a `Use`, or a
    function of no arguments.

    Example:
        >>> @register_hook("count_calls")
        ... def count_calls(site, by=1):
        ...     def apply():
        ...         site.module.calls = 0
        ...         count = lambda module, *_: setattr(module, "calls", module.calls + by)
        ...         return site.module.register_forward_hook(count)
        ...     return apply
        >>> import torch, shardtensor as st
        >>> linear = st.shard_module(nn.Linear(2, 2), {"weight": "[tp, -]", "use": "count_calls(by=2)"})
        >>> _ = linear(torch.ones(1, 2))
        >>> linear.calls
        2
    """

    def register(hook: Callable[..., Any]) -> Callable[..., Any]:
        _HOOKS[name] = hook
        return hook

    return register


def called(hook: Hook, site: Site) -> Use:
    """Ask a hook what it is going to do.

    Raises:
        PlanError: there is no such hook, its arguments are others, or it cannot be used there.
    """
    function = _HOOKS.get(hook.name)
    if function is None:
        near = get_close_matches(hook.name, _HOOKS, 1)
        raise site.refused(
            f"no hook is called `{hook.name}`",
            {"there are": ", ".join(sorted(_HOOKS))},
            f"did you mean `{near[0]}`?" if near else f'define it with @register_hook("{hook.name}")',
        )
    try:
        inspect.signature(function).bind(site, *hook.args, **hook.kwargs)
    except TypeError as error:
        wanted = ", ".join(str(p) for p in list(inspect.signature(function).parameters.values())[1:])
        raise site.refused(
            f"`use {hook.name}`: {error}", {"it takes": wanted or "nothing"}, "change the arguments"
        ) from None
    found = function(site, *hook.args, **hook.kwargs)
    return found if isinstance(found, Use) else Use(found)


class NewForward:
    """Gives a module another forward, by a class of its own, so that copies have it too; ``remove()`` undoes it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.kind = module, type(module)
        module.__class__ = type(self.kind.__name__, (self.kind,), {"forward": forward})

    def remove(self) -> None:
        self.module.__class__ = self.kind
