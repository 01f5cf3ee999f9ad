"""Random values for a sharded tensor: bit for bit the pieces of the unsharded draw.

Every rank draws the same stream, keeps the elements in its boxes, and leaves the generator where the unsharded call
leaves it. No rank holds the whole tensor: scratch is 64k elements on the CPU and one pass of the card's threads (about
a million elements, three of them during the proof) on CUDA.

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

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Generator, Tensor

from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import part_of
from shardtensor.layout.box import Box, runs
from shardtensor.layout.layout import Layout

Sample = Callable[[Tensor, Generator | None], object]
"""Fills a contiguous tensor in place with one torch random operation."""

BLOCK = 16
PIECE = 65536


def piece_bounds(numel: int, piece: int) -> list[int]:
    """Return the bounds of pieces of ``range(numel)``, none shorter than a block of 16."""
    return [*range(0, numel - BLOCK + 1, piece), numel]


def serial_pieces(
    sample: Sample, numel: int, *, dtype: torch.dtype, generator: Generator | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(start, values)``: flat ranges of a CPU tensor of `numel` (at least 16) elements, in one small
    scratch. At the end the generator is where the whole call leaves it, if `sample` is exact in pieces."""
    scratch = torch.empty(min(numel, PIECE + BLOCK - 1), dtype=dtype, device="cpu")
    for start, stop in pairwise(piece_bounds(numel, PIECE)):
        values = scratch[: stop - start]
        sample(values, generator)
        yield start, values


def is_exact_in_pieces(sample: Sample, dtype: torch.dtype, generator: Generator | None) -> bool:
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
    is_needed: Callable[[int, int], bool],
    *,
    dtype: torch.dtype,
    device: torch.device,
    generator: Generator | None,
) -> Iterator[tuple[int, Tensor]] | None:
    """Yield ``(start, values)``: the needed passes of a CUDA tensor of `numel` elements, in a scratch of one pass.

    At the end the generator is where the whole call leaves it. None, with the generator unchanged, if the tensor fits
    one pass, or is complex and larger than 2 GiB, or if `sample` is not exact in passes.
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
    return None if found is None else draw_passes(draw, stream, numel, is_needed, *found, dtype.itemsize)


def pass_lengths(index: int) -> tuple[int, int]:
    """Return the elements one pass may cover on card ``index``: four a thread, or two for 64-bit draws."""
    card = torch.cuda.get_device_properties(index)
    blocks = card.multi_processor_count * (card.max_threads_per_multi_processor // THREADS_PER_BLOCK)
    return 4 * THREADS_PER_BLOCK * blocks, 2 * THREADS_PER_BLOCK * blocks


def find_pass(draw: Callable[..., Tensor], stream: Any, lengths: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the ``(length, step)`` of a pass that is proved to reproduce ``draw``, or None. The offset is put back.

    Two passes and one element drawn at once are compared with the same in three passes, values and final offset. Which
    of `lengths` is right depends on the sampler, its arguments and the dtype, so it is proved for every call.
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
    is_needed: Callable[[int, int], bool],
    length: int,
    step: int,
    itemsize: int,
    max_bytes: int = MAX_BYTES,
) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(start, values)`` for each needed pass, then leave the offset where the whole draw leaves it.

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
            if is_needed(start, stop):
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


def agree_on_state(
    group: Group, device: torch.device, generator: torch.Generator | None, note: Sequence[int] = ()
) -> tuple[int, ...]:
    """Set the generator state of the group's first rank on every rank, and return that rank's `note`: one broadcast.
    All ranks of the group call it; None means the device's default generator. `note` has numbers up to 255."""
    if group.size == 1:
        return tuple(note)
    if generator is None:
        generator = default_generator(device)
    state = generator.get_state()
    sent = group.broadcast(torch.cat([state, torch.tensor(list(note), dtype=torch.uint8, device="cpu")]), 0)
    if not torch.equal(sent[: state.numel()], state):
        generator.set_state(sent[: state.numel()].clone())
    return tuple(sent[state.numel() :].tolist())


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that torch draws from on a device when none is given."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def draw(
    sample: Sample,
    layout: Layout,
    group: Group,
    *,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
    order: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return this rank's local tensor of the draw that ``sample`` makes of the whole. All ranks of the group call it.

    Bit for bit the part of the unsharded draw from the first rank's state; every rank's generator ends where that call
    leaves it. `order` lists the whole's dims in memory order (see `memory_order`); the first rank's is used. A tensor
    that is not row-major is drawn whole and sliced, because torch fills it in another order.
    """
    local_shape = layout.local_shape(group.rank)
    if group.index < 0 or device.type == "meta":
        return torch.empty(local_shape, dtype=dtype, device=device)
    rows_first = tuple(range(len(layout.shape)))
    order = agree_on_state(group, device, generator, rows_first if order is None else order)
    if order != rows_first:
        whole = torch.empty_permuted(layout.shape, order, dtype=dtype, device=device)
        sample(whole, generator)
        return part_of(whole, layout, group.rank).clone()
    boxes = layout.boxes(group.rank)
    pieces = draw_boxes(sample, layout.shape, boxes, dtype=dtype, device=device, generator=generator)
    if len(pieces) == 1:
        return pieces[0].view(local_shape).detach()  # autograd refuses writes into a view made under no_grad
    local = torch.empty(local_shape, dtype=dtype, device=device)
    for place, piece in zip(layout.local_boxes(group.rank), pieces, strict=True):
        local[place.slices].copy_(piece.view(place.sizes))
    return local


def memory_order(local: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """Return the dims of the whole, outermost first, in the memory order of this rank's local tensor. Of two dims of
    equal stride the longer is the outer; their order is unknown on a rank where both have length one or less."""
    dims = tuple(range(len(layout.shape)))
    if layout.packed:
        return dims
    strides, sizes = local.stride(), local.shape
    return tuple(sorted(dims, key=lambda dim: (-strides[dim], -sizes[dim])))


def draw_boxes(
    sample: Sample,
    shape: Sequence[int],
    boxes: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    generator: Generator | None = None,
) -> list[Tensor]:
    """Draw only this rank's boxes of a random tensor, equal to the unsharded draw; on CPU it costs that draw's time.

    The generator ends as after the unsharded call, also with no box or only empty ones. Each large draw first proves on
    a few elements that drawing in pieces is exact. Where that fails (``bernoulli_(p)`` and dropout on Intel CPUs with
    MKL, every device but CPU and CUDA) the whole is drawn and sliced.

    Args:
        sample: fills a contiguous tensor of any shape in place with **one** torch random operation, from the generator
            it is given. Values may depend on the order of the elements, not on the shape; loops that reject and draw
            again are not allowed.
        boxes: ``(offsets, sizes)`` pairs within the global `shape`; they may be empty and may overlap.
        generator: of the device; None means its default one. Ranks that must agree pass it in the same state.

    Returns:
        One contiguous tensor for each box, owning exactly its bytes.
    """
    shape, device = tuple(shape), torch.device(device)
    parts = [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]
    is_whole = [box.sizes for box in parts] == [shape]
    if math.prod(shape) > PIECE and not is_whole:
        results = _draw_pieces(sample, shape, parts, dtype, device, generator)
        if results is not None:
            return results
    whole = torch.empty(shape, dtype=dtype, device=device)
    sample(whole, generator)
    return [whole] if is_whole else [whole[box.slices].clone(memory_format=torch.contiguous_format) for box in parts]


def _draw_pieces(
    sample: Sample,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    dtype: torch.dtype,
    device: torch.device,
    generator: Generator | None,
) -> list[Tensor] | None:
    """Draw the boxes from pieces of the flat whole, or return None where the whole is to be drawn at once."""
    results = [torch.empty(box.sizes, dtype=dtype, device=device) for box in boxes]

    def is_needed(start: int, stop: int) -> bool:
        return any(run.overlap(box) for run in runs(start, stop, shape) for box in boxes)

    pieces = None
    if device.type == "cpu" and is_exact_in_pieces(sample, dtype, generator):
        pieces = serial_pieces(sample, math.prod(shape), dtype=dtype, generator=generator)
    elif device.type == "cuda":
        pieces = philox_pieces(sample, math.prod(shape), is_needed, dtype=dtype, device=device, generator=generator)
    if pieces is None:
        return None
    for start, values in pieces:
        done = 0
        for run in runs(start, start + values.numel(), shape):
            slab = values[done : done + run.numel].view(run.sizes)
            done += run.numel
            for box, result in zip(boxes, results, strict=True):
                both = box.overlap(run)
                if both is not None:
                    result[both.seen_from(box).slices].copy_(slab[both.seen_from(run).slices])
    return results
