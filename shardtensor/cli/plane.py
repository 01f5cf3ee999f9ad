"""The boxes of a tensor as rectangles of a plane: two of its dims, as many planes as further dims are cut into."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, product

import attrs

from shardtensor.layout.box import Box

_Stretch = tuple[int, int, int, int, int]
"""Of a strip, which is a plane with both ends of one side: those, and the ends of the other side."""

MAX_RUNS = 2000
"""Of a tensor drawn as one line; with more there is nothing to see."""


@attrs.frozen
class Rect:
    """Elements ``top`` to ``bottom`` down, ``left`` to ``right`` across, of one of the planes."""

    plane: int
    top: int
    bottom: int
    left: int
    right: int


@attrs.frozen
class Plane:
    """How a tensor is drawn.

    Attributes:
        down, across: the dims that are drawn; None for one of length 1. `across` is -1 where all elements lie in one
            line, row-major.
        apart: further dims that are cut, each drawn as planes beside one another.
        height, width: in elements.
        titles: for each plane, the intervals of the dims apart.
    """

    shape: tuple[int, ...]
    down: int | None
    across: int | None
    apart: tuple[int, ...] = ()
    height: int = 1
    width: int = 1
    titles: tuple[tuple[tuple[int, int], ...], ...] = ((),)

    def rects(self, boxes: Sequence[Box]) -> tuple[Rect, ...]:
        """Where boxes lie; empty ones nowhere, and those that lie side by side in one."""
        found = [rect for box in boxes if box.numel for rect in self._rects(box)]
        return _joined(found)

    def _rects(self, box: Box) -> list[Rect]:
        if self.across == -1:
            return [Rect(0, 0, 1, start, stop) for start, stop in line_runs(box, self.shape)]
        key = tuple((box.offsets[dim], box.ends[dim]) for dim in self.apart)
        plane = self.titles.index(key)
        top, bottom = (0, 1) if self.down is None else (box.offsets[self.down], box.ends[self.down])
        left, right = (0, 1) if self.across is None else (box.offsets[self.across], box.ends[self.across])
        return [Rect(plane, top, bottom, left, right)]


def plane_of(shape: tuple[int, ...], boxes: Sequence[Box]) -> Plane | None:
    """Choose what of a tensor is drawn, so that all its boxes are seen; None where they are too fine for any picture.

    Example:
        >>> plane = plane_of((4, 8, 6), [Box((0, 0, 0), (4, 8, 3)), Box((0, 0, 3), (4, 8, 3))])
        >>> plane.down, plane.across, plane.height, plane.width
        (1, 2, 8, 6)
    """
    full = [box for box in boxes if box.numel]
    cut = [d for d, size in enumerate(shape) if any(box.sizes[d] != size for box in full)]
    if len(shape) < 2:
        return Plane(shape, None, 0 if shape else None, width=shape[0] if shape else 1)
    if len(shape) == 2:
        return Plane(shape, 0, 1, (), *shape)
    others = sorted((d for d in range(len(shape)) if d not in cut), key=lambda dim: (shape[dim], dim))
    drawn = sorted([*cut[-2:], *others[len(others) - max(0, 2 - len(cut)) :]])
    apart = tuple(cut[:-2])
    sides = [sorted({(box.offsets[dim], box.ends[dim]) for box in full}) for dim in apart]
    if all(one[1] <= other[0] for side in sides for one, other in pairwise(side)):
        titles = tuple(product(*sides))
        return Plane(shape, drawn[0], drawn[1], apart, shape[drawn[0]], shape[drawn[1]], titles)
    if sum(_count_runs(box, shape) for box in full) > MAX_RUNS:
        return None
    return Plane(shape, None, -1, width=math.prod(shape))


def line_runs(box: Box, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The stretches of the row-major elements of a tensor that a box is made of.

    Example:
        >>> line_runs(Box((0, 1), (2, 2)), (2, 4))
        [(1, 3), (5, 7)]
    """
    last = _last_cut(box, shape)
    run = math.prod(box.sizes[last:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = []
    for index in product(*(range(o, o + n) for o, n in zip(box.offsets[:last], box.sizes[:last], strict=True))):
        start = sum(i * s for i, s in zip((*index, *box.offsets[last:]), strides, strict=True))
        found.append((start, start + run))
    return found


def _last_cut(box: Box, shape: tuple[int, ...]) -> int:
    return max((dim for dim, size in enumerate(shape) if box.sizes[dim] != size), default=0)


def _count_runs(box: Box, shape: tuple[int, ...]) -> int:
    return math.prod(box.sizes[: _last_cut(box, shape)])


def _joined(rects: Sequence[Rect]) -> tuple[Rect, ...]:
    """Rectangles with those in one that lie below or beside one another and fit."""
    down = _in_runs((r.plane, r.left, r.right, r.top, r.bottom) for r in rects)
    across = _in_runs((plane, top, bottom, left, right) for plane, left, right, top, bottom in down)
    return tuple(Rect(*each) for each in across)


def _in_runs(stretches: Iterable[_Stretch]) -> list[_Stretch]:
    """Stretches of one strip that follow one another as one."""
    found: list[_Stretch] = []
    for stretch in sorted(stretches):
        last = found[-1] if found else None
        if last and (*last[:3], last[4]) == stretch[:4]:
            found[-1] = (*last[:4], stretch[4])
        else:
            found.append(stretch)
    return found
