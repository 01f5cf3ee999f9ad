"""Indexing by tensors, lists and masks: ``x[1:, ids]``, ``x[mask]``, index_put and assignment.

As torch does, integers, slices and None come first, and the tensors index what they give. A mask of leading dims
selects from the rows that each rank has; one of other dims becomes the indices where it is true.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardtensor.ops.lookup import index_of
from shardtensor.ops.masks import select
from shardtensor.tensor.sharded_tensor import ShardedTensor


class Advanced(NamedTuple):
    """An index, apart in two.

    Attributes:
        basic: integers, slices and None, with a whole slice wherever a tensor stood.
        tensors: integer tensors and masks, and None, for the dims of what `basic` gives; a mask has several dims.
    """

    basic: tuple[Any, ...]
    tensors: tuple[torch.Tensor | None, ...]

    @property
    def is_plain(self) -> bool:
        """Whether `basic` takes all there is."""
        return all(isinstance(item, slice) and item == slice(None) for item in self.basic)

    @property
    def leading_mask(self) -> torch.Tensor | None:
        """The mask of the first dims, where it is all there is."""
        first = self.tensors[0]
        alone = all(t is None for t in self.tensors[1:])
        return first if first is not None and first.dtype == torch.bool and alone else None

    def indices(self) -> list[torch.Tensor | None]:
        """One integer tensor, or None, for each dim: a mask tells where it is true."""
        found: list[torch.Tensor | None] = []
        for item in self.tensors:
            if item is None or item.dtype != torch.bool:
                found.append(item)
            else:
                mask = item.full_tensor() if isinstance(item, ShardedTensor) else item
                found += mask.nonzero(as_tuple=True)
        return found


def advanced(index: Any, shape: tuple[int, ...], device: torch.device) -> Advanced | None:
    """Read an index that has tensors in it; None for what torch shall judge (floats, True and False, ragged lists)."""
    items = list(index) if isinstance(index, tuple) else [index]
    for i, item in enumerate(items):
        if isinstance(item, bool) or (isinstance(item, torch.Tensor) and item.dtype == torch.bool and not item.dim()):
            return None
        if isinstance(item, list | range) or type(item).__module__ == "numpy":
            try:
                items[i] = item = torch.as_tensor(list(item) if isinstance(item, range) else item)
            except (TypeError, ValueError, RuntimeError):
                return None
            if not item.numel():
                items[i] = item = item.to(torch.int64)
        if isinstance(item, torch.Tensor):
            if item.dtype == torch.uint8 or item.is_floating_point() or item.is_complex():
                return None
            if item.device != device:  # torch takes indices from the CPU for a tensor elsewhere
                items[i] = item = item.to(device)
            if not item.dim():
                items[i] = int(item)
    if sum(item is Ellipsis for item in items) > 1:
        return None
    taking = sum(_taken(item) for item in items)
    if taking > len(shape):
        return None
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - taking)
    basic: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    dim = 0
    for item in items:
        if isinstance(item, torch.Tensor):
            count = _taken(item)
            if item.dtype == torch.bool and tuple(item.shape) != shape[dim : dim + count]:
                return None
            basic += [slice(None)] * count
            tensors.append(item)
        else:
            basic.append(item)
            if item is None or isinstance(item, slice):
                tensors.append(None)
        dim += _taken(item)
    return Advanced(tuple(basic), tuple(tensors)) if any(t is not None for t in tensors) else None


def _taken(item: Any) -> int:
    """How many dims an item indexes."""
    if isinstance(item, torch.Tensor):
        return item.dim() if item.dtype == torch.bool else 1
    return int(item is not None and item is not Ellipsis)


def read(x: torch.Tensor, found: Advanced) -> torch.Tensor | None:
    """What an index gives of `x`, a copy; None where it must be gathered."""
    if not found.is_plain:
        x = x[found.basic]
    mask = found.leading_mask
    if mask is not None:
        if not isinstance(x, ShardedTensor) and not isinstance(mask, ShardedTensor):
            return x[mask]
        return select(x, mask)
    return index_of(x, found.indices())
