"""The random streams of the CPU and of CUDA, drawn in pieces that add up to the whole call.

The CPU generator is one serial stream (mt19937), so two calls on two halves give what one call on the whole gives. But
``normal_`` works in blocks of 16 from 16 elements on and, where the size is no multiple of 16, draws the *last 16
elements* again at the end. Pieces that are a multiple of 16 long, and a last piece of at least 16, are exact for all.

CUDA's Philox is counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A torch sampler
runs a fixed grid of threads over the tensor again and again; one pass fills ``length`` consecutive elements and moves
the generator's offset by ``step``. Pass ``k`` of a large tensor is therefore the same call on a tensor of ``length``
elements with the offset set ``k * step`` further. The numbers depend on the card's count of multiprocessors, as those
of the unsharded call do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Generator, Tensor

Sample = Callable[[Tensor, Generator | None], object]
"""Fills a contiguous tensor in place with one torch random operation."""

BLOCK = 16
PIECE = 65536


def serial_pieces(
    sample: Sample, numel: int, *, dtype: torch.dtype, generator: Generator | None
) -> Iterator[tuple[int, Tensor]] | None:
    """Yield ``(start, values)``: flat ranges of a CPU tensor of `numel` (at least 16) elements, in one small scratch.

    Used up, it leaves the generator where the whole call does. None, and the generator as it was, if `sample` is not
    exact in pieces.
    """
    return _draw(sample, numel, dtype, generator) if _is_exact_in_pieces(sample, dtype, generator) else None


def piece_bounds(numel: int, piece: int) -> list[int]:
    """Return the cuts of ``range(numel)`` into pieces, none shorter than a block of 16."""
    return [*range(0, numel - BLOCK + 1, piece), numel]


def _draw(sample: Sample, numel: int, dtype: torch.dtype, generator: Generator | None) -> Iterator[tuple[int, Tensor]]:
    scratch = torch.empty(min(numel, PIECE + BLOCK - 1), dtype=dtype, device="cpu")
    for start, stop in pairwise(piece_bounds(numel, PIECE)):
        values = scratch[: stop - start]
        sample(values, generator)
        yield start, values


def _is_exact_in_pieces(sample: Sample, dtype: torch.dtype, generator: Generator | None) -> bool:
    """Compare 37 elements drawn at once with the same in two pieces, then put the generator back.

    Some samplers seed a stream of their own with one draw a call (``bernoulli_`` with a number, and so dropout, on
    Intel CPUs with MKL). That shows in the generator's state even where the few values happen to agree.
    """
    stream = torch.default_generator if generator is None else generator
    before = stream.get_state()
    try:
        whole = torch.empty(2 * BLOCK + 5, dtype=dtype, device="cpu")
        sample(whole, generator)
        after_whole = stream.get_state()
        stream.set_state(before)
        parts = torch.empty_like(whole)
        for start, stop in pairwise(piece_bounds(whole.numel(), BLOCK)):
            sample(parts[start:stop], generator)
        same_bits = torch.equal(whole.view(torch.uint8), parts.view(torch.uint8))
        return same_bits and torch.equal(after_whole, stream.get_state())
    finally:
        stream.set_state(before)


THREADS_PER_BLOCK = 256
MAX_BYTES = 2**31 - 1  # a kernel indexes with 32 bits; torch halves larger tensors until they fit


def philox_pieces(
    sample: Sample,
    numel: int,
    wanted: Callable[[int, int], bool],
    *,
    dtype: torch.dtype,
    device: torch.device,
    generator: Generator | None,
) -> Iterator[tuple[int, Tensor]] | None:
    """Yield ``(start, values)``: the wanted passes of a CUDA tensor of `numel` elements, in a scratch of one pass.

    Used up, it leaves the generator where the whole call does. None, and the generator as it was, if the tensor fits
    one pass, or is complex and larger than 2 GiB, or if `sample` is not exact in passes. `wanted` tells whether
    anything of a flat range is needed.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    lengths = pass_lengths(index)
    too_small = numel <= max(lengths)
    splits_pairs = dtype.is_complex and len(split_for_indexing(numel, dtype.itemsize)) > 1  # halves count real numbers
    if too_small or splits_pairs:
        return None
    stream = torch.cuda.default_generators[index] if generator is None else generator

    def draw(count: int, scratch: Tensor | None = None) -> Tensor:
        values = torch.empty(count, dtype=dtype, device=device) if scratch is None else scratch[:count]
        sample(values, generator)
        return values

    found = find_pass(draw, stream, lengths)
    return None if found is None else draw_passes(draw, stream, numel, wanted, *found, dtype.itemsize)


def pass_lengths(index: int) -> tuple[int, int]:
    """Return the elements one pass may cover on card ``index``: four a thread, or two for 64-bit draws."""
    card = torch.cuda.get_device_properties(index)
    blocks = card.multi_processor_count * (card.max_threads_per_multi_processor // THREADS_PER_BLOCK)
    return 4 * THREADS_PER_BLOCK * blocks, 2 * THREADS_PER_BLOCK * blocks


def find_pass(draw: Callable[..., Tensor], stream: Any, lengths: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the ``(length, step)`` of a pass that is proved to reproduce ``draw``, or None. The offset is put back.

    The proof compares two passes and one element drawn at once with the same in three passes, values and final offset.
    Which of ``lengths`` is right depends on the sampler, its arguments and the dtype (``random_`` over a wide range
    draws 64 bits), so it is proved for every call; that costs four draws of a pass and one synchronisation.
    """
    base = stream.get_offset()
    try:
        for length in lengths:
            stream.set_offset(base)
            whole = draw(2 * length + 1)
            moved = stream.get_offset() - base
            stream.set_offset(base)
            scratch = draw(length)
            step = stream.get_offset() - base
            if moved != 3 * step:
                continue
            exact = True
            for number, expected in enumerate(whole.split(length)):
                stream.set_offset(base + number * step)
                values = draw(length, scratch)[: expected.numel()]
                exact = exact and torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
            if exact:
                return length, step
        return None
    finally:
        stream.set_offset(base)


def draw_passes(
    draw: Callable[..., Tensor],
    stream: Any,
    numel: int,
    wanted: Callable[[int, int], bool],
    length: int,
    step: int,
    itemsize: int,
    max_bytes: int = MAX_BYTES,
) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(start, values)`` for each wanted pass, then leave the offset where the whole draw leaves it.

    A tensor too large for 32-bit indexing is drawn by torch as a sequence of calls on its parts, each with passes of
    its own; before it splits the tensor it reserves (and does not use) the offsets for the whole.
    """
    base = stream.get_offset()
    parts = split_for_indexing(numel, itemsize, max_bytes)
    if len(parts) > 1:
        base += step * -(-numel // length)
    scratch = None
    for first, last in pairwise(accumulate(parts, initial=0)):
        for start in range(first, last, length):
            stop = min(start + length, last)
            if wanted(start, stop):
                stream.set_offset(base)
                # A short last pass is drawn in full too: fewer elements may run on a smaller grid of threads.
                scratch = draw(length, scratch)
                yield start, scratch[: stop - start]
            base += step
    stream.set_offset(base)


def split_for_indexing(numel: int, itemsize: int, max_bytes: int = MAX_BYTES) -> list[int]:
    """Return the sizes of the parts that torch draws one after the other: halves until a part fits 32-bit indexing."""
    if (numel - 1) * itemsize + 1 <= max_bytes:
        return [numel]
    half = numel // 2
    return split_for_indexing(half, itemsize, max_bytes) + split_for_indexing(numel - half, itemsize, max_bytes)
