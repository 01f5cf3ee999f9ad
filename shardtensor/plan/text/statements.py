"""Statements of a plan other than its rules: parameters, names, styles, dims, ties, stores."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
from lark import Token

from shardtensor.errors import SpecError
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.flows.flow import Flow
from shardtensor.plan.line import Dims, Line, Store, Tie, Unmatched
from shardtensor.plan.text.evaluate import Evaluator, is_kind
from shardtensor.plan.text.scope import (
    FUNCTIONS,
    POISON,
    RESERVED,
    AxisValue,
    Binding,
    Node,
    Poisoned,
    Scope,
    Style,
    finding_of,
    kind_of,
    known_values,
    other_values,
    params_in,
    shown,
)
from shardtensor.plan.text.syntax import parse_value
from shardtensor.spec.diagnostics import Source, nearest
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.reader import WORDS, Word, span

MAX_FINDINGS = 100
MAX_PATTERN = 512
"""The largest number of characters of a pattern from the root."""
MAX_STARS = 6
"""The largest number of ``*`` and braces in one segment, and of segments ``**``; so that matching stays fast."""


class Stop(Exception):
    """Ends reading: there are too many findings, or a file is missing that may define names that are used later."""


class Statements:
    """The statements of a plan, as they are collected.

    Args:
        given: the values of parameters from outside.

    Attributes:
        evaluator: of the file that is read.
        lines: the rules, in the order of the text, with styles expanded.
        depth: how many includes deep the file is.
        flows: each flow by itself: equal ones become one object, so that look-ups need no comparison.
    """

    def __init__(self, scope: Scope, given: Mapping[str, Any]) -> None:
        self.scope = scope
        self.given = given
        self.evaluator = Evaluator(Source(""), scope)
        self.findings: list[Finding] = []
        self.axes: Axes | None = None
        self.data: tuple[str, ...] = ()
        self.lines: list[Line] = []
        self.flows: dict[Flow, Flow] = {}
        self.stores: list[Store] = []
        self.ties: list[Tie] = []
        self.all_dims: list[Dims] = []
        self.rest: Unmatched | None = None
        self.depth = 0
        self._places: dict[str, Origin] = {}
        self._seen: set[Any] = set()

    def find(self, finding: Finding) -> None:
        """Record a finding, once for each place."""
        origin = finding.origin
        place = finding.fault if origin is None else (origin.source.file, origin.span)
        if (finding.code, place) in self._seen:
            return
        self._seen.add((finding.code, place))
        self.findings.append(finding)
        if len(self.findings) >= MAX_FINDINGS and finding.severity == "error":
            raise Stop

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Turn errors of a text into findings."""
        try:
            yield
        except Poisoned:
            pass
        except SpecError as error:
            self.find(finding_of(error))

    def origin(self, node: Node) -> Origin:
        return Origin(self.evaluator.source, span(node))

    def fault(self, code: str, node: Node, fault: str, why: str = "", fix: str = "") -> SpecError:
        return self.evaluator.fault(code, node, fault, why, fix)

    # ---------- names ----------

    def define(self, token: Node, binding: Binding) -> None:
        """Define a name.

        Raises:
            SpecError: E103, the name is defined already.
        """
        name, other = str(token), "choose another name"
        if name in RESERVED:
            raise self.fault("E103", token, f"`{name}` is a word of the language", fix=other)
        if name in self._places:
            why = f"it is also defined in {self._places[name]}"
            raise self.fault("E103", token, f"`{name}` is defined twice", why, other)
        self._places[name] = self.origin(token)
        self.scope.names[name] = binding

    @contextmanager
    def _defining(self, token: Node) -> Iterator[None]:
        """If a definition fails, define the name with an unknown value."""
        try:
            yield
        except (SpecError, Poisoned):
            self.scope.names.setdefault(str(token), Binding(POISON))
            raise

    def _param(self, node: Node) -> None:
        token, *defaults = node.children
        source, name = self.evaluator.source, str(token)
        binding = self.scope.names.get(name)
        if binding is not None and binding.is_param and self._places[name].source is not source:
            return  # the including file has set it
        with self._defining(token):
            try:
                value, given = self._param_value(token, defaults)
            except (SpecError, Poisoned):
                self.define(token, Binding(POISON, is_param=True))
                raise
            self.define(token, Binding(value, defaults[0] if defaults else None, source, True, given))

    def _param_value(self, token: Node, defaults: list[Node]) -> tuple[Any, str]:
        """Return the value, and how it was given from outside."""
        name = str(token)
        if name not in self.given:
            if defaults:
                return self.evaluator.value(defaults[0]), ""
            fault, fix = f"the parameter `{name}` has no value", f"give one: --set {name}=VALUE"
            raise self.fault("E101", token, fault, "it has no default", fix)
        value, given = self.given[name], f"from {_given_by(name, self.given[name])}"
        if isinstance(value, str):
            source = Source(value, f"--set {name}")
            value = Evaluator(source, self.scope).value(parse_value(source))
        if not isinstance(value, int | ShardingSpec | AxisValue | str):
            why = "a parameter is a whole number, true or false, a layout or a word"
            raise self.fault("E107", token, f"{value!r} is no value of the parameter `{name}`", why)
        if defaults:  # the value must have the kind of the default
            kinds: tuple[str, ...] = ()
            with self.caught():
                kinds = (kind_of(value), kind_of(self.evaluator.value(defaults[0])))
            if len({*kinds}) == 2 and kinds not in _ALIKE:
                fault = f"the parameter `{token}` is {kinds[1]} by default, and it is given {kinds[0]}"
                self.find(attrs.evolve(finding_of(self.fault("E107", token, fault)), notes=(given,)))
                raise Poisoned
        return value, given

    def _let(self, node: Node) -> None:
        """Define a name; several files may define one name with the same value."""
        token, expr = node.children
        source = self.evaluator.source
        with self._defining(token):
            value = self.evaluator.value(expr)
            before = self.scope.names.get(str(token))
            if before is not None and before.node is not None and not before.is_param:
                is_other_file = self._places[str(token)].source is not source
                if is_other_file and type(before.value) is type(value) and before.value == value:
                    return
            self.define(token, Binding(value, expr, source))

    def _style(self, node: Node) -> None:
        token, *needed, block = node.children
        name, other, styles = str(token), "choose another name", self.scope.styles
        if name in WORDS or name in FUNCTIONS:
            raise self.fault("E103", token, f"`{name}` is a word of the language", fix=other)
        if name in styles:
            raise self.fault("E103", token, f"the style `{name}` is defined twice", fix=other)
        above = dict(styles)
        styles[name] = None
        defaults: dict[str, Node] = {}
        params: dict[str, str] = {}
        for param in needed:
            key, *default = param.children
            if key in params or key in RESERVED:
                raise self.fault("E103", key, f"`{key}` cannot be a parameter here", fix=other)
            if defaults and not default:
                fault = f"`{key}` needs a default, for a parameter before it has one"
                raise self.fault("E102", key, fault, fix=f"write `{key}=1`, or move it to the front")
            params[str(key)] = "value"
            defaults |= {str(key): expr for expr in default}
        usage = f"{name}({', '.join(self.evaluator.text(param).replace(' ', '') for param in needed)})"
        word = Word(name, "style", usage, params, len(params) - len(defaults))
        styles[name] = Style(word, defaults, tuple(block.children), self.evaluator.source, above)

    def unknown_params(self) -> None:
        """Find given parameters that no file declares."""
        params = sorted(name for name, binding in self.scope.names.items() if binding.is_param)
        why = f"the parameters are {', '.join(params)}" if params else "the plan has no parameters"
        for name, value in self.given.items():
            if name not in params:
                notes = (f"from {_given_by(name, value)}",)
                self.find(Finding("E101", f"no parameter is called `{name}`", None, why, nearest(name, params), notes))

    def _data(self, node: Node) -> None:
        if self.data:
            raise self.fault("E105", node.children[0], "the axes of the data are said twice", fix="keep one line")
        with self.evaluator.apart("the data"):
            self.data = self.evaluator.axes(node.children[0])

    def _require(self, node: Node) -> None:
        condition, token = node.children
        reason = self.evaluator.string(token)
        if self.evaluator.truth(condition):
            return
        finding = finding_of(self.fault("E106", condition, f"requirement not met: {reason}"))
        names = params_in(self.scope, condition)
        given = [binding.given for name in names if (binding := self.scope.names[name]).given]
        why = known_values(self.scope, condition)
        self.find(attrs.evolve(finding, why=why, fix=other_values(names), notes=tuple(given)))

    # ---------- tensors ----------

    def _dims(self, node: Node) -> None:
        glob, *args = node.children
        if args[-1].data == "condition" and not self.evaluator.truth(args.pop().children[0]):
            return
        found: dict[str, tuple[int, ...]] = {}
        for arg in args:
            name, expr = arg.children
            if name in found:
                raise self.fault("E204", name, f"the dim `{name}` is named twice", fix="keep one")
            parts = expr.children if is_kind(expr, "tuple") else [expr]
            found[str(name)] = tuple(map(self.evaluator.number, parts))
            if (least := min(found[str(name)])) < 0:
                raise self.fault("E107", expr, f"a dim has {least} elements")
        pattern = self._counted(pattern_of(glob, self.evaluator, names=False), glob)
        blocks = tuple((name, lengths) for name, lengths in found.items() if len(lengths) > 1)
        self.all_dims.append(Dims(pattern, tuple(found), tuple(map(sum, found.values())), self.origin(glob), blocks))

    def _counted(self, pattern: str, glob: Node) -> str:
        """Return `pattern` with the values of its ``<L>``: ``layers.<32>``."""

        def number(found: re.Match[str]) -> str:
            if found[1].isdigit():
                return found[0]
            name = _token_in(glob, found)
            value = self.scope.names.get(found[1], Binding(None)).value
            if value is POISON:
                raise Poisoned
            if value is None:
                code, fault, why, fix = self.scope.unknown_name(found[1])
                raise self.fault(code, name, fault, why, fix)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.fault("E107", name, f"`{found[1]}` is {kind_of(value)}, and counts nothing")
            return f"<{value}>"

        return re.sub(r"<([A-Za-z0-9_]+)>", number, pattern)

    def _tie(self, node: Node) -> None:
        one, other, *condition = node.children
        if condition and not self.evaluator.truth(condition[0].children[0]):
            return
        pattern, to = (pattern_of(glob, self.evaluator) for glob in (one, other))
        self.ties.append(Tie(pattern, to, Origin(self.evaluator.source, (span(one)[0], span(other)[1]))))

    def _store(self, node: Node) -> None:
        glob, expr, *by = node.children
        spec = self.evaluator.layout_value(expr)
        if not isinstance(spec, Spec) or spec.dims or spec.named or spec.only_part or spec.partial_parts:
            why = "what is stored is the layout of the rule, flattened"
            raise self.fault("E107", expr, f"`{spec}` cannot be stored", why, "write such as `flat(dp)` or `replicate`")
        pattern, *units = (pattern_of(glob, self.evaluator, names=False) for glob in (glob, *by))
        self.stores.append(Store(pattern, spec.flat_part, tuple(units), self.origin(expr), self.origin(glob)))

    def _unmatched(self, node: Node) -> None:
        (expr,) = node.children
        spec = self.evaluator.layout_value(expr)
        if not isinstance(spec, Spec):
            why = "tensors of many shapes may fall to it"
            raise self.fault("E107", expr, f"`{spec}` names devices", why, "write `replicate`")
        before = self.rest
        if before is not None and before.depth == self.depth and before.spec != spec:
            raise self.fault("E302", expr, "`unmatched` is said twice", f"also in {before.origin}", "keep one")
        if before is None or self.depth < before.depth:
            self.rest = Unmatched(spec, self.depth, self.origin(expr))


_ALIKE = {("an axis", "a number"), ("a number", "an axis"), ("a word", "a number"), ("a number", "a word")}
"""Kinds of values that may replace one another: ``grain = row``."""


def _given_by(name: str, value: Any) -> str:
    """Return how a parameter was given from outside, as text."""
    if isinstance(value, str):
        return f"--set {name}={value} on the command line"
    return f"{name}={shown(value)}, given by the caller"


_SEGMENT = re.compile(r"\*\*|(?:(?!\*\*|[{}]).|\{[^}]*\})+", re.DOTALL)
"""A segment of a pattern: ``**`` alone, or text with stars and closed braces."""


def pattern_of(glob: Node, evaluator: Evaluator, above: str = "", *, names: bool = True) -> str:
    """Return the pattern of a node, from the root.

    Args:
        names: whether ``<ep>`` must be an axis of the mesh.
    """
    (token,) = glob.children
    text = evaluator.string(token) if token.type == "STRING" else str(token)
    fault, fix = "", ""
    segments = text.split(".")
    whole = ".".join(filter(None, (above, text)))
    if not all(_SEGMENT.fullmatch(segment) for segment in segments):
        fault = "a segment of this pattern is empty, or has a part of `**` or `{a,b}`"
        fix = "write names with one dot between them, `**` between dots, and alternatives without dots"
    elif any(len(re.findall(r"\*|\{", segment)) > MAX_STARS for segment in segments) or (
        whole.split(".").count("**") > MAX_STARS
    ):
        fault, fix = f"a pattern has at most {MAX_STARS} of `*` and braces in a segment, and of `**`", "write fewer"
    elif len(whole) > MAX_PATTERN:
        fault, fix = f"a pattern has at most {MAX_PATTERN} characters", "write `**` for segments in between"
    if fault:
        raise evaluator.fault("E001", glob, fault, f"the pattern is `{text[:80]}`", fix)
    for found in re.finditer(r"<([A-Za-z0-9_]+)>", text) if names else ():
        with evaluator.apart("the numbers"):
            evaluator.axis(_token_in(glob, found))
    return whole


def _token_in(glob: Node, found: re.Match[str]) -> Token:
    """Return the name between ``<`` and ``>``, at its place in the text."""
    start = span(glob)[0] + (glob.children[0].type == "STRING")
    return Token("NAME", found[1], start + found.start(1), end_pos=start + found.end(1))
