"""A call of an operation that has a row: its operands, the dims it names, and how to make it on local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardtensor.layout.layout import Shape
from shardtensor.ops.local_call import Place, operands_at, with_operands
from shardtensor.rules.call import ALIASES, Signature
from shardtensor.rules.pattern import Pattern, Side
from shardtensor.rules.rule import several_dims
from shardtensor.rules.table import Row


@attrs.frozen
class BoundCall:
    """A call split into its operands and the arguments to repeat it on local tensors.

    Attributes:
        sides: of the rule, one for each operand.
        operands: in the order of the rule; None for an absent one.
        places: of the operands that are present.
        args, kwargs: of the call, None in place of the operands.
        dims: that the call selects.
    """

    func: Any
    name: str
    signature: Signature
    sides: tuple[Side, ...]
    operands: tuple[torch.Tensor | None, ...]
    places: tuple[Place, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: tuple[int, ...]
    keepdim: bool

    @classmethod
    def of(cls, func: Any, name: str, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall | None:
        """Bind a call; return None if it does not have the form that the row gives."""
        signature, pattern = row.call, row.pattern
        assert pattern is not None
        places: list[Any] = []
        found: list[Any] = []
        sides = pattern.sides
        if pattern.is_elementwise:  # each tensor is an operand, wherever it stands; others may be numbers
            if any(type(value).__module__ == "numpy" and getattr(value, "ndim", 0) for value in args):
                return None
            places = [key for key, value in (*enumerate(args), *kwargs.items()) if isinstance(value, torch.Tensor)]
            found = operands_at(places, args, kwargs)
            sides = pattern.sides[:1] * len(found)
        for operand in () if pattern.is_elementwise else signature.operands:
            place = signature.place(operand)
            is_named = place >= len(args) or (signature.spread and place > 0)
            x = kwargs.get(operand) if is_named else args[place]
            if found and isinstance(x, int | float | complex):  # a number in place of an operand stays as it is
                x = None
            found.append(x)
            if x is not None:
                places.append(operand if is_named else place)
        if pattern.listed:
            if not isinstance(found[0], list | tuple):
                return None
            sides, places = sides * len(found[0]), [(place, i) for place in places for i in range(len(found[0]))]
            found = list(found[0])
        if not found or not all(isinstance(x, torch.Tensor) for x in found if x is not None or pattern.listed):
            return None
        others, kwargs = with_operands(places, [None] * len(places), args, kwargs)
        if any(isinstance(value, torch.Tensor) for value in (*others, *kwargs.values())):
            return None
        dims = _named_dims(signature, pattern, found, others, kwargs)
        if dims is None:
            return None
        keepdim = bool(_option(signature, "keepdim", others, kwargs)) if "keepdim" in signature.names else False
        return cls(func, name, signature, sides, tuple(found), tuple(places), tuple(others), kwargs, dims, keepdim)

    @property
    def present(self) -> list[torch.Tensor]:
        return [x for x in self.operands if x is not None]

    @property
    def present_names(self) -> list[str]:
        names = self.signature.operands * (len(self.operands) // len(self.signature.operands))
        return [name for name, x in zip(names, self.operands, strict=True) if x is not None]

    @property
    def shapes(self) -> tuple[Shape | None, ...]:
        return tuple(None if x is None else tuple(x.shape) for x in self.operands)

    def compute(self, *locals_: torch.Tensor) -> Any:
        """Make the call on local tensors."""
        args, kwargs = with_operands(self.places, locals_, self.args, self.kwargs)
        return self.func(*args, **kwargs)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are no operands, by name."""
        values = dict(self.signature.defaults)
        names = [name for name in self.signature.names if name not in self.signature.operands]
        values |= {name: self.args[self.signature.place(name)] for name in names
                  if self.signature.place(name) < len(self.args)}  # fmt: skip
        return values | {k: v for k, v in self.kwargs.items() if k not in self.signature.operands}


def row_keyword(key: str, signature: Signature) -> str:
    """Return the name that a row has for a keyword of a call."""
    if key in signature.names:
        return key
    alias = ALIASES.get(key, key)
    return signature.names[0] if alias == "input" else alias if alias in signature.names else key


def _option(signature: Signature, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    place = signature.place(name)
    if signature.spread and name == signature.naming and place < len(args):
        rest = args[place:]
        return rest[0] if len(rest) == 1 else rest
    if place < len(args):
        return args[place]
    return kwargs.get(name, dict(signature.defaults).get(name, _MISSING))


_MISSING = object()


def _named_dims(
    signature: Signature,
    pattern: Pattern,
    operands: Sequence[torch.Tensor | None],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[int, ...] | None:
    """Return the dims that the call names, sorted; None if it does not give them in the form of the row."""
    if signature.naming is None:
        return ()
    first = operands[0]
    assert first is not None
    value = _option(signature, signature.naming, args, kwargs)
    if value is None and dict(signature.defaults).get(signature.naming, 0) is not None:
        return None
    if isinstance(value, bool):  # sort(descending)
        value = dict(signature.defaults).get(signature.naming, _MISSING)
    if value is _MISSING or (value is not None and not isinstance(value, int | tuple | list)):
        return None
    inside = any(term.named for side in pattern.sides for term in side.terms)
    ndim = first.dim() + (not inside)
    if pattern.listed:  # empty vectors may be among operands of any number of dims
        ndim = max(x.dim() for x in operands if x is not None) + (not inside)
    if signature.naming == "normalized_shape" and value is not None:
        count = 1 if isinstance(value, int) else len(value)
        return tuple(range(ndim - count, ndim)) if count <= ndim else None
    if not ndim:
        return ()
    return several_dims(ndim, tuple(value) if isinstance(value, list) else value)
