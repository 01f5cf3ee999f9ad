"""What is to be done to each module with flows: the class that it gets, or the hooks that move its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs
from torch import nn

from shardtensor.comm.along_dim import DimSizes
from shardtensor.errors import PlanError
from shardtensor.parallel.layers import Flowing, LayerFlow, layer_class
from shardtensor.plan.flows.flow import Axes, Flow, changes, cuts
from shardtensor.plan.flows.gradients import Flows
from shardtensor.plan.flows.layer_flows import layer_work
from shardtensor.plan.flows.modules import Stated
from shardtensor.sharding.flows import Binder, layer_flow
from shardtensor.sharding.passing import Entering, Leaving, Result, Wrapping, arguments
from shardtensor.spec.nodes import Spec


@attrs.frozen(eq=False)
class Settled:
    """What is to be done to one module.

    Attributes:
        path: as the plan calls it.
        cut: names of its parameters that are sharded.
    """

    path: str
    module: nn.Module
    layer: LayerFlow | None = None
    cut: frozenset[str] = frozenset()
    entering: Entering | None = None
    leaving: Leaving | None = None

    def apply(self, handles: str) -> None:
        """Change the module's class, or set its hooks; the handles of hooks are kept in the attribute `handles`."""
        module: Any = self.module
        if self.layer is not None:
            kind = type(module)
            made = layer_class(kind)
            assert made is not None
            module.flow, module.flow_cut, module.flow_of = self.layer, self.cut, kind
            module.__class__ = made
        kept = module.__dict__.setdefault(handles, []) if self.entering or self.leaving else []
        if self.entering is not None:
            kept.append(module.register_forward_pre_hook(self.entering, with_kwargs=True))
        if self.leaving is not None:
            kept.append(module.register_forward_hook(self.leaving))


def unsettle(module: Any) -> None:
    """Give a layer its own class back."""
    if isinstance(module, Flowing):
        module.__class__ = module.flow_of  # type: ignore[assignment]
        del module.flow, module.flow_cut, module.flow_of


def settle(
    modules: Mapping[str, nn.Module],
    flows: Flows,
    sharded: Mapping[str, frozenset[str]],
    binder: Binder,
    lone: Collection[str] = (),
) -> list[Settled]:
    """Find what each module with a flow does.

    Args:
        modules: by their paths, as the plan calls them.
        flows: of the plan, in which nothing was found that is wrong.
        sharded: the names of each module's own parameters that are ShardedTensors, by its path.
        binder: turns axes into groups; one that does not is used for the checks, before ranks have agreed.
        lone: layers of which nothing is said, and that work on plain values all the same.

    Raises:
        PlanError: a module cannot do what the plan says.
    """
    stated = flows.modules.stated
    found: list[Settled] = []
    met: dict[int, str] = {}
    for path in (*(path for path, each in stated.items() if each.ins or each.outs), *lone):
        module, flow = modules[path], stated.get(path, Stated())
        first = met.setdefault(id(module), path)
        if first == path:
            try:
                found.append(_settled(path, module, flows, sharded.get(path, frozenset()), binder))
            except PlanError as error:
                fault, *facts = str(error).splitlines()
                raise PlanError("\n".join([f"{path or type(module).__name__}: {fault}", *facts])) from None
        elif stated.get(first, Stated()).said != flow.said:  # one module under two names
            raise PlanError(
                f"{first} and {path} are one module, and the plan has different flows for them",
                {first: _text(stated.get(first, Stated()).said), path: _text(flow.said)},
                "give both the same",
            )
    return found


def _settled(path: str, module: nn.Module, flows: Flows, sharded: frozenset[str], binder: Binder) -> Settled:
    known, stated = flows.modules.layers.get(path), flows.modules.stated.get(path, Stated())
    if known is not None and layer_class(type(module)) is not None:
        work = flows.works.get(path) or layer_work(known, flows.modules.nearest_in(path) is not None)
        rank = flows.modules.axes.mesh.ranks[binder.group.index]
        return Settled(path, module, layer_flow(module, known, work, binder, rank), sharded)
    if sharded and not stated.passing.uses:  # a hook may let it work on plain slices of its parameters
        stated = _of_sharded(stated)
    return _container(path, module, stated, flows.meetings.addends.get(path, ()), binder, bool(sharded))


def _text(flows: Mapping[str, Flow]) -> str:
    return ", ".join(f"{side}: {flow}" for side, flow in flows.items())


def _container(
    path: str, module: nn.Module, stated: Stated, addends: Axes, binder: Binder, has_tensors: bool
) -> Settled:
    names = arguments(module)
    moves, wraps = {}, {}
    for said, flow in stated.ins.items():
        name = said or next(iter(names), "")
        if name not in names:
            raise PlanError(
                f"forward has no argument `{name}`", {"arguments": ", ".join(names)}, "name one of them, or write `in`"
            )
        moves[name] = binder.move(changes(flow, () if has_tensors else addends))
        if has_tensors and cuts(flow.after):
            stretches = tuple(
                (team, DimSizes(dim, cut.sizes, cut.balanced))
                for dim, cut in cuts(flow.after).items()
                if (team := binder.team(cut.axes)) is not None
            )
            wraps[name] = Wrapping(flow.after, stretches, binder.group)
    entering = None
    if wraps or any(moves.values()):  # a hook that does nothing would cost each call some microseconds
        entering = Entering(moves, names, wraps, bool(addends) and not has_tensors)
    results = (
        (name, binder.move(changes(flow)), flow.before if has_tensors else None) for name, flow in stated.outs.items()
    )
    found = {name: Result(move, takes_from) for name, move, takes_from in results if move or takes_from is not None}
    leaving = Leaving(found) if found else None
    return Settled(path, module, entering=entering, leaving=leaving)


def _of_sharded(stated: Stated) -> Stated:
    """The flows of a module that works on ShardedTensors: it gives sums where a layer would leave addends."""

    def summed(flow: Flow) -> Flow:
        before = flow.before
        bare = Spec.of(before.dims, before.named, before.flat_part, before.only_part)
        return attrs.evolve(flow, before=bare) if before.partial_parts else flow

    return attrs.evolve(stated, outs={name: summed(flow) for name, flow in stated.outs.items()})
