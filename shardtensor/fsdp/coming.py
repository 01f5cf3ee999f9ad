"""`Coming`: what a backward of this rank brings, as far as that can be known before it is there.

Autograd tells which of the nodes of gathered parameters the backward will run. What was computed inside of a reentrant
checkpoint is hidden from it: that is computed again in the middle of the backward, which then runs one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_will_run = torch._C._will_engine_execute_node


class Coming:
    """Numbers of flats whose gradients are to come, may come, or do not come.

    Attributes:
        hidden: those that a backward inside of this one may bring.
        missing: those that this rank brings no gradients of.
    """

    def __init__(self) -> None:
        self.hidden: set[int] = set()
        self.missing: set[int] = set()
        self._places: Mapping[int, int] = {}
        self._passed: set[int] = set()

    def hide(self, numbers: Iterable[int]) -> None:
        """Take note that these compute where autograd records nothing: a backward of their own may bring gradients."""
        self.hidden.update(numbers)

    def begin(self, places: Mapping[int, int], nodes: Iterable[Any]) -> None:
        """A backward begins.

        Args:
            places: for each number what its place is in the order in which gradients are expected.
            nodes: the autograd nodes of the same, in the same order.
        """
        self._places, self.missing, self._passed = places, set(), set()
        comes = list(map(_will_run, nodes))  # 60 ns each
        if not all(comes):
            found = zip(places, comes, strict=True)
            self.missing = {number for number, is_coming in found if not is_coming} - self.hidden

    def end(self) -> None:
        """The backward has ended, or broke off."""
        self.hidden.clear()

    def is_without(self, number: int) -> bool:
        """Whether this rank brings no gradients of it, and others may wait for its turn."""
        return number in self.missing and number in self._passed

    def pass_by(self, numbers: Iterable[int]) -> None:
        """Take note that it is the turn of these."""
        self._passed.update(numbers)

    def skip(self, numbers: Iterable[int]) -> bool:
        """Take note that the backward does not come to these; return whether that can change anything."""
        gone = self.hidden.intersection(numbers)
        self.hidden -= gone
        self.missing |= gone
        self._passed |= gone
        return bool(gone)

    def reach(self, place: int) -> None:
        """Take note that gradients of this place are there: what is hidden and has an earlier one was skipped."""
        self.skip([number for number in self.hidden if self._places.get(number, place) < place])
