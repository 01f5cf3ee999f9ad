"""Regions of a rank's local memory: seen, put end to end, and taken apart again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardtensor.layout.transfer import Region

WIDE = 16


def see(local: torch.Tensor, region: Region) -> torch.Tensor:
    """A view of what a region of a local tensor holds."""
    held = local[region.held] if region.held else local
    return held if region.shape is None else held.view(region.shape)[region.within]


def follow_one_another(pieces: Sequence[torch.Tensor]) -> bool:
    """Whether pieces lie in memory end to end, in their order."""
    at = pieces[0].storage_offset() if pieces else 0
    for piece in pieces:
        if not piece.is_contiguous() or piece.storage_offset() != at or piece.is_conj() or piece.is_neg():
            return False
        at += piece.numel()
    return True


def end_to_end(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pieces that follow one another in memory as one flat tensor."""
    first = next((piece for piece in pieces if piece.numel()), pieces[0])
    return first.as_strided((sum(piece.numel() for piece in pieces),), (1,))


def pack(pieces: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
    start = 0
    for piece in pieces:
        copy(piece, flat[start : start + piece.numel()].view(piece.shape))
        start += piece.numel()


def unpack(flat: torch.Tensor, pieces: Iterable[torch.Tensor]) -> None:
    start = 0
    for piece in pieces:
        copy(flat[start : start + piece.numel()].view(piece.shape), piece)
        start += piece.numel()


def copy(here: torch.Tensor, there: torch.Tensor) -> None:
    """Copy; on CUDA 16 bytes at a time where both allow it, as its kernel for strided tensors moves single elements."""
    if here.is_cuda and _is_wide(here) and _is_wide(there):
        here, there = here.view(torch.complex128), there.view(torch.complex128)
    there.copy_(here)


def _is_wide(t: torch.Tensor) -> bool:
    """Whether a tensor can be seen as elements of 16 bytes."""
    size = t.element_size()
    if not t.dim() or t.stride(-1) != 1 or t.is_conj() or t.is_neg() or t.data_ptr() % WIDE:
        return False
    return t.shape[-1] * size % WIDE == 0 and all(n * size % WIDE == 0 for n in (t.storage_offset(), *t.stride()[:-1]))
