"""torch.chunk's sizes under the names that torch's own sharding code gives them."""

from __future__ import annotations

from typing import Any


def get_split_size(dim_size: int, chunks: int) -> int:
    """The size of all chunks but the last ones: ceil(dim_size / chunks).

    Example:
        >>> get_split_size(5, 4), get_split_size(9, 4), get_split_size(10, 5)
        (2, 3, 2)
    """
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """The size of chunk `idx`, 0 once the dim is used up.

    Example:
        >>> [get_chunked_dim_size(5, 2, i) for i in range(4)]
        [2, 2, 1, 0]
    """
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(sharding_dim_size: int, world_size: int, spec: Any, rank: int) -> tuple[int, int]:
    """The offset and size of `rank`'s chunk under a chunk spec, ``(-1, -1)`` for a rank it does not name."""
    split_size = get_split_size(sharding_dim_size, world_size)
    for index, placement in enumerate(spec.placements):
        if placement.rank() == rank:
            length = get_chunked_dim_size(sharding_dim_size, split_size, index)
            return min(split_size * index, sharding_dim_size), length
    return -1, -1
