"""The arguments of an operation, as text: ``input, k=, dim=-1``."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import attrs

from shardtensor.spec.diagnostics import Source

ALIASES = {"self": "input", "axis": "dim", "keepdims": "keepdim", "a": "input", "x": "input"}
"""Other names of arguments that torch accepts, from numpy and its own older ones."""

NAMING = ("dim", "dims", "normalized_shape")
"""Arguments that select dims; ``normalized_shape`` selects as many trailing ones as it has sizes."""


@attrs.frozen(eq=False)
class Signature:
    """The arguments of a call, in order.

    Attributes:
        names: of all arguments.
        operands: the names of tensors, in the order of the rule's sides.
        defaults: of the other arguments, if they have one.
        naming: the argument that selects dims, if there is one.
        spread: whether `naming` is written ``*dims``: all further positional values.
    """

    names: tuple[str, ...]
    operands: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    naming: str | None
    spread: bool = False

    def place(self, name: str) -> int:
        """Return the position of an argument."""
        return self.names.index(name)

    def __str__(self) -> str:
        defaults = dict(self.defaults)
        return ", ".join(
            name if name in self.operands else f"*{name}" if self.spread and name == self.naming
            else f"{name}={defaults.get(name, '')}"
            for name in self.names
        )  # fmt: skip


@lru_cache(maxsize=1024)
def parse_call(text: str, file: str = "<call>") -> Signature:
    """Parse the arguments of a call: a bare name is an operand, one with ``=`` is passed unchanged.

    Example:
        >>> call = parse_call("input, k=, dim=-1")
        >>> call.operands, call.naming, dict(call.defaults)
        (('input',), 'dim', {'dim': -1})
    """
    names: list[str] = []
    operands: list[str] = []
    defaults: list[tuple[str, Any]] = []
    spread = False
    for match in re.finditer(r"[^,]+", text):
        word = match[0].strip()
        found = re.fullmatch(r"(\*?)([a-z_]\w*)(?:(=)(-?\w*))?", word)
        if found is None:
            raise Source(text, file).error("E607", match.span(), f"`{word}` is no argument", fix="write `dim=-1`")
        star, name, equals, value = found.groups()
        names.append(name)
        spread |= bool(star)
        if equals and value:
            defaults.append(
                (name, {"None": None, "False": False, "True": True}.get(value) if value.isalpha() else int(value))
            )
        elif not equals and not star:
            operands.append(name)
    naming = next((name for name in names if name in NAMING and name not in operands), None)
    return Signature(tuple(names), tuple(operands), tuple(defaults), naming, spread)
