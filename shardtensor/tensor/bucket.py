"""`Bucket`: parameters of one dtype that lie end to end in one flat buffer, and their gradients, packed in another.

It computes where each parameter lies; its users own the buffers. `fully_shard` gathers and reduces a buffer over the
ranks that hold ranges of it, `data_parallel` reduces a replicated one, and optimizers step a rank's range, a
`FlatShard`, as one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs
import torch

from shardtensor.layout.ranges import Ranges, ShardPlacement

KEPT_BYTES = 1 << 24
"""Larger gradient buffers are freed after each backward: memory use is highest at the loss, before the next one."""

Shape = tuple[int, ...]
Grads = Sequence[torch.Tensor | None]


class Bucket:
    """The positions of parameters in a flat buffer; each rank holds one range of it. It holds no values.

    Args:
        placements, shapes: of the parameters, in the order in which they lie in the buffer.
        ranges: which elements each rank holds.
        index: this rank's place among the ranges.

    Attributes:
        total, chunk: elements of the buffer, and of a rank's range.
        starts: where this rank's shard of each parameter begins in its range.
    """

    def __init__(self, placements: Sequence[ShardPlacement], shapes: Sequence[Shape], ranges: Ranges, index: int):
        self.ranges, self.index = ranges, index
        self.total, self.chunk = ranges.total, ranges.chunk
        self._params = list(zip(placements, shapes, strict=True))
        self._sizes = ranges.all_cuts()
        self._gaps = [i for i, size in enumerate(self._sizes) if not i % 2 and size]
        self._reshaped: list[tuple[int, ShardPlacement, Shape]] = []
        own = ranges.cuts(index)
        *starts, _ = accumulate(own)
        self.starts = tuple(starts[::2])
        *gaps, last = own[::2]
        # A split makes a view for each size, in each step: empty gaps are left out if all but the last are empty.
        self._own_sizes = own if any(gaps) else own[1::2] + ([last] if last else [])
        self._own_params = slice(1, None, 2) if any(gaps) else slice(len(gaps))

    def views(self, whole: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the parameters in a whole buffer, and the padding between them."""
        views = whole.split_with_sizes(self._sizes)
        params = [
            placement.as_param(view, shape) for (placement, shape), view in zip(self._params, views[1::2], strict=True)
        ]
        return params, [views[i] for i in self._gaps]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's range of a whole buffer."""
        return whole.narrow(0, self.index * self.chunk, self.chunk)

    def reshape(self, i: int, shape: Shape) -> None:
        """Make `shards` return parameter `i` in this shape: a slice of a dim other than the first is no flat range."""
        self._reshaped.append((i, self._params[i][0], shape))

    def shards(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return this rank's shards of the parameters, as views of its range."""
        shards = self.flat_shards(own)
        if self._reshaped:
            shards = list(shards)
            for i, placement, shape in self._reshaped:
                shards[i] = placement.as_param(shards[i], shape)
        return shards

    def flat_shards(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the same as flat tensors."""
        return own.split_with_sizes(self._own_sizes)[self._own_params]

    def gradient_buffer(self, memory: torch.Tensor) -> GradientBuffer:
        """Return the gradient buffer in flat `memory`, of `total` elements, or of `chunk` more to hold the sum."""
        packed, behind = memory[: self.total], memory[self.total :]
        params, padding = self.views(packed)
        return GradientBuffer(packed, params, padding, behind if len(behind) else self.own(packed))


@attrs.frozen(eq=False)
class GradientBuffer:
    """Gradients of a bucket's parameters, packed for a reduction.

    Attributes:
        packed: all gradients, end to end.
        params, padding: views of it.
        summed: where a reduce-scatter writes this rank's range of the sum: in place, or behind `packed`.
    """

    packed: torch.Tensor
    params: list[torch.Tensor]
    padding: list[torch.Tensor]
    summed: torch.Tensor

    def pack(self, grads: Grads) -> list[bool]:
        """Copy gradients into the buffer, zeros for parameters that have none; return which have one."""
        params, zeros = self.params, self.padding
        used = [grad is not None for grad in grads]
        if not all(used):
            zeros = zeros + [param for param, grad in zip(params, grads, strict=True) if grad is None]
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if zeros:
            torch._foreach_zero_(zeros)
        if params:
            torch._foreach_copy_(params, grads)  # type: ignore[arg-type]
        return used


def allocate(memory: torch.Tensor) -> None:
    """Allocate the memory of a flat tensor again after `free`; views use it, and their values are undefined."""
    storage = memory.untyped_storage()
    if not storage.nbytes():
        storage.resize_(memory.nbytes)


def free(memory: torch.Tensor) -> None:
    """Free the memory of a flat tensor, if it is large, until the next backward; 0.2 ms with `allocate`."""
    if memory.nbytes > KEPT_BYTES and not memory.is_meta:
        memory.untyped_storage().resize_(0)


class FlatShard:
    """A flat tensor `whole` that contains the leaves of parameters, which begin at `starts`; the ``_flat_shard`` of a
    leaf is this object and the leaf's number.

    The leaves get gradients that are the same parts of one tensor like `whole`, so an optimizer can step all of it as
    one tensor: the gaps are zero in `whole` and in the gradient. Autograd does not run hooks of leaves whose gradients
    it does not set; the code that sets them reads `has_hooks`.
    """

    __slots__ = ("has_hooks", "starts", "whole")

    def __init__(self, whole: torch.Tensor, starts: tuple[int, ...]) -> None:
        self.whole, self.starts = whole, starts
        self.has_hooks = False


def flat_shard_of(leaf: torch.Tensor) -> tuple[FlatShard, int] | None:
    """Return the `FlatShard` that contains `leaf`, and its number there; None without one."""
    return vars(leaf).get("_flat_shard")
