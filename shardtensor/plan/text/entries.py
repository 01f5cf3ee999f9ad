"""Convert entries of modules to lines of a plan: expand blocks and styles, and join patterns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import attrs

from shardtensor.errors import PlanError, SpecError
from shardtensor.plan.findings.finding import Origin
from shardtensor.plan.flows.flow import Flow, cut_axes, flow_of
from shardtensor.plan.line import Hook, Line
from shardtensor.plan.text.evaluate import Evaluator, is_kind
from shardtensor.plan.text.scope import AxisValue, Bundle, Node, Poisoned, finding_of, kind_of
from shardtensor.plan.text.statements import Statements, pattern_of
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.reader import span


@attrs.frozen
class Above:
    """The context of an entry: the blocks and calls of styles around it.

    Attributes:
        pattern: of the block it is in, from the root.
        calls: of styles, the one in the user's text first.
        pattern_origin: of the pattern before the first call, in the user's text.
    """

    pattern: str = ""
    is_optional: bool = False
    calls: tuple[Origin, ...] = ()
    pattern_origin: Origin | None = None


class Body:
    """Reads the entries of one module, of a style that is called for it, or of the file."""

    def __init__(self, plan: Statements, evaluator: Evaluator, above: Above) -> None:
        self.plan = plan
        self.evaluator = evaluator
        self.above = above

    def read(self, node: Node) -> None:
        """Read one entry."""
        with self._caught(node):
            self.evaluator.spend(node)
            getattr(self, f"_{node.data}")(node)

    @contextmanager
    def _caught(self, node: Node) -> Iterator[None]:
        """Turn errors into findings; the place of a wrong argument of a style is the call."""
        try:
            yield
        except Poisoned:
            pass
        except SpecError as error:
            finding, (source, _, is_of_value) = finding_of(error), error.parts
            is_of_style = finding.code in ("E102", "E103", "E201") and not is_of_value
            if self.above.calls and source is self.evaluator.source and not is_of_style:
                entry = Origin(source, _entry_span(node))
                notes = (*finding.notes, f"in `{entry.text}`, {source.file}:{entry.line}")
                finding = attrs.evolve(finding, origin=_chained(self.above.calls, finding.origin), notes=notes)
            self.plan.find(finding)

    def _add(self, node: Node, expr: Node, line: Line, above: Above) -> None:
        """Add a line to the plan, with the place of its value."""
        origin = Origin(self.evaluator.source, span(expr))
        if above.calls:
            origin = _chained(above.calls, Origin(self.evaluator.source, _entry_span(node)))
        line = attrs.evolve(line, module=self.above.pattern, is_optional=above.is_optional)
        self.plan.lines.append(attrs.evolve(line, origin=origin, pattern_origin=above.pattern_origin))

    # ---------- rules ----------

    def _rule(self, node: Node) -> None:
        *prefixes, glob, right = node.children
        above, here = self.above, Origin(self.evaluator.source, span(right))
        below = Above(
            pattern_of(glob, self.evaluator, above.pattern),
            above.is_optional or bool(prefixes),
            above.calls,
            above.pattern_origin if above.calls else attrs.evolve(here, span=span(glob)),
        )
        if is_kind(right, "block"):
            body = Body(self.plan, self.evaluator, below)
            for child in right.children:
                body.read(child)
            return
        value = self.evaluator.value(right)
        if isinstance(value, Bundle):
            inside = self.evaluator.inside(value.style, value.given)
            body = Body(self.plan, inside, attrs.evolve(below, calls=(*above.calls, here)))
            for child in value.style.body:
                body.read(child)
        elif isinstance(value, ShardingSpec):
            self._add(node, right, Line(below.pattern, "tensor", value), below)
        else:
            fault = f"`{self.evaluator.text(right)}` is {kind_of(value)}, and a rule says a layout or a style"
            raise self.evaluator.fault("E107", right, fault, fix="write such as `[tp, -]` or `replicate`")

    # ---------- flows ----------

    def _in(self, node: Node) -> None:
        self._side("in", node)

    def _out(self, node: Node) -> None:
        self._side("out", node)

    def _side(self, kind: Literal["in", "out"], node: Node) -> None:
        *names, expr = node.children
        name = "".join(str(self.evaluator.digits(each)) if each.type == "INT" else str(each) for each in names)
        self._add(node, expr, Line(self.above.pattern, kind, self._flow(expr), name), self.above)

    def _flow(self, node: Node) -> Flow:
        *sides, last = node.children
        grad = self.evaluator.layout_value(last.children[0]) if is_kind(last, "grad") else None
        sides = [each for each in (*sides, *(() if grad else (last,))) if not is_kind(each, "ARROW")]
        try:
            flow = flow_of([self.evaluator.layout_value(each) for each in sides], grad)
        except PlanError as error:
            facts = dict(error.rows)
            raise self.evaluator.fault("E107", node, error.fault, facts.get("why", ""), facts["fix"]) from None
        return self.plan.flows.setdefault(flow, flow)

    # ---------- the rest ----------

    def _local(self, node: Node) -> None:
        name, expr = node.children
        spec = self.evaluator.layout_value(expr)
        if not isinstance(spec, Spec) or spec.axis_names != set(cut_axes(spec)) or len(spec.dims) > 1:
            why = "a number that counts is cut as one dim"
            raise self.evaluator.fault("E202", expr, f"`{spec}` is no layout of one dim", why, "write such as `[tp]`")
        self._add(node, expr, Line(self.above.pattern, "local", spec, str(name)), self.above)

    def _use(self, node: Node) -> None:
        (call,) = node.children
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for child in call.children[1:]:
            name, expr = child.children if is_kind(child, "arg") else ("", child)
            if name in kwargs:
                raise self.evaluator.fault("E102", child, f"`{name}` is given twice", fix="keep one")
            value = self.evaluator.value(expr)
            if isinstance(value, AxisValue):
                value = value.axes[0] if len(value.axes) == 1 else value.axes
            if name:
                kwargs[str(name)] = value
            else:
                args.append(value)
        hook = Hook(str(call.children[0]), tuple(args), kwargs)
        self._add(node, call, Line(self.above.pattern, "use", hook), self.above)


def _entry_span(node: Node) -> tuple[int, int]:
    """Return the span of an entry, without the word ``optional`` before it."""
    first = next((child for child in node.children if not is_kind(child, "OPTIONAL")), node)
    return span(first if node.data == "rule" else node)[0], span(node.children[-1])[1]


def _chained(calls: tuple[Origin, ...], last: Origin | None) -> Origin:
    through = last
    for call in reversed(calls):
        through = Origin(call.source, call.span, through)
    assert through is not None
    return through
