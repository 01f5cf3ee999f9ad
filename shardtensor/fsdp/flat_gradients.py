"""What a flat does with gradients: holds, packs and sums them, and gives each parameter its piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardtensor.fsdp.carry import Carry
from shardtensor.fsdp.domain import Domain
from shardtensor.fsdp.entry import Entry
from shardtensor.fsdp.forms import Form
from shardtensor.layout.ranges import Ranges
from shardtensor.tensor.pieces import Pieces
from shardtensor.tensor.sharded_tensor import ShardedTensor


class FlatGradients:
    """The part of `Flat` that comes after a backward."""

    entries: list[Entry]
    shapes: list[tuple[int, ...]]
    shells: list[ShardedTensor]
    shard: torch.Tensor
    domain: Domain
    ranges: Ranges
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype
    grad_dtypes: list[torch.dtype] | None
    carry: Carry
    pieces: Pieces
    syncs: bool
    is_offloaded: bool
    held: Sequence[torch.Tensor | None] | None
    _own_parting: tuple[list[int], slice]
    _all_cuts: list[int]
    _gaps: list[int]
    prescale: float
    _reshaped: list[tuple[int, Form, tuple[int, ...]]]

    @property
    def index(self) -> int:
        """This rank's place among those that hold one copy."""
        return self.domain.shard.index

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the packed gradients."""
        return self.ranges.total * self.reduce_dtype.itemsize

    # -- gradients --------------------------------------------------------------------------------------------------

    def hold(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep gradients of whole parameters, added to those that are kept."""
        if not self.syncs:
            self.carry.add(grads)
        elif self.held is None:
            self.held = grads
        else:
            self.held = [a if b is None else b if a is None else a + b for a, b in zip(self.held, grads, strict=True)]

    def divide_by(self, factor: float) -> None:
        """Divide summed gradients by `factor`; in float16 their addends, since the sum may be too large for it."""
        self.divisor = factor
        is_first = self.reduce_dtype == torch.float16
        self.scale, self.prescale = (1.0, 1 / factor) if is_first else (1 / factor, 0.0)

    def let_go(self) -> Sequence[torch.Tensor | None]:
        """The gradients that are held, and those that waited, which are on their way from now on."""
        grads, self.held = self.held or [None] * len(self.shells), None
        return self.carry.unload(grads) if self.carry.is_loaded else grads

    def cut_up(self, whole: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parameters' parts of a whole range, and what is between them."""
        cuts = whole.split_with_sizes(self._all_cuts)
        return self._as_parameters(cuts[1::2]), [cuts[i] for i in self._gaps]

    @property
    def takes_as_is(self) -> bool:
        """Whether all there is to do with a sum is to average it, into a new gradient of the sum's dtype."""
        is_plain = not self.carry.is_special and self.reduce_dtype == self.grad_dtype and not self.is_offloaded
        return is_plain and (self.pieces.has_hooks or self._kept_gradient() is None)

    def receive(self, summed: torch.Tensor, used: list[bool]) -> torch.Tensor | None:
        """Take this rank's range of the sum, averaged, into a new gradient or onto the one that is there; return it.

        None where it is kept back until the copies are summed; `used` then tells of all that is in the sum.
        """
        scale = self.scale
        if self.carry.is_special:
            left = self.carry.finish(summed, used, scale)
            if left is None:
                return None
            scale = left
        return self._accept(summed, scale)

    def _accept(self, summed: torch.Tensor, scale: float) -> torch.Tensor:
        grad = None if self.pieces.has_hooks else self._kept_gradient()  # hooks see what is to be added by itself
        if grad is not None:
            return grad.add_(summed, alpha=scale)
        if summed.dtype == self.grad_dtype:
            return summed * scale
        return torch.mul(summed, scale, out=torch.empty_like(self.shard, dtype=self.grad_dtype))

    def _kept_gradient(self) -> torch.Tensor | None:
        """The flat gradient that every parameter's gradient is a piece of, if it is there still.

        Nothing but those pieces keeps it: its memory goes when they do.
        """
        grads = [shell._local.grad for shell in self.shells]
        whole = grads[0]._base if grads[0] is not None else None
        if whole is None or whole.shape != self.shard.shape or any(g is None or g._base is not whole for g in grads):
            return None
        return whole

    def attach(self, grad: torch.Tensor, used: Sequence[bool]) -> None:
        """Make what was received the gradients of the parameters that were used."""
        pieces = None
        for i, (shell, is_used) in enumerate(zip(self.shells, used, strict=True)):
            leaf = shell._local
            own = leaf.grad
            if not is_used or (own is not None and own._base is grad):
                continue
            pieces = self._pieces(grad) if pieces is None else pieces
            piece = self._hooked_gradient(leaf, pieces[i]) if self.pieces.has_hooks else pieces[i]
            if own is None:
                leaf.grad = piece if self.grad_dtypes is None else piece.to(self.grad_dtypes[i])
            else:
                own.add_(piece)  # of the user's own, or from a time when others had none

    @staticmethod
    def _hooked_gradient(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """What hooks on the gradient of `leaf` make of it."""
        for hook in list((leaf._backward_hooks or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    def run_hooks(self, used: Sequence[bool]) -> None:
        """Run the hooks of the parameters that were used, which have their gradients now."""
        for shell, is_used in zip(self.shells, used, strict=True):
            if is_used:
                hooks: Any = shell._local._post_accumulate_grad_hooks
                for hook in list((hooks or {}).values()):
                    hook(shell._local)

    def _as_parameters(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            entry.form.shown(part, shape) for entry, part, shape in zip(self.entries, parts, self.shapes, strict=True)
        ]

    def _pieces(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """This rank's pieces of the parameters, views of its range, in the shapes of the leaves."""
        pieces = self._stretches(shard)
        if self._reshaped:
            pieces = list(pieces)
            for i, form, shape in self._reshaped:
                pieces[i] = form.shown(pieces[i], shape)
        return pieces

    def _stretches(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        sizes, pieces = self._own_parting
        return shard.split_with_sizes(sizes)[pieces]
