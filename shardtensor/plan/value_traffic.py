"""What values send on their way through the modules of a plan, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from shardtensor.plan.collective import Collective, all_reduce
from shardtensor.plan.flow import changes, cuts
from shardtensor.plan.givers import Givers
from shardtensor.plan.gradients import Flows
from shardtensor.plan.layer_flows import LayerWork
from shardtensor.plan.model import BYTES
from shardtensor.plan.modules import Layer, Names
from shardtensor.plan.value_moves import Moves

_LOSSES = "float32"


@attrs.frozen(eq=False)
class _Module:
    """One module with flows: its place in the tree of such modules, and what it sends."""

    path: str
    enter: tuple[tuple[Collective, ...], tuple[Collective, ...]]  # forward, backward
    leave: tuple[tuple[Collective, ...], tuple[Collective, ...]]
    parameters: tuple[Collective, ...] = ()


class ValueTraffic:
    """The collectives of modules, for one rank.

    Args:
        batch: samples of one data rank.
        seq: tokens of a sample.
        dtype: of values.
    """

    def __init__(self, flows: Flows, batch: int, seq: int, dtype: str, rank: int) -> None:
        self._flows, self._modules = flows, flows.modules
        self._batch, self._seq, self._dtype = batch, seq, dtype
        self._rank, self._moves = rank, Moves(self._modules, dtype, rank)
        self._first_trained = self._find_first_trained()
        self._tables = self._find_tables()
        self._found = [self._module(path) for path in self._order()]

    def forward(self) -> Iterator[Collective]:
        """In the order in which modules are entered and left; the loss at the end."""
        opened: list[_Module] = []
        for module in self._found:
            while opened and not _holds(opened[-1].path, module.path):
                yield from opened.pop().leave[0]
            yield from module.enter[0]
            opened.append(module)
        while opened:
            yield from opened.pop().leave[0]
        yield from self._losses()

    def backward(self) -> Iterator[Collective]:
        """The other way round."""
        events: list[tuple[_Module, bool]] = []
        opened: list[_Module] = []
        for module in self._found:
            while opened and not _holds(opened[-1].path, module.path):
                events.append((opened.pop(), False))
            events.append((module, True))
            opened.append(module)
        events += [(module, False) for module in reversed(opened)]
        for module, is_enter in reversed(events):
            yield from (module.enter if is_enter else module.leave)[1]
            if is_enter:
                yield from module.parameters

    # -- which modules, in which order --------------------------------------------------------------------------------

    def _order(self) -> list[str]:
        modules = self._modules
        told = {*(path for path, stated in modules.stated.items() if stated.ins or stated.outs), *self._flows.works}
        told = (told - {*self._tables.values()}) | {*self._tables}  # a table under several names runs under the others
        places = modules.places
        known = [path for path in modules.resolved.model.paths if path in told]
        return sorted(known, key=lambda path: _tree_place(path, places))

    def _find_tables(self) -> dict[str, str]:
        """Embeddings whose table is tied to another embedding's, with the path of that one."""
        found = {}
        for path, layer in self._modules.layers.items():
            other = layer.params["weight"].tied_to.rpartition(".")[0]
            source = self._modules.layers.get(other)
            is_table = layer.kind.name == "embedding" and source is not None and source.kind.name == "embedding"
            if is_table and other in self._flows.works:
                found[path] = other
        return found

    def _find_first_trained(self) -> int:
        """Where the first parameter that trains stands, if ids come in; values before it ask for no gradient."""
        modules = self._modules
        if not any(layer.kind.name == "embedding" for layer in modules.layers.values()):
            return -1  # what comes in may ask for one
        trained = (
            modules.places.get(path, 0)
            for path, params in modules.owned.items()
            if any(placed.tensor.requires_grad for placed in params.values())
        )
        return min(trained, default=2**62)

    def _asks(self, path: str) -> bool:
        """Whether what enters a module asks for a gradient."""
        return self._modules.places.get(path, 0) > self._first_trained

    # -- what one module sends ----------------------------------------------------------------------------------------

    def _module(self, path: str) -> _Module:
        work = self._flows.works.get(path) or self._flows.works.get(self._tables.get(path, path))
        if work is not None:
            return self._layer(self._modules.layers[path], work)
        stated = self._modules.stated[path]
        enter: list[tuple[list[Collective], list[Collective]]] = []
        addends = self._flows.meetings.addends.get(path, ())
        width = self._width_into(path)
        for name, flow in stated.ins.items():
            last = self._last_of(path, name, width)
            if last is None:
                continue
            steps = changes(flow, addends)
            shape = (self._batch * self._seq, last) if self._is_of_tokens(path) else (self._batch, self._seq, last)
            enter.append(self._moves.of_value(path, flow, steps, shape, {}, self._asks(path), name or "its input"))
        leave: list[tuple[list[Collective], list[Collective]]] = []
        for name, flow in stated.outs.items():
            shape = (self._batch, self._seq, self._width_out_of(path, width))
            leave.append(
                self._moves.of_value(path, flow, changes(flow), shape, {}, True, f"result {name}" if name else "it")
            )
        return _Module(path, _both(enter), _both(leave))

    def _layer(self, layer: Layer, work: LayerWork) -> _Module:
        kind, path = layer.kind.name, layer.path
        into, out = {"linear": ("in", "out"), "embedding": ("", "embed"), "norm": ("embed", "embed")}[kind]
        ends = {"in": self._pieces(layer, "in"), "out": self._pieces(layer, "out" if kind == "linear" else "embed")}
        enter: tuple[list[Collective], list[Collective]] = ([], [])
        if into:
            shape = (self._batch, self._seq, layer.width(into))
            asks = self._asks(path)
            enter = self._moves.of_value(path, work.came, work.enter, shape, ends["in"], asks, "its input")
            if work.sums_beside and asks and "bias" in layer.params:
                enter = enter[0], [self._with_bias(each, layer) for each in enter[1]]
        shape = (self._batch, self._seq, layer.width(out))
        leave = self._moves.of_value(
            path, work.leaves, work.leave, shape, ends["out"], layer.trains or self._asks(path), "it"
        )
        parameters = list(self._parameters(layer, work))
        if parameters and layer.cut("weight", "in") and parameters[0].where.endswith(".bias"):
            leave = leave[0], [parameters.pop(0), *leave[1]]  # it is added last
        return _Module(path, _both([enter]), _both([leave]), tuple(parameters))

    def _with_bias(self, collective: Collective, layer: Layer) -> Collective:
        """The sum of an input's gradient, with the bias's in the same message."""
        bias = layer.params["bias"].tensor
        if collective.kind != "all_reduce" or not bias.requires_grad:
            return collective
        numel = collective.bytes // BYTES[collective.dtype] + bias.numel
        made = all_reduce(
            "backward", collective.axes, collective.group_size, numel, BYTES[collective.dtype],
            dtype=collective.dtype, where=collective.where, why="",
        )  # fmt: skip
        return attrs.evolve(made, why=f"{collective.why}, and that of the bias with it")

    def _parameters(self, layer: Layer, work: LayerWork) -> Iterator[Collective]:
        for name in reversed(list(layer.params)):
            placed = layer.params[name]
            sums = work.sums.get(name, ())
            if not sums or not placed.tensor.requires_grad:
                continue
            if name == "bias" and work.sums_beside and self._asks(layer.path):
                continue  # its gradient travels with the input's
            numel = placed.layout.numel(self._rank)
            yield self._moves.sum(
                "backward", sums, numel, placed.tensor.dtype, placed.tensor.name, "its gradient is summed"
            )

    def _pieces(self, layer: Layer, dim: str) -> dict[Names, tuple[int, ...]]:
        """The true pieces of a dim of a weight, by the axes that cut it."""
        axes = layer.cut("weight", dim)
        layout = layer.params["weight"].layout
        if not axes:
            return {}
        cut = layout.dims[layer.kind.dims["weight"].index(dim)]  # type: ignore[attr-defined]
        return {axes: tuple(cut.pieces.size(i) for i in range(self._moves.size(axes)))}

    # -- widths -------------------------------------------------------------------------------------------------------

    def _width_into(self, path: str) -> int:
        """The last dim of what enters a module: that of the first layer in it which takes it."""
        served = self._flows.meetings.served.get(path, [])
        for layer in served:
            return layer.width("in" if layer.kind.name == "linear" else "embed")
        return self._hidden

    def _width_out_of(self, path: str, into: int) -> int:
        last = [layer for layer in self._modules.layers.values() if _holds(path, layer.path)]
        made = [layer for layer in last if layer.kind.name == "linear" and layer.stated.out is not None]
        return made[-1].width("out") if made else into

    @property
    def _hidden(self) -> int:
        """The width of values between modules."""
        for kind, dim in (("embedding", "embed"), ("norm", "embed"), ("linear", "in")):
            for layer in self._modules.layers.values():
                if layer.kind.name == kind:
                    return layer.width(dim)
        return 0

    def _last_of(self, path: str, name: str, width: int) -> int | None:
        """The last dim of an argument; None for one that sends nothing: no gradient, or no value."""
        if not name:
            return width
        if name == "top_k_weights":
            hooks = self._modules.stated[path].passing.uses
            found = next((hook.kwargs.get("top_k") for hook, _ in hooks if "top_k" in hook.kwargs), None)
            return int(found) if found is not None else None
        is_cross = any(word in path.lower() for word in ("cross", "encdec", "encoder_attn"))
        return width if is_cross and ("states" in name or "encoder" in name) else None

    def _is_of_tokens(self, path: str) -> bool:
        """Whether samples and tokens are one dim, as for experts."""
        return path != "" and any(hook.name != "cross_entropy" for hook, _ in self._modules.stated[path].passing.uses)

    # -- the loss -----------------------------------------------------------------------------------------------------

    def _losses(self) -> Iterator[Collective]:
        """Cross entropy of logits that stay cut: the maxima of rows, and their sums."""
        modules = self._modules
        dtype = "float64" if self._dtype == "float64" else _LOSSES
        for path in Givers(modules, self._flows.meetings).logits:
            out = modules.stated[path].out
            assert out is not None
            axes = tuple(axis for cut in cuts(out.after).values() for axis in cut.axes)
            rows = self._batch * self._seq
            yield self._moves.sum("forward", axes, rows, dtype, path, "the loss: largest logits")
            yield self._moves.sum("forward", axes, 2 * rows, dtype, path, "the loss: sums and logits of targets")


def _both(
    moves: Sequence[tuple[list[Collective], list[Collective]]],
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    return tuple(x for move in moves for x in move[0]), tuple(x for move in moves[::-1] for x in move[1])


def _holds(above: str, path: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}."))


def _tree_place(path: str, places: dict[str, int]) -> tuple[int, ...]:
    """What sorts modules as a walk meets them: those around before those in them."""
    segments = path.split(".") if path else []
    return tuple(places.get(".".join(segments[: i + 1]), 0) for i in range(len(segments)))
