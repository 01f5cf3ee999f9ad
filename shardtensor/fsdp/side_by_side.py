"""Flats end to end, and the same as it is sent: the ranges of a rank side by side, one rank after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class SideBySide:
    """Brings flats from one order to the other, all in one call.

    Args:
        chunks: elements of a rank's range of each flat.
        whole: the flats end to end.
        sent: as many elements, of the same dtype.
    """

    def __init__(self, chunks: Sequence[int], whole: torch.Tensor, sent: torch.Tensor) -> None:
        grain, ranks = math.gcd(*chunks), whole.numel() // sum(chunks)
        numbers = torch.arange(whole.numel() // grain, device=whole.device).view(ranks, -1)
        parts = numbers.split([chunk // grain for chunk in chunks], 1)
        self._dealt = torch.cat([part.reshape(-1) for part in parts])
        self._collected = torch.argsort(self._dealt)
        self._whole, self._sent = (x.view(torch.uint8).view(-1, grain * x.itemsize) for x in (whole, sent))

    def collect(self) -> None:
        """Write what lies end to end as it is sent."""
        torch.index_select(self._whole, 0, self._collected, out=self._sent)

    def deal(self) -> None:
        """Write what was sent end to end."""
        torch.index_select(self._sent, 0, self._dealt, out=self._whole)
