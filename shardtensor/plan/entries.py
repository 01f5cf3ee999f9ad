"""The entries of modules to lines of a plan: blocks spread out, styles spelled out, patterns joined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from lark import Token

from shardtensor.errors import PlanError, SpecError
from shardtensor.plan.evaluate import Evaluator
from shardtensor.plan.finding import Finding
from shardtensor.plan.flow import Flow, cut_axes, cuts, partial_axes
from shardtensor.plan.line import Hook, Line
from shardtensor.plan.origin import Origin
from shardtensor.plan.scope import AxisValue, Bundle, Node, Poisoned, finding_of, kind_of
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
    is_override: bool = False
    calls: tuple[Origin, ...] = ()
    pattern_origin: Origin | None = None


class Entries:
    """Reads entries; lines and findings are collected.

    Args:
        find: takes each finding.
        data: the axes along which samples differ, spelled out; asked for with each flow.
    """

    def __init__(self, find: Callable[[Finding], None], data: Callable[[], tuple[str, ...]]) -> None:
        self.lines: list[Line] = []
        self.find = find
        self.data = data
        self.depth = 0

    def read(self, node: Node, evaluator: Evaluator, above: Above) -> None:
        """Read one entry."""
        with self._caught(node, evaluator, above):
            evaluator.spend(node)
            getattr(self, f"_{node.data}")(node, evaluator, above)

    @contextmanager
    def _caught(self, node: Node, evaluator: Evaluator, above: Above) -> Iterator[None]:
        try:
            yield
        except Poisoned:
            pass
        except SpecError as error:
            finding, fault = finding_of(error), error.parts[1]
            names_a_word = finding.code in ("E102", "E103", "E201") and not fault.is_of_value
            if above.calls and error.parts[0] is evaluator.source and not names_a_word:
                entry = Origin(evaluator.source, _entry_span(node))
                origin = _chained(above.calls, finding.origin)
                notes = (*finding.notes, f"in `{entry.text}`, {entry.source.file}:{entry.line}")
                finding = attrs.evolve(finding, origin=origin, notes=notes)
            self.find(finding)

    def _line(self, node: Node, said: Node, evaluator: Evaluator, above: Above, line: Line) -> None:
        origin = Origin(evaluator.source, span(said))
        if above.calls:
            origin = _chained(above.calls, Origin(evaluator.source, _entry_span(node)))
        self.lines.append(
            attrs.evolve(
                line,
                is_optional=line.is_optional or above.is_optional,
                is_override=line.is_override or above.is_override,
                depth=self.depth,
                origin=origin,
                pattern_origin=above.pattern_origin or line.pattern_origin,
            )
        )

    # ---------- rules ----------

    def _rule(self, node: Node, evaluator: Evaluator, above: Above) -> None:
        *prefixes, glob, said = node.children
        at = Origin(evaluator.source, span(glob))
        inner = Above(
            pattern_of(glob, evaluator, above.pattern),
            above.is_optional or "OPTIONAL" in [token.type for token in prefixes],
            above.is_override or "OVERRIDE" in [token.type for token in prefixes],
            above.calls,
            at,
        )
        if not isinstance(said, Token) and said.data == "block":
            for child in said.children:
                self.read(child, evaluator, inner)
            return
        notes = evaluator.scope.notes
        taken = len(notes)
        value = evaluator.value(said)
        other = notes[taken][1] if len(notes) > taken else ""
        if isinstance(value, Bundle):
            style = value.style
            call = Origin(evaluator.source, span(said))
            below = attrs.evolve(
                inner, calls=(*above.calls, call), pattern_origin=above.pattern_origin if above.calls else at
            )
            inside = evaluator.inside(style, value.given)
            first = len(self.lines)
            for child in style.body:
                self.read(child, inside, below)
            if other:
                self.lines[first:] = [attrs.evolve(line, other=line.other or other) for line in self.lines[first:]]
            return
        if not isinstance(value, ShardingSpec):
            fault = f"`{evaluator.text(said)}` is {kind_of(value)}, and a rule says a layout or a style"
            raise evaluator.fault("E107", said, fault, fix="write such as `[tp, -]` or `replicate`")
        line = Line(inner.pattern, "tensor", value, module=above.pattern, other=other, pattern_origin=at)
        self._line(
            node, said, evaluator, attrs.evolve(inner, pattern_origin=above.pattern_origin if above.calls else at), line
        )

    # ---------- flows ----------

    def _in(self, node: Node, evaluator: Evaluator, above: Above) -> None:
        self._side("in", node, evaluator, above)

    def _out(self, node: Node, evaluator: Evaluator, above: Above) -> None:
        self._side("out", node, evaluator, above)

    def _side(self, kind: Any, node: Node, evaluator: Evaluator, above: Above) -> None:
        *names, said = node.children
        taken = len(evaluator.scope.notes)
        value = self._flow(said, evaluator)
        name = str(names[0]) if names else ""
        if names and names[0].type == "INT":
            name = str(evaluator.digits(names[0]))
        other = evaluator.scope.notes[taken][1] if len(evaluator.scope.notes) > taken else ""
        line = Line(above.pattern, kind, value, name, module=above.pattern, other=other)
        self._line(node, said, evaluator, above, line)

    def _flow(self, node: Node, evaluator: Evaluator) -> Flow:
        sides = [child for child in node.children if not _is_kind(child, "ARROW", "grad")]
        grad = next((child.children[0] for child in node.children if _is_kind(child, "grad")), None)
        layouts = [_value_layout(evaluator, side) for side in sides]
        addends: tuple[str, ...] = ()
        if grad is not None:
            spec = _value_layout(evaluator, grad)
            if cuts(spec):
                why = "a flow says along which axes the gradient that comes back is an addend"
                raise evaluator.fault("E107", grad, "`grad` stands before addends", why, "write `grad partial(tp)`")
            try:
                addends = partial_axes(spec)
            except PlanError:
                raise evaluator.fault(
                    "E107", grad, "gradients add up", fix="write `partial(tp)`, without `op`"
                ) from None
        flow = Flow(layouts[0], layouts[-1], addends, grad is not None)
        if twice := set(evaluator.scope.leaves(flow_axes(flow))) & set(self.data()):
            raise evaluator.fault("E204", node, *data_axis_fault(sorted(twice)))
        return flow

    # ---------- the rest ----------

    def _local(self, node: Node, evaluator: Evaluator, above: Above) -> None:
        name, said = node.children
        taken = len(evaluator.scope.notes)
        value = evaluator.layout_value(said)
        is_one = isinstance(value, Spec) and not (
            value.named or value.flat_part or value.only_part or value.partial_parts
        )
        if not is_one or (isinstance(value, Spec) and value.dims and len(value.dims) != 1):
            why = "a number that counts is cut as one dim"
            raise evaluator.fault("E202", said, f"`{value}` is no layout of one dim", why, "write such as `[tp]`")
        other = evaluator.scope.notes[taken][1] if len(evaluator.scope.notes) > taken else ""
        self._line(
            node, said, evaluator, above, Line(above.pattern, "local", value, str(name), above.pattern, other=other)
        )

    def _use(self, node: Node, evaluator: Evaluator, above: Above) -> None:
        (call,) = node.children
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for child in call.children[1:]:
            if not _is_kind(child, "arg"):
                args.append(_hook_value(evaluator.value(child)))
                continue
            name, said = child.children
            if name in kwargs:
                raise evaluator.fault("E102", child, f"`{name}` is given twice", fix="keep one")
            kwargs[str(name)] = _hook_value(evaluator.value(said))
        hook = Hook(str(call.children[0]), tuple(args), kwargs)
        self._line(node, call, evaluator, above, Line(above.pattern, "use", hook, module=above.pattern))


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
        for found in re.finditer(r"<([A-Za-z_][A-Za-z0-9_]*)>", text):
            at = start + found.start(1)
            evaluator.axis(Token("NAME", found[1], at, end_pos=at + len(found[1])))
            evaluator.uses.clear()
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
    first = next((child for child in node.children if not _is_kind(child, "OPTIONAL", "OVERRIDE")), node)
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
