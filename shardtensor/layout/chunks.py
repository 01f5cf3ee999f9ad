"""The sizes of torch.chunk, with the function names of torch's ``_shard`` package."""

from __future__ import annotations

from typing import Any


def get_split_size(dim_size: int, chunks: int) -> int:
    """Return the size of a full chunk: ceil(dim_size / chunks). Only the last chunks are smaller.

    Example:
        >>> get_split_size(5, 4), get_split_size(9, 4), get_split_size(10, 5)
        (2, 3, 2)
    """
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Return the size of chunk `idx`; 0 if the chunks before it hold all elements.

    Example:
        >>> [get_chunked_dim_size(5, 2, i) for i in range(4)]
        [2, 2, 1, 0]
    """
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(sharding_dim_size: int, world_size: int, spec: Any, rank: int) -> tuple[int, int]:
    """Return the offset and size of `rank`'s chunk; ``(-1, -1)`` if no placement of the spec names the rank."""
    split_size = get_split_size(sharding_dim_size, world_size)
    for index, placement in enumerate(spec.placements):
        if placement.rank() == rank:
            length = get_chunked_dim_size(sharding_dim_size, split_size, index)
            return min(split_size * index, sharding_dim_size), length
    return -1, -1
