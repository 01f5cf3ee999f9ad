"""What a known layer does with the values that pass it, and the layouts of its gradients.

A *copy* is equal on all ranks along an axis, a *cut* value is sharded over them, a *partial sum* has the sum of all as
its value. The gradient of a copy is a copy, except at a product that is sharded along the axis: there it is partial.
"""

from __future__ import annotations

import attrs

from shardtensor.layout.route import DimStep
from shardtensor.plan.flows.flow import Flow, FlowError, cut_axes, cuts, flow_route, last_cut, partial_axes, union
from shardtensor.plan.flows.modules import REPLICATE, Layer, Names
from shardtensor.spec.nodes import Replicate, Spec


@attrs.frozen
class LayerWork:
    """What one layer does.

    Attributes:
        came: the flow from the layout of its input to the layout that it computes with.
        leaves: the flow from the layout of its result to the layout that it returns.
        enter, leave: the steps of these.
        partials: axes along which the gradient of its input is a partial sum, before `enter` sums it.
        sums: for each parameter, the axes without the data axes along which its gradient is a partial sum.
        sums_beside: whether the gradients of bias and input are reduced in one message.
    """

    came: Flow
    leaves: Flow
    enter: tuple[DimStep, ...]
    leave: tuple[DimStep, ...]
    partials: Names
    sums: dict[str, Names]
    sums_beside: bool = False


def layer_work(layer: Layer, is_inside: bool) -> LayerWork:
    """Return the work of a layer of a known kind.

    Args:
        is_inside: whether a module around it has an `in`, which sums the gradients of its inputs.

    Raises:
        FlowError: its flows do not match its tensors.
    """
    if layer.loose:
        placed = layer.params[layer.loose]
        raise FlowError(
            "E402", layer.loose, "flows go with dims cut over axes", f"{layer.loose} is `{placed.spec}`",
            "write the layout in axes, such as `[tp, -]`",
        )  # fmt: skip
    if layer.kind.name == "embedding":
        return _embedding(layer)
    if layer.kind.name == "norm":
        return _norm(layer)
    return _linear(layer, is_inside)


def natural(last: Names, partial: Names = ()) -> Flow:
    """Return the default flow of a layer: sharded as its weight is, with partial sums reduced at once."""
    after = Spec(..., last) if last else Replicate()
    return Flow(after.partial(*partial) if partial else after, after)


def partials_of(layer: Layer) -> Names:
    """Return the axes along which a layer leaves the gradient of its input as a partial sum."""
    out = layer.stated.out
    declared = out.returned if out is not None else ()
    if layer.kind.name == "embedding":
        return ()
    return union(layer.cut("weight", "out"), declared) if layer.kind.name == "linear" else declared


def _linear(layer: Layer, is_inside: bool) -> LayerWork:
    out_axes, in_axes = layer.cut("weight", "out"), layer.cut("weight", "in")
    enters = _the_one_in(layer)
    came = enters if enters is not None else natural(in_axes)
    leaves = layer.stated.out if layer.stated.out is not None else natural(out_axes, in_axes)
    _check_layout(layer, "in", came, came.after, in_axes, ())
    _check_layout(layer, "out", leaves, leaves.before, out_axes, in_axes)
    stream = _stream(came.after)
    twice = [axis for axis in stream if axis in (*out_axes, *in_axes)]
    if twice:
        name = layer.named(twice)
        raise FlowError(
            "E402", "in" if enters is not None else "out", f"the input and the weight are both cut along {name}",
            f"a rank has one part of the tokens and other features than the rest: no rank makes whole rows or columns; "
            f"the weight is `{layer.params['weight'].spec}`",
            f"gather the input: `in: {layer.written('in').partition(' -> ')[0] or came.after} -> replicate`",
        )  # fmt: skip
    if enters is not None and set(_stream(leaves.before)) != set(stream):
        raise FlowError(
            "E402", "out", "`out` does not follow from `in`",
            f"a linear layer keeps how dims before the last are cut; `in` gives `{came.after}`, `out` begins with "
            f"`{leaves.before}`",
            f"write `out: {came.after}`" if not last_cut(leaves.before) else "cut both sides alike",
        )  # fmt: skip
    _no_blocks_on_the_way(layer, "in", came)
    _no_blocks_on_the_way(layer, "out", leaves)
    _declared_once(layer, leaves, (*out_axes, *in_axes))
    returned = leaves.returned
    partials = union(out_axes, returned)
    own = enters is not None or not is_inside
    enter = flow_route(attrs.evolve(came, partials=()), union(partials, came.partials) if own else (), "in")
    summed = () if returned == leaves.partials else tuple(axis for axis in leaves.partials if axis not in returned)
    leave = flow_route(attrs.evolve(leaves, partials=summed), (), "out")
    sums = {"weight": union(stream, returned)}
    beside = False
    if "bias" in layer.params:
        bias_axes = layer.cut("bias", "out")
        if bias_axes and bias_axes != out_axes:
            how = f"[{'*'.join(bias_axes)}]"
            raise FlowError(
                "E402", "bias", "the bias is cut over other axes than the weight's `out`",
                f"the weight is `{layer.params['weight'].spec}`, the bias `{how}`: "
                + ("each rank would add a part to the whole sum" if in_axes else "each rank makes other outputs"),
                "keep the bias whole (`replicate`): it is added once, to what leaves" if in_axes
                else "cut the bias as the weight's `out` is cut, or leave it whole",
            )  # fmt: skip
        across = last_cut(leaves.after)
        if in_axes and across is not None and across.axes != out_axes:
            raise FlowError(
                "E402", "out", f"`out: {layer.written('out')}` leaves parts of the features, and the bias is whole",
                "it is added once, to what leaves: each rank would add all of it to its part",
                "leave the sum whole (`-> replicate`) or cut along tokens; or drop the bias",
            )  # fmt: skip
        if in_axes:
            left = tuple(axis for axis in cut_axes(leaves.after) if axis not in out_axes)
            sums["bias"] = union(left, partial_axes(leaves.after), leaves.partials)
        else:
            sums["bias"] = union(stream, leaves.partials)
        if out_axes and not bias_axes:
            if layer.is_blocked("out"):
                raise FlowError(
                    "E402", "bias", "a weight cut in blocks goes with a bias cut alike",
                    f"the weight is `{layer.params['weight'].spec}`, the bias whole", "cut the bias in blocks, too",
                )  # fmt: skip
            sums["bias"] = union(sums["bias"], out_axes)
            is_summed = enter and enter[0].kind == "sum_gradient"
            beside = bool(is_summed) and sums["bias"] == out_axes and not in_axes and not leave and len(enter) == 1
    return LayerWork(came, leaves, enter, leave, partials, sums, beside)


def _embedding(layer: Layer) -> LayerWork:
    rows, columns = layer.cut("weight", "vocab"), layer.cut("weight", "embed")
    leaves = layer.stated.out if layer.stated.out is not None else natural(columns, rows)
    _check_layout(layer, "out", leaves, leaves.before, columns, rows)
    if layer.is_blocked("vocab"):
        raise FlowError(
            "E402", "weight", "a vocabulary in blocks takes no flow", f"the weight is `{layer.params['weight'].spec}`",
            "cut the vocabulary without `blocks`",
        )  # fmt: skip
    came = _the_one_in(layer) or REPLICATE
    _declared_once(layer, leaves, (*rows, *columns))
    sums = {"weight": union(cut_axes(came.after), leaves.partials)}
    leave = flow_route(attrs.evolve(leaves, partials=()), (), "out")
    return LayerWork(came, leaves, flow_route(came, (), "in"), leave, (), sums)


def _norm(layer: Layer) -> LayerWork:
    for name in layer.params:
        if layer.cut(name, "embed"):
            raise FlowError(
                "E402", name, "a norm with a flow has whole parameters", f"{name} is `{layer.params[name].spec}`",
                "write `replicate`",
            )  # fmt: skip
    came = _the_one_in(layer) or REPLICATE
    leaves = layer.stated.out or Flow(came.after, came.after)
    if partial_axes(came.after):
        axes = layer.named(partial_axes(came.after))
        raise FlowError(
            "E404", "in", f"partial sums along {axes} reach a norm",
            "a norm is not linear: the norms of partial sums do not add up to the norm of their sum",
            f"sum them before: `out: partial({axes}) -> replicate` where they are made",
        )  # fmt: skip
    if last_cut(came.after) is not None and came.after.dims != (last_cut(came.after),):
        raise FlowError(
            "E402", "in", "a norm takes whole last dims", f"`in` is `{came}`: no rank has all that is normalised",
            "cut the stream along another dim",
        )  # fmt: skip
    if leaves.before != came.after:
        raise FlowError(
            "E402", "out" if layer.stated.out is not None else "in", "a norm gives what it takes",
            f"`in` gives `{came.after}`, `out` begins with `{leaves.before}`", f"write `out: {came.after}`",
        )  # fmt: skip
    sums = union(cut_axes(came.after), leaves.partials)
    enter = flow_route(attrs.evolve(came, partials=()), came.partials, "in")
    leave = flow_route(attrs.evolve(leaves, partials=()), (), "out")
    return LayerWork(came, leaves, enter, leave, leaves.partials, dict.fromkeys(layer.params, sums))


def _the_one_in(layer: Layer) -> Flow | None:
    named = [name for name in layer.stated.ins if name]
    if named:
        raise FlowError(
            "E402", f"in {named[0]}", f"a layer has one input, not `{named[0]}`", "its arithmetic is known",
            "write `in` alone",
        )  # fmt: skip
    return layer.stated.ins.get("")


def _stream(spec: Spec) -> Names:
    """Return the axes along which a value is sharded on a dim that is not the last."""
    return tuple(axis for dim, cut in cuts(spec).items() if dim != -1 for axis in cut.axes)


def _check_layout(layer: Layer, side: str, flow: Flow, at_weight: Spec, last: Names, partial: Names) -> None:
    """Raise FlowError if a flow's layout at the weight does not match the weight's layout."""
    found = last_cut(at_weight)
    axes = found.axes if found is not None and (... in at_weight.dims or len(at_weight.dims) > 1) else ()
    if axes == last and set(partial_axes(at_weight)) == set(partial):
        return
    name = layer.named
    sums = f"partial({name(partial)})" if partial else ""
    expected = " ".join(filter(None, [f"[..., {name(last)}]" if last else "" if partial else "replicate", sums]))
    weight = layer.params["weight"]
    shape = ", ".join(f"{d}={n}" for d, n in zip(layer.kind.dims["weight"], weight.tensor.shape, strict=True))
    why = f"the weight ({shape}) is `{weight.spec}`"
    if set(partial_axes(at_weight)) != set(partial):
        what = "is complete on every rank: nothing is left to sum"
        if partial:
            what = f"is a partial sum along {name(partial)} until it is summed"
            what += ", for rows of other ranks give zeros" if layer.kind.name == "embedding" else ""
        why += f", so what it makes {what}"
    else:
        what = f"cut over {name(last)} on its last dim" if last else "whole on its last dim"
        why += f", so its {'input is wanted' if side == 'in' else 'result is'} {what}"
    before, _, after = layer.written(side).partition(" grad ")[0].partition(" -> ")
    if side == "in":
        text = f"{before} -> {expected}" if after and before != expected else expected
    else:
        text = f"{expected} -> {after or (before if partial and not axes else 'replicate')}"
        text = text if after or partial else expected
    raise FlowError(
        "E402", side, f"`{side}: {layer.written(side)}` contradicts the layout of the weight", why,
        f"write `{side}: {text}`",
    )  # fmt: skip


def _no_blocks_on_the_way(layer: Layer, side: str, flow: Flow) -> None:
    """Raise if a dim that the weight shards in blocks is to be gathered or scattered: ranks hold a range of each."""
    if flow.before == flow.after or not layer.is_blocked("out" if side == "out" else "in"):
        return
    at_weight, other = (flow.before, flow.after) if side == "out" else (flow.after, flow.before)
    if last_cut(at_weight) is not None and last_cut(other) != last_cut(at_weight):
        sides = layer.written(side).partition(" grad ")[0].split(" -> ")
        raise FlowError(
            "E402", side, "what is cut in blocks cannot be cut or joined on the way",
            f"the weight is `{layer.params['weight'].spec}`: a rank has a range of each block, not of the whole",
            f"let the value pass as it is: `{side}: {sides[0 if side == 'out' else -1]}`",
        )  # fmt: skip


def _declared_once(layer: Layer, leaves: Flow, own: Names) -> None:
    """Raise if declared partial sums are along an axis that shards the value or the weight: its gradient is a shard."""
    for what, cut in (("result", cut_axes(leaves.after)), ("weight", own)):
        axes = layer.named([axis for axis in leaves.returned if axis in cut]) if leaves.partials else ""
        if axes:
            raise FlowError(
                "E401", "out", f"the gradient of this output along {axes} is declared a partial sum, and is none",
                f"the {what} is cut along {axes}: summing would add gradients of different parts",
                f"leave {axes} out of `grad`",
            )  # fmt: skip
