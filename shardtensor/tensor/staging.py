"""Buffers for elements on their way, kept for the next time: fresh pages cost the CPU more than the transfer does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

KEPT_BYTES = 1 << 28
"""The most that is kept between uses; larger buffers go back to the system."""

_free: list[torch.Tensor] = []


@contextmanager
def staging(numel: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    """Lend a flat buffer of `numel` elements of the dtype and on the device of `like`, with any content.

    On CUDA torch's own allocator keeps memory, and in the order of streams, so that nothing is kept here.
    """
    if not like.is_cpu or not numel:
        yield like.new_empty(numel)
        return
    size = numel * like.element_size()
    # Taken out of the pool while in use: ranks may be threads.
    buffer = _free.pop() if _free else torch.empty(0, dtype=torch.uint8, device="cpu")
    if buffer.numel() < size:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    try:
        yield buffer[:size].view(like.dtype)
    finally:
        if buffer.numel() <= KEPT_BYTES and not _free:
            _free.append(buffer)
