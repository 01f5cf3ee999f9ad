"""Why an expression has the value it has: the numbers behind its names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lark import Token

from shardtensor.errors import SpecError
from shardtensor.plan.text.scope import Binding, Node, Poisoned, shown
from shardtensor.spec.diagnostics import printable
from shardtensor.spec.nodes import ShardingSpec

if TYPE_CHECKING:
    from shardtensor.plan.text.expressions import Expressions

MOST = 8
"""Facts that are told."""


def explain(evaluator: Expressions, node: Node) -> str:
    """The values of names in an expression, and remainders: ``heads=32, tp=6, 32 % 6 = 2``."""
    facts: dict[str, None] = {}
    _explain(evaluator, node, facts, set())
    return ", ".join(list(facts)[:MOST])


def _explain(evaluator: Expressions, node: Node, facts: dict[str, None], seen: set[str]) -> None:
    remainders: dict[str, None] = {}
    for tree in subtrees(node):
        if tree.data == "word":
            _explain_name(evaluator, tree, facts, seen)
        elif tree.data == "product":
            for sign, left, right in zip(tree.children[1::2], tree.children[::2], tree.children[2::2], strict=False):
                if sign in ("%", "/") and len(tree.children) == 3:
                    try:
                        one, other = evaluator.number(left), evaluator.number(right)
                    except (SpecError, Poisoned):
                        continue
                    if other and (sign == "%" or one % other):
                        remainders[f"{one} % {other} = {one % other}"] = None
    facts.update(remainders)


def _explain_name(evaluator: Expressions, tree: Node, facts: dict[str, None], seen: set[str]) -> None:
    name = ".".join(map(str, tree.children))
    if name in seen or name == "replicate":
        return
    seen.add(name)
    text = text_in(evaluator.scope.config, list(map(str, tree.children)))
    if text:
        facts[f"{name} is {text}"] = None
        return
    try:
        value = evaluator.named(tree)
    except (SpecError, Poisoned):
        return
    if isinstance(value, ShardingSpec | str):
        return
    facts[f"{name}={shown(value)}"] = None
    binding = evaluator.scope.names.get(name, Binding(None))
    if isinstance(value, bool) and binding.source is not None and not binding.is_param:
        _explain(type(evaluator)(binding.source, evaluator.scope), binding.node, facts, seen)


def text_in(config: Mapping[str, Any], words: list[str]) -> str:
    """The text that config.json has under a key, or the texts of the list there; empty where it has none.

    Example:
        >>> text_in({"architectures": ["A", "B"]}, ["config", "architectures"])
        'A, B'
    """
    value: Any = {"config": config}
    for word in words:
        value = value.get(word) if isinstance(value, Mapping) else None
    texts = value if isinstance(value, list) else [value]
    return ", ".join(printable(text[:100]) for text in texts[:MOST] if isinstance(text, str))


def subtrees(node: Node) -> Iterator[Node]:
    """A node and the trees below it, in the order of the text."""
    stack = [] if isinstance(node, Token) else [node]
    while stack:
        tree = stack.pop()
        yield tree
        stack += [child for child in reversed(tree.children) if not isinstance(child, Token)]
