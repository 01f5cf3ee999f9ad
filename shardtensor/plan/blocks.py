"""Rules in Python: ``{"layers.*": {"in": ..., "mlp.up": colwise("tp")}}``, spread out to one line of a plan each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from shardtensor.errors import PlanError
from shardtensor.plan.call_text import read_call, read_store
from shardtensor.plan.flows.flow import Flow, read_flow
from shardtensor.plan.line import Hook, Line, Store, Tie, Unmatched
from shardtensor.spec.nodes import Spec
from shardtensor.spec.parse import as_spec

_SIDES = {"in": 2, "out": 2, "local": 2, "use": 1}
"""Words that begin a key which is no pattern, and how many words the key has at most."""


@attrs.frozen(eq=False)
class Statements:
    """What rules say, each kind in the order in which it was written."""

    lines: tuple[Line, ...]
    stores: tuple[Store, ...]
    ties: tuple[Tie, ...]
    unmatched: Unmatched | None


def statements(rules: Mapping[str, Any]) -> Statements:
    """Read the rules of a whole plan: lines, and ``"store **"``, ``"tie A"`` and ``"unmatched"`` beside them.

    Example:
        >>> found = statements({"store **": "flat(dp) by layers.*", "tie head.weight": "embed.weight"})
        >>> found.stores[0].by, found.ties[0].to
        (('layers.*',), 'embed.weight')
    """
    rest: dict[str, Any] = {}
    stores, ties, unmatched = [], [], None
    for key, value in rules.items():
        words = key.split() if isinstance(key, str) and not isinstance(value, Mapping) else []
        if words[:1] == ["store"] and len(words) == 2:
            flat, by = read_store(value)
            stores.append(Store(words[1], flat, by))
        elif words[:1] == ["tie"] and len(words) == 2:
            ties.append(Tie(words[1], value))
        elif words == ["unmatched"]:
            unmatched = Unmatched(_in_axes(as_spec(value)))
        else:
            rest[key] = value
    return Statements(tuple(lines(rest)), tuple(stores), tuple(ties), unmatched)


def lines(rules: Mapping[str, Any], above: str = "", is_optional: bool = False) -> Iterator[Line]:
    """Spread out the rules of a block.

    Example:
        >>> for line in lines({"mlp": {"in": "replicate", "optional up.bias": "[tp]", "local width": "[tp]"}}):
        ...     print(line.pattern, line.kind, line.name, line.value, line.is_optional)
        mlp in  replicate False
        mlp.up.bias tensor  [tp] True
        mlp local width [tp] False
    """
    for key, value in rules.items():
        if not isinstance(key, str):
            raise PlanError("a rule starts with a pattern", {"found": repr(key)}, "write text: `layers.*.weight`")
        words = key.split()
        optional = is_optional or words[:1] == ["optional"]
        if words[:1] == ["optional"]:
            words.pop(0)
        if words and words[0] in _SIDES and not isinstance(value, Mapping):
            yield from _side(key, words, value, Line(above, module=above, is_optional=optional))
            continue
        if len(words) > 1:
            raise PlanError(
                f"`{key}` is no pattern", fix="write dotted names, after `optional` where they may be missing"
            )
        pattern = ".".join(filter(None, (above, *words)))
        if isinstance(value, Mapping):
            yield from lines(value, pattern, optional)
        else:
            value = as_spec(value) if isinstance(value, str) else value
            yield Line(pattern, value=value, module=above, is_optional=optional)


def _side(key: str, words: list[str], value: Any, line: Line) -> Iterator[Line]:
    """What is said of a module itself: how values pass, what is counted, what is used."""
    kind: Any = words[0]
    name = words[1] if len(words) > 1 else ""
    if len(words) > _SIDES[kind] or (kind == "local" and not name):
        ways = "write `in`, `in NAME`, `out`, `out NAME`, `local NAME` or `use`"
        raise PlanError(f"`{key}` is no side of a module", fix=ways)
    if kind == "use":
        for call in (value,) if isinstance(value, str | Hook) else value:
            yield attrs.evolve(line, kind=kind, value=call if isinstance(call, Hook) else read_call(call))
    elif kind == "local":
        yield attrs.evolve(line, kind=kind, name=name, value=_in_axes(as_spec(value)))
    else:
        where = f"{line.pattern}.{key}" if line.pattern else key
        yield attrs.evolve(line, kind=kind, name=name, value=_flow(value, where))


def _in_axes(spec: Any) -> Spec:
    if not isinstance(spec, Spec):
        raise PlanError("this is said in mesh axes", {"found": str(spec)}, "write such as `[tp]` or `replicate`")
    return spec


def _flow(value: Any, where: str) -> Flow:
    try:
        return read_flow(value)
    except PlanError as error:
        fault, *facts = str(error).splitlines()
        raise PlanError("\n".join([f"{where}: {fault}", *facts])) from None
