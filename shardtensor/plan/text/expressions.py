"""Expressions in plans: numbers, true and false, and what operators make of them. Nothing in a text runs code."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from lark import Token, Tree

from shardtensor.errors import SpecError
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.origin import Origin
from shardtensor.plan.text.scope import AxisValue, Bundle, Node, Poisoned, Scope, kind_of, known_values
from shardtensor.spec.atoms import MAX_NUMBER
from shardtensor.spec.diagnostics import Source
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.reader import Reader, span

MAX_ENTRIES = 10_000

_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip


class MissingKey(SpecError):
    """A config key is missing or null; `??` gives another value."""


class Expressions(Reader):
    """Reads what stands in a plan where a value may stand; names and calls are for `Evaluator`.

    Faults are raised as `SpecError`; a value that is not known because of another fault raises `Poisoned`.
    """

    def __init__(self, source: Source, scope: Scope) -> None:
        super().__init__(source)
        self.scope = scope

    def value(self, node: Node) -> Any:
        """The value of an expression, of any kind."""
        if isinstance(node, Token):
            return self.digits(node) if node.type == "INT" else str(node) == "true"
        return getattr(self, f"_{node.data}", self._misplaced)(node)

    def _misplaced(self, node: Node) -> Any:
        what = {"tuple": "numbers in round brackets", "places": "a list of placements", "box": "a box"}[node.data]
        raise self.fault(
            "E107", node, f"{what} cannot stand here", "only arguments of `chunk`, `grid`, `enum` are such"
        )

    def named(self, node: Node) -> Any:
        """The value of a name."""
        raise NotImplementedError

    def number(self, node: Node) -> int:
        """The value of an expression that must be a number; an axis counts as its size."""
        return self._as_number(node, self.value(node))

    def _as_number(self, node: Node, value: Any) -> int:
        if isinstance(value, AxisValue):
            if value.size is None:
                raise Poisoned
            return value.size
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_kind(node, value, "a number")
        return value

    def truth(self, node: Node) -> bool:
        """The value of an expression that must be true or false."""
        value = self.value(node)
        if not isinstance(value, bool):
            raise self._wrong_kind(node, value, "true or false")
        return value

    def layout_value(self, node: Node) -> ShardingSpec:
        """The value of an expression that must be a layout."""
        value = self.value(node)
        if not isinstance(value, ShardingSpec):
            raise self._wrong_kind(node, value, "a layout")
        return value

    def _wrong_kind(self, node: Node, value: Any, wanted: str) -> SpecError:
        text = self.text(node)
        fault = f"`{text}` is {kind_of(value)}, and {wanted} is needed here"
        fix = ""
        if wanted == "a layout" and isinstance(value, AxisValue):
            fix = f"write `[{value}, ...]` to cut the first dim, `[..., {value}]` to cut the last"
        return self.fault("E107", node, fault, fix=fix)

    def text(self, node: Node) -> str:
        """An expression as it was written, its blanks folded."""
        start, end = span(node)
        text = " ".join(self.source.text[start:end].split())
        return text if len(text) <= 80 else text[:77] + "..."

    def spend(self, node: Node) -> None:
        """Count one entry or call of a style; styles that call styles could make any number of them."""
        self.scope.spent.append(None)
        if len(self.scope.spent) > MAX_ENTRIES:
            raise self.fault("E001", node, f"the styles of this plan make more than {MAX_ENTRIES} entries")

    def limited(self, node: Node, value: int) -> int:
        if abs(value) > MAX_NUMBER:
            fault = f"`{self.text(node)}` is too large"
            raise self.fault("E107", node, fault, f"numbers go up to {MAX_NUMBER}")
        return value

    # ---------- operators ----------

    def _choose(self, node: Node) -> Any:
        chosen, condition, other = node.children
        if self.truth(condition):
            return self.value(chosen)
        value = self.value(other)
        if isinstance(value, ShardingSpec | Bundle) and not self._is_switch(condition):
            fault = f"the `else` side was taken: `{self.text(other)}`"
            note = Finding("N001", fault, Origin(self.source, span(node)), known_values(self, condition))
            self.scope.notes.append((note, self.text(condition)))
        return value

    def _is_switch(self, condition: Node) -> bool:
        """Whether a condition is a parameter by itself: the user's choice, not something that did not fit."""
        binding = self.scope.names.get(self.text(condition))
        return binding is not None and binding.is_param

    def _default(self, node: Node) -> Any:
        *most, last = [child for child in node.children if not is_kind(child, "MISSING")]
        for child in most:
            if self._is_missing(child):
                continue
            try:
                return self.value(child)
            except MissingKey:
                continue
        return self.value(last)

    def _is_missing(self, node: Node) -> bool:
        """Whether an expression is a key that config lacks; found without making an error."""
        word = node.children[0] if is_kind(node, "spec") else None
        if word is None or not is_kind(word, "word") or word.children[0] != "config":
            return False
        value: Any = self.scope.config
        for key in map(str, word.children[1:]):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value is None

    def _or(self, node: Node) -> bool:
        return any(self.truth(child) for child in node.children)

    def _and(self, node: Node) -> bool:
        return all(self.truth(child) for child in node.children)

    def _negate(self, node: Node) -> bool:
        return not self.truth(node.children[-1])

    def _compare(self, node: Node) -> bool:
        left, sign, right = node.children
        if sign in ("==", "!="):
            one, other = (v.size if isinstance(v, AxisValue) else v for v in (self.value(left), self.value(right)))
            if one is None or other is None:
                raise Poisoned
            if kind_of(one) == kind_of(other):
                return (one == other) == (sign == "==")
            fault = f"`{self.text(left)}` is {kind_of(one)} and `{self.text(right)}` is {kind_of(other)}"
            raise self.fault("E107", node, fault, "values of one kind are compared")
        return _COMPARE[str(sign)](self.number(left), self.number(right))

    def _sum(self, node: Node) -> int:
        total = self.number(node.children[0])
        for sign, child in zip(node.children[1::2], node.children[2::2], strict=True):
            term = self.number(child)
            total = self.limited(node, total + term if sign == "+" else total - term)
        return total

    def _product(self, node: Node) -> Any:
        values = [self.value(child) for child in node.children[::2]]
        if all(isinstance(value, AxisValue) for value in values) and {*map(str, node.children[1::2])} == {"*"}:
            axes = tuple(axis for value in values for axis in value.axes)
            sizes = [value.size for value in values if value.size is not None]
            return AxisValue(axes, self.limited(node, math.prod(sizes)) if len(sizes) == len(values) else None)
        total, *factors = (self._as_number(child, v) for child, v in zip(node.children[::2], values, strict=True))
        for sign, factor in zip(node.children[1::2], factors, strict=True):
            if sign == "*":
                total = self.limited(node, total * factor)
                continue
            if factor == 0:
                raise self.fault("E107", node, f"`{self.text(node)}` divides by 0")
            if sign == "/" and total % factor:
                fault = f"`{self.text(node)}` is not a whole number"
                why = f"it is {total} / {factor}"
                raise self.fault("E107", node, fault, why, "`//` rounds down, `/` has to be exact")
            total = total % factor if sign == "%" else total // factor
        return total

    def _minus(self, node: Node) -> int:
        return -self.number(node.children[-1])


def is_kind(node: Node, data: str) -> bool:
    """Whether a node is made by a rule, or is a token, of that name."""
    return (isinstance(node, Tree) and node.data == data) or (isinstance(node, Token) and node.type == data)
