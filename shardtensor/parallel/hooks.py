"""Hooks of plans: Python functions that change a module in ways that no layout can express; and the library's own.

The latter are ``use cross_entropy()`` and those of std/hugging_face.shard; `expert_dispatch` has ``use dispatch()``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from operator import truediv
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.collectives import sum_gradient, with_adjoint
from shardtensor.comm.group import Group, group_along
from shardtensor.comm.untraced import untraced
from shardtensor.errors import PlanError
from shardtensor.parallel.module_changes import dim_sizes_of
from shardtensor.plan.flows.flow import cut_axes, cuts
from shardtensor.plan.flows.gradients import Flows
from shardtensor.plan.flows.modules import is_inside
from shardtensor.plan.line import Hook
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.spec.nodes import Cut, Spec
from shardtensor.tensor.placing import bind_named, mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of, wrap

_HOOKS: dict[str, Callable[..., Any]] = {}


@attrs.frozen(eq=False)
class Site:
    """Where a hook is used.

    Attributes:
        path, module: of the module whose block has the hook.
        root: the module that is sharded.
        group: all ranks, with the axes of the plan.
        flows: the flows of values through modules, and the layouts of layers' parameters.
        modules: by their paths, as the flows have them.
    """

    path: str
    module: nn.Module
    root: nn.Module
    group: Group
    flows: Flows
    modules: Mapping[str, nn.Module]

    def group_along(self, axes: str | Iterable[str]) -> Group:
        """Return the group along some axes of the plan. All ranks call it, and only when the hook is applied."""
        return group_along(self.group, (axes,) if isinstance(axes, str) else axes, PlanError)

    def replicated(self, axis: str) -> frozenset[str]:
        """Return the names of the module's own parameters that are replicated along an axis of the plan."""
        modules, prefix = self.flows.modules, f"{unwrapped(self.path)}." if self.path else ""
        axes = set(modules.leaves((axis,)))
        found = []
        for name in self.module._parameters:
            placed = modules.resolved.tensors.get(f"{prefix}{name}")
            if placed is not None and isinstance(placed.spec, Spec):
                found += [name] * axes.isdisjoint(cut_axes(modules.spec(placed.spec)))
        return frozenset(found)

    def refused(
        self, fault: str, facts: Mapping[str, object] | None = None, fix: str | Iterable[str] = ()
    ) -> PlanError:
        """Return the error for a hook that cannot be used here."""
        return PlanError(f"{self.path or type(self.root).__name__}: {fault}", facts, fix)


@attrs.frozen(eq=False)
class Use:
    """What a hook will do.

    Attributes:
        apply: a function that makes the change after the module is sharded; all ranks call it. It may return an
            object with a ``remove()`` that undoes the change, or several.
        takes: modules whose results it uses: these may stay sharded although no other module expects them sharded.
    """

    apply: Callable[[], Any]
    takes: tuple[str, ...] = ()


def register_hook(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the hook of a name, for ``use NAME(...)`` in plans.

    The function is called before anything changes, with a `Site` and the arguments of the plan: numbers, booleans, and
    axes by name. It may raise PlanError. It returns what to do after the module is sharded: a `Use`, or a
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
    """Call a hook and return what it will do; raise PlanError if it cannot be used."""
    function = _HOOKS.get(hook.name)
    if function is None:
        matches = get_close_matches(hook.name, _HOOKS, 1)
        raise site.refused(
            f"no hook is called `{hook.name}`",
            {"there are": ", ".join(sorted(_HOOKS))},
            f"did you mean `{matches[0]}`?" if matches else f'define it with @register_hook("{hook.name}")',
        )
    try:
        inspect.signature(function).bind(site, *hook.args, **hook.kwargs)
    except TypeError as error:
        accepted = ", ".join(str(p) for p in list(inspect.signature(function).parameters.values())[1:])
        raise site.refused(
            f"`use {hook.name}`: {error}", {"it takes": accepted or "nothing"}, "change the arguments"
        ) from None
    found = function(site, *hook.args, **hook.kwargs)
    return found if isinstance(found, Use) else Use(found)


class NewForward:
    """Replaces a module's forward, by a new class, so that copies have it too; ``remove()`` undoes it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.kind = module, type(module)
        module.__class__ = type(self.kind.__name__, (self.kind,), {"forward": forward})

    def remove(self) -> None:
        self.module.__class__ = self.kind


# -- the library's own -----------------------------------------------------------------------------------------------

UNCOMPILED = (
    "`use cross_entropy()` makes one ShardedTensor of the logits, which no graph takes: compile what stands before the "
    "head, as in `model.model.compile(fullgraph=True)`"
)


@register_hook("cross_entropy")
def cross_entropy(site: Site) -> Use:
    """Wrap the logits in one ShardedTensor; each rank holds the columns that its head computed.

    So code that computes the loss gets logits of the dense shape, in the model's own forward or outside of it: views,
    slices and casts stay sharded, and `F.cross_entropy` and `nn.CrossEntropyLoss` return the dense loss and gradient.
    They cost two all-reduces of the size of the losses and never gather logits (``logits.full_tensor()`` would).

    The head is the layer whose block has the hook; else those linear layers below whose results stay sharded along the
    last dim and go to no other module that takes such.
    """
    here = unwrapped(site.path)
    heads = [path for path in site.flows.takers.logits if path == here or is_inside(path, here)]

    def apply() -> list[Any]:
        return [site.modules[path].register_forward_hook(_logits(site, path)) for path in heads]

    return Use(apply, tuple(heads))


@attrs.frozen(eq=False)
class Logits:
    """A forward hook: wraps the columns that the ranks of a subgroup have in one ShardedTensor."""

    subgroup: Group
    spec: Spec
    classes: int

    @untraced(UNCOMPILED)
    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        layout = bind_named(self.spec, (*output.shape[:-1], self.classes), mesh_of(self.subgroup))
        return wrap(output, layout, self.spec, self.subgroup)

    def __deepcopy__(self, memo: Any) -> Logits:
        return self


def _logits(site: Site, path: str) -> Logits:
    out = site.flows.modules.stated[path].out
    assert out is not None, "it leaves logits"
    axes = cuts(out.after)[-1].axes
    sizes = dim_sizes_of(site.flows.modules.layers[path], "out")
    even = len(set(sizes)) == 1
    return Logits(site.group_along(axes), Spec(..., Cut(axes[0]) if even else Cut(axes[0], sizes=sizes)), sum(sizes))


@register_hook("hf_sum_rope_gradient")
def sum_rope_gradient(site: Site, ax: Any, rope: int) -> Any:
    """Sum the gradient of the last `rope` features of the module's result, over the ranks along `ax`.

    In latent attention one product computes the input of a product that is sharded by heads and sums the gradient of
    its input itself, and also `rope` features that all heads use directly: their gradient is one rank's partial sum.
    Costs one all-reduce of their size in backward.
    """

    def apply() -> Any:
        subgroup = site.group_along(ax)

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            latent, shared = output.split([output.shape[-1] - rope, rope], dim=-1)
            return torch.cat([latent, sum_gradient(shared, subgroup)], dim=-1)

        return site.module.register_forward_hook(hook)

    return apply


@register_hook("hf_alibi_of_heads")
def alibi_of_heads(site: Site, ax: Any) -> Any:
    """Pass this rank's heads of the argument `alibi`, a bias of scores of shape (batch * heads, 1, length) or None."""

    def apply() -> Any:
        subgroup: Group = site.group_along(ax)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bound = signature.bind_partial(*args, **kwargs)
            alibi = bound.arguments.get("alibi")
            if alibi is not None:
                heads: Any = module.num_heads  # of this rank
                alibi = alibi.unflatten(0, (-1, subgroup.size * heads))
                bound.arguments["alibi"] = alibi.narrow(1, subgroup.index * heads, heads).flatten(0, 1)
            return bound.args, bound.kwargs

        return site.module.register_forward_pre_hook(hook, with_kwargs=True)

    signature = inspect.signature(site.module.forward)
    if "alibi" not in signature.parameters or not hasattr(site.module, "num_heads"):
        raise site.refused(
            "`use hf_alibi_of_heads` is for attention with an argument `alibi` and an attribute `num_heads`",
            {"arguments": ", ".join(signature.parameters)},
            "leave it out",
        )
    return apply


@register_hook("hf_share_of")
def share_of(site: Site, ax: Any) -> Any:
    """Divide the module's input by the number of ranks along `ax`: its result is summed over them later."""

    def apply() -> Any:
        subgroup: Group = site.group_along(ax)

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0] / subgroup.size, *args[1:])

        return site.module.register_forward_pre_hook(hook)

    return apply


@register_hook("hf_local_params")
def local_params(site: Site, added: Any = None) -> Any:
    """Make the module's own forward compute with its rank's slices of parameters, as plain tensors: of its own ones and
    those of modules below that have no flows.

    For code that multiplies by parameters itself: stacked experts, the sinks of attention, the convolution of Mamba.
    With `added`, an axis along which the result is a partial sum, each of its ranks adds an equal share of replicated
    parameters, such as the bias of a product by rows.
    """
    kind = type(site.module)
    has_flows = {id(site.modules[path]) for path, flows in site.flows.modules.stated.items() if flows.ins or flows.outs}
    paths = [
        path for path, each in site.module.named_modules()
        if each._parameters and (not path or id(each) not in has_flows)
    ]  # fmt: skip

    def apply() -> NewForward:
        shares = 1 if added is None else site.group_along(added).size
        whole = site.replicated(added) if shares > 1 else frozenset[str]()

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            replaced = []
            for path in paths:
                parameters: dict[str, Any] = self.get_submodule(path)._parameters
                for name, each in parameters.items():
                    is_shared = not path and name in whole
                    if is_shared or isinstance(each, ShardedTensor):
                        local = local_of(each)
                        parameters[name] = with_adjoint(local, truediv, _whole, shares) if is_shared else local
                        replaced.append((parameters, name, each))
            try:
                return kind.forward(self, *args, **kwargs)
            finally:
                for parameters, name, each in replaced:
                    parameters[name] = each

        return NewForward(site.module, functools.wraps(kind.forward)(forward))

    return apply


def _whole(gradient: torch.Tensor, shares: int) -> torch.Tensor:
    """Return the gradient of a sum of equal shares: all ranks have it."""
    return gradient
