"""The numbers and names that specs are made of, checked on the way in (attrs converters) and shown on the way out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from operator import index
from typing import Any

from shardtensor.errors import SpecError

MAX_NUMBER = 2**63 - 1

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def whole_number(value: Any, what: str, least: int) -> int:
    """Return `value` as an int, when it is a whole number of at least `least`."""
    try:
        number = index(value)
    except TypeError:
        raise SpecError(f"{what} needs to be a whole number, found {value!r}", code="E102") from None
    if not least <= number <= MAX_NUMBER:
        wanted = f"at least {least}" if number < least else f"at most {MAX_NUMBER}"
        raise SpecError(f"{what} needs to be {wanted}, found {_short(number)}", code="E102")
    return number


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**30 else f"a number of {number.bit_length()} bits"


def whole_numbers(values: Any, what: str, least: int, count: int = 1) -> tuple[int, ...]:
    """Return `values` as a tuple, when they are at least `count` whole numbers, each of at least `least`."""
    try:
        numbers = tuple(values)
    except TypeError:
        raise SpecError(f"{what} needs to be a list of whole numbers, found {values!r}", code="E102") from None
    if len(numbers) < count:
        raise SpecError(f"{what} needs at least {count} number{'s' * (count > 1)}", code="E102")
    return tuple(whole_number(number, what, least) for number in numbers)


def optional_sizes(values: Any) -> tuple[int, ...] | None:
    """Return `values` as a tuple of sizes in elements; None stays."""
    return None if values is None else whole_numbers(values, "sizes", 0)


def name(value: Any, what: str = "an axis") -> str:
    """Return `value` when it can be the name of an axis or a dim."""
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


def one_or_all(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    """The shortest Python spelling of some axes."""
    return axes[0] if len(axes) == 1 else axes


def tuple_text(numbers: Sequence[int]) -> str:
    """Numbers in round brackets, read as a tuple by the language and by Python alike."""
    return f"({numbers[0]},)" if len(numbers) == 1 else f"({', '.join(map(str, numbers))})"


def quoted(text: str) -> str:
    """A string of the language, and of Python."""
    return json.dumps(text, ensure_ascii=False)
