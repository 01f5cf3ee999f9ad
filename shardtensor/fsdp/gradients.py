"""The gradients of a parameter group: accumulated, packed, summed over the ranks, set on the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.tensor.bucket import Bucket, FlatShard, GradientBuffer, Grads
from shardtensor.tensor.sharded_tensor import ShardedTensor


class GroupGradients:
    """Gradients of one `ParamGroup`.

    Attributes:
        position: of the group in its model; the same on all ranks.
        dtype, dtypes: of gradients, and of each parameter's gradient if they differ, else None.
        requires_sync: whether backward reduces gradients, or accumulates them on each rank (``no_sync``).
        all_reduces: with replicas: sum over them in the next backward, or accumulate the sums of the shard group.
        held: unsharded gradients of the present backward that were not sent yet.
        is_accumulating: whether there are unsharded gradients of earlier backwards.
        hook, stream: `FSDPModule.set_all_reduce_hook`.
        offload_to: starts to copy this rank's range of a gradient to the CPU; None without offloading.
        flat_shard: records whether any leaf has hooks.
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
        """Drop all accumulated gradients."""
        self.held: Grads | None = None
        self.is_accumulating = False
        self._unsharded: list[torch.Tensor | None] = []
        self._is_own: list[bool] = []
        self._partial: torch.Tensor | None = None
        self._partial_used: list[bool] = []

    def over(self, sharded_params: list[ShardedTensor]) -> GroupGradients:
        """Return an object with the same settings for a copy of the group, with nothing accumulated."""
        copied = copy.copy(self)
        copied._sharded_params = sharded_params
        copied.forget()
        return copied

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
        """Keep the gradients of unsharded parameters until they are packed, added to those already kept."""
        if not self.requires_sync:
            self._accumulate(grads)
        elif self.held is None:
            self.held = grads
        else:
            self.held = [a if b is None else b if a is None else a + b for a, b in zip(self.held, grads, strict=True)]

    def _accumulate(self, grads: Grads) -> None:
        """Add gradients, in the dtype of reductions if that is wider than theirs."""
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
            else:  # autograd may have passed the same tensor to other nodes too
                self._unsharded[i], self._is_own[i] = kept + wide, True

    @property
    def are_waiting(self) -> bool:
        """Whether gradients of earlier backwards are not reduced yet."""
        return self.is_accumulating or self._partial is not None

    @property
    def are_due(self) -> bool:
        """Whether a reduction now would include them."""
        return self.requires_sync and (self.is_accumulating or (self._partial is not None and self.all_reduces))

    @property
    def input_bytes(self) -> int:
        """The bytes of an input buffer, with the output behind it on devices other than cuda."""
        count = self._bucket.total + (0 if self.data_mesh.whole.device_type == "cuda" else self._bucket.chunk)
        return count * self.reduce_dtype.itemsize

    def input_buffer(self, memory: torch.Tensor) -> GradientBuffer:
        """Return the input buffer in `memory`, a tensor of bytes."""
        return self._bucket.gradient_buffer(memory[: self.input_bytes].view(self.reduce_dtype))

    def pack(self, buffer: GradientBuffer) -> list[bool]:
        """Copy all gradients that are not reduced yet into a buffer, zeros for parameters that have none.

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
        """Start to reduce-scatter packed gradients over the shard group."""
        return self.data_mesh.reduce.reduce_scatter_into(buffer.summed, buffer.packed)

    # -- after it -----------------------------------------------------------------------------------------------------

    def receive(self, summed: torch.Tensor, used: list[bool]) -> torch.Tensor | None:
        """Return this rank's range of the sum as a new gradient, or added to the existing flat one.

        Args:
            summed: the sum over the shard group; overwritten.
            used: which parameters have a gradient; updated if accumulated sums have gradients of others.

        Returns:
            None if the sum is kept until a later backward sums it over the replicas.
        """
        scale = self._scale
        replicate = self.data_mesh.replicate
        if replicate is not None and not self._sum_over(replicate, summed, used):
            return None
        if self.hook is not None:
            summed.mul_(scale)
            self._run_hook(summed)
            scale = 1.0
        grad = None if self.flat_shard.has_hooks else self._flat_gradient()  # hooks get each sum alone
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
        """Return the flat tensor that the gradients of all parameters are views of, or None.

        Only those views refer to it: its memory is freed with them.
        """
        grads = [sharded._local.grad for sharded in self._sharded_params]
        whole = grads[0]._base if grads[0] is not None else None
        if whole is None or whole.shape != (self._bucket.chunk,):
            return None
        return None if any([grad is None or grad._base is not whole for grad in grads]) else whole

    def attach(self, grad: torch.Tensor, used: Sequence[bool]) -> None:
        """Set the gradients of the parameters that were used to views of this rank's range; run their hooks."""
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
                own.add_(shard)  # a gradient that the user set, or one from when other parameters had none

    def run_hooks(self, used: Sequence[bool]) -> None:
        """Run the post-accumulate-grad hooks of the parameters that were used."""
        for sharded, is_used in zip(self._sharded_params, used, strict=True):
            hooks: Any = sharded._local._post_accumulate_grad_hooks
            for hook in list((hooks or {}).values()) if is_used else ():
                hook(sharded._local)


def _hooked(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return `grad` after the hooks on the gradient of a leaf."""
    for hook in list((leaf._backward_hooks or {}).values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad
