"""The names of a plan while it is read: their values, the origins of these, and the names in an expression."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from lark import Token

from shardtensor.errors import SpecError
from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.spec.diagnostics import Source, listed, nearest, printable
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.reader import WORDS, Use, Word, as_in, example, words_for

Node = Any
"""A lark ``Tree`` or ``Token``."""


class Poisoned(Exception):
    """A value is unknown because its expression has an error, which was reported; no further error is reported."""


BARE_WORDS = ("row", "sum", "avg", "max", "min")
"""Words that are allowed as arguments."""

RESERVED = ("replicate", "world", "config", "true", "false")
"""Names that are defined everywhere."""

FUNCTIONS: dict[str, tuple[Word, Callable[..., int]]] = {
    name: (Word(name, "function", f"{name}(tp, kv)", rest="number"), function)
    for name, function in (("gcd", math.gcd), ("min", min), ("max", max))
}

ONE_OF = "one_of"
"""The function that returns whether a text of config.json is one of some names; texts have no other use in a plan."""

POISON = object()
"""The value of a name whose definition failed."""


@attrs.frozen
class AxisValue:
    """The value of a mesh axis' name: the size where a number is needed, the axis where an axis is needed.

    Attributes:
        axes: one name, or those of a product, major to minor.
        size: the product of their sizes; None if it is not known.
    """

    axes: tuple[str, ...]
    size: int | None

    def __str__(self) -> str:
        return "*".join(self.axes)


@attrs.frozen(eq=False)
class Style:
    """A named list of entries that a file defines, with parameters.

    Attributes:
        word: name and parameters, for calls.
        defaults: the syntax of each default of a parameter.
        body: the entries.
        above: the styles that were defined before it; it may call these.
    """

    word: Word
    defaults: Mapping[str, Node]
    body: tuple[Node, ...]
    source: Source
    above: Mapping[str, Style | None]


@attrs.frozen(eq=False)
class Bundle:
    """A style with its arguments: the value of ``colwise(tp)``."""

    style: Style
    given: Mapping[str, Any]

    def __str__(self) -> str:
        return self.style.word.name


@attrs.frozen(eq=False)
class Binding:
    """A name's value, and its expression.

    Attributes:
        node, source: the expression, to explain the value in messages; None for axes and parameters of styles.
        is_param: whether it is a parameter of the plan.
        given: how its value was given from outside, as text; empty for the default.
    """

    value: Any
    node: Node = None
    source: Source | None = None
    is_param: bool = False
    given: str = ""


@attrs.define(eq=False)
class Scope:
    """The names that a plan's expressions may use.

    Attributes:
        config: keys of config.json; `config_source` is its name in messages.
        names: of params, lets and axes; inside a style also its parameters.
        styles: by name.
        axes: of the mesh as they were written, major first; None before the mesh.
        made_of: axis -> its factors that are not made of others, major first.
        below: names that the current file defines further down.
        notes: N001 of layouts and styles after an ``else``.
        spent: one for each entry and call of a style; shared by all scopes of a plan.
    """

    config: Mapping[str, Any]
    world: int
    config_source: str = "config.json"
    names: dict[str, Binding] = attrs.field(factory=dict)
    styles: dict[str, Style | None] = attrs.field(factory=dict)
    axes: tuple[str, ...] | None = None
    made_of: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    below: frozenset[str] = frozenset()
    notes: list[Finding] = attrs.field(factory=list)
    spent: list[None] = attrs.field(factory=list)

    def inner(self, style: Style, given: Mapping[str, Any]) -> Scope:
        """Return the scope inside a style."""
        names = {**self.names, **{name: Binding(value) for name, value in given.items()}}
        return attrs.evolve(self, names=names, styles=dict(style.above), below=frozenset())

    def leaves(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes that some axes are made of."""
        return tuple(leaf for name in axes for leaf in self.made_of.get(name, (name,)))

    @property
    def mesh_text(self) -> str:
        made = [f"{name} is made of {', '.join(leaves)}" for name, leaves in self.made_of.items()]
        return ", and ".join([", ".join(self.axes or ()), *made])

    def unknown_name(self, name: str) -> tuple[str, str, str, str]:
        """Return the code, the fault, the reason and the fix for a name without a value."""
        if name in self.below:
            return "E103", f"`{name}` is used above its definition", "", "define it further up"
        if name in self.styles:
            style = self.styles[name]
            return "E102", f"the style `{name}` needs its arguments", "", as_in(style.word) if style else ""
        names = sorted(self.names)
        why = f"names in scope: {', '.join(names[:20])}" if names else "no name is defined"
        fix = example(WORDS[name]) if name in WORDS else nearest(name, [*names, *RESERVED])
        return "E103", f"nothing is called `{name}`", why, f"write `config.{name}`" if name in self.config else fix

    def unknown_call(self, name: str) -> tuple[str, str, str, str]:
        """Return the same for a name before brackets."""
        functions, forms = [*FUNCTIONS, ONE_OF], words_for("form", "suffix")
        known = {"style": sorted(self.styles), "function": functions, "spec": forms}
        kind = next((kind for kind, words in known.items() if nearest(name, words)), "style")
        why, fix = f"{kind}s in scope: {', '.join(known[kind])}", nearest(name, known[kind])
        if name in self.names:
            fix = f"`{name}` takes no arguments"
        elif name in self.below:
            fix = "define it further up"
        elif not known[kind]:
            why, fix = "no style is in scope", 'write `include "std/styles.shard"` at the top'
        return "E102", f"no {kind} is called `{name}`", why, fix

    def unknown_axis(self, name: str, value: Any) -> tuple[str, str, str, str]:
        """Return the same for a name that is no axis; `value` is its value, None if it has none."""
        if value is not None:
            fault = f"`{name}` is {kind_of(value)}, and an axis of the mesh is needed here"
            return "E107", fault, f"{name}={shown(value)}", "name an axis of the mesh"
        why, fix = "no mesh is written above this line", f"write `mesh ({name} = world)` further up"
        if self.axes is not None:
            why = f"the mesh of this plan has the axes {self.mesh_text}"
            fix = nearest(name, [*self.axes, *self.leaves(tuple(self.made_of))])
        return "E201", f"no mesh axis is called `{name}`", why, fix

    def axis_twice(self, axes: tuple[str, ...], place: str, first: Use) -> tuple[str, str, str, str]:
        """Return the same for axes that shard one tensor twice."""
        axis, other = "*".join(axes), "*".join(first.axes)
        where = f"{place} twice" if first.place == place else f"{first.place} and {place} of one tensor"
        fault, why = f"axis `{axis}` splits {where}", f"each rank has a single {axis} coordinate"
        if axis != other:
            shared = ", ".join(sorted(set(self.leaves(axes)) & set(self.leaves(first.axes))))
            fault = f"axis `{axis}` and axis `{other}` split one tensor, and they share {shared}"
            why = f"the mesh has {self.mesh_text}"
        return "E204", fault, why, "keep one of the two"


def kind_of(value: Any) -> str:
    """Return the kind of a value as text.

    Example:
        >>> kind_of(True), kind_of(3), kind_of(AxisValue(("tp",), 4))
        ('true or false', 'a number', 'an axis')
    """
    if isinstance(value, bool):
        return "true or false"
    kinds = {int: "a number", ShardingSpec: "a layout", AxisValue: "an axis", Bundle: "a style", str: "a word"}
    return next((words for kind, words in kinds.items() if isinstance(value, kind)), "nothing a plan knows")


def shown(value: Any) -> str:
    """Return a value in the language of plans."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value.size) if isinstance(value, AxisValue) else str(value)


def finding_of(error: SpecError) -> Finding:
    """Return an error of a text as a finding."""
    source, span, _ = error.parts
    facts = dict(error.rows)
    notes = [f"{key}: {value}" for key, value in error.rows if key not in ("why", "fix")]
    fields = printable(error.fault), Origin(source, span), facts.get("why", ""), facts.get("fix", "")
    return Finding(error.code, *fields, tuple(notes))


MOST = 8
"""The largest number of values that an error lists."""


def known_values(scope: Scope, node: Node) -> str:
    """Return the values of the names in a condition, and in the conditions that these name: ``heads=32, tp=6``."""
    facts = []
    for name, binding in _names_in(scope, node, through=bool):
        value: Any = {"config": scope.config, "world": scope.world} if binding is None else binding.value
        for key in name.split(".") if binding is None else ():
            value = value.get(key) if isinstance(value, Mapping) else None
        texts = value if isinstance(value, list) and binding is None else [value]
        if any(isinstance(text, str) for text in texts):
            found = ", ".join(printable(text[:100]) for text in texts[:MOST] if isinstance(text, str))
            facts += [f"{name} is {found}"] * (binding is None)
        elif isinstance(value, int | AxisValue | Bundle):
            facts.append(f"{name}={shown(value)}")
    return ", ".join(facts[:MOST])


def params_in(scope: Scope, node: Node) -> tuple[str, ...]:
    """Return the parameters that the value of an expression depends on, through the names in it."""
    named = _names_in(scope, node, through=object)
    return tuple(name for name, binding in named if binding is not None and binding.is_param)


def _names_in(scope: Scope, node: Node, through: type) -> Iterator[tuple[str, Binding | None]]:
    """Yield the names in an expression, and in those of names whose values are of the type `through`, each once."""
    seen: set[str] = set()
    todo = [node]
    while todo:
        tree = todo.pop()
        if isinstance(tree, Token):
            continue
        name = ".".join(map(str, tree.children[: 1 if tree.data == "axis" else None]))
        if tree.data in ("word", "axis") and name not in seen:
            seen.add(name)
            binding = scope.names.get(name)
            yield name, binding
            if binding is not None and binding.node is not None and not binding.is_param:
                todo += [binding.node] * isinstance(binding.value, through)
        todo += reversed(tree.children)


def other_values(params: tuple[str, ...]) -> str:
    """Return the fix for values of parameters that do not fit; empty without parameters.

    Example:
        >>> other_values(("tp",))
        'give `tp` another value, as in --set tp=N; without --set, `shardtensor plan --search` lists those that fit'
    """
    if not params:
        return ""
    names = listed([f"`{name}`" for name in params])
    search = "without --set, `shardtensor plan --search` lists those that fit"
    return f"give {names} another value, as in --set {params[0]}=N; {search}"
