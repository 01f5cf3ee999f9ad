"""What an operator on ShardedTensors sends, by the rules and routes that decide how it runs.

Nothing is decided here: `shardtensor.rules` says what each operand must be and what the local results are, and
`shardtensor.layout.route` how a tensor gets from one layout to another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from shardtensor.layout.layout import CutLayout, Layout, Shape, replicated
from shardtensor.layout.pieces import Blocked
from shardtensor.layout.route import route
from shardtensor.layout.transfer import transfer
from shardtensor.mesh import Mesh, Ranks, as_ranks, ranks_text
from shardtensor.plan.flows.modules import Modules, Names
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.traffic.collective import Collective, Phase, all_gather, all_reduce, reduce_scatter
from shardtensor.rules.propagate import Need, Recipe, propagate
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS

JOINS = {"@own_rows": 1, "@moments": 2, "@mean_square": 1}
"""Ways of joining that are sums over the ranks, and how many."""

IN_BLOCKS = ("@moments", "@mean_square")
"""Those that take dims cut in blocks; others want them whole."""

_HALF = ("float16", "bfloat16")


class Unknown(Exception):
    """What an operator sends is not known; the message says why."""


@attrs.frozen(eq=False)
class Value:
    """A tensor that an operator gets or gives.

    Attributes:
        shape: global.
        layout: None where every rank has a copy.
        asks: it asks for a gradient.
    """

    shape: Shape
    layout: Layout | None
    dtype: str
    asks: bool

    @property
    def laid(self) -> Layout | Shape:
        """As `propagate` takes it."""
        return self.shape if self.layout is None else self.layout


@attrs.frozen
class _Join:
    """A way of joining what ranks have along a letter, and the axes that cut this."""

    name: str
    letter: str
    axes: tuple[int, ...]
    is_blocked: bool


class Operators:
    """The operators of one module, as one rank runs them one after the other.

    Attributes:
        forward, backward: what they send so far, each in the order in which it does.

    Args:
        where: the path of the module.
    """

    def __init__(self, modules: Modules, rank: int, where: str) -> None:
        self._modules, self._mesh, self._rank, self._where = modules, modules.axes.mesh, rank, where
        self.forward: list[Collective] = []
        self.backward: list[Collective] = []

    def linear(self, x: Value, weight: Value, bias: Value | None) -> Value:
        """``F.linear``: a plain bias's gradient travels with a plain input's where the weight is cut by rows."""
        layout = weight.layout
        is_plain = x.layout is None and bias is not None and bias.layout is None
        if is_plain and isinstance(layout, CutLayout) and layout.cut_dims == (0,) and not layout.is_blocked(0):
            out = self.run("linear", [attrs.evolve(x, asks=False), weight, None])
            assert bias is not None
            numel = math.prod(x.shape) * x.asks + math.prod(bias.shape) * bias.asks
            what = " and ".join(["its input"] * x.asks + ["the bias"] * bias.asks)
            cut = layout.dims[0]
            assert cut is not None
            self._sum("backward", layout, cut.axes, numel, x.dtype, f"the gradient of {what} is summed")
            return attrs.evolve(out, asks=out.asks or x.asks or bias.asks)
        return self.run("linear", [x, weight, bias], ("its input", "its weight", "its bias"))

    def run(
        self, name: str, operands: Sequence[Value | None], said: Sequence[str] = (), dims: tuple[int, ...] = ()
    ) -> Value:
        """The result of an operator of the table, on operands of which one at least is sharded.

        Args:
            operands: in the order of its row; None for one that the call does without.
            said: what reasons call them.
            dims: that the call names.

        Raises:
            Unknown: its row does not say what it sends.
        """
        row, said = ROWS[name], said or [f"operand {i}" for i in range(len(operands))]
        present = [x for x in operands if x is not None]
        said = [word for word, x in zip(said, operands, strict=True) if x is not None]
        rule = row.rule(tuple(None if x is None else x.shape for x in operands), dims)
        recipe = None if rule is None else self._recipe(rule, present)
        if row.pattern is None or rule is None or recipe is None:
            raise Unknown(f"`{name}` has no rule for what it gets")
        sides = zip(row.pattern.sides, operands, strict=True)
        added = [i for i, (side, x) in enumerate(sides) if side.added and x is not None]
        if added and recipe.output.partial:  # what is added, once, comes after the sum
            out = self.run(name, [None if i in added else x for i, x in enumerate(operands)], dims=dims)
            for i in added:
                x = operands[i]
                assert x is not None
                if out.layout is not None or x.layout is not None:
                    out = self.run("add", [out, x], ("the sum", "its bias"))
            return out
        joined = _joined(row.pattern.joins, rule, recipe)
        if joined is not None and joined.is_blocked and joined.name not in IN_BLOCKS:
            recipe, joined = self._recipe(attrs.evolve(rule, whole=rule.whole | {joined.letter}), present), None
            assert recipe is not None, "some operand is sharded"
        for x, need, word in zip(present, recipe.needs, said, strict=True):
            self._bring(x, need, word)
        asks = any(x.asks for x in present)
        dtype = next(x for x in present if x.dtype in BYTES and not x.dtype.startswith("int")).dtype
        if joined is not None:
            self._join(joined, recipe.settled, dtype, present[0].asks)
        if recipe.output.partial:
            self._move("forward", recipe.output, recipe.settled, dtype, "its addends are summed")
        layout = recipe.settled
        return Value(layout.shape, None if layout.is_replicated else layout, dtype, asks)

    # -- as the rule says ---------------------------------------------------------------------------------------------

    def _recipe(self, rule: Rule, operands: Sequence[Value]) -> Recipe | None:
        laid = tuple(x.laid for x in operands)
        recipe = propagate(rule, laid)
        if recipe is not None and any(need.moves for need in recipe.needs) and len({x.dtype for x in operands}) > 1:
            recipe = propagate(rule, laid, tuple(BYTES[x.dtype] for x in operands))
        if recipe is not None and len(recipe.settled.ranks) != self._mesh.size:
            raise Unknown("it runs on some of the ranks only")
        return recipe

    def _join(self, join: _Join, layout: Layout, dtype: str, asks: bool) -> None:
        """Rows that are looked up are summed; so are, of each row of values, the moments of a norm, and gradients."""
        if join.name == "@own_rows":
            self._sum("forward", layout, join.axes, layout.numel(self._rank), dtype, "rows are on one rank each")
            return
        rows = math.prod(layout.local_shape(self._rank)[:-1])
        dtype = "float32" if dtype in _HALF else dtype
        for _ in range(JOINS[join.name]):
            self._sum("forward", layout, join.axes, rows, dtype, "the moments of its rows are summed")
            if asks:
                self._sum("backward", layout, join.axes, rows, dtype, "the gradients of moments are summed")

    def _bring(self, x: Value, need: Need, word: str) -> None:
        """Bring an operand to what it must be, and its gradient back."""
        layout = need.layout
        if need.addend_axes and x.asks:
            numel = layout.numel(self._rank)
            self._sum("backward", layout, need.addend_axes, numel, x.dtype, f"the gradient of {word} is summed")
        have = self._everywhere(layout) if x.layout is None else x.layout
        if have == layout or (x.layout is None and not layout.cut_dims):
            return
        if x.layout is not None:
            self._move("forward", x.layout, layout, x.dtype, f"{word} is laid out for it")
        if x.asks:
            self._move("backward", layout, have.reduced(), x.dtype, f"the gradient of {word} is laid out as that is")

    def _everywhere(self, layout: Layout) -> Layout:
        return replicated(layout.shape, layout.ranks, layout.grid)

    # -- collectives --------------------------------------------------------------------------------------------------

    def _move(self, phase: Phase, source: Layout, target: Layout, dtype: str, why: str) -> None:
        if 0 in source.shape:
            return
        for step in route(source, target):
            if step.kind in ("slice", "split"):
                continue
            if step.kind == "all_reduce":
                assert step.axes is not None
                self._sum(phase, step.source, step.axes, step.source.numel(self._rank), dtype, why)
                continue
            team, axes = self._team(step.source, step.axes)
            own, left, item = step.source.numel(self._rank), step.target.numel(self._rank), BYTES[dtype]
            said: dict[str, Any] = {"dtype": dtype, "where": self._where, "why": why}
            if step.kind == "all_gather":
                self._note(all_gather(phase, axes, len(team), own, own * len(team), item, **said), team)
            elif step.kind == "reduce_scatter":
                self._note(reduce_scatter(phase, axes, len(team), left, own, item, **said), team)
            else:
                moved, whole = transfer(step.source, step.target, self._rank, team), math.prod(step.source.shape)
                parts = whole * item, moved.sent * item, moved.received * item
                self._note(Collective("all_to_all", phase, axes, len(team), *parts, **said), team)

    def _sum(self, phase: Phase, layout: Layout, along: Sequence[int], numel: int, dtype: str, why: str) -> None:
        team, axes = self._team(layout, along)
        if len(team) > 1 and numel:
            item = BYTES[dtype]
            self._note(all_reduce(phase, axes, len(team), numel, item, dtype=dtype, where=self._where, why=why), team)

    def _note(self, collective: Collective, team: Ranks) -> None:
        if not {*collective.axes} <= {*self._modules.axes.names}:
            collective = attrs.evolve(collective, why=f"{collective.why}, among ranks {ranks_text(team)}")
        (self.forward if collective.phase == "forward" else self.backward).append(collective)

    def _team(self, layout: Layout, axes: Sequence[int] | None) -> tuple[Ranks, Names]:
        """The ranks that exchange with this one along axes of a layout's grid: all, where those are all there is.

        And the axes, as the plan calls them, or as messages call those of a grid that is the layout's own.
        """
        rest = [] if axes is None else [size for axis, size in enumerate(layout.grid) if axis not in axes]
        names = self._mesh.names
        if axes is None or all(size == 1 for size in rest):
            team = self._mesh.ranks
        else:
            grid = Mesh(tuple((f"axis{i}", size) for i, size in enumerate(layout.grid)), layout.ranks)
            team = as_ranks(sorted(grid.ranks_along(self._rank, tuple(axes))))
            if (layout.grid, layout.ranks) != (self._mesh.sizes, self._mesh.ranks):
                return team, tuple(layout.axis_name(axis) for axis in axes)
            names = tuple(names[axis] for axis in axes)
        return team, tuple(self._modules.named(self._modules.leaves(names)).split("*"))


def _joined(joins: Sequence[tuple[str, str]], rule: Rule, recipe: Recipe) -> _Join | None:
    """The way of joining of a cut letter that has one of its own.

    Raises:
        Unknown: it is no sum.
    """
    for letter, join in joins:
        dims = [
            need.layout.dims[d]
            for need, letters in zip(recipe.needs, rule.inputs, strict=True)
            for d, name in enumerate(letters)
            if name is not None and join.startswith("@") and name.rstrip("0123456789") == letter
        ]
        cuts = [cut for cut in dims if cut is not None]
        if cuts and join not in JOINS:
            raise Unknown(f"its parts are joined in a way of their own along {letter}")
        if cuts:
            axes = sorted({axis for cut in cuts for axis in cut.axes})
            return _Join(join, letter, tuple(axes), any(isinstance(cut.pieces, Blocked) for cut in cuts))
    return None
