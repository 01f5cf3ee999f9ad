"""The CPU's random stream, drawn in pieces that add up to the whole call.

The CPU generator is one serial stream (mt19937). Most torch samplers take from it element by element, so two calls on
two halves give what one call on the whole gives. ``normal_`` differs: from 16 elements on it works in blocks of 16
and, where the size is no multiple of 16, draws the *last 16 elements* again at the end. Pieces that are a multiple
of 16 long, and a last piece of at least 16, are exact for both kinds, values and final state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Generator, Tensor

BLOCK = 16
PIECE = 65536


def serial_pieces(
    sample: Callable[[Tensor, Generator | None], object],
    numel: int,
    *,
    dtype: torch.dtype,
    generator: Generator | None,
) -> Iterator[tuple[int, Tensor]] | None:
    """Draw a CPU tensor of ``numel`` elements piece by piece into one small scratch.

    Args:
        sample: fills a contiguous tensor in place with one torch random operation.
        numel: elements of the whole tensor, at least 16.
        dtype: the dtype it is drawn in.
        generator: a CPU generator; None means torch's default one.

    Returns:
        An iterator of ``(start, values)``: ``values`` is the whole's flat range that begins at ``start``, valid until
        the next step. When the iterator is used up, the generator is where the whole call leaves it.
        None if ``sample`` is not exact in pieces, with the generator untouched.

    Example:
        >>> pieces = serial_pieces(lambda t, g: t.uniform_(generator=g), 200_000, dtype=torch.float32, generator=None)
        >>> [(start, values.numel()) for start, values in pieces]
        [(0, 65536), (65536, 65536), (131072, 65536), (196608, 3392)]
    """
    if not _is_exact_in_pieces(sample, dtype, generator):
        return None
    return _draw(sample, numel, dtype, generator)


def piece_bounds(numel: int, piece: int) -> list[int]:
    """Return the cuts of ``range(numel)`` into pieces, none shorter than a block of 16.

    Example:
        >>> piece_bounds(100, 48), piece_bounds(112, 48)
        ([0, 48, 100], [0, 48, 96, 112])
    """
    return [*range(0, numel - BLOCK + 1, piece), numel]


def _draw(
    sample: Callable[[Tensor, Generator | None], object], numel: int, dtype: torch.dtype, generator: Generator | None
) -> Iterator[tuple[int, Tensor]]:
    scratch = torch.empty(min(numel, PIECE + BLOCK - 1), dtype=dtype, device="cpu")
    for start, stop in pairwise(piece_bounds(numel, PIECE)):
        values = scratch[: stop - start]
        sample(values, generator)
        yield start, values


def _is_exact_in_pieces(
    sample: Callable[[Tensor, Generator | None], object], dtype: torch.dtype, generator: Generator | None
) -> bool:
    """Compare 37 elements drawn at once with the same in two pieces, then put the generator back.

    Some samplers seed a stream of their own with one draw a call (``bernoulli_`` with a number, and so dropout, on
    Intel CPUs with MKL). That shows in the generator's state even where the few values happen to agree. The check
    costs some 20 µs beside at least 130 µs for the draw, so it is made on every call and there is no cache to go stale.
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
