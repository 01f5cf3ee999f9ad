"""What ``torch.distributed.checkpoint`` asks of a tensor: the boxes that a rank writes and reads, and their memory.

A file holds boxes with offsets in the global tensor, whatever layout wrote them, so a tensor loads into any layout and
any number of ranks, and files are read by, and written for, plain tensors and DTensors, too. Ranks that hold copies
list the same boxes; the planner of torch chooses one writer for each. A flat range that ends inside a row is several
boxes, as everywhere in `layout`. Nothing here sends anything.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardtensor.errors import RuleError
from shardtensor.layout.box import Box, whole
from shardtensor.tensor.sharded_tensor import ShardedTensor


def create_write_items(tensor: ShardedTensor, fqn: str, saved: Any) -> list[Any]:
    """Return a `WriteItem` for each box that this rank holds. A tensor without elements is one empty box.

    Raises:
        RuleError: the ranks still hold addends. The planner runs on every rank, so that all raise.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    _refuse_addends(tensor, fqn)
    properties = TensorProperties.create_from_tensor(tensor._local)
    size = torch.Size(tensor._layout.shape)
    boxes = _boxes(tensor)
    if not size.numel() and tensor._group.rank in tensor._layout.ranks:
        boxes = {(0,) * len(size): (0, whole(tuple(size)))}  # so that its name is in the file
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=size),
        )
        for _, box in boxes.values()
    ]


def create_chunk_list(tensor: ShardedTensor) -> list[Any]:
    """Return the boxes that this rank has to read, perhaps none.

    Raises:
        RuleError: the ranks hold addends, which the loaded value would be added up from.
    """
    _refuse_addends(tensor)
    return [_chunk(box) for _, box in _boxes(tensor).values()]


def get_tensor_shard(tensor: ShardedTensor, index: Any) -> torch.Tensor:
    """Return the local memory of the box at ``index.offset``: what is written there is written into the tensor.

    Raises:
        ValueError: this rank holds no such box.
    """
    offsets = tuple(index.offset or (0,) * len(tensor._layout.shape))
    if not math.prod(tensor._layout.shape):
        return tensor._local.detach().new_empty(tensor._layout.shape)
    found = _boxes(tensor).get(offsets)
    if found is None:
        raise ValueError(f"rank {tensor._group.rank} holds no box at {offsets} of {index.fqn}")
    with torch.no_grad():
        return tensor._shard_tensor(found[0]).detach()  # shares the version counter, which tells of the load


def _boxes(tensor: ShardedTensor) -> dict[tuple[int, ...], tuple[int, Box]]:
    """The boxes with elements that this rank holds, and their numbers, by offsets, which no two of them share."""
    boxes = tensor._layout.boxes(tensor._group.rank)
    return {box.offsets: (i, box) for i, box in enumerate(boxes) if box.numel}


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _refuse_addends(tensor: ShardedTensor, fqn: str | None = None) -> None:
    if tensor._layout.partial:
        raise RuleError(
            "a checkpoint takes no tensor that is still to be reduced",
            {**({"tensor": fqn} if fqn else {}), "spec": str(tensor.sharding_spec())},
            "reduce it first: st.reshard(tensor, spec) with a spec that is not partial",
        )


ShardedTensor.__create_write_items__ = create_write_items  # type: ignore[attr-defined]
ShardedTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[attr-defined]
ShardedTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[attr-defined]
