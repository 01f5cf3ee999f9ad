"""Layers of which a plan states no flow: what they compute with and give are ShardedTensors, and operators move them.

Which value reaches a layer is the model's own code. A ShardedTensor is taken to go to the next layer in the same module
that takes values of its width, as from ``up`` to ``down``, and to be cut there as it left; other values are plain. What
does not fit in there is not counted, and said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs

from shardtensor.layout.layout import CutLayout, Layout
from shardtensor.plan.flows.gradients import Flows
from shardtensor.plan.flows.modules import Layer, around
from shardtensor.plan.resolved import Placed
from shardtensor.plan.traffic.collective import Collective
from shardtensor.plan.traffic.operators import Operators, Unknown, Value
from shardtensor.plan.traffic.value_shapes import Shapes
from shardtensor.rules.propagate import with_dims

_TAKES = {"linear": "in", "norm": "embed"}
_NORMS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
"""torch's own classes; norms that libraries write are their own code."""


@attrs.frozen
class Uncounted:
    """What a step sends, or may send, that no list has.

    Attributes:
        where: the path of a module.
        why: it is not known.
    """

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class ShardedLayers:
    """What such layers send, for one rank.

    Args:
        asks: whether what enters a module asks for a gradient, by its path.
        order: the modules in the order in which they run.

    Attributes:
        sends: by path, forward and backward.
        uncounted: what is not known, in the order of the model.
    """

    def __init__(
        self, flows: Flows, shapes: Shapes, dtype: str, rank: int, asks: Callable[[str], bool], order: list[str]
    ) -> None:
        self._modules, self._shapes, self._dtype, self._rank, self._asks = flows.modules, shapes, dtype, rank, asks
        self.sends: dict[str, tuple[list[Collective], list[Collective]]] = {}
        self._faults: dict[str, str] = {}
        self._left: dict[tuple[str, int], dict[str, Value]] = {}  # ShardedTensors that nobody took so far
        self._widths = {shapes.hidden}  # of plain values
        for path in order:
            self._pass(path)
        for path, value in ((path, value) for left in self._left.values() for path, value in left.items()):
            self._faults[path] = f"its result stays cut, {value.layout}, for operators of the model's own code"
        self.uncounted = tuple(Uncounted(path, self._faults[path]) for path in order if path in self._faults)

    def _pass(self, path: str) -> None:
        layer = self._modules.layers.get(path)
        if layer is None:
            if self._is_own_code(path, self._modules.owned.get(path, {})):
                self._faults[path] = "it is cut, and operators of its own code compute with that"
            return
        kind = layer.kind.name
        out = layer.width("embed" if kind in ("embedding", "norm") else "out")
        if layer.has_flow:
            self._widths.add(out)
            return
        taken = self._left.get(self._place(path, layer.width(_TAKES[kind])), {}) if kind in _TAKES else {}
        if not taken and not layer.is_cut:
            self._widths.add(out)
            return
        values = [*taken.values()]
        taken.clear()
        try:
            result = self._run(layer, values)
        except Unknown as why:
            self._faults[path] = str(why)
            return
        if result.layout is None:
            self._widths.add(out)
        else:
            self._left.setdefault(self._place(path, out), {})[path] = result

    def _place(self, path: str, width: int) -> tuple[str, int]:
        """Where a ShardedTensor is taken to go: layers of one module, values of one width."""
        return path.rpartition(".")[0], width

    def _run(self, layer: Layer, taken: list[Value]) -> Value:
        kind, path = layer.kind.name, layer.path
        if kind == "conv":
            raise Unknown("what convolutions of ShardedTensors send is not listed")
        does = Operators(self._modules, self._rank, path)
        params = {name: self._param(placed) for name, placed in layer.params.items()}
        weight, bias = params["weight"], params.get("bias")
        if kind == "embedding":
            shape = self._shapes.with_last(path, 0)[:-1]
            result = does.run("embedding", [Value(shape, None, "int64", False), weight], ("ids", "its table"))
        else:
            x = taken[-1] if taken else self._plain(layer)
            if kind == "norm":
                result = self._norm(does, layer, x, weight, bias)
            elif layer.kind.dims["weight"] == ("out", "in"):
                result = does.linear(x, weight, bias)
            else:
                result = _transposed(does, x, weight, bias)
        self.sends[path] = does.forward, does.backward[::-1]
        return attrs.evolve(result, dtype=self._dtype)

    def _plain(self, layer: Layer) -> Value:
        width = layer.width(_TAKES[layer.kind.name])
        if width not in self._widths:
            raise Unknown(f"it takes values of width {width}, which no layer before it gives")
        return Value(self._shapes.with_last(layer.path, width), None, self._dtype, self._asks(layer.path))

    def _norm(self, does: Operators, layer: Layer, x: Value, weight: Value, bias: Value | None) -> Value:
        module = self._modules.resolved.model.modules.get(layer.path)
        name = _NORMS.get(module.class_name if module is not None else "")
        if name is None:
            raise Unknown("it is cut, or what it gets is, and operators of its own code compute with that")
        operands = [x, weight, bias] if name == "layer_norm" else [x, weight]
        return does.run(name, operands, ("its input", "its weight", "its bias")[: len(operands)], (len(x.shape) - 1,))

    def _param(self, placed: Placed) -> Value:
        layout: Layout | None = placed.layout
        if placed.layout.is_replicated and placed.layout.ranks == self._modules.axes.mesh.ranks:
            layout = None
        return Value(placed.tensor.shape, layout, placed.tensor.dtype, placed.tensor.requires_grad)

    def _is_own_code(self, path: str, params: Mapping[str, Placed]) -> bool:
        """Whether a module of no known kind has parameters that are cut, and no line says how values pass it."""
        if all(placed.layout.is_replicated for placed in params.values()):
            return False
        stated = (self._modules.stated.get(each) for each in (path, *around(path)))
        said = [each for each in stated if each is not None]
        own = self._modules.stated.get(path)
        is_told = own is not None and (own.ins or own.outs or own.passing.locals)
        return not is_told and not any(each.passing.uses for each in said if each.ins or each.outs or each is own)


def _transposed(does: Operators, x: Value, weight: Value, bias: Value | None) -> Value:
    """``addmm`` of rows, as layers do that store ``(in, out)``."""
    *before, width = x.shape
    rows = math.prod(before), width
    flat = attrs.evolve(x, shape=rows, layout=_as(x.layout, rows))
    if bias is None:
        out = does.run("matmul", [flat, weight], ("its input", "its weight"))
    else:
        out = does.run("addmm", [bias, flat, weight], ("its bias", "its input", "its weight"))
    shape = (*before, out.shape[-1])
    return attrs.evolve(out, shape=shape, layout=_as(out.layout, shape))


def _as(layout: Layout | None, shape: tuple[int, ...]) -> Layout | None:
    """A layout that cuts the last dim alone, of a tensor with other dims before that."""
    if layout is None:
        return None
    if not isinstance(layout, CutLayout) or any(layout.dims[:-1]):
        raise Unknown("rows of its input are cut")
    return with_dims(layout, shape, (*[None] * (len(shape) - 1), layout.dims[-1]))
