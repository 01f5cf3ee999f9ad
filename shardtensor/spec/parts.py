"""The parts of a spec in mesh axes: a cut of one dim, and the suffixes; the numbers and names in them are checked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from operator import index
from typing import Any, Literal

import attrs

from shardtensor.errors import SpecError

MAX_NUMBER = 2**63 - 1

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def whole_number(value: Any, what: str, least: int) -> int:
    """Return `value` as an int; raise SpecError unless it is a whole number of at least `least`."""
    try:
        number = index(value)
    except TypeError:
        raise SpecError(f"{what} needs to be a whole number, found {value!r}", code="E102") from None
    if not least <= number <= MAX_NUMBER:
        bound = f"at least {least}" if number < least else f"at most {MAX_NUMBER}"
        raise SpecError(f"{what} needs to be {bound}, found {_short(number)}", code="E102")
    return number


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**30 else f"a number of {number.bit_length()} bits"


def whole_numbers(values: Any, what: str, least: int, count: int = 1) -> tuple[int, ...]:
    """Return `values` as a tuple; raise unless they are `count` or more whole numbers, each of at least `least`."""
    try:
        numbers = tuple(values)
    except TypeError:
        raise SpecError(f"{what} needs to be a list of whole numbers, found {values!r}", code="E102") from None
    if len(numbers) < count:
        raise SpecError(f"{what} needs at least {count} number{'s' * (count > 1)}", code="E102")
    return tuple(whole_number(number, what, least) for number in numbers)


def optional_sizes(values: Any) -> tuple[int, ...] | None:
    """Return `values` as a tuple of sizes in elements; None for None."""
    return None if values is None else whole_numbers(values, "sizes", 0)


def name(value: Any, what: str = "an axis") -> str:
    """Return `value`; raise SpecError if it cannot be the name of an axis or a dim."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return str(value)
    raise SpecError(
        f"{value!r} cannot be the name of {what}",
        {"why": "a name is letters, digits and underscores, and does not begin with a digit"},
        _instead(value),
        code="E102",
    )


def _instead(value: Any) -> str:
    if value == "-":
        return "a whole dim is None in Python"
    if isinstance(value, str) and re.fullmatch(r"\s*\w+(\s*\*\s*\w+)+\s*", value):
        return f"a product of axes is a tuple in Python: {tuple(value.replace('*', ' ').split())}"
    return "parse_spec reads text" if isinstance(value, str) and value[:1] == "[" else ""


def axis_tuple(value: Any) -> tuple[str, ...]:
    """Return an axis, or several, as a tuple of names."""
    names = (name(value),) if isinstance(value, str) or not isinstance(value, tuple | list) else tuple(map(name, value))
    if not names:
        raise SpecError("a cut needs an axis", code="E102")
    return names


def tuple_text(numbers: Sequence[int]) -> str:
    """Return numbers in round brackets: a tuple in the language of specs and in Python."""
    return f"({numbers[0]},)" if len(numbers) == 1 else f"({', '.join(map(str, numbers))})"


def quoted(text: str) -> str:
    """Return text in quotes: a string in the language of specs and in Python."""
    return json.dumps(text, ensure_ascii=False)


REDUCTIONS = ("sum", "avg", "max", "min")


def _blocks(value: Any) -> int | tuple[int, ...]:
    if isinstance(value, tuple | list):
        return whole_numbers(value, "blocks", 1, count=2)
    return whole_number(value, "blocks", 1)


def _pad(value: Any) -> int | None:
    return None if value is None else whole_number(value, "pad", 1)


def _unit_or_row(value: Any) -> int | Literal["row"]:
    return "row" if value == "row" else whole_number(value, "unit", 1)


@attrs.frozen(cache_hash=True)
class Cut:
    """One dim that is sharded over mesh axes.

    Args:
        axes: an axis, or several, major to minor.
        unit: pieces are multiples of this many elements.
        blocks: the dim has this many equal consecutive blocks (a tuple: in these proportions), each sharded separately.
        pad: the dim is sharded as if it were padded to the next multiple of this and of the number of pieces.
        balanced: pieces differ by at most one unit, larger ones first.
        sizes: the size of each piece, in elements.

    Example:
        >>> str(Cut(("tp", "dp"), unit=128)), str(Cut("tp", blocks=3))
        ('tp*dp unit(128)', 'tp blocks(3)')
    """

    axes: tuple[str, ...] = attrs.field(converter=axis_tuple)
    unit: int = attrs.field(default=1, converter=lambda value: whole_number(value, "unit", 1))
    blocks: int | tuple[int, ...] = attrs.field(default=1, converter=_blocks)
    pad: int | None = attrs.field(
        default=None, converter=lambda value: None if value is None else whole_number(value, "pad", 1)
    )
    balanced: bool = attrs.field(default=False, converter=bool)
    sizes: tuple[int, ...] | None = attrs.field(default=None, converter=optional_sizes)

    def __attrs_post_init__(self) -> None:
        if self.balanced and self.sizes is not None:
            raise SpecError("a cut is balanced or has sizes, not both", {"cut": str(self)}, "drop one", code="E102")

    def __str__(self) -> str:
        parts = ["*".join(self.axes)]
        parts += [f"pad({self.pad})"] * (self.pad is not None)
        parts += [f"blocks({_joined(self.blocks)})"] * (self.blocks != 1)
        parts += [f"unit({self.unit})"] * (self.unit != 1)
        parts += [f"sizes({_joined(self.sizes)})"] if self.sizes is not None else ["balanced"] * self.balanced
        return " ".join(parts)


def _joined(numbers: int | tuple[int, ...] | None) -> str:
    return ", ".join(map(str, numbers)) if isinstance(numbers, tuple) else str(numbers)


@attrs.frozen(cache_hash=True)
class Flat:
    """Each local tensor is flattened row-major and cut over `axes` into ranges, never inside a `unit` (or a row)."""

    axes: tuple[str, ...] = attrs.field(converter=axis_tuple)
    unit: int | Literal["row"] = attrs.field(default=1, converter=_unit_or_row)
    sizes: tuple[int, ...] | None = attrs.field(default=None, converter=optional_sizes)

    def __str__(self) -> str:
        unit = f", unit={self.unit}" * (self.unit != 1)
        sizes = "" if self.sizes is None else f", sizes={tuple_text(self.sizes)}"
        return f"flat({'*'.join(self.axes)}{unit}{sizes})"


@attrs.frozen(cache_hash=True)
class Only:
    """The tensor exists only at coordinate `index` of `axis`."""

    axis: str = attrs.field(converter=name)
    index: int = attrs.field(converter=lambda value: whole_number(value, "the coordinate", 0))

    def __str__(self) -> str:
        return f"only({self.axis}, {self.index})"


_REDUCTION_FIX = f"write one of {', '.join(REDUCTIONS)}; several axes are one product: `partial(a*b)`"


@attrs.frozen(cache_hash=True)
class Partial:
    """Each rank along `axes` holds a partial sum; `op` is ``sum``, ``avg``, ``max`` or ``min``."""

    axes: tuple[str, ...] = attrs.field(converter=axis_tuple)
    op: str = attrs.field(default="sum")

    @op.validator
    def _check_op(self, _: Any, op: object) -> None:
        if op not in REDUCTIONS:
            raise SpecError(f"no reduction is called {op!r}", fix=_REDUCTION_FIX, code="E102")

    def __str__(self) -> str:
        return f"partial({'*'.join(self.axes)}{f', op={self.op}' * (self.op != 'sum')})"
