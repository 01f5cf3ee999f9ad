"""The flows of all modules of a plan settled together: what each layer and container does, and what is forgotten."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs
from torch import nn

from shardtensor.comm.along_dim import Stretches
from shardtensor.errors import PlanError
from shardtensor.parallel.dim_names import dim_names
from shardtensor.parallel.layers import Flowing, LayerFlow, LinearFlow, layer_class
from shardtensor.plan.flows.flow import Axes, Flow, changes, cut_axes, cuts, partial_axes
from shardtensor.plan.flows.modules import around, is_below
from shardtensor.sharding.flows import Binder, Stated, Tensors, addend_axes, layer_flow, natural_layout
from shardtensor.sharding.passing import Entering, Leaving, Result, Wrapping, arguments
from shardtensor.spec.nodes import Spec


@attrs.frozen(eq=False)
class Settled:
    """What is to be done to one module."""

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
    root: nn.Module,
    stated: Mapping[str, Stated],
    tensors: Mapping[str, Tensors],
    binder: Binder,
    taken: Collection[str] = (),
    hooked: Collection[str] = (),
) -> list[Settled]:
    """Find what each module with a flow does.

    Args:
        root: the module that is sharded.
        stated: the flows, by the path of their module.
        tensors: the layouts of each module's own parameters, by its path.
        binder: turns axes into groups; one that does not is used for the checks, before ranks have agreed.
        taken: the modules whose local slices a hook takes.
        hooked: the modules that have a hook, which may let them work on plain slices of their parameters.

    Raises:
        PlanError: flows contradict tensors or one another, or a value would reach a module that does not expect it.
    """
    none = Tensors()
    found = []
    addends = {path: _addends_at(path, root, stated, tensors) for path in stated}
    met: dict[int, str] = {}
    for path, flows in stated.items():
        module = root.get_submodule(path)
        first = met.setdefault(id(module), path)
        if first != path:  # one module under two names
            if stated[first] != flows:
                raise PlanError(
                    f"{first} and {path} are one module, and the plan has different flows for them",
                    {first: _said(stated[first]), path: _said(flows)},
                    "give both the same",
                )
            continue
        own = tensors.get(path, none)
        try:
            if layer_class(type(module)) is not None:
                inside = any(stated[above].ins for above in around(path) if above in stated)
                flow = layer_flow(module, flows, own, binder, inside)
                found.append(Settled(path, module, flow, frozenset(own.specs)))
            else:
                if own.specs and path not in hooked:
                    flows = _of_sharded(module, flows)
                found.append(_container(path, module, flows, addends[path], binder, bool(own.specs)))
        except PlanError as error:
            fault, *facts = str(error).splitlines()
            raise PlanError("\n".join([f"{path or type(module).__name__}: {fault}", *facts])) from None
    _refuse_forgotten(root, stated, addends, tensors)
    for path in escapes(root, stated, tensors):
        if path not in taken:
            raise _escaped(path, root.get_submodule(path), stated[path])
    siblings: dict[str, list[str]] = {}
    for each in found:
        if _may_share(each):
            parent, _, name = each.path.rpartition(".")
            siblings.setdefault(parent, []).append(name)
    return [_with_siblings(each, siblings.get(each.path, [])) for each in found]


def _may_share(layer: Settled) -> bool:
    """Whether a layer multiplies what came into the module around it, and leaves its gradient as an addend.

    Not where its weight's gradient is summed, too, which would come before the input's.
    """
    flow, kind = layer.layer, layer_class(type(layer.module))
    if flow is None or kind is None or not issubclass(kind, LinearFlow):
        return False
    return bool(layer.path) and not (flow.enter or flow.adds_bias_last or flow.sums is not None or flow.is_transposed)


def _with_siblings(settled: Settled, names: list[str]) -> Settled:
    entering = settled.entering
    if entering is None or entering.wraps or not names:
        return settled
    return attrs.evolve(settled, entering=attrs.evolve(entering, siblings=tuple(names)))


def _said(flows: Stated) -> str:
    sides = [f"in{f' {name}' if name else ''}: {flow}" for name, flow in flows.ins.items()]
    outs = {"": flows.out, **flows.others} if flows.out else flows.others
    return ", ".join([*sides, *(f"out{f' {name}' if name else ''}: {flow}" for name, flow in outs.items())])


def _container(
    path: str, module: nn.Module, flows: Stated, addends: Axes, binder: Binder, has_tensors: bool
) -> Settled:
    names = arguments(module)
    moves, wraps = {}, {}
    for said, flow in flows.ins.items():
        name = next(iter(names), "") if said is None else said
        if name not in names:
            raise PlanError(
                f"forward has no argument `{name}`", {"arguments": ", ".join(names)}, "name one of them, or write `in`"
            )
        moves[name] = binder.move(changes(flow, () if has_tensors else addends))
        if has_tensors and cuts(flow.after):
            stretches = tuple(
                (team, Stretches(dim, cut.sizes, cut.balanced))
                for dim, cut in cuts(flow.after).items()
                if (team := binder.team(cut.axes)) is not None
            )
            wraps[name] = Wrapping(flow.after, stretches, binder.group)
    entering = None
    if wraps or any(moves.values()):  # a hook that does nothing would cost each call some microseconds
        entering = Entering(moves, names, wraps, bool(addends) and not has_tensors)
    outs = {"": flows.out, **flows.others} if flows.out is not None else flows.others
    results = ((name, binder.move(changes(flow)), flow.before if has_tensors else None) for name, flow in outs.items())
    found = {name: Result(move, takes_from) for name, move, takes_from in results if move or takes_from is not None}
    leaving = Leaving(found) if found else None
    return Settled(path, module, entering=entering, leaving=leaving)


def _of_sharded(module: nn.Module, flows: Stated) -> Stated:
    """The flows of a module that works on ShardedTensors: it gives sums where a layer would leave addends."""

    def summed(flow: Flow) -> Flow:
        if not flow.before.partial_parts:
            return flow
        if flow.after.partial_parts:
            raise PlanError(
                f"{type(module).__name__} works on ShardedTensors, which are summed at once: it leaves no addends",
                {"out": str(flow)},
                f"write `out: {flow.before} -> replicate`",
            )
        before = flow.before
        return attrs.evolve(flow, before=Spec.of(before.dims, before.named, before.flat_part, before.only_part))

    out = None if flows.out is None else summed(flows.out)
    return attrs.evolve(flows, out=out, others={name: summed(flow) for name, flow in flows.others.items()})


# -- what meets what ---------------------------------------------------------------------------------------------------


def _served(path: str, stated: Mapping[str, Stated]) -> Iterable[str]:
    """The modules below `path` whose inputs its `in` serves: no other `in` stands between, nor their own."""
    for other, flows in stated.items():
        if is_below(other, path) and not flows.ins:
            nearest = next((above for above in around(other) if above in stated and stated[above].ins), None)
            if nearest == path:
                yield other


def _addends_at(path: str, root: nn.Module, stated: Mapping[str, Stated], tensors: Mapping[str, Tensors]) -> Axes:
    """The axes along which what comes back to the `in` of a container is an addend: the same for all that it serves."""
    found: dict[str, Axes] = {}
    none = Tensors()
    for other in _served(path, stated) if stated[path].ins else ():
        module = root.get_submodule(other)
        if layer_class(type(module)) is not None and not isinstance(module, nn.Embedding):  # ids have no gradient
            found[other] = addend_axes(module, stated[other], tensors.get(other, none))
    if len({frozenset(axes) for axes in found.values()}) > 1:
        raise PlanError(
            f"{path or 'the module'}: what comes back to its `in` is not of one kind: addends meet copies",
            {other: f"addends along {'*'.join(axes)}" if axes else "copies" for other, axes in found.items()},
            "give those that are not addends along the same axes an `in` of their own",
        )
    return next(iter(found.values()), ())


def _refuse_forgotten(
    root: nn.Module, stated: Mapping[str, Stated], addends: Mapping[str, Axes], tensors: Mapping[str, Tensors]
) -> None:
    """Refuse values that reach modules which do not expect them."""
    streams = {axis: path for path in reversed(list(stated)) for axis in _stream_axes(stated[path])}
    for path, module in root.named_modules():
        if path in stated or not any(param is not None for param in module._parameters.values()):
            continue
        outer = next((above for above in around(path) if above in stated and stated[above].ins), None)
        if outer is not None and addends.get(outer):
            axes = "*".join(addends[outer])
            raise PlanError(
                f"{path}: the gradients of its parameters along {axes} are not known",
                {f"in of {outer or 'the module'}": f"sums what comes back along {axes}", "why": "a sibling is cut"},
                [f'give `{path}` a flow: along("replicate"), or an `in` and an `out`'],
            )
        copies = {
            axis
            for above in around(path)
            if above in stated
            for flow in stated[above].ins.values()
            for axis in set(cut_axes(flow.before)) - set(cut_axes(flow.after))
        }
        left = [axis for axis in streams if axis not in copies]
        if left:
            raise PlanError(
                f"{path or type(module).__name__}: it may meet values that are cut along {left[0]}, "
                "and its gradients would be addends",
                {f"flow of {streams[left[0]]}": str(stated[streams[left[0]]].outs[0])},
                f'give `{path}` a flow: along("[-, {left[0]}, ...]") if values come so, along("replicate") if not',
            )


def _stream_axes(flows: Stated) -> Axes:
    """Axes along which values leave a module cut along a dim that is not the last, by a sum that was scattered."""
    return tuple(
        axis
        for flow in flows.outs
        for dim, cut in cuts(flow.after).items()
        if dim != -1
        for axis in cut.axes
        if axis in partial_axes(flow.before)
    )


def escapes(root: nn.Module, stated: Mapping[str, Stated], tensors: Mapping[str, Tensors]) -> list[str]:
    """The modules that let go of local slices which no other takes: they would be met as if they were the whole."""
    takes = takers(root, stated, tensors)
    found = []
    for path, flows in stated.items():
        above = [flow for outer in around(path) if outer in stated for flow in stated[outer].outs]
        for flow in flows.outs if path else ():
            gone = {*cut_axes(flow.after), *partial_axes(flow.after)}
            expected = any(other != path and gone <= set(cut_axes(take.before)) for other, take in takes)
            expected = expected or any(gone <= {*cut_axes(out.before), *partial_axes(out.before)} for out in above)
            if gone and not expected:
                found.append(path)
    return found


def takers(root: nn.Module, stated: Mapping[str, Stated], tensors: Mapping[str, Tensors]) -> list[tuple[str, Flow]]:
    """How values enter modules, said or following from a weight."""
    takes: list[tuple[str, Flow]] = []
    for path, flows in stated.items():
        takes += [(path, flow) for flow in flows.ins.values()]
        module = root.get_submodule(path)
        if not flows.ins and layer_class(type(module)) is not None and path in tensors:
            is_linear = "in" in (dim_names(module, "weight") or ())
            in_axes = tensors[path].cut(module, "weight", "in") if is_linear else ()
            if in_axes:
                natural = natural_layout(in_axes)
                takes.append((path, Flow(natural, natural)))
    return takes


def _escaped(path: str, module: nn.Module, flows: Stated) -> PlanError:
    last = flows.outs[0]
    return PlanError(
        f"{path}: its local slices reach no module that expects them",
        {"out": str(last), "layer": type(module).__name__},
        [
            f"declare who takes them: `in: {last.after}` there, or such an `out` on the module around",
            f"gather them: `out: {last.before} -> replicate`",
        ],
    )
