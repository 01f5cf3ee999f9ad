"""What values send on their way through the modules of a plan, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from shardtensor.plan.flows.flow import changes, cuts
from shardtensor.plan.flows.gradients import Flows
from shardtensor.plan.flows.layer_flows import LayerWork
from shardtensor.plan.flows.modules import Layer, Names
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.traffic.collective import Collective, all_reduce
from shardtensor.plan.traffic.expert_traffic import ROUTED, ExpertTraffic
from shardtensor.plan.traffic.sharded_layers import ShardedLayers, Uncounted
from shardtensor.plan.traffic.value_moves import Moves
from shardtensor.plan.traffic.value_shapes import Shapes

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
        self._dtype, self._shapes = dtype, Shapes(flows, batch, seq, rank)
        self._rank, self._moves = rank, Moves(self._modules, dtype, rank)
        self._first_trained = self._find_first_trained()
        self._tables = self._find_tables()
        self._sharded = ShardedLayers(flows, self._shapes, dtype, rank, self._asks, self._in_order(self._layers()))
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

    @property
    def uncounted(self) -> tuple[Uncounted, ...]:
        """What these may send beyond that."""
        return self._sharded.uncounted

    # -- which modules, in which order --------------------------------------------------------------------------------

    def _order(self) -> list[str]:
        modules = self._modules
        told = {*(path for path, stated in modules.stated.items() if stated.ins or stated.outs), *self._flows.works}
        told = (told - {*self._tables.values()}) | {*self._tables}  # a table under several names runs under the others
        told |= {*self._shapes.dealings, *self._sharded.sends}
        return self._in_order(told)

    def _in_order(self, paths: set[str]) -> list[str]:
        """The modules among these that this rank has, as a walk meets them."""
        modules = self._modules
        known = [path for path in modules.resolved.model.paths if path in paths and self._shapes.is_here(path)]
        return sorted(known, key=lambda path: _tree_place(path, modules.places))

    def _layers(self) -> set[str]:
        """The modules that have parameters, each table under one name."""
        return {*self._modules.owned} - {*self._tables.values()}

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
            return self._of_routed(path, self._layer(self._modules.layers[path], work))
        if path in self._sharded.sends:
            forward, backward = self._sharded.sends[path]
            return _Module(path, (tuple(forward), tuple(backward)), ((), ()))
        stated = self._modules.stated[path]
        enter: list[tuple[list[Collective], list[Collective]]] = []
        addends = self._flows.meetings.addends.get(path, ())
        for name, flow in stated.ins.items():
            shape = self._shapes.into(path, name)
            if shape is not None:
                steps, asks = changes(flow, addends), self._asks(path)
                enter.append(self._moves.of_value(path, flow, steps, shape, {}, asks, name or "its input"))
        leave: list[tuple[list[Collective], list[Collective]]] = []
        dealing = self._shapes.dealings.get(path)
        if dealing is not None:
            index = self._moves.place(dealing.axes)
            size, tokens, width = self._moves.size(dealing.axes), self._shapes.tokens, self._shapes.hidden
            experts = ExpertTraffic(dealing, self._modules, size, index, tokens, width, self._dtype)
            enter.append(([experts.counts(), experts.rows("forward", False)], [experts.rows("backward", True)]))
            leave.append(([experts.rows("forward", True)], [experts.rows("backward", False)]))
        for name, flow in stated.outs.items():
            what = f"result {name}" if name else "it"
            leave.append(self._moves.of_value(path, flow, changes(flow), self._shapes.out_of(path), {}, True, what))
        return self._of_routed(path, _Module(path, _both(enter), _both(leave)))

    def _of_routed(self, path: str, module: _Module) -> _Module:
        """A module, with what it sends said to depend on the router where it is an expert or a part of one."""
        if self._shapes.dealing_around(path) is None:
            return module

        def said(sends: tuple[Collective, ...]) -> tuple[Collective, ...]:
            return tuple(attrs.evolve(each, why=f"{each.why} ({ROUTED})") for each in sends)

        enter, leave = ((said(forward), said(backward)) for forward, backward in (module.enter, module.leave))
        return attrs.evolve(module, enter=enter, leave=leave)

    def _layer(self, layer: Layer, work: LayerWork) -> _Module:
        kind, path = layer.kind.name, layer.path
        into, out = {"linear": ("in", "out"), "embedding": ("", "embed"), "norm": ("embed", "embed")}[kind]
        ends = {"in": self._pieces(layer, "in"), "out": self._pieces(layer, "out" if kind == "linear" else "embed")}
        enter: tuple[list[Collective], list[Collective]] = ([], [])
        if into:
            shape = self._shapes.with_last(path, layer.width(into))
            asks = self._asks(path)
            enter = self._moves.of_value(path, work.came, work.enter, shape, ends["in"], asks, "its input")
            if work.sums_beside and asks and "bias" in layer.params:
                enter = enter[0], [self._with_bias(each, layer) for each in enter[1]]
        shape = self._shapes.with_last(path, layer.width(out))
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

    # -- the loss -----------------------------------------------------------------------------------------------------

    def _losses(self) -> Iterator[Collective]:
        """Cross entropy of logits that stay cut: the maxima of rows, and their sums."""
        modules = self._modules
        dtype = "float64" if self._dtype == "float64" else _LOSSES
        for path in self._flows.givers.logits:
            out = modules.stated[path].out
            assert out is not None
            axes = tuple(axis for cut in cuts(out.after).values() for axis in cut.axes)
            rows = self._shapes.tokens
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
