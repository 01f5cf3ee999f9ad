"""Rules for the LoRA layers that peft adds beside a linear layer: they follow from the rules of the layer.

The adapters of a layer ``q_proj`` are ``q_proj.lora_A.NAME`` and ``q_proj.lora_B.NAME``; their product is added to the
layer's result. So B is sharded as a column product is, A as a row product, and the other one of both is whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from shardtensor.errors import PlanError
from shardtensor.plan.flows.flow import Flow, cut_axes
from shardtensor.plan.flows.modules import Layer, Modules, around
from shardtensor.plan.line import Line
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Resolved
from shardtensor.spec.nodes import Replicate, Spec

_A, _B = "lora_A", "lora_B"
_WHOLE = Flow(Replicate(), Replicate())


def resolve_with_adapters(plan: Plan, model: Model) -> Resolved:
    """Match a plan to a model, as `resolve` does, with rules for its LoRA layers added.

    Raises:
        PlanError: a sharded layer has adapters of another kind.
    """
    resolved = resolve(plan, model)
    more = () if plan.is_part else tuple(_adapter_lines(resolved))
    return resolve(attrs.evolve(plan, lines=(*plan.lines, *more)), model) if more else resolved


def _adapter_lines(resolved: Resolved) -> Iterator[Line]:
    """Yield the rules of the LoRA layers that have none."""
    below = _adapters(resolved.model)
    modules = Modules(resolved) if below else None
    for path, names in below.items():
        assert modules is not None
        layer = modules.layers.get(path)
        own = {name for name in names if name.split(".")[0] in (_A, _B) and name.endswith(".weight")}
        if layer is not None and layer.is_cut and own != names:
            raise PlanError(
                f"`{path}` is sharded, and how its adapters are is not known",
                {"adapters": ", ".join(sorted(names - own))},
                ["add LoRA layers without more parameters", "merge them: `model.merge_and_unload()`"],
            )
        if layer is None or layer.kind.name != "linear":
            continue
        for name in sorted(own):
            if resolved.tensors.get(f"{path}.{name}") is None or resolved.tensors[f"{path}.{name}"].line is None:
                yield from _lines(layer, name, modules)


def _adapters(model: Model) -> dict[str, set[str]]:
    """Return the names of the tensors below each layer that has LoRA layers, without its own tensors."""
    owners = {name.partition(f".{_A}.")[0] for name in model.by_name if f".{_A}." in name}
    found: dict[str, set[str]] = {owner: set() for owner in owners}
    for name in model.by_name if owners else ():
        owner = next((above for above in around(name) if above in owners), None)
        if owner is not None and "." in name.removeprefix(f"{owner}."):
            found[owner].add(name.removeprefix(f"{owner}."))
    return found


def _lines(layer: Layer, name: str, modules: Modules) -> list[Line]:
    """Return the rules of one tensor of an adapter and the flows of its layer."""
    path = f"{layer.path}.{name.rpartition('.')[0]}"
    flows = layer.stated.module_flows
    entering, leaving = (side[""][0] if "" in side else None for side in (flows.ins, flows.outs))
    is_first, rows, columns = name.startswith(_A), layer.cut("weight", "in"), layer.cut("weight", "out")
    ins, outs = {}, {}
    if rows:
        leaving = leaving or Flow(Replicate().partial(*rows), Replicate())
        last = Flow(leaving.after, leaving.after)
        ins[""], outs[""] = (entering or Flow(Spec(..., rows), Spec(..., rows)), leaving) if is_first else (last, last)
    elif columns:
        leaving = leaving or Flow(Spec(..., columns), Spec(..., columns))
        is_summed_around = entering is None and modules.nearest_in(layer.path) is not None
        if not is_first:
            outs[""] = leaving
        elif is_summed_around:  # the `in` around sums the gradients of all that it serves
            partials = tuple(dict.fromkeys((*cut_axes(leaving.before), *leaving.partials)))
            outs[""] = Flow(Replicate(), Replicate(), partials, True)
        else:
            outs[""] = _WHOLE
        if not is_summed_around:
            ins[""] = (entering or _WHOLE) if is_first else _WHOLE
    elif flow := entering or leaving:  # whole, with values that pass as the layer's do
        ins[""] = outs[""] = flow
    side = "in" if is_first else "out"
    value = _weight(layer, side) if (rows if is_first else columns) else Replicate()
    found = [Line(f"{layer.path}.{name}", value=value, module=path)]
    found += [Line(path, "in", flow, module=path) for flow in ins.values()]
    return found + [Line(path, "out", flow, module=path) for flow in outs.values()]


def _weight(layer: Layer, side: str) -> Spec:
    """Return the layout of a weight (out, in) that is cut along one of them as the layer's own is."""
    spec = layer.params["weight"].spec
    assert isinstance(spec, Spec)
    whole = (None,) * (3 - len(spec.dims))
    dims = [each for dim in spec.dims for each in (whole if dim is ... else (dim,))]
    cut = dims[layer.kind.dims["weight"].index(side)]
    return Spec(cut, None) if side == "out" else Spec(None, cut)
