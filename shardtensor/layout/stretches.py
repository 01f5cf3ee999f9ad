"""A dim cut again and again: which stretches of it each place is left with, and how those are told as pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from shardtensor.layout.pieces import Blocked, Interval, Pieces, chunked, listed

Runs = tuple[Interval, ...]
"""Stretches of a dim, in the order in which a rank holds them."""


def nested_parts(length: int, counts: tuple[int, ...], blocks: tuple[int, ...]) -> list[Runs]:
    """What is left of a dim for each place of the axes that cut it, row-major."""
    parts: list[Runs] = [((0, length),)]
    for count, stretches in zip(counts, blocks, strict=True):
        parts = [part for runs in parts for part in _chunks_of_stretches(runs, count, stretches)]
    return parts


def _chunks_of_stretches(runs: Runs, count: int, stretches: int) -> list[Runs]:
    """Chunk what is left into stretches, and each of them into `count`: part i is all the i-th ones."""
    first = [_taken(runs, *chunked(_size(runs), stretches).interval(i)) for i in range(stretches)]
    cut = [[_taken(part, *chunked(_size(part), count).interval(i)) for part in first] for i in range(count)]
    return [joined(run for part in parts for run in part) for parts in cut]


def _taken(runs: Runs, start: int, stop: int) -> Runs:
    """The elements from one place to another of runs laid end to end."""
    found, at = [], 0
    for low, high in runs:
        a, b = max(start - at, 0), min(stop - at, high - low)
        if a < b:
            found.append((low + a, low + b))
        at += high - low
    return tuple(found)


def joined(runs: Iterable[Interval]) -> Runs:
    """Runs with those that follow one another made one."""
    found: list[Interval] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _size(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def reordered(parts: Sequence[Runs], counts: tuple[int, ...], order: tuple[int, ...]) -> list[Runs]:
    """The parts, row-major over `counts`, in row-major order over the counts taken in another order."""
    found = []
    for steps in product(*(range(counts[i]) for i in order)):
        place = dict(zip(order, steps, strict=True))
        index = 0
        for i, count in enumerate(counts):
            index = index * count + place[i]
        found.append(parts[index])
    return found


def as_pieces(length: int, parts: Sequence[Runs]) -> Pieces:
    """Parts as pieces: blocks as few as hold at most one run of each part, in the order of the parts."""
    owned = sorted((start, stop, i) for i, runs in enumerate(parts) for start, stop in runs)
    blocks: list[list[tuple[int, int, int]]] = [[]]
    for run in owned:
        if blocks[-1] and run[2] <= blocks[-1][-1][2]:
            blocks.append([])
        blocks[-1].append(run)
    cut = []
    for block in blocks:
        sizes = [0] * len(parts)
        for start, stop, i in block:
            sizes[i] = stop - start
        cut.append(listed(tuple(sizes)))
    assert sum(pieces.length for pieces in cut) == length, "the parts make up the dim"
    return cut[0] if len(cut) == 1 else Blocked(tuple(cut))
