"""What a parameter group does with gradients: holds, packs and sums them, and gives each parameter its piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor.comm.group import Group
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.param_info import ParamInfo, ShardPlacement
from shardtensor.layout.ranges import Ranges
from shardtensor.tensor.pieces import Pieces
from shardtensor.tensor.sharded_tensor import ShardedTensor

Grads = Sequence[torch.Tensor | None]


class AccumulatedGradients:
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

    def fresh(self) -> AccumulatedGradients:
        """One with the same settings and nothing that waits."""
        made = AccumulatedGradients(self.replicate)
        made.dtype, made.all_reduces = self.dtype, self.all_reduces
        made.set_hook(self.hook, self.stream)
        return made

    def drop(self) -> None:
        """Forget all that waits."""
        self._whole, self._partial, self.is_loaded = [], None, False


class ParamGroupGradients:
    """The part of `ParamGroup` that comes after a backward."""

    params_info: list[ParamInfo]
    shapes: list[tuple[int, ...]]
    sharded_params: list[ShardedTensor]
    shard: torch.Tensor
    data_mesh: DataMesh
    ranges: Ranges
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype
    grad_dtypes: list[torch.dtype] | None
    accumulated: AccumulatedGradients
    pieces: Pieces
    syncs: bool
    is_offloaded: bool
    held: Sequence[torch.Tensor | None] | None
    _own_parting: tuple[list[int], slice]
    _all_cuts: list[int]
    _gaps: list[int]
    prescale: float
    _reshaped: list[tuple[int, ShardPlacement, tuple[int, ...]]]

    @property
    def index(self) -> int:
        """This rank's place among those that hold one copy."""
        return self.data_mesh.shard.index

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the packed gradients."""
        return self.ranges.total * self.reduce_dtype.itemsize

    # -- gradients --------------------------------------------------------------------------------------------------

    def hold(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep gradients of whole parameters, added to those that are kept."""
        if not self.syncs:
            self.accumulated.add(grads)
        elif self.held is None:
            self.held = grads
        else:
            self.held = [a if b is None else b if a is None else a + b for a, b in zip(self.held, grads, strict=True)]

    def divide_by(self, factor: float) -> None:
        """Divide summed gradients by `factor`; in float16 their addends, since the sum may be too large for it."""
        self.divisor = factor
        is_first = self.reduce_dtype == torch.float16
        self.scale, self.prescale = (1.0, 1 / factor) if is_first else (1 / factor, 0.0)

    def take_held(self) -> Sequence[torch.Tensor | None]:
        """The gradients that are held, and those that waited, which are on their way from now on."""
        grads, self.held = self.held or [None] * len(self.sharded_params), None
        return self.accumulated.unload(grads) if self.accumulated.is_loaded else grads

    def cut_up(self, whole: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parameters' parts of a whole range, and what is between them."""
        cuts = whole.split_with_sizes(self._all_cuts)
        return self._as_parameters(cuts[1::2]), [cuts[i] for i in self._gaps]

    @property
    def takes_as_is(self) -> bool:
        """Whether all there is to do with a sum is to average it, into a new gradient of the sum's dtype."""
        is_plain = not self.accumulated.is_special and self.reduce_dtype == self.grad_dtype and not self.is_offloaded
        return is_plain and (self.pieces.has_hooks or self._kept_gradient() is None)

    def receive(self, summed: torch.Tensor, used: list[bool]) -> torch.Tensor | None:
        """Take this rank's range of the sum, averaged, into a new gradient or onto the one that is there; return it.

        None where it is kept back until the copies are summed; `used` then tells of all that is in the sum.
        """
        scale = self.scale
        if self.accumulated.is_special:
            left = self.accumulated.finish(summed, used, scale)
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
        grads = [sharded._local.grad for sharded in self.sharded_params]
        whole = grads[0]._base if grads[0] is not None else None
        if whole is None or whole.shape != self.shard.shape or any(g is None or g._base is not whole for g in grads):
            return None
        return whole

    def attach(self, grad: torch.Tensor, used: Sequence[bool]) -> None:
        """Make what was received the gradients of the parameters that were used."""
        pieces = None
        for i, (sharded, is_used) in enumerate(zip(self.sharded_params, used, strict=True)):
            leaf = sharded._local
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
        for sharded, is_used in zip(self.sharded_params, used, strict=True):
            if is_used:
                hooks: Any = sharded._local._post_accumulate_grad_hooks
                for hook in list((hooks or {}).values()):
                    hook(sharded._local)

    def _as_parameters(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            info.form.as_param(part, shape)
            for info, part, shape in zip(self.params_info, parts, self.shapes, strict=True)
        ]

    def _pieces(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """This rank's pieces of the parameters, views of its range, in the shapes of the leaves."""
        pieces = self._stretches(shard)
        if self._reshaped:
            pieces = list(pieces)
            for i, form, shape in self._reshaped:
                pieces[i] = form.as_param(pieces[i], shape)
        return pieces

    def _stretches(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        sizes, pieces = self._own_parting
        return shard.split_with_sizes(sizes)[pieces]
