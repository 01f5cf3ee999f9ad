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
from shardtensor.plan.line import Hook
from shardtensor.sharding.counts import Count
from shardtensor.sharding.flows import Binder, Stated, Tensors
from shardtensor.sharding.hooks import Site, Use, called
from shardtensor.sharding.plan import Sharder
from shardtensor.sharding.settle import Settled, settle
from shardtensor.sharding.stores import Keeping
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.frozen(eq=False)
class Target:
    """One tensor, under one name or several, and how it is to lie; no layout where its spec shards it itself."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    spec: ShardingSpec
    layout: Layout | None
    device: torch.device

    def __str__(self) -> str:
        tensor = self.tensor
        frozen = "" if tensor.requires_grad else ", frozen"
        without_memory = " on meta" if tensor.is_meta else ""
        return f"{self.spec} of {tuple(tensor.shape)} {tensor.dtype}{without_memory}{frozen}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"


@attrs.frozen(eq=False, slots=False)
class Work:
    """All that is to be done to a module, in the order of its plan.

    Attributes:
        module: the module; paths and names are its own.
        group: all ranks, with the axes of the plan.
        targets: tensors that become ShardedTensors.
        wholes: tensors that stay plain; all ranks take the source's values.
        flows: how values pass modules.
        counts: attributes that become the rank's share.
        hooks: calls of hooks, with the module each stands in.
        ties: names, each with the name of the tensor that takes its place.
        keeping: what of the parameters is kept while nobody computes, and over which axes samples differ.
        sharders, outputs, local_outputs: what torch's own plans say beside.
        said: facts that all ranks must have alike, beside those that follow from the above.
    """

    module: nn.Module
    group: Group
    targets: tuple[Target, ...]
    flows: Mapping[str, Stated]
    counts: tuple[Count, ...] = ()
    hooks: tuple[tuple[str, Hook], ...] = ()
    wholes: tuple[tuple[str, torch.Tensor], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    keeping: Keeping | None = None
    sharders: tuple[tuple[str, Sharder], ...] = ()
    outputs: tuple[tuple[str, ShardingSpec], ...] = ()
    local_outputs: tuple[str, ...] = ()
    said: Mapping[str, str] = attrs.field(factory=dict)

    def facts(self) -> dict[str, str]:
        """What all ranks must have alike, as text."""
        found = {", ".join(target.names): str(target) for target in self.targets}
        found |= {name: f"whole, {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in self.wholes}
        named = [*((target.names[0], target.tensor) for target in self.targets), *self.wholes]
        found |= {"frozen": _listed(name for name, tensor in named if not tensor.requires_grad)}
        found |= {"on the meta device": _listed(name for name, tensor in named if tensor.is_meta)}
        found = {**self.said, **found, **self.said}  # which begins with what all else follows from
        found |= {path: type(sharder).__qualname__ for path, sharder in self.sharders}
        for path, flows in self.flows.items():
            where = path or "the module"
            found |= {f"in {name or ''} of {where}": str(flow) for name, flow in flows.ins.items()}
            found |= {f"out of {where}": str(flows.out)} if flows.out is not None else {}
            found |= {f"out {name} of {where}": str(flow) for name, flow in flows.others.items()}
        found |= {f"local {count.name} of {count.path or 'the module'}": str(count) for count in self.counts}
        found |= {f"use {i} of {path or 'the module'}": str(hook) for i, (path, hook) in enumerate(self.hooks)}
        found |= {f"output of {path or 'the module'}": str(spec) for path, spec in self.outputs}
        return found | {f"local output of {path or 'the module'}": "yes" for path in self.local_outputs}

    def settled(self, binder: Binder) -> list[Settled]:
        """What each module with a flow does."""
        taken = [path for use in self.uses for path in use.takes]
        return settle(self.module, self.flows, self._tensors, binder, taken, {path for path, _ in self.hooks})

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """What each hook is going to do."""
        root, flows, tensors = self.module, self.flows, self._tensors
        sites = (Site(path, root.get_submodule(path), root, self.group, flows, tensors) for path, _ in self.hooks)
        return tuple(called(hook, site) for (_, hook), site in zip(self.hooks, sites, strict=True))

    @cached_property
    def _tensors(self) -> dict[str, Tensors]:
        """How the parameters of the modules with flows lie."""
        targets = {id(target.tensor): target for target in self.targets if target.layout is not None}
        paths = dict.fromkeys((*self.flows, *(path for path, _ in self.hooks)))
        axis = self._the_axis() if self.group.mesh is None and paths else "*"
        found = {}
        for path in paths:
            specs: dict[str, ShardingSpec] = {}
            layouts: dict[str, Layout] = {}
            for name, tensor in self.module.get_submodule(path).named_parameters(recurse=False):
                target = targets.get(id(tensor))  # under whatever name the plan sharded it: it may be tied
                if target is not None and target.layout is not None:
                    specs[name], layouts[name] = target.spec, target.layout
                elif isinstance(tensor, ShardedTensor):  # it was sharded before
                    specs[name], layouts[name] = tensor.sharding_spec(), tensor._layout
            found[path] = Tensors(specs, layouts, self.group.mesh, axis)
        return found

    def _the_axis(self) -> str:
        """What the plan calls the one axis of a group that has no mesh."""
        flows = [flow for stated in self.flows.values() for flow in (*stated.ins.values(), *stated.outs)]
        names = {axis for flow in flows for side in (flow.before, flow.after) for axis in side.axis_names}
        names |= {axis for target in self.targets if isinstance(target.spec, Spec) for axis in target.spec.axis_names}
        if len(names) > 1:
            raise PlanError(
                "the ranks have one axis, and the plan has several names for it",
                {"names": ", ".join(sorted(names))},
                ["use one name", "pass a DeviceMesh with these axes as process_group"],
            )
        return names.pop() if names else "*"
