"""Regions of a rank's local memory: seen, put end to end, and taken apart again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardtensor.layout.transfer import Region


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


def pack(pieces: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
    """Put pieces end to end."""
    start = 0
    for piece in pieces:
        flat[start : start + piece.numel()].view(piece.shape).copy_(piece)
        start += piece.numel()


def unpack(flat: torch.Tensor, pieces: Iterable[torch.Tensor]) -> None:
    """Fill pieces from memory that has them end to end."""
    start = 0
    for piece in pieces:
        piece.copy_(flat[start : start + piece.numel()].view(piece.shape))
        start += piece.numel()
