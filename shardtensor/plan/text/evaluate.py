"""The values of expressions in plans: numbers, true and false, layouts, axes, styles. Nothing in a text runs code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import SequenceMatcher
from typing import Any

from lark import Token

from shardtensor.errors import SpecError
from shardtensor.plan.text.expressions import Expressions, MissingKey, is_kind
from shardtensor.plan.text.scope import POISON, AxisValue, Binding, Bundle, Node, Poisoned, Scope, Style, kind_of, shown
from shardtensor.spec.atoms import MAX_NUMBER
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec
from shardtensor.spec.diagnostics import Source, nearest
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.reader import WORDS, Use, Word, as_in, example, words_for

BARE_WORDS = ("row", "sum", "avg", "max", "min")
"""Words that arguments take."""

RESERVED = ("replicate", "world", "config", "true", "false")
"""Names that mean something everywhere."""

FUNCTIONS: dict[str, tuple[Word, Callable[..., int]]] = {
    name: (Word(name, "function", f"{name}(tp, kv)", rest="number"), function)
    for name, function in (("gcd", math.gcd), ("min", min), ("max", max))
}

ONE_OF = "one_of"
"""The function that asks whether a text of config.json is one of some names; a plan has no other use for texts."""


class Evaluator(Expressions):
    """Reads what stands in a plan where a value may stand, with the names of a scope."""

    def __init__(self, source: Source, scope: Scope) -> None:
        super().__init__(source, scope)
        self._by_leaf: dict[str, Use] = {}

    def inside(self, style: Style, given: Mapping[str, Any]) -> Evaluator:
        """The evaluator of a style's body: it names its parameters, and the styles above it."""
        return Evaluator(style.source, self.scope.inner(style, given))

    # ---------- layouts, names and calls ----------

    def _spec(self, tree: Node) -> Any:
        with self.apart(""):  # a layout may stand in an argument of what stands in a layout
            return self._within_world(tree, self.spec(tree))

    @contextmanager
    def apart(self, place: str) -> Iterator[None]:
        """Axes that are named inside have nothing to do with those named before."""
        kept = self.uses, self._by_leaf, self.place
        self.uses, self._by_leaf, self.place = [], {}, place
        try:
            yield
        finally:
            self.uses, self._by_leaf, self.place = kept

    def head(self, head: Node) -> Any:
        if head.data == "word":
            return self.named(head)
        if head.data == "call":
            name = str(head.children[0])
            if name == ONE_OF:
                return self._one_of(head)
            if name in FUNCTIONS:
                word, function = FUNCTIONS[name]
                return self.limited(head, function(*self.arguments(word, head)[""]))
            if name in self.scope.styles:
                return self._bundle(self.scope.styles[name], head)
            if name not in WORDS:
                raise self._no_such_call(head.children[0])
        return super().head(head)

    def suffixed(self, spec: Any, call: Node) -> Spec:
        if not isinstance(spec, ShardingSpec):
            fault = f"`{self.text(call)}` stands after a layout, and this is {kind_of(spec)}"
            raise self.fault("E107", call, fault)
        built = super().suffixed(spec, call)
        leaves = self.scope.leaves(tuple(sorted(built.axis_names)))
        twice = next((leaf for i, leaf in enumerate(leaves) if leaf in leaves[:i]), None)
        if twice is not None:
            why = f"the layout is `{built}`, and {self.scope.mesh}"
            raise self.fault("E204", call, f"axis `{twice}` splits one tensor twice", why, "keep one of the two")
        return built

    def named(self, node: Node) -> Any:
        """The value of a name, dotted ones of config."""
        first, *rest = map(str, node.children)
        if first == "config":
            return self._config_key(node, rest)
        if rest:
            why = "only `config` has keys"
            fix = f"write `config.{'.'.join(rest)}`" if rest[0] in self.scope.config else ""
            raise self.fault("E103", node, f"`{first}` has no key `{rest[0]}`", why, fix)
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
        raise self._unknown(node, first)

    def _unknown(self, node: Node, name: str) -> Exception:
        if not self.scope.is_whole:
            return Poisoned()
        if name in self.scope.below:
            return self.fault("E103", node, f"`{name}` is used above its definition", fix="define it further up")
        if name in self.scope.styles:
            style = self.scope.styles[name]
            fix = as_in(style.word) if style else ""
            return self.fault("E102", node, f"the style `{name}` needs its arguments", fix=fix)
        known = [*self.scope.names, *RESERVED]
        names = sorted(self.scope.names)
        why = f"names in scope: {', '.join(names[:20])}" if names else "no name is defined"
        fix = nearest(name, known)
        if name in self.scope.config:
            fix = f"write `config.{name}`"
        elif name in WORDS:
            fix = example(WORDS[name])
        return self.fault("E103", node, f"nothing is called `{name}`", why, fix)

    def _config_key(self, node: Node, keys: list[str]) -> Any:
        scope, value = self.scope, self._found(node, keys)
        if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= MAX_NUMBER):
            return value
        what = "a number too large" if isinstance(value, int) else f"of type {type(value).__name__}"
        fault = f"`{self.text(node)}` is {what}"
        raise self.fault("E107", node, fault, f"a plan takes whole numbers, true and false from {scope.config_source}")

    def _found(self, node: Node, keys: list[str]) -> Any:
        """What config.json has under a key."""
        value: Any = self.scope.config
        if not keys:
            raise self.fault("E103", node, "`config` is not a value", fix="write one of its keys: `config.hidden_size`")
        for i, key in enumerate(keys):
            if not isinstance(value, Mapping) or value.get(key) is None:
                raise self._missing_key(node, keys[: i + 1], value)
            value = value[key]
        return value

    def _one_of(self, call: Node) -> bool:
        """Whether the text under a key of config.json, or a text of the list there, is one of the names that follow."""
        words = [
            arg.children[0] if is_kind(arg, "spec") and len(arg.children) == 1 else None for arg in call.children[1:]
        ]
        names = [list(map(str, word.children)) if is_kind(word, "word") else [] for word in words]  # type: ignore[union-attr]
        if len(names) < 2 or names[0][:1] != ["config"] or any(len(name) != 1 for name in names[1:]):
            fix = f"write such as `{ONE_OF}(config.model_type, llama, mistral)`"
            raise self.fault("E102", call, f"`{ONE_OF}` takes a key of config and names", fix=fix)
        found = self._found(words[0], names[0][1:])
        texts = found if isinstance(found, list) else [found]
        return not {name for (name,) in names[1:]}.isdisjoint(text for text in texts if isinstance(text, str))

    def _missing_key(self, node: Node, keys: list[str], found: Any) -> SpecError:
        scope, key = self.scope, keys[-1]
        file = scope.config_source.replace("\\", "/").rsplit("/", 1)[-1]
        where = f" in `{'.'.join(keys[:-1])}`" if keys[:-1] else ""
        fault = f"{file} has no key `{key}`{where}"
        known = found if isinstance(found, Mapping) else {}
        if key in known:
            fault = f"the key `{key}` of {file} is null"
        near = [name for name in nearest_keys(key, known) if isinstance(known[name], int)]
        text = self.text(node)
        fix = f"give a default: `{text} ?? 1`"
        why = f"{scope.config_source} has {len(known)} keys"
        if not scope.config:
            fault = f"no config was given, and the plan takes `{key}` from it"
            why = "sizes of the model stand in its config.json"
            fix = f"give it: `--model config.json`, or `config=` in Python; or {fix}"
        elif near:
            value = shown(known[near[0]])
            why += f"; the nearest is `{near[0]}` ({value})"
            fix = f"use `{'.'.join(['config', *keys[:-1], near[0]])}`, or give a default: `{text} ?? {value}`"
        error = self.fault("E104", node, fault, why, fix)
        missing = MissingKey(str(error), code="E104", file=error.file, line=error.line, col=error.col)
        missing.parts = error.parts
        return missing

    def _bundle(self, style: Style | None, call: Node) -> Bundle:
        if style is None:
            raise Poisoned
        self.spend(call)
        given = self.arguments(style.word, call)
        for name in style.word.params:
            if name not in given:
                given[name] = self.inside(style, given).value(style.defaults[name])
        return Bundle(style, given)

    def _no_such_call(self, token: Node) -> Exception:
        if not self.scope.is_whole:
            return Poisoned()
        name, styles = str(token), sorted(self.scope.styles)
        forms = words_for("form", "suffix")
        fix = nearest(name, [*styles, *FUNCTIONS, ONE_OF, *forms])
        kind, why = "style", f"styles in scope: {', '.join(styles)}"
        if name in self.scope.names:
            fix = f"`{name}` takes no arguments"
        elif name in self.scope.below:
            fix = "define it further up"
        elif any(f"`{word}`" in fix for word in (*FUNCTIONS, ONE_OF)):
            kind, why = "function", f"there are {', '.join((*FUNCTIONS, ONE_OF))}"
        elif any(f"`{word}`" in fix for word in forms):
            kind, why = "spec", f"there are {', '.join(forms)}"
        elif not styles:
            why, fix = "no style is in scope", 'write `include "std/styles.shard"` at the top'
        return self.fault("E102", token, f"no {kind} is called `{name}`", why, fix)

    # ---------- arguments ----------

    def argument(self, kind: str, node: Node, word: Word) -> Any:
        if kind == "value":
            return self.value(node)
        if kind in ("number", "number or row"):
            value = self.value(node) if kind == "number or row" else None
            return value if value == "row" else self.number(node)
        if kind in ("axes", "axis"):
            axes = tuple(axis for token in self._axis_tokens(node, word) for axis in self.axis(token))
            return axes[0] if kind == "axis" and len(axes) == 1 else axes
        if kind == "word":
            value = self.value(node)
            if isinstance(value, str):
                return value
            raise self.fault("E102", node, f"`{word.name}` needs a word here", fix=as_in(word))
        if kind == "numbers" and not is_kind(node, "tuple"):
            raise self.fault("E102", node, f"`{word.name}` needs numbers in brackets here", fix=as_in(word))
        return super().argument(kind, node, word)

    def _axis_tokens(self, node: Node, word: Word) -> list[Token]:
        words = [child for child in node.children[::2]] if is_kind(node, "product") else [node]
        signs = node.children[1::2] if is_kind(node, "product") else []
        tokens = []
        for child in words:
            inner = child.children[0] if is_kind(child, "spec") and len(child.children) == 1 else None
            if not is_kind(inner, "word") or len(inner.children) > 1 or set(signs) - {"*"}:  # type: ignore[union-attr]
                fault = f"`{word.name}` needs an axis, or a product as in `tp*dp`"
                raise self.fault("E102", node, fault, fix=as_in(word))
            tokens.append(inner.children[0])  # type: ignore[union-attr]
        return tokens

    def axis(self, token: Token) -> tuple[str, ...]:
        """The axes that a name means where axes stand."""
        binding = self.scope.names.get(str(token), Binding(None))
        if binding.value is POISON:
            raise Poisoned
        if not isinstance(binding.value, AxisValue):
            raise self._no_such_axis(token, binding.value)
        axes = binding.value.axes
        leaves = self.scope.leaves(axes)
        if len({*leaves}) < len(leaves):
            fault = f"`{binding.value}` names an axis twice"
            raise self.fault("E204", token, fault, f"it is made of {', '.join(leaves)}", "keep one of the two")
        for leaf in leaves:
            if leaf in self._by_leaf:
                use = self._by_leaf[leaf]
                raise self._used_twice(token, axes, use, set(leaves) & set(self.scope.leaves(use.axes)))
        self.uses.append(Use(token, axes, self.place))
        self._by_leaf |= dict.fromkeys(leaves, self.uses[-1])
        return axes

    def _no_such_axis(self, token: Token, value: Any) -> Exception:
        name, mesh = str(token), self.scope.mesh
        if not self.scope.is_whole:
            return Poisoned()
        if value is not None:
            fault = f"`{name}` is {kind_of(value)}, and an axis of the mesh is needed here"
            return self.fault("E107", token, fault, f"{name}={shown(value)}", "name an axis of the mesh")
        if mesh is None:
            why, fix = "no mesh is written above this line", f"write `mesh ({name} = world)` further up"
            return self.fault("E201", token, f"no mesh axis is called `{name}`", why, fix)
        why = f"the mesh of this plan has the axes {mesh}"
        return self.fault("E201", token, f"no mesh axis is called `{name}`", why, nearest(name, mesh.names))

    def _used_twice(self, token: Token, axes: tuple[str, ...], first: Use, both: set[str]) -> SpecError:
        axis = axes[0] if len(axes) == 1 else sorted(both)[0]
        other = next((name for name in first.axes if set(self.scope.leaves((name,))) & both), first.axes[0])
        place = self.place
        if axis != other:
            mesh = self.scope.mesh
            fault = f"axis `{axis}` and axis `{other}` split one tensor, and they share {', '.join(sorted(both))}"
            return self.fault("E204", token, fault, f"the mesh has {mesh}", "keep one of the two")
        if first.place == place:
            fault = f"axis `{axis}` splits {place} twice"
            return self.fault("E204", token, fault, f"each rank has a single {axis} coordinate", "keep one of the two")
        why = f"each rank has a single {axis} coordinate, so it would hold only the diagonal blocks"
        fix = f"keep one of the two, or make the axis of factors: `{axis} (a = 2, b = {axis} / a)` and `[a, b]`"
        if not place.startswith("dim") or not first.place.startswith("dim"):
            why, fix = f"each rank has a single {axis} coordinate", "keep one of the two"
        return self.fault("E204", token, f"axis `{axis}` splits {first.place} and {place} of one tensor", why, fix)

    # ---------- device forms ----------

    def _within_world(self, node: Node, spec: Any) -> Any:
        if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
            ranks = spec.placements.ranks
            last = (
                max((rank for rank in ranks if rank is not None), default=0)
                if not isinstance(ranks, range)
                else (ranks[-1])
            )
        elif isinstance(spec, EnumerableShardingSpec):
            last = max((box.placement.rank_ or 0 for box in spec.boxes if box.placement is not None), default=0)
        else:
            return spec
        if last >= self.scope.world:
            fault = f"rank {last} is named, and the world has {self.scope.world} ranks"
            raise self.fault("E501", node, fault, f"ranks go from 0 to {self.scope.world - 1}")
        return spec


def nearest_keys(key: str, known: Mapping[str, Any]) -> list[str]:
    """The keys of a config that may have been meant, nearest first."""
    names = [name for name in known if isinstance(name, str) and len(name) <= 100][:1000]
    near = {name: SequenceMatcher(None, name, key).ratio() for name in names if len(key) <= 100}
    return sorted((name for name in near if near[name] >= 0.5), key=lambda name: -near[name])
