"""`Carry`: what a flat keeps of gradients from one backward to the next, and what happens to them on their last way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor.comm.group import Group

Grads = Sequence[torch.Tensor | None]


class Carry:
    """Gradients that wait for others: whole ones for a backward that syncs, summed ones for the sum over copies.

    Attributes:
        is_loaded: whether there are whole gradients that wait.
        dtype: of reductions.
        is_special: whether a sum over one copy's ranks is not all: there are more copies, or there is a hook.
        all_reduces: sum over the copies in the backwards to come, or only add up what one copy's ranks summed.
        hook: called with this rank's range of the averaged gradient, before it becomes the parameters'.
        stream: where the hook runs; None for where the reduction does.
    """

    def __init__(self, replicate: Group | None) -> None:
        self.replicate = replicate
        self.dtype = torch.float32
        self.all_reduces = True
        self.is_loaded = False
        self.set_hook(None, None)
        self._whole: list[torch.Tensor | None] = []
        self._is_own: list[bool] = []
        self._partial: torch.Tensor | None = None
        self._partial_used: list[bool] = []

    # -- whole gradients --------------------------------------------------------------------------------------------

    def add(self, grads: Grads) -> None:
        """Add whole gradients to those that wait, in the dtype of reductions where that is wider than theirs."""
        if not self._whole:
            self._whole, self._is_own, self.is_loaded = [None] * len(grads), [False] * len(grads), True
        for i, grad in enumerate(grads):
            if grad is not None:
                self._add_one(i, grad)

    def _add_one(self, i: int, grad: torch.Tensor) -> None:
        wide = grad.to(self.dtype) if self.dtype.itemsize > grad.dtype.itemsize else grad
        kept = self._whole[i]
        if kept is None:
            self._whole[i], self._is_own[i] = wide, wide is not grad
        elif self._is_own[i]:
            kept.add_(wide)
        else:  # autograd may have given the same tensor to others
            self._whole[i], self._is_own[i] = kept + wide, True

    def unload(self, grads: Grads) -> list[torch.Tensor | None]:
        """Give what waits, with `grads` added."""
        self.add(grads)
        whole, self._whole, self.is_loaded = self._whole, [], False
        return whole

    @property
    def is_waiting(self) -> bool:
        """Whether any gradients wait."""
        return self.is_loaded or self._partial is not None

    @property
    def is_due(self) -> bool:
        """Whether a reduction now would take what waits further."""
        return self.is_loaded or (self._partial is not None and self.all_reduces)

    # -- summed gradients -------------------------------------------------------------------------------------------

    def set_hook(self, hook: Callable[[torch.Tensor], None] | None, stream: Any) -> None:
        """Have `hook` called with averaged gradients, in `stream` where that is not None."""
        self.hook, self.stream = hook, stream
        self.is_special = self.replicate is not None or hook is not None

    def finish(self, summed: torch.Tensor, used: list[bool], scale: float) -> float | None:
        """Sum over the copies and run the hook, in place; or keep back what was summed.

        Args:
            summed: this rank's range of the sum over one copy's ranks.
            used: which parameters it is for; set to which ones any addend was for.
            scale: what the sum is to be multiplied by.

        Returns:
            what is left to multiply with; None where it is kept back.
        """
        if self.replicate is not None:
            if self._partial is not None:
                summed.add_(self._partial)
                used[:] = [a or b for a, b in zip(used, self._partial_used, strict=True)]
            if not self.all_reduces:
                self._partial, self._partial_used = summed.clone(), used
                return None
            self._partial = None
            self.replicate.all_reduce(summed)
        if self.hook is None:
            return scale
        summed.mul_(scale)
        if self.stream is None:
            self.hook(summed)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.hook(summed)
            torch.cuda.current_stream().wait_stream(self.stream)
        return 1.0

    def fresh(self) -> Carry:
        """One with the same settings and nothing that waits."""
        made = Carry(self.replicate)
        made.dtype, made.all_reduces = self.dtype, self.all_reduces
        made.set_hook(self.hook, self.stream)
        return made

    def drop(self) -> None:
        """Forget all that waits."""
        self._whole, self._partial, self.is_loaded = [], None, False
