"""How small the sizes of a model may become, so that a plan says of the tiny one what it says of the real one."""

from __future__ import annotations

import math

import attrs

from shardtensor.plan.models.model import Model

PAD = 128
"""Rows to whose multiples plans pad vocabularies."""


@attrs.frozen
class Sizes:
    """Sizes of a tiny model. Numbers of heads and of experts stay as they are.

    Attributes:
        ranks: of the world; a cut is over a divisor of it.
        head: elements of a head, at most.
        layers: how many.

    Example:
        >>> sizes = Sizes(ranks=8)
        >>> sizes.width(14336), sizes.width(14340), sizes.vocab(50257)
        (32, 36, 209)
    """

    ranks: int
    head: int = 2
    layers: int = 2

    def width(self, real: int, unlike: int = 0) -> int:
        """A small size that leaves the remainder of the real one, whatever divisor of the world divides it.

        Args:
            unlike: another size of the tiny model; with two that are equal, a product could be mistaken for another.
        """
        step = 2 * self.ranks * self.head
        small = _congruent(real, step)
        return small if small != unlike else min(real, small + step)

    def of_heads(self, heads: int, real: int) -> int:
        """The width of so many small heads, which the real ones are as many of."""
        return heads * min(self.head, real // heads)

    def of_stack(self, heads: int, table: tuple[int, ...], hidden: int) -> tuple[int, ...]:
        """Of one stack of layers with learned positions: heads, width, hidden width, layers, positions, vocabulary.

        Args:
            table: the shape of the real embedding.
            hidden: the real hidden width.
        """
        width = self.of_heads(heads, table[1])
        return heads, width, self.width(hidden, unlike=width), self.layers, self.positions, self.vocab(table[0])

    def vocab(self, real: int) -> int:
        """The same for rows that may be padded: the last rank holds as much padding as of the real one."""
        return _congruent(real, math.lcm(PAD, self.ranks))

    @property
    def positions(self) -> int:
        """As many as the longest sequence of a step has."""
        return max(16, 2 * self.ranks)


def _congruent(real: int, modulus: int) -> int:
    return min(real, real % modulus + modulus)


@attrs.frozen
class RealSizes(Sizes):
    """The sizes of the real model, for one that has no memory."""

    @classmethod
    def of(cls, model: Model) -> RealSizes:
        """Those of a model.

        Example:
            >>> from shardtensor.plan.models.model import TensorInfo
            >>> RealSizes.of(Model((TensorInfo("layers.11.weight", (8,)),))).layers
            12
        """
        numbers = [int(segment) for t in model.tensors for segment in t.name.split(".")[:-1] if segment.isdecimal()]
        return cls(1, 1 << 62, 1 + max(numbers, default=0))

    def width(self, real: int, unlike: int = 0) -> int:
        return real

    def vocab(self, real: int) -> int:
        return real
