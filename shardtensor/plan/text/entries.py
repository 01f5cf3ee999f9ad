"""The entries of modules to lines of a plan: blocks spread out, styles spelled out, patterns joined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import attrs
from lark import Token

from shardtensor.errors import PlanError, SpecError
from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.flows.flow import Flow, cut_axes, cuts, partial_axes
from shardtensor.plan.line import Hook, Line
from shardtensor.plan.text.evaluate import Evaluator
from shardtensor.plan.text.scope import AxisValue, Bundle, Node, Poisoned, finding_of, kind_of
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.reader import span

MAX_PATTERN = 512
"""Characters of a pattern from the root."""
MAX_STARS = 6
"""Of ``*``, ``**`` and braces, in one segment and of segments ``**``; so that matching stays quick."""


@attrs.frozen
class Above:
    """What stands above an entry.

    Attributes:
        pattern: of the block it is in, from the root.
        calls: of styles, the one in the user's text first.
        pattern_origin: of the pattern that the user wrote before the first call.
    """

    pattern: str = ""
    is_optional: bool = False
    calls: tuple[Origin, ...] = ()
    pattern_origin: Origin | None = None


@attrs.define(eq=False)
class Entries:
    """What the entries of a plan say, as it is collected.

    Attributes:
        lines: in the order of the text, styles spelled out.
        find: takes each finding.
        data: gives the axes along which samples differ, spelled out.
        depth: how many includes deep the file at hand is.
        flows: each that was read, by itself: equal ones are one object, which is found without comparing.
    """

    find: Callable[[Finding], None]
    data: Callable[[], tuple[str, ...]]
    lines: list[Line] = attrs.field(factory=list)
    depth: int = 0
    flows: dict[Flow, Flow] = attrs.field(factory=dict)


class Body:
    """Reads the entries of one module, of a style that was called for it, or of the file."""

    def __init__(self, entries: Entries, evaluator: Evaluator, above: Above) -> None:
        self.entries = entries
        self.evaluator = evaluator
        self.above = above

    def read(self, node: Node) -> None:
        """Read one entry."""
        with self._caught(node):
            self.evaluator.spend(node)
            getattr(self, f"_{node.data}")(node)

    @contextmanager
    def _caught(self, node: Node) -> Iterator[None]:
        """Faults become findings; what a style was given is wrong where it was called."""
        try:
            yield
        except Poisoned:
            pass
        except SpecError as error:
            finding, (source, fault) = finding_of(error), error.parts
            is_of_style = finding.code in ("E102", "E103", "E201") and not fault.is_of_value
            if self.above.calls and source is self.evaluator.source and not is_of_style:
                entry = Origin(source, _entry_span(node))
                notes = (*finding.notes, f"in `{entry.text}`, {source.file}:{entry.line}")
                finding = attrs.evolve(finding, origin=_chained(self.above.calls, finding.origin), notes=notes)
            self.entries.find(finding)

    def _evaluated(self, said: Node, evaluate: Callable[[Node], Any]) -> tuple[Any, str]:
        """A value, and the condition of the ``else`` side that was taken for it."""
        notes = self.evaluator.scope.notes
        before = len(notes)
        value = evaluate(said)
        return value, notes[before][1] if len(notes) > before else ""

    def _add(self, node: Node, said: Node, line: Line, above: Above) -> None:
        origin = Origin(self.evaluator.source, span(said))
        if above.calls:
            origin = _chained(above.calls, Origin(self.evaluator.source, _entry_span(node)))
        self.entries.lines.append(
            attrs.evolve(
                line,
                is_optional=above.is_optional,
                depth=self.entries.depth,
                origin=origin,
                pattern_origin=above.pattern_origin,
            )
        )

    # ---------- rules ----------

    def _rule(self, node: Node) -> None:
        *prefixes, glob, said = node.children
        above = self.above
        below = Above(
            pattern_of(glob, self.evaluator, above.pattern),
            above.is_optional or "optional" in prefixes,
            above.calls,
            above.pattern_origin if above.calls else Origin(self.evaluator.source, span(glob)),
        )
        if _is_kind(said, "block"):
            body = Body(self.entries, self.evaluator, below)
            for child in said.children:
                body.read(child)
            return
        value, other = self._evaluated(said, self.evaluator.value)
        if isinstance(value, Bundle):
            self._spell_out(
                value, attrs.evolve(below, calls=(*above.calls, Origin(self.evaluator.source, span(said)))), other
            )
        elif isinstance(value, ShardingSpec):
            self._add(node, said, Line(below.pattern, "tensor", value, module=above.pattern, other=other), below)
        else:
            fault = f"`{self.evaluator.text(said)}` is {kind_of(value)}, and a rule says a layout or a style"
            raise self.evaluator.fault("E107", said, fault, fix="write such as `[tp, -]` or `replicate`")

    def _spell_out(self, bundle: Bundle, above: Above, other: str) -> None:
        lines = self.entries.lines
        first = len(lines)
        body = Body(self.entries, self.evaluator.inside(bundle.style, bundle.given), above)
        for child in bundle.style.body:
            body.read(child)
        lines[first:] = [attrs.evolve(line, other=line.other or other) for line in lines[first:]]

    # ---------- flows ----------

    def _in(self, node: Node) -> None:
        self._side("in", node)

    def _out(self, node: Node) -> None:
        self._side("out", node)

    def _side(self, kind: Literal["in", "out"], node: Node) -> None:
        *names, said = node.children
        flow, other = self._evaluated(said, self._flow)
        name = str(names[0]) if names else ""
        if names and names[0].type == "INT":
            name = str(self.evaluator.digits(names[0]))
        pattern = self.above.pattern
        self._add(node, said, Line(pattern, kind, flow, name, module=pattern, other=other), self.above)

    def _flow(self, node: Node) -> Flow:
        evaluator = self.evaluator
        sides = [child for child in node.children if not _is_kind(child, "ARROW", "grad")]
        before, *after = (_value_layout(evaluator, side) for side in sides)
        grads = [child.children[0] for child in node.children if _is_kind(child, "grad")]
        addends = tuple(axis for grad in grads for axis in self._addends(grad))
        flow = Flow(before, after[0] if after else before, addends, bool(grads))
        flow = self.entries.flows.setdefault(flow, flow)
        if wrong := set(evaluator.scope.leaves(flow_axes(flow))) & set(self.entries.data()):
            fault, why, fix = data_axis_fault(sorted(wrong))
            raise evaluator.fault("E204", node, fault, why, fix)
        return flow

    def _addends(self, grad: Node) -> tuple[str, ...]:
        spec = _value_layout(self.evaluator, grad)
        if cuts(spec):
            why = "a flow says along which axes the gradient that comes back is an addend"
            fix = f"write `partial({'*'.join(cut_axes(spec))})`"
            raise self.evaluator.fault("E107", grad, "`grad` stands before addends", why, fix)
        try:
            return partial_axes(spec)
        except PlanError:
            fix = "write `partial(tp)`, without `op`"
            raise self.evaluator.fault("E107", grad, "gradients add up", fix=fix) from None

    # ---------- the rest ----------

    def _local(self, node: Node) -> None:
        name, said = node.children
        spec, other = self._evaluated(said, self.evaluator.layout_value)
        if not isinstance(spec, Spec) or spec.axis_names != set(cut_axes(spec)) or len(spec.dims) > 1:
            why = "a number that counts is cut as one dim"
            raise self.evaluator.fault("E202", said, f"`{spec}` is no layout of one dim", why, "write such as `[tp]`")
        pattern = self.above.pattern
        self._add(node, said, Line(pattern, "local", spec, str(name), module=pattern, other=other), self.above)

    def _use(self, node: Node) -> None:
        (call,) = node.children
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for child in call.children[1:]:
            if not _is_kind(child, "arg"):
                args.append(_hook_value(self.evaluator.value(child)))
                continue
            name, said = child.children
            if name in kwargs:
                raise self.evaluator.fault("E102", child, f"`{name}` is given twice", fix="keep one")
            kwargs[str(name)] = _hook_value(self.evaluator.value(said))
        hook = Hook(str(call.children[0]), tuple(args), kwargs)
        self._add(node, call, Line(self.above.pattern, "use", hook, module=self.above.pattern), self.above)


def flow_axes(flow: Flow) -> tuple[str, ...]:
    """All axes that a flow names."""
    partial = tuple(axis for side in (flow.before, flow.after) for part in side.partial_parts for axis in part.axes)
    return (*cut_axes(flow.before), *cut_axes(flow.after), *partial, *flow.addends)


def data_axis_fault(axes: list[str]) -> tuple[str, str, str]:
    """What is wrong with a flow that names axes of the data."""
    fault = f"`{axes[0]}` is a data axis, and a flow names it"
    return (
        fault,
        "a flow says what ranks of one data coordinate see; along data axes samples differ",
        f"drop `{axes[0]}`",
    )


def pattern_of(glob: Node, evaluator: Evaluator, above: str = "", *, names: bool = True) -> str:
    """The pattern that a node writes, from the root.

    Args:
        names: ``<ep>`` has to be an axis of the mesh.
    """
    (token,) = glob.children
    text = str(token)
    if token.type == "STRING":
        text = evaluator.string(token)
    fault, fix = "", ""
    segments = text.split(".")
    whole = ".".join(filter(None, (above, text)))
    if not text or "" in segments:
        fault, fix = "a segment of this pattern is empty", "write names with one dot between them"
    elif any("**" in segment and segment != "**" for segment in segments):
        fault, fix = "`**` stands for whole segments", "write it between dots, or `*` for characters of a segment"
    elif any(re.search(r"\{[^}]*$|^[^{]*\}", segment) for segment in segments):
        fault, fix = "alternatives in braces are of one segment", "write `{a,b}` without dots, or two rules"
    elif any(len(re.findall(r"\*|\{", segment)) > MAX_STARS for segment in segments) or (
        whole.split(".").count("**") > MAX_STARS
    ):
        fault, fix = f"a pattern has at most {MAX_STARS} of `*` and braces in a segment, and of `**`", "write fewer"
    elif len(whole) > MAX_PATTERN:
        fault, fix = f"a pattern has at most {MAX_PATTERN} characters", "write `**` for segments in between"
    if fault:
        raise evaluator.fault("E001", glob, fault, f"the pattern is `{text[:80]}`", fix)
    if names:
        start = span(glob)[0] + (token.type == "STRING")
        for found in re.finditer(r"<([A-Za-z0-9_]+)>", text):
            at = start + found.start(1)
            with evaluator.apart("the numbers"):
                evaluator.axis(Token("NAME", found[1], at, end_pos=at + len(found[1])))
    return whole


def _value_layout(evaluator: Evaluator, node: Node) -> Spec:
    spec = evaluator.layout_value(node)
    if not isinstance(spec, Spec) or spec.named or spec.flat_part or spec.only_part:
        why = "a value has no dim names, is not stored, and lies on all ranks"
        fix = "write such as `replicate`, `[..., tp]`, `[-, tp, ...]`, `partial(tp)`"
        raise evaluator.fault("E107", node, f"`{spec}` is no layout of a value", why, fix)
    return spec


def _hook_value(value: Any) -> Any:
    if isinstance(value, AxisValue):
        return value.axes[0] if len(value.axes) == 1 else value.axes
    return value


def _entry_span(node: Node) -> tuple[int, int]:
    """An entry without the word ``optional`` before it, and the end of its line."""
    first = next((child for child in node.children if not _is_kind(child, "OPTIONAL")), node)
    start = span(first)[0] if node.data == "rule" else span(node)[0]
    return start, span(node.children[-1])[1]


def _chained(calls: tuple[Origin, ...], last: Origin | None) -> Origin:
    through = last
    for call in reversed(calls):
        through = Origin(call.source, call.span, through)
    assert through is not None
    return through


def _is_kind(node: Node, *kinds: str) -> bool:
    return (node.type if isinstance(node, Token) else node.data) in kinds
