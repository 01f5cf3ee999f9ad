"""The names of a plan while it is read: their values, where they came from, which of them are in an expression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from lark import Token

from shardtensor.errors import SpecError
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.origin import Origin
from shardtensor.spec.diagnostics import Source, listed, printable
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.reader import Word

if TYPE_CHECKING:
    from shardtensor.plan.text.expressions import Expressions


Node = Any
"""A lark ``Tree`` or ``Token``."""


class Poisoned(Exception):
    """A value is not known because making it failed; that has been told, and what needs it is left out in silence."""


POISON = object()
"""The value of a name whose definition failed."""


@attrs.frozen
class AxisValue:
    """What the name of a mesh axis means: its size where numbers stand, the axis itself where axes stand.

    Attributes:
        axes: one name, or those of a product, major to minor.
        size: the product of their sizes; None where it could not be found.
    """

    axes: tuple[str, ...]
    size: int | None

    def __str__(self) -> str:
        return "*".join(self.axes)


@attrs.frozen(eq=False)
class Style:
    """A bundle of entries that a file defines: its word, and what stands behind each parameter.

    Attributes:
        word: name and parameters, as a call sees them.
        defaults: of parameters that have one, its syntax.
        body: the entries.
        above: the styles that were defined before it, which are those it may call.
    """

    word: Word
    defaults: Mapping[str, Node]
    body: tuple[Node, ...]
    source: Source
    above: Mapping[str, Style | None]


@attrs.frozen(eq=False)
class Bundle:
    """A style with its arguments: what ``colwise(tp)`` is as a value."""

    style: Style
    given: Mapping[str, Any]

    def __str__(self) -> str:
        return self.style.word.name


@attrs.frozen(eq=False)
class Binding:
    """A name's value, and the text that made it.

    Attributes:
        node, source: the expression, for telling why a value is what it is; None for axes and parameters of styles.
        param: it is a parameter of the plan.
        given: how its value was given from outside, in words; empty where the default holds.
    """

    value: Any
    node: Node = None
    source: Source | None = None
    is_param: bool = False
    given: str = ""


@attrs.frozen(eq=False)
class MeshNames:
    """The axes of the mesh of a plan, sizes apart.

    Attributes:
        axes: as they were written, major first.
        made_of: axis -> its factors that are not made of others, major first.
    """

    axes: tuple[str, ...]
    made_of: Mapping[str, tuple[str, ...]]

    def leaves(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(leaf for name in names for leaf in self.made_of.get(name, (name,)))

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.axes, *(leaf for leaves in self.made_of.values() for leaf in leaves))

    def __str__(self) -> str:
        made = [f"{name} is made of {', '.join(leaves)}" for name, leaves in self.made_of.items()]
        return ", and ".join([", ".join(self.axes), *made])


@attrs.define(eq=False)
class Scope:
    """What a plan's expressions may name.

    Attributes:
        config: keys of config.json; `config_source` says in messages where they are from.
        names: of params, lets and axes; inside a style also its parameters.
        styles: by name.
        mesh: None as long as none was written.
        below: names that the file at hand defines further down.
        is_whole: False once a file could not be read, so that unknown names may have been defined there.
        notes: N001 of layouts and styles that stand after an ``else``, and the conditions.
        spent: one for each entry and call of a style; shared by all scopes of a plan.
    """

    config: Mapping[str, Any]
    world: int
    config_source: str = "config.json"
    names: dict[str, Binding] = attrs.field(factory=dict)
    styles: dict[str, Style | None] = attrs.field(factory=dict)
    mesh: MeshNames | None = None
    below: frozenset[str] = frozenset()
    is_whole: bool = True
    notes: list[tuple[Finding, str]] = attrs.field(factory=list)
    spent: list[None] = attrs.field(factory=list)

    def inner(self, style: Style, given: Mapping[str, Any]) -> Scope:
        """The scope inside a style."""
        names = {**self.names, **{name: Binding(value) for name, value in given.items()}}
        return attrs.evolve(self, names=names, styles=dict(style.above), below=frozenset())

    def leaves(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes that some axes are made of."""
        return axes if self.mesh is None else self.mesh.leaves(axes)


def kind_of(value: Any) -> str:
    """What a value is, in words.

    Example:
        >>> kind_of(True), kind_of(3), kind_of(AxisValue(("tp",), 4))
        ('true or false', 'a number', 'an axis')
    """
    if isinstance(value, bool):
        return "true or false"
    kinds = {int: "a number", ShardingSpec: "a layout", AxisValue: "an axis", Bundle: "a style", str: "a word"}
    return next((words for kind, words in kinds.items() if isinstance(value, kind)), "nothing a plan knows")


def shown(value: Any) -> str:
    """A value as a plan would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value.size) if isinstance(value, AxisValue) else str(value)


def finding_of(error: Exception) -> Finding:
    """The finding that an error of a text is."""
    source, fault = error.parts  # type: ignore[attr-defined]
    facts = dict(fault.facts)
    notes = [f"{key}: {value}" for key, value in fault.facts if key not in ("why", "fix")]
    origin = Origin(source, fault.span)
    return Finding(error.code, printable(fault.text), origin, facts.get("why", ""), facts.get("fix", ""), tuple(notes))  # type: ignore[attr-defined]


MOST = 8
"""Values that an error lists."""


def known_values(evaluator: Expressions, node: Node) -> str:
    """The values of the names in a condition, and of those in the conditions that it names: ``heads=32, tp=6``."""
    facts: dict[str, None] = {}
    _collect(evaluator, node, facts, set())
    return ", ".join(list(facts)[:MOST])


def _collect(evaluator: Expressions, node: Node, facts: dict[str, None], seen: set[str]) -> None:
    for tree in _subtrees(node):
        name = ".".join(map(str, tree.children)) if tree.data == "word" else ""
        if name in seen or name in ("", "replicate"):
            continue
        seen.add(name)
        text = _text_in(evaluator.scope.config, list(map(str, tree.children)))
        if text:
            facts[f"{name} is {text}"] = None
            continue
        try:
            value = evaluator.named(tree)
        except (SpecError, Poisoned):
            continue
        if isinstance(value, ShardingSpec | str):
            continue
        facts[f"{name}={shown(value)}"] = None
        binding = evaluator.scope.names.get(name, Binding(None))
        if isinstance(value, bool) and binding.source is not None and not binding.is_param:
            _collect(type(evaluator)(binding.source, evaluator.scope), binding.node, facts, seen)


def _text_in(config: Mapping[str, Any], words: list[str]) -> str:
    """The text that config.json has under a key, or the texts of the list there; empty where it has none.

    Example:
        >>> _text_in({"architectures": ["A", "B"]}, ["config", "architectures"])
        'A, B'
    """
    value: Any = {"config": config}
    for word in words:
        value = value.get(word) if isinstance(value, Mapping) else None
    texts = value if isinstance(value, list) else [value]
    return ", ".join(printable(text[:100]) for text in texts[:MOST] if isinstance(text, str))


def params_in(scope: Scope, node: Node) -> tuple[str, ...]:
    """The parameters that the value of an expression comes from, through the names in it."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    todo = [node]
    while todo:
        for tree in _subtrees(todo.pop()):
            name = str(tree.children[0]) if tree.data in ("word", "axis") else ""
            if not name or name in seen:
                continue
            seen.add(name)
            binding = scope.names.get(name, Binding(None))
            if binding.is_param:
                found[name] = None
            elif binding.node is not None:
                todo.append(binding.node)
    return tuple(found)


def other_values(params: tuple[str, ...]) -> str:
    """The way out where the values of parameters do not fit; empty without parameters.

    Example:
        >>> other_values(("tp",))
        'give `tp` another value, as in --set tp=N; without --set, `shardtensor plan --search` lists those that fit'
    """
    if not params:
        return ""
    names = listed([f"`{name}`" for name in params])
    search = "without --set, `shardtensor plan --search` lists those that fit"
    return f"give {names} another value, as in --set {params[0]}=N; {search}"


def _subtrees(node: Node) -> Iterator[Node]:
    """A node and the trees below it, in the order of the text."""
    stack = [] if isinstance(node, Token) else [node]
    while stack:
        tree = stack.pop()
        yield tree
        stack += [child for child in reversed(tree.children) if not isinstance(child, Token)]
