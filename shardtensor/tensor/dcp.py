"""What ``torch.distributed.checkpoint`` asks of a tensor: the boxes to write and to read, and the memory of each.

A file holds boxes with offsets in the global tensor, whatever layout wrote them, so a tensor loads into any layout and
any number of ranks, plain tensors and DTensors too. Ranks that hold replicas list the same boxes; torch's planner
chooses one writer for each. The copies of ``async_save``, which call no method of a tensor, are extended.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from shardtensor.errors import RuleError
from shardtensor.imports import when_imported
from shardtensor.layout.box import Box, whole
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


def create_write_items(tensor: ShardedTensor, fqn: str, saved: Any) -> list[Any]:
    """Return a `WriteItem` for each box that this rank holds. A tensor without elements is one empty box."""
    rank = tensor._group.rank
    boxes = [box for _, box in _boxes(tensor).values()]
    if rank in tensor._layout.ranks and not math.prod(tensor._layout.shape):
        boxes = [whole(tensor._layout.shape)]  # so that its name is in the file
    return _write_items(tensor, fqn, boxes)


def _write_items(tensor: ShardedTensor, fqn: str, boxes: Iterable[Box]) -> list[Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    _refuse_partials(tensor, fqn)
    properties = TensorProperties.create_from_tensor(tensor._local)
    size = torch.Size(tensor._layout.shape)
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=size),
        )
        for box in boxes
    ]


def create_chunk_list(tensor: ShardedTensor) -> list[Any]:
    """Return the boxes that this rank has to read, perhaps none."""
    _refuse_partials(tensor)
    return [_chunk(box) for _, box in _boxes(tensor).values()]


def get_tensor_shard(tensor: ShardedTensor, index: Any) -> torch.Tensor:
    """Return the local memory of the box at ``index.offset``: a write there is a write into the tensor.

    Raises:
        ValueError: there is no offset, and not every rank holds the whole tensor; or this rank holds no box there.
    """
    shape, offsets = tensor._layout.shape, index.offset
    if offsets is None and not tensor._layout.is_replicated:
        raise ValueError(f"Cannot lookup {index.fqn} since its a ShardedTensor and no offset was provided")
    if not math.prod(shape):
        return tensor._local.detach().new_empty(shape)
    found = _boxes(tensor).get((0,) * len(shape) if offsets is None else tuple(offsets))
    if found is None:
        raise ValueError(
            f"Could not find shard at '{offsets}' for FQN: '{index.fqn}' among those of rank {tensor._group.rank}"
        )
    with torch.no_grad():
        return tensor._shard_tensor(found[0]).detach()  # shares the version counter, which counts the load


def _boxes(tensor: ShardedTensor) -> dict[tuple[int, ...], tuple[int, Box]]:
    """Return this rank's boxes that have elements, with their numbers, by offsets, which are unique."""
    boxes = tensor._layout.boxes(tensor._group.rank)
    return {box.offsets: (i, box) for i, box in enumerate(boxes) if box.numel}


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _refuse_partials(tensor: ShardedTensor, fqn: str | None = None) -> None:
    if tensor._layout.partial:
        raise RuleError(
            "a checkpoint takes no tensor that is still to be reduced",
            {**({"tensor": fqn} if fqn else {}), "spec": str(tensor.sharding_spec())},
            "reduce it first: st.reshard(tensor, spec) with a spec that is not partial",
        )


ShardedTensor.__create_write_items__ = create_write_items  # type: ignore[attr-defined]
ShardedTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[attr-defined]
ShardedTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[attr-defined]


def _extend_stager(module: ModuleType) -> None:
    """Make ``async_save`` copy the local tensor of a sharded one."""
    stager = module.StateDictStager
    offload = stager._offload_tensor

    @functools.wraps(offload)
    def offload_sharded(self: Any, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(x, ShardedTensor):
            return offload(self, x, memo, non_blocking)
        local = self.deepcopy_with_tensor_offload(x._local, memo, non_blocking=non_blocking)
        memo[id(x)] = copied = wrap(local, x._layout, None, x._group)
        return copied

    stager._offload_tensor = offload_sharded


when_imported("torch.distributed.checkpoint._state_dict_stager", _extend_stager)
