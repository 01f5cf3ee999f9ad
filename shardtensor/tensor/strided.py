"""Copies between strided places of memory, settled once: as few as can be, in words as wide as all of them allow.

CUDA copies strided memory element by element; elements of two bytes leave most of its bandwidth unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

WIDEST = 16
"""Bytes of the widest word."""
_WORDS = {WIDEST: torch.complex128, 8: torch.int64}  # any dtype that is copied as it is

Pair = tuple[torch.Tensor, torch.Tensor]


class Strided(NamedTuple):
    """The same number of places in two memories, strides and offsets in words."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    other_stride: tuple[int, ...]
    other_offset: int


class Copies(NamedTuple):
    """What is to be copied between two tensors; empty when nothing is.

    Attributes:
        pieces: the copies.
        per_word: elements in a word.
        word: the dtype of a word; None where it is the element.
    """

    pieces: tuple[Strided, ...]
    per_word: int = 1
    word: torch.dtype | None = None

    def between(self, one: torch.Tensor, other: torch.Tensor) -> list[Pair]:
        """The pieces as views of the two tensors; offsets count from where each tensor starts."""
        if self.word is not None:
            one, other = self._in_words(one), self._in_words(other)
        start, other_start = one.storage_offset(), other.storage_offset()
        return [
            (one.as_strided(size, stride, start + at), other.as_strided(size, other_stride, other_start + other_at))
            for size, stride, at, other_stride, other_at in self.pieces
        ]

    def _in_words(self, t: torch.Tensor) -> torch.Tensor:
        assert self.word is not None
        if t.dim() and t.shape[-1] % self.per_word == 0 and t.numel():
            return t.view(self.word)
        return t.view(-1)[: t.numel() // self.per_word * self.per_word].view(self.word)


def end_to_end(views: Iterable[torch.Tensor]) -> list[Pair]:
    """Pair views with their places when they are put one after the other; on the meta device."""
    pairs, at = [], 0
    for view in views:
        place = torch.empty(0, device="meta")
        pairs.append((view, place.as_strided(view.shape, torch.empty(view.shape, device="meta").stride(), at)))
        at += view.numel()
    return pairs


def copies(pairs: Sequence[Pair], item: int, misplaced: int | None) -> Copies:
    """Settle the copies between pairs of views of equal shapes, all of the same two tensors.

    Args:
        item: bytes of an element.
        misplaced: bytes by which either tensor starts after a whole widest word; None where words are no use, which is
            where a tensor is not contiguous, and on the CPU.
    """
    pieces = _merged(pairs)
    for width, word in _WORDS.items() if misplaced is not None else ():
        if misplaced is not None and misplaced % width == 0 and item < width:
            n = width // item
            wide = tuple(piece for narrow in pieces if (piece := _widened(narrow, n)) is not None)
            if len(wide) == len(pieces):
                return Copies(wide, n, word)
    return Copies(pieces)


def misplacement(t: torch.Tensor) -> int | None:
    """`misplaced` of `copies` for a tensor."""
    if not t.is_cuda or not t.is_contiguous():
        return None
    at = int(t.storage_offset()) * t.element_size() % WIDEST  # torch sees words only from a whole number of them on
    if torch.compiler.is_compiling():
        return at
    return at if t.data_ptr() % WIDEST == at else 1  # memory that torch did not allocate may start anywhere


def _merged(pairs: Sequence[Pair]) -> tuple[Strided, ...]:
    """Runs of equal views at equal distances, in both tensors, become one with a dim more."""
    pieces: list[Strided] = []
    k = 0
    while k < len(pairs):
        one, other = pairs[k]
        run, distance = 1, (0, 0)
        while k + run < len(pairs):
            next_one, next_other = pairs[k + run]
            gap = _distance(one, next_one), _distance(other, next_other)
            is_alike = next_one.shape == one.shape and next_one.stride() == one.stride()
            if not is_alike or next_other.stride() != other.stride() or min(gap) < 0:
                break
            if run > 1 and gap != (run * distance[0], run * distance[1]):
                break
            distance, run = gap if run == 1 else distance, run + 1
        if one.numel():
            strides = (distance[0], *one.stride()), (distance[1], *other.stride())
            at, other_at = int(one.storage_offset()), int(other.storage_offset())
            pieces.append(Strided((run, *one.shape), strides[0], at, strides[1], other_at))
        k += run
    return tuple(pieces)


def _distance(one: torch.Tensor, other: torch.Tensor) -> int:
    return int(other.storage_offset()) - int(one.storage_offset())


def _widened(piece: Strided, n: int) -> Strided | None:
    """A piece in words of n elements; None where its rows do not start and end with whole words."""
    size, stride, at, other_stride, other_at = piece
    if len(size) < 2 or stride[-1] != 1 or other_stride[-1] != 1:
        return None
    if any(x % n for x in (size[-1], at, other_at, *stride[:-1], *other_stride[:-1])):
        return None
    outer, other_outer = tuple(x // n for x in stride[:-1]), tuple(x // n for x in other_stride[:-1])
    return Strided((*size[:-1], size[-1] // n), (*outer, 1), at // n, (*other_outer, 1), other_at // n)
