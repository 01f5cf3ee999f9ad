"""The simplest spec that says what a list of shards says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec
from shardtensor.spec.nodes import ShardingSpec


def infer_sharding_spec(shards_metadata: Sequence[Any]) -> ShardingSpec:
    """Return the chunk spec that makes just these shards, or else the spec that lists them.

    The order of the list says nothing; placements are ordered by offset. One shard alone says no dim, and is listed.

    Args:
        shards_metadata: `ShardMetadata` of every shard, or what has its three attributes.

    Example:
        >>> from shardtensor.spec.devices import ShardMetadata
        >>> print(infer_sharding_spec([ShardMetadata([2], [1], "rank:1"), ShardMetadata([0], [2], "rank:0")]))
        chunk(dim=0, placements=["rank:0-1/cpu"])
    """
    listed = EnumerableShardingSpec(shards_metadata)
    boxes = listed.boxes
    cut_dims = {dim for box in boxes for dim, offset in enumerate(box.offsets) if offset}
    if len(cut_dims) != 1:
        return listed
    (dim,) = cut_dims
    if len({box.sizes[:dim] + box.sizes[dim + 1 :] for box in boxes}) > 1 or any(
        box.placement is None for box in boxes
    ):
        return listed
    length = sum(box.sizes[dim] for box in boxes)
    chunk = -(-length // len(boxes))
    for i, box in enumerate(boxes):
        start = min(chunk * i, length)
        if box.sizes[dim] != min(chunk, length - start) or (box.sizes[dim] and box.offsets[dim] != start):
            return listed
    return ChunkShardingSpec(dim, [box.placement for box in boxes])
