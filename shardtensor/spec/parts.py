"""The parts of a spec in mesh axes: a cut of one dim, and the suffixes."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from shardtensor.errors import SpecError
from shardtensor.spec.atoms import axis_tuple, name, one_or_all, optional_sizes, tuple_text, whole_number, whole_numbers

REDUCTIONS = ("sum", "avg", "max", "min")


def _unit(value: Any) -> int:
    return whole_number(value, "unit", 1)


def _unit_or_row(value: Any) -> int | Literal["row"]:
    return "row" if value == "row" else _unit(value)


def _blocks(value: Any) -> int | tuple[int, ...]:
    if isinstance(value, tuple | list):
        return whole_numbers(value, "blocks", 1, count=2)
    return whole_number(value, "blocks", 1)


def _pad(value: Any) -> int | None:
    return None if value is None else whole_number(value, "pad", 1)


def _coordinate(value: Any) -> int:
    return whole_number(value, "the coordinate", 0)


@attrs.frozen(cache_hash=True, repr=False)
class Cut:
    """One dim cut over mesh axes.

    Args:
        axes: an axis, or several, major to minor.
        unit: the dim is cut only at multiples of so many elements.
        blocks: the dim is so many equal blocks laid end to end (a tuple: in these proportions), each of them cut.
        pad: the dim is cut as if it were longer: the next multiple of this and of the number of pieces.
        balanced: pieces differ by at most one unit, larger ones first.
        sizes: the size of each piece, in elements.

    Example:
        >>> str(Cut(("tp", "dp"), unit=128)), str(Cut("tp", blocks=3))
        ('tp*dp unit(128)', 'tp blocks(3)')
    """

    axes: tuple[str, ...] = attrs.field(converter=axis_tuple)
    unit: int = attrs.field(default=1, converter=_unit)
    blocks: int | tuple[int, ...] = attrs.field(default=1, converter=_blocks)
    pad: int | None = attrs.field(default=None, converter=_pad)
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

    def __repr__(self) -> str:
        shown = ((field.name, getattr(self, field.name)) for field in attrs.fields(Cut)[1:] if field.name != "axes")
        defaults = {field.name: field.default for field in attrs.fields(Cut)}
        rest = "".join(f", {key}={value!r}" for key, value in shown if value != defaults[key])
        return f"Cut({one_or_all(self.axes)!r}{rest})"


def _joined(numbers: int | tuple[int, ...] | None) -> str:
    return ", ".join(map(str, numbers)) if isinstance(numbers, tuple) else str(numbers)


@attrs.frozen(cache_hash=True)
class Flat:
    """What the dims leave is flattened row-major and cut over `axes` into ranges, never inside a `unit` (or a row)."""

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
    index: int = attrs.field(converter=_coordinate)

    def __str__(self) -> str:
        return f"only({self.axis}, {self.index})"


_REDUCTION_FIX = f"write one of {', '.join(REDUCTIONS)}; several axes are one product: `partial(a*b)`"


@attrs.frozen(cache_hash=True)
class Partial:
    """Each rank along `axes` holds an addend; `op` is ``sum``, ``avg``, ``max`` or ``min``."""

    axes: tuple[str, ...] = attrs.field(converter=axis_tuple)
    op: str = attrs.field(default="sum")

    @op.validator
    def _known(self, _: Any, op: object) -> None:
        if op not in REDUCTIONS:
            raise SpecError(f"no reduction is called {op!r}", fix=_REDUCTION_FIX, code="E102")

    def __str__(self) -> str:
        return f"partial({'*'.join(self.axes)}{f', op={self.op}' * (self.op != 'sum')})"
