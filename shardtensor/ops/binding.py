"""A call of an operation that has a row: its operands, the dims it names, and how to make it on local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardtensor.layout.layout import Shape
from shardtensor.rules.call import ALIASES, Signature
from shardtensor.rules.pattern import Pattern, Side
from shardtensor.rules.rule import several_dims
from shardtensor.rules.table import Row


@attrs.frozen
class BoundCall:
    """A call split into its operands (None for an absent one) and the arguments to repeat it on local tensors."""

    func: Any
    name: str
    signature: Signature
    sides: tuple[Side, ...]
    operands: tuple[torch.Tensor | None, ...]
    places: tuple[int | str | None, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: tuple[int, ...]
    keepdim: bool
    listed: bool

    @classmethod
    def of(cls, func: Any, name: str, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall | None:
        """Bind a call; return None if it does not have the form that the row gives."""
        signature, pattern = row.call, row.pattern
        assert pattern is not None
        places: list[int | str | None] = []
        found: list[Any] = []
        for operand in signature.operands:
            place = signature.place(operand)
            if place < len(args) and not (signature.spread and place > 0):
                found.append(args[place])
                places.append(place)
            else:
                found.append(kwargs.get(operand))
                places.append(operand if operand in kwargs else None)
        for i, x in enumerate(found):
            if i and isinstance(x, int | float | complex):  # a number in place of an operand stays as it is
                found[i], places[i] = None, None
        if pattern.listed:
            if not isinstance(found[0], list | tuple) or not all(isinstance(x, torch.Tensor) for x in found[0]):
                return None
            operands, sides = tuple(found[0]), pattern.sides * len(found[0])
        else:
            operands, sides = tuple(found), pattern.sides
        others = [v for i, v in enumerate(args) if i not in places] + [v for k, v in kwargs.items() if k not in places]
        if (
            not operands
            or any(x is not None and not isinstance(x, torch.Tensor) for x in operands)
            or any(isinstance(v, torch.Tensor) for v in others)
        ):
            return None
        dims = _named_dims(signature, pattern, operands, args, kwargs)
        if dims is None:
            return None
        keepdim = bool(_option(signature, "keepdim", args, kwargs)) if "keepdim" in signature.names else False
        return cls(func, name, signature, sides, operands, tuple(places), args, kwargs, dims, keepdim, pattern.listed)

    @property
    def present(self) -> list[torch.Tensor]:
        return [x for x in self.operands if x is not None]

    @property
    def present_names(self) -> list[str]:
        names = self.signature.operands * (len(self.operands) if self.listed else 1)
        return [name for name, x in zip(names, self.operands, strict=True) if x is not None]

    @property
    def shapes(self) -> tuple[Shape | None, ...]:
        return tuple(None if x is None else tuple(x.shape) for x in self.operands)

    def without(self, which: Sequence[int]) -> BoundCall:
        """Return the same call without some of its operands."""
        operands = tuple(None if i in which else x for i, x in enumerate(self.operands))
        return attrs.evolve(self, operands=operands)

    def compute(self, *locals_: torch.Tensor) -> Any:
        """Make the call on local tensors."""
        args, kwargs = list(self.args), dict(self.kwargs)
        if self.listed:
            place = self.places[0]
            if isinstance(place, int):
                args[place] = list(locals_)
            else:
                kwargs[str(place)] = list(locals_)
            return self.func(*args, **kwargs)
        given = iter(locals_)
        for place, x in zip(self.places, self.operands, strict=True):
            if place is None:
                continue
            value = None if x is None else next(given)
            if isinstance(place, int):
                args[place] = value
            else:
                kwargs[place] = value
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


def _option(signature: Signature, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    operands: tuple[torch.Tensor | None, ...],
    args: tuple[Any, ...],
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
