"""The gradients of a parameter group: accumulated, packed, summed over the ranks, given to the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.parallel.data_mesh import DataMesh
from shardtensor.tensor.bucket import Bucket, FlatShard, GradientBuffer, Grads
from shardtensor.tensor.sharded_tensor import ShardedTensor


class GroupGradients:
    """Gradients of one `ParamGroup`.

    Attributes:
        position: of the group in its model; the same on all ranks.
        dtype, dtypes: of gradients, and of each parameter's where they differ, else None.
        requires_sync: whether backward reduces gradients, or accumulates them on each rank (``no_sync``).
        all_reduces: with replicas: sum over them in the next backward, or accumulate what one copy's ranks summed.
        held: unsharded gradients of the present backward that were not sent yet.
        is_accumulating: whether there are unsharded gradients of earlier backwards.
        hook, stream: `FSDPModule.set_all_reduce_hook`.
        offload_to: starts to copy this rank's range of a gradient to the CPU; None where it stays.
        flat_shard: says whether any leaf has hooks.
    """

    def __init__(
        self,
        bucket: Bucket,
        data_mesh: DataMesh,
        sharded_params: list[ShardedTensor],
        offload_to: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self._bucket, self.data_mesh, self._sharded_params = bucket, data_mesh, sharded_params
        self.offload_to = offload_to
        self.position = -1
        self.requires_sync = self.all_reduces = True
        self.hook: Callable[[torch.Tensor], None] | None = None
        self.stream: Any = None
        self.flat_shard: FlatShard
        self.dtype = self.reduce_dtype = torch.float32
        self.dtypes: list[torch.dtype] | None = None
        self.divide_by(float(data_mesh.whole.size))
        self.forget()

    def forget(self) -> None:
        """Drop all that is accumulated."""
        self.held: Grads | None = None
        self.is_accumulating = False
        self._unsharded: list[torch.Tensor | None] = []
        self._is_own: list[bool] = []
        self._partial: torch.Tensor | None = None
        self._partial_used: list[bool] = []

    def over(self, sharded_params: list[ShardedTensor]) -> GroupGradients:
        """Return the same settings for a copy of the group, with nothing accumulated."""
        twin = copy.copy(self)
        twin._sharded_params = sharded_params
        twin.forget()
        return twin

    def reduce_in(self, dtype: torch.dtype) -> None:
        """Set the dtype of reductions."""
        self.reduce_dtype = dtype
        self.divide_by(self.divisor)

    def divide_by(self, divisor: float) -> None:
        """Divide summed gradients by `divisor`; in float16 before they are summed, since the sum may be too large."""
        self.divisor = divisor
        is_first = self.reduce_dtype == torch.float16
        self._scale, self._prescale = (1.0, 1 / divisor) if is_first else (1 / divisor, 0.0)

    # -- before the reduction -----------------------------------------------------------------------------------------

    def hold(self, grads: Grads) -> None:
        """Keep the gradients of unsharded parameters, added to those that are kept."""
        if not self.requires_sync:
            self._accumulate(grads)
        elif self.held is None:
            self.held = grads
        else:
            self.held = [a if b is None else b if a is None else a + b for a, b in zip(self.held, grads, strict=True)]

    def _accumulate(self, grads: Grads) -> None:
        """Add gradients in the dtype of reductions where that is wider than theirs."""
        if not self._unsharded:
            self._unsharded, self._is_own, self.is_accumulating = [None] * len(grads), [False] * len(grads), True
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            wide = grad.to(self.reduce_dtype) if self.reduce_dtype.itemsize > grad.dtype.itemsize else grad
            kept = self._unsharded[i]
            if kept is None:
                self._unsharded[i], self._is_own[i] = wide, wide is not grad
            elif self._is_own[i]:
                kept.add_(wide)
            else:  # autograd may have given the same tensor to others
                self._unsharded[i], self._is_own[i] = kept + wide, True

    @property
    def are_waiting(self) -> bool:
        """Whether gradients of earlier backwards wait for a reduction."""
        return self.is_accumulating or self._partial is not None

    @property
    def are_due(self) -> bool:
        """Whether a reduction now would include them."""
        return self.requires_sync and (self.is_accumulating or (self._partial is not None and self.all_reduces))

    @property
    def input_bytes(self) -> int:
        """Bytes of an input buffer, and of the output behind it."""
        count = self._bucket.total + (0 if self.data_mesh.whole.device_type == "cuda" else self._bucket.chunk)
        return count * self.reduce_dtype.itemsize

    def input_buffer(self, memory: torch.Tensor) -> GradientBuffer:
        """Return the input buffer in `memory`, bytes."""
        return self._bucket.gradient_buffer(memory[: self.input_bytes].view(self.reduce_dtype))

    def pack(self, buffer: GradientBuffer) -> list[bool]:
        """Copy all gradients that wait into a buffer, zeros for parameters that have none.

        Returns:
            which parameters have one.
        """
        grads, self.held = self.held or [None] * len(self._sharded_params), None
        if self.is_accumulating:
            self._accumulate(grads)
            grads, self._unsharded, self.is_accumulating = self._unsharded, [], False
        used = buffer.pack(grads)
        if self._prescale:
            buffer.packed.mul_(self._prescale)
        return used

    def reduce(self, buffer: GradientBuffer) -> Pending:
        """Start to sum packed gradients over the ranks of one copy."""
        return self.data_mesh.reduce.reduce_scatter_into(buffer.summed, buffer.packed)

    # -- after it -----------------------------------------------------------------------------------------------------

    def receive(self, summed: torch.Tensor, used: list[bool]) -> torch.Tensor | None:
        """Make this rank's range of the sum a new gradient, or add it to the one that is there; return it.

        Args:
            summed: the sum over the ranks of one copy; overwritten.
            used: which parameters have a gradient; changed where accumulated sums have others.

        Returns:
            None where the sum is kept until a later backward sums it over the replicas.
        """
        scale = self._scale
        replicate = self.data_mesh.replicate
        if replicate is not None and not self._sum_over(replicate, summed, used):
            return None
        if self.hook is not None:
            summed.mul_(scale)
            self._run_hook(summed)
            scale = 1.0
        grad = None if self.flat_shard.has_hooks else self._flat_gradient()  # hooks see each sum by itself
        if self.offload_to is not None:
            averaged = summed.mul_(scale).to(self.dtype)
            return self.offload_to(averaged) if grad is None else grad.add_(averaged.cpu())
        if grad is not None:
            return grad.add_(summed, alpha=scale)
        if summed.dtype == self.dtype:
            return summed * scale
        return torch.mul(summed, scale, out=torch.empty_like(summed, dtype=self.dtype))

    def _sum_over(self, replicate: Group, summed: torch.Tensor, used: list[bool]) -> bool:
        if self._partial is not None:
            summed.add_(self._partial)
            used[:] = [a or b for a, b in zip(used, self._partial_used, strict=True)]
        if not self.all_reduces:
            self._partial, self._partial_used = summed.clone(), used
            return False
        self._partial = None
        replicate.all_reduce(summed)
        return True

    def _run_hook(self, averaged: torch.Tensor) -> None:
        assert self.hook is not None
        if self.stream is None:
            self.hook(averaged)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.hook(averaged)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _flat_gradient(self) -> torch.Tensor | None:
        """The flat tensor that the gradients of all parameters are views of, if it is there still.

        Nothing but those views keeps it: its memory is freed with them.
        """
        grads = [sharded._local.grad for sharded in self._sharded_params]
        whole = grads[0]._base if grads[0] is not None else None
        if whole is None or whole.shape != (self._bucket.chunk,):
            return None
        return None if any([grad is None or grad._base is not whole for grad in grads]) else whole

    def attach(self, grad: torch.Tensor, used: Sequence[bool]) -> None:
        """Make this rank's range the gradients of the parameters that were used, and run the hooks of those."""
        shards = None
        for i, (sharded, is_used) in enumerate(zip(self._sharded_params, used, strict=True)):
            leaf = sharded._local
            own = leaf.grad
            if not is_used or (own is not None and own._base is grad):
                continue
            shards = self._bucket.shards(grad) if shards is None else shards
            shard = _hooked(leaf, shards[i]) if self.flat_shard.has_hooks else shards[i]
            if own is None:
                leaf.grad = shard if self.dtypes is None else shard.to(self.dtypes[i])
            else:
                own.add_(shard)  # the user's own, or of a time when others had none

    def run_hooks(self, used: Sequence[bool]) -> None:
        """Run the hooks for after the accumulation of a gradient."""
        for sharded, is_used in zip(self._sharded_params, used, strict=True):
            hooks: Any = sharded._local._post_accumulate_grad_hooks
            for hook in list((hooks or {}).values()) if is_used else ():
                hook(sharded._local)


def _hooked(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return what the hooks on the gradient of a leaf make of `grad`."""
    for hook in list((leaf._backward_hooks or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad
