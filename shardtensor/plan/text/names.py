"""The names in an expression: their values, and the parameters that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lark import Token

from shardtensor.errors import SpecError
from shardtensor.plan.text.scope import Binding, Node, Poisoned, Scope, shown
from shardtensor.spec.diagnostics import listed, printable
from shardtensor.spec.nodes import ShardingSpec

if TYPE_CHECKING:
    from shardtensor.plan.text.expressions import Expressions

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
