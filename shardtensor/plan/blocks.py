"""Rules in Python: ``{"layers.*": {"in": ..., "mlp.up": colwise("tp")}}``, spread out to one line of a plan each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardtensor.errors import PlanError
from shardtensor.plan.flow import Flow, read_flow
from shardtensor.plan.line import Line


def lines(rules: Mapping[str, Any], above: str = "", is_optional: bool = False) -> Iterator[Line]:
    """Spread out the rules of a block.

    Example:
        >>> for line in lines({"mlp": {"in": "replicate", "optional up.bias": "[tp]"}}):
        ...     print(line.pattern, line.kind, line.value, line.is_optional)
        mlp in replicate False
        mlp.up.bias tensor [tp] True
    """
    for key, value in rules.items():
        if not isinstance(key, str):
            raise PlanError("a rule starts with a pattern", {"found": repr(key)}, "write text: `layers.*.weight`")
        words = key.split()
        optional = is_optional or words[:1] == ["optional"]
        words = words[1:] if words[:1] == ["optional"] else words
        if words and words[0] in ("in", "out") and not isinstance(value, Mapping):
            if len(words) > (2 if words[0] == "in" else 1):
                raise PlanError(f"`{key}` is no side of a module", fix="write `in`, `in NAME` or `out`")
            flow = _flow(value, f"{above}.{key}" if above else key)
            name = words[1] if len(words) > 1 else ""
            yield Line(above, "in" if words[0] == "in" else "out", flow, name, is_optional=optional)
            continue
        if len(words) > 1:
            raise PlanError(
                f"`{key}` is no pattern", fix="write dotted names, after `optional` where they may be missing"
            )
        pattern = ".".join(filter(None, (above, *words)))
        if isinstance(value, Mapping):
            yield from lines(value, pattern, optional)
        else:
            yield Line(pattern, value=value, is_optional=optional)


def _flow(value: Any, where: str) -> Flow:
    try:
        return read_flow(value)
    except PlanError as error:
        fault, *facts = str(error).splitlines()
        raise PlanError("\n".join([f"{where}: {fault}", *facts])) from None
