"""Dims from torch's ``dim`` arguments."""

from __future__ import annotations

from collections.abc import Iterable


def one_dim(ndim: int, dim: int) -> int:
    """Return `dim` of a tensor of `ndim` dims, counted from the front.

    Raises:
        IndexError: as in torch: it is out of range.

    Example:
        >>> one_dim(3, -1), one_dim(0, -1)
        (2, 0)
    """
    bound = max(ndim, 1)
    if not -bound <= dim < bound:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but got {dim})")
    return dim % bound


def several_dims(ndim: int, dim: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the dims of one number, several, or None (all of them), sorted and counted from the front.

    Raises:
        IndexError: as in torch: one is out of range.
        RuntimeError: as in torch: one appears twice.

    Example:
        >>> several_dims(3, (-1, 0)), several_dims(2, None), several_dims(2, ())
        ((0, 2), (0, 1), (0, 1))
    """
    if dim is None:
        return tuple(range(ndim))
    if isinstance(dim, int):
        return (one_dim(ndim, dim),)
    dims = tuple(sorted(one_dim(ndim, d) for d in dim))
    if len(set(dims)) != len(dims):
        twice = next(d for d in dims if dims.count(d) > 1)
        raise RuntimeError(f"dim {twice} appears multiple times in the list of dims")
    return dims or tuple(range(ndim))
