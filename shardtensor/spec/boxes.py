"""Do boxes share an element? Integers only."""

from __future__ import annotations

from collections.abc import Sequence

Extent = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a box."""


def find_overlap(boxes: Sequence[Extent]) -> tuple[int, int] | None:
    """Return the indices of two boxes that share an element, or None. An empty box overlaps nothing.

    Grids, and whatever else straight cuts make, cost n log n: boxes are parted along one dim after another.

    Example:
        >>> find_overlap([((0, 0), (5, 4)), ((5, 0), (5, 4)), ((4, 1), (2, 2))])
        (0, 2)
    """
    live = [i for i, (_, sizes) in enumerate(boxes) if all(sizes)]
    parts = [live]
    while parts:
        part = parts.pop()
        if len(part) < 2:
            continue
        for dim in range(len(boxes[part[0]][0])):
            split = _split(boxes, part, dim)
            if len(split) > 1:
                parts += split
                break
        else:
            pair = _sweep(boxes, part)
            if pair is not None:
                return pair
    return None


def _split(boxes: Sequence[Extent], part: list[int], dim: int) -> list[list[int]]:
    """Part boxes wherever a straight cut across `dim` meets none of them."""
    groups: list[list[int]] = []
    end = -1
    for i in sorted(part, key=lambda i: boxes[i][0][dim]):
        offsets, sizes = boxes[i]
        if offsets[dim] >= end:
            groups.append([])
        groups[-1].append(i)
        end = max(end, offsets[dim] + sizes[dim])
    return groups


def _sweep(boxes: Sequence[Extent], part: list[int]) -> tuple[int, int] | None:
    """Compare each box with those that begin before it ends."""
    ndim = len(boxes[part[0]][0])
    dim = max(range(ndim), key=lambda d: len({boxes[i][0][d] for i in part}), default=None)
    if dim is None:  # boxes without dims are all the one element
        return min(part), max(part)
    order = sorted(part, key=lambda i: boxes[i][0][dim])
    for at, i in enumerate(order):
        end = boxes[i][0][dim] + boxes[i][1][dim]
        for later in range(at + 1, len(order)):
            j = order[later]
            if boxes[j][0][dim] >= end:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(*boxes[i], *boxes[j], strict=True)):
                return min(i, j), max(i, j)
    return None
