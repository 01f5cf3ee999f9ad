"""What a plan comes to for one module: found before anything changes, agreed on by all ranks, then done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import PlanError
from shardtensor.layout.layout import Layout
from shardtensor.plan.findings.report import text_report
from shardtensor.plan.flows.gradients import Flows
from shardtensor.plan.line import Hook
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.sharding.hooks import Site, Use, called
from shardtensor.sharding.rules import Rules
from shardtensor.sharding.settle import Binder, Settled, settle
from shardtensor.sharding.stores import Keeping
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.frozen(eq=False)
class Target:
    """One tensor, under one name or several, and how it is to lie; no layout where its spec shards it itself."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    spec: ShardingSpec
    layout: Layout | None
    device: torch.device


_BEFORE = "_sharding_counts"
"""Where a module keeps what it counted before."""


@attrs.frozen(eq=False)
class Count:
    """An attribute that becomes this rank's share: a module that splits by ``num_heads`` counts its rank's heads."""

    path: str
    module: nn.Module
    name: str
    value: int
    spec: ShardingSpec
    share: int

    def apply(self) -> None:
        vars(self.module).setdefault(_BEFORE, {}).setdefault(self.name, self.value)
        setattr(self.module, self.name, self.share)


def count_as_before(module: nn.Module) -> None:
    """Give a module the numbers back that it had."""
    for name, value in module.__dict__.pop(_BEFORE, {}).items():
        setattr(module, name, value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"


@attrs.frozen(eq=False, slots=False)
class Work:
    """The changes that a plan makes to a module, in the order of the plan.

    Attributes:
        module: the module; paths and names are its own.
        group: all ranks, with the axes of the plan.
        targets: tensors that become ShardedTensors.
        wholes: tensors that stay plain; the source sends its values to all ranks.
        rules: as they were read, with the other entries of torch's own plans.
        flows: how values pass modules, free of errors; None where the plan has no rules for modules.
        counts: attributes that become the rank's share.
        hooks: calls of hooks, with the module each stands in.
        ties: names, each with the name of the tensor that takes its place.
        lone: layers without flows that compute with plain values: they exist on some ranks only.
        keeping: which parameters are stored in shards, and the axes along which samples differ.
        said: the canonical lines of the plan, as text that must be equal on all ranks.
    """

    module: nn.Module
    group: Group
    targets: tuple[Target, ...]
    rules: Rules
    flows: Flows | None = None
    counts: tuple[Count, ...] = ()
    hooks: tuple[tuple[str, Hook], ...] = ()
    wholes: tuple[tuple[str, torch.Tensor], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    keeping: Keeping | None = None
    lone: tuple[str, ...] = ()
    said: Mapping[str, str] = attrs.field(factory=dict)

    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks, as text."""
        named = [*((target.names[0], target.tensor) for target in self.targets), *self.wholes]
        found = {**self.said, "frozen": _listed(name for name, tensor in named if not tensor.requires_grad)}
        found |= {"on the meta device": _listed(name for name, tensor in named if tensor.is_meta)}
        found |= {path: type(sharder).__qualname__ for path, sharder in self.rules.sharders}
        for path, stated in self.flows.modules.stated.items() if self.flows is not None else ():
            found |= {f"{side} of {path or 'the module'}": str(flow) for side, flow in stated.said.items()}
        found |= {f"local {c.name} of {c.path or 'the module'}": f"{c.spec} of {c.value}" for c in self.counts}
        found |= {f"use {i} of {path or 'the module'}": str(hook) for i, (path, hook) in enumerate(self.hooks)}
        found |= {f"output of {path or 'the module'}": str(spec) for path, spec in self.rules.outputs}
        return found | {f"local output of {path or 'the module'}": "yes" for path in self.rules.local_outputs}

    def settled(self, binder: Binder) -> list[Settled]:
        """What each module with a flow does; raises PlanError where it cannot, or where no hook takes a value."""
        if self.flows is None:
            return []
        taken = {unwrapped(path) for use in self.uses for path in use.takes}
        left = [finding for path, finding in self.flows.takers.to_hooks.items() if path not in taken]
        if left:
            raise PlanError(text_report(left))
        return settle(self._modules, self.flows, self._sharded, binder, self.lone)

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """What each hook is going to do."""
        if self.flows is None:
            return ()
        root, modules, flows = self.module, self._modules, self.flows
        sites = (Site(path, root.get_submodule(path), root, self.group, flows, modules) for path, _ in self.hooks)
        return tuple(called(hook, site) for (_, hook), site in zip(self.hooks, sites, strict=True))

    @property
    def _modules(self) -> dict[str, nn.Module]:
        """By their paths as plans see them: what is wrapped, not what wraps."""
        return {unwrapped(path): module for path, module in self.module.named_modules(remove_duplicate=False)}

    @cached_property
    def _sharded(self) -> dict[str, frozenset[str]]:
        """The names of each module's own parameters that are going to be ShardedTensors, or are."""
        targets = {id(target.tensor) for target in self.targets if target.layout is not None}
        found: dict[str, set[str]] = {}
        for full, tensor in self.module.named_parameters(remove_duplicate=False):
            if id(tensor) in targets or isinstance(tensor, ShardedTensor):
                path, _, name = unwrapped(full).rpartition(".")
                found.setdefault(path, set()).add(name)
        return {path: frozenset(names) for path, names in found.items()}
