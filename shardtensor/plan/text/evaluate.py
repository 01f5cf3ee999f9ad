"""Evaluate expressions in plans: numbers, true and false, layouts, axes, styles. No text runs code."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import SequenceMatcher
from typing import Any

from lark import Token

from shardtensor.errors import SpecError
from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.text.scope import (
    BARE_WORDS,
    FUNCTIONS,
    ONE_OF,
    POISON,
    AxisValue,
    Binding,
    Bundle,
    Node,
    Poisoned,
    Scope,
    Style,
    kind_of,
    known_values,
    shown,
)
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec
from shardtensor.spec.diagnostics import Source
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parts import MAX_NUMBER
from shardtensor.spec.reader import WORDS, Reader, Use, Word, span

MAX_ENTRIES = 10_000
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_MISPLACED = {"tuple": "numbers in round brackets", "places": "a list of placements", "box": "a box"}


class Evaluator(Reader):
    """Evaluates the values in a plan, with the names of a scope.

    Errors are raised as `SpecError`; a value that is unknown because of another error raises `Poisoned`.
    """

    def __init__(self, source: Source, scope: Scope) -> None:
        super().__init__(source)
        self.scope = scope
        self._has_default = 0

    def inside(self, style: Style, given: Mapping[str, Any]) -> Evaluator:
        """Return the evaluator of a style's body, in which its parameters and the styles above it are defined."""
        return Evaluator(style.source, self.scope.inner(style, given))

    def value(self, node: Node) -> Any:
        """Return the value of an expression, of any kind."""
        if isinstance(node, Token):
            return self.digits(node) if node.type == "INT" else str(node) == "true"
        if node.data in _MISPLACED:
            why = "only arguments of `chunk`, `grid`, `enum` are such"
            raise self.fault("E107", node, f"{_MISPLACED[node.data]} cannot stand here", why)
        return getattr(self, f"_{node.data}")(node)

    def number(self, node: Node) -> int:
        """Return the value of an expression that must be a number; an axis counts as its size."""
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
        """Return the value of an expression that must be true or false."""
        return self._of_kind(node, bool, "true or false")

    def layout_value(self, node: Node) -> ShardingSpec:
        """Return the value of an expression that must be a layout."""
        return self._of_kind(node, ShardingSpec, "a layout")

    def _of_kind(self, node: Node, kind: type, expected: str) -> Any:
        value = self.value(node)
        if not isinstance(value, kind):
            raise self._wrong_kind(node, value, expected)
        return value

    def _wrong_kind(self, node: Node, value: Any, expected: str) -> SpecError:
        fix = ""
        if expected == "a layout" and isinstance(value, AxisValue):
            fix = f"write `[{value}, ...]` to cut the first dim, `[..., {value}]` to cut the last"
        return self.fault(
            "E107", node, f"`{self.text(node)}` is {kind_of(value)}, and {expected} is needed here", fix=fix
        )

    def text(self, node: Node) -> str:
        """Return the text of an expression, with single blanks."""
        start, end = span(node)
        text = " ".join(self.source.text[start:end].split())
        return text if len(text) <= 80 else text[:77] + "..."

    def _fault_at(self, node: Node, message: tuple[str, str, str, str]) -> SpecError:
        code, fault, why, fix = message
        return self.fault(code, node, fault, why, fix)

    def spend(self, node: Node) -> None:
        """Count one entry or call of a style, and raise at `MAX_ENTRIES`: styles that call styles can make many."""
        self.scope.spent.append(None)
        if len(self.scope.spent) > MAX_ENTRIES:
            raise self.fault("E001", node, f"the styles of this plan make more than {MAX_ENTRIES} entries")

    def _limited(self, node: Node, value: int) -> int:
        if abs(value) > MAX_NUMBER:
            raise self.fault("E107", node, f"`{self.text(node)}` is too large", f"numbers go up to {MAX_NUMBER}")
        return value

    # ---------- operators ----------

    def _choose(self, node: Node) -> Any:
        chosen, condition, other = node.children
        if self.truth(condition):
            return self.value(chosen)
        value = self.value(other)
        switch = self.scope.names.get(self.text(condition))  # no note for a single parameter: that is the user's choice
        if isinstance(value, ShardingSpec | Bundle) and not (switch is not None and switch.is_param):
            fault = f"the `else` side was taken: `{self.text(other)}`"
            note = Finding("N001", fault, Origin(self.source, span(node)), known_values(self.scope, condition))
            self.scope.notes.append(note)
        return value

    def _default(self, node: Node) -> Any:
        *most, last = [child for child in node.children if not is_kind(child, "MISSING")]
        for child in most:
            self._has_default += 1
            try:
                return self.value(child)
            except SpecError as error:
                if error.code != "E104":
                    raise
            finally:
                self._has_default -= 1
        return self.value(last)

    def _or(self, node: Node) -> bool:
        return any(self.truth(child) for child in node.children)

    def _and(self, node: Node) -> bool:
        return all(self.truth(child) for child in node.children)

    def _negate(self, node: Node) -> bool:
        return not self.truth(node.children[-1])

    def _compare(self, node: Node) -> bool:
        left, sign, right = node.children
        if sign not in ("==", "!="):
            return _COMPARE[str(sign)](self.number(left), self.number(right))
        one, other = (v.size if isinstance(v, AxisValue) else v for v in (self.value(left), self.value(right)))
        if one is None or other is None:
            raise Poisoned
        if kind_of(one) != kind_of(other):
            fault = f"`{self.text(left)}` is {kind_of(one)} and `{self.text(right)}` is {kind_of(other)}"
            raise self.fault("E107", node, fault, "values of one kind are compared")
        return (one == other) == (sign == "==")

    def _sum(self, node: Node) -> int:
        total = self.number(node.children[0])
        for sign, child in zip(node.children[1::2], node.children[2::2], strict=True):
            term = self.number(child)
            total = self._limited(node, total + term if sign == "+" else total - term)
        return total

    def _product(self, node: Node) -> Any:
        values = [self.value(child) for child in node.children[::2]]
        if all(isinstance(value, AxisValue) for value in values) and {*map(str, node.children[1::2])} == {"*"}:
            axes = tuple(axis for value in values for axis in value.axes)
            sizes = [value.size for value in values if value.size is not None]
            return AxisValue(axes, self._limited(node, math.prod(sizes)) if len(sizes) == len(values) else None)
        total, *factors = map(self._as_number, node.children[::2], values)
        for sign, factor in zip(node.children[1::2], factors, strict=True):
            if sign == "*":
                total = self._limited(node, total * factor)
                continue
            if factor == 0:
                raise self.fault("E107", node, f"`{self.text(node)}` divides by 0")
            if sign == "/" and total % factor:
                fault, why = f"`{self.text(node)}` is not a whole number", f"it is {total} / {factor}"
                raise self.fault("E107", node, fault, why, "`//` rounds down, `/` has to be exact")
            total = total % factor if sign == "%" else total // factor
        return total

    def _minus(self, node: Node) -> int:
        return -self.number(node.children[-1])

    # ---------- layouts, names and calls ----------

    def _spec(self, tree: Node) -> Any:
        with self.apart(""):  # an argument inside of a layout may be a layout itself
            spec = self.spec(tree)
        if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
            ranks: Any = spec.placements.ranks
        elif isinstance(spec, EnumerableShardingSpec):
            ranks = [box.placement.rank_ for box in spec.boxes if box.placement is not None]
        else:
            return spec
        last = max((rank or 0 for rank in (ranks[-1:] if isinstance(ranks, range) else ranks)), default=0)
        if last >= self.scope.world:
            fault = f"rank {last} is named, and the world has {self.scope.world} ranks"
            raise self.fault("E501", tree, fault, f"ranks go from 0 to {self.scope.world - 1}")
        return spec

    @contextmanager
    def apart(self, place: str) -> Iterator[None]:
        """Check axes inside this context independently of those named before."""
        kept = self.used, self.place
        self.used, self.place = {}, place
        try:
            yield
        finally:
            self.used, self.place = kept

    def head(self, head: Node) -> Any:
        if head.data == "word":
            return self.named(head)
        name = str(head.children[0])
        if head.data != "call" or name in WORDS:
            return super().head(head)
        if name == ONE_OF:
            return self._one_of(head)
        if name in FUNCTIONS:
            word, function = FUNCTIONS[name]
            return self._limited(head, function(*self.arguments(word, head)[""]))
        if name not in self.scope.styles:
            raise self._fault_at(head.children[0], self.scope.unknown_call(name))
        style = self.scope.styles[name]
        if style is None:
            raise Poisoned
        self.spend(head)
        given = self.arguments(style.word, head)
        for param in style.word.params:
            if param not in given:
                given[param] = self.inside(style, given).value(style.defaults[param])
        return Bundle(style, given)

    def suffixed(self, spec: Any, call: Node) -> Spec:
        if not isinstance(spec, ShardingSpec):
            fault = f"`{self.text(call)}` stands after a layout, and this is {kind_of(spec)}"
            raise self.fault("E107", call, fault)
        built = super().suffixed(spec, call)
        leaves = self.scope.leaves(tuple(sorted(built.axis_names)))
        twice = next((leaf for i, leaf in enumerate(leaves) if leaf in leaves[:i]), None)
        if twice is not None:
            why = f"the layout is `{built}`, and {self.scope.mesh_text}"
            raise self.fault("E204", call, f"axis `{twice}` splits one tensor twice", why, "keep one of the two")
        return built

    def named(self, node: Node) -> Any:
        """Return the value of a name, or of a dotted key of config."""
        first, *rest = map(str, node.children)
        if first == "config":
            return self._config_key(node, rest)
        if rest:
            fix = f"write `config.{'.'.join(rest)}`" if rest[0] in self.scope.config else ""
            raise self.fault("E103", node, f"`{first}` has no key `{rest[0]}`", "only `config` has keys", fix)
        if first == "replicate":
            return super().head(node)
        if first == "world":
            return self.scope.world
        binding = self.scope.names.get(first)
        if binding is not None:
            if binding.value is POISON:
                raise Poisoned
            return binding.value
        if first in BARE_WORDS:
            return first
        raise self._fault_at(node, self.scope.unknown_name(first))

    def _config_key(self, node: Node, keys: list[str]) -> Any:
        value = self._found(node, keys)
        if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= MAX_NUMBER):
            return value
        what = "a number too large" if isinstance(value, int) else f"of type {type(value).__name__}"
        why = f"a plan takes whole numbers, true and false from {self.scope.config_source}"
        raise self.fault("E107", node, f"`{self.text(node)}` is {what}", why)

    def _found(self, node: Node, keys: list[str]) -> Any:
        """Return the value of a key of config.json."""
        value: Any = self.scope.config
        if not keys:
            raise self.fault("E103", node, "`config` is not a value", fix="write one of its keys: `config.hidden_size`")
        for i, key in enumerate(keys):
            if not isinstance(value, Mapping) or value.get(key) is None:
                raise self._missing_key(node, keys[: i + 1], value)
            value = value[key]
        return value

    def _one_of(self, call: Node) -> bool:
        """Whether the text of a key of config.json, or a text of the list there, is one of the names after it."""
        words = [_word(arg) for arg in call.children[1:]]
        names = [list(map(str, word.children)) if word is not None else [] for word in words]
        if len(names) < 2 or names[0][:1] != ["config"] or any(len(name) != 1 for name in names[1:]):
            fix = f"write such as `{ONE_OF}(config.model_type, llama, mistral)`"
            raise self.fault("E102", call, f"`{ONE_OF}` takes a key of config and names", fix=fix)
        found = self._found(words[0], names[0][1:])
        texts = found if isinstance(found, list) else [found]
        return not {name for (name,) in names[1:]}.isdisjoint(text for text in texts if isinstance(text, str))

    def _missing_key(self, node: Node, keys: list[str], found: Any) -> SpecError:
        if self._has_default:  # the default is used, so similar keys are not searched
            return SpecError("", code="E104")
        scope, key, text = self.scope, keys[-1], self.text(node)
        section = found if isinstance(found, Mapping) else {}
        names = [name for name, value in section.items() if isinstance(value, int) and max(len(name), len(key)) <= 100]
        scores = {name: SequenceMatcher(None, name, key).ratio() for name in names[:1000]}
        near = max(scores, key=lambda name: scores[name], default="")
        why, fix = f"{scope.config_source} has {len(section)} keys", f"give a default: `{text} ?? 1`"
        file = scope.config_source.replace("\\", "/").rsplit("/", 1)[-1]
        fault = f"the key `{key}` of {file} is null" if key in section else f"{file} has no key `{key}`"
        if not scope.config:
            fault = f"no config was given, and the plan takes `{key}` from it"
            why = "sizes of the model stand in its config.json"
            fix = f"give it: `--model config.json`, or `config=` in Python; or {fix}"
        elif scores.get(near, 0) >= 0.5:
            value = shown(section[near])
            why += f"; the nearest is `{near}` ({value})"
            fix = f"use `{'.'.join(['config', *keys[:-1], near])}`, or give a default: `{text} ?? {value}`"
        return self.fault("E104", node, fault, why, fix)

    # ---------- arguments ----------

    def argument(self, kind: str, node: Node, word: Word) -> Any:
        if kind == "value":
            return self.value(node)
        if kind == "number":
            return self.number(node)
        if kind == "number or row":
            value = self.value(node)
            return value if value == "row" else self._as_number(node, value)
        if kind in ("axes", "axis"):
            is_product = is_kind(node, "product") and set(node.children[1::2]) == {"*"}
            names = [_word(each) for each in (node.children[::2] if is_product else [node])]
            if all(name is not None and len(name.children) == 1 for name in names):
                axes = tuple(axis for name in names for axis in self.axis(name.children[0]))
                return axes[0] if kind == "axis" and len(axes) == 1 else axes
        if kind == "word" and isinstance(value := self.value(node), str):
            return value
        return super().argument(kind, node, word)  # or its error

    def axis(self, token: Token) -> tuple[str, ...]:
        """Return the axes of a name, where the language needs axes."""
        value = self.scope.names.get(str(token), Binding(None)).value
        if value is POISON:
            raise Poisoned
        if not isinstance(value, AxisValue):
            raise self._fault_at(token, self.scope.unknown_axis(str(token), value))
        leaves = self.scope.leaves(value.axes)
        if len({*leaves}) < len(leaves):
            why = f"it is made of {', '.join(leaves)}"
            raise self.fault("E204", token, f"`{value}` names an axis twice", why, "keep one of the two")
        for leaf in leaves:
            if leaf in self.used:
                raise self._fault_at(token, self.scope.axis_twice(value.axes, self.place, self.used[leaf]))
        self.used |= dict.fromkeys(leaves, Use(value.axes, self.place))
        return value.axes


def is_kind(node: Node, *kinds: str) -> bool:
    """Whether a node's rule, or its token type, has one of these names."""
    return (node.type if isinstance(node, Token) else node.data) in kinds


def _word(node: Node) -> Node:
    """Return the name of an expression that is only a name; else None."""
    inner = node.children[0] if is_kind(node, "spec") and len(node.children) == 1 else node
    return inner if is_kind(inner, "word") else None
