"""Random values for a sharded tensor: one generator state for all ranks, and each rank's part of the unsharded draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Generator, Tensor

from shardtensor.comm.group import Group
from shardtensor.layout.box import Box, runs
from shardtensor.layout.layout import Layout, replicated
from shardtensor.tensor.move import take
from shardtensor.tensor.random_streams import PIECE, Sample, philox_pieces, serial_pieces


def agree_on_state(
    group: Group, device: torch.device, generator: torch.Generator | None, note: Sequence[int] = ()
) -> tuple[int, ...]:
    """Give every rank the generator state of the group's first rank, and return that rank's note: one broadcast.

    All ranks of the group call it. `device` is the one whose default generator is meant when `generator` is None;
    `note` a few small numbers (0 to 255), as many on every rank.
    """
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
    """The generator that torch draws from on a device when none is given."""
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
    leaves it. `order` are the whole's dims as its memory has them (see `memory_order`); the first rank's counts.
    Anything but row-major is drawn whole and cut, for torch fills such a tensor in an order of its own.
    """
    local_shape = layout.local_shape(group.rank)
    if group.index < 0 or device.type == "meta":
        return torch.empty(local_shape, dtype=dtype, device=device)
    rows_first = tuple(range(len(layout.shape)))
    order = agree_on_state(group, device, generator, rows_first if order is None else order)
    if order != rows_first:
        whole = torch.empty_permuted(layout.shape, order, dtype=dtype, device=device)
        sample(whole, generator)
        return take(whole, replicated(layout.shape, layout.ranks, layout.grid), layout, group.rank).clone()
    boxes = layout.boxes(group.rank)
    pieces = draw_boxes(sample, layout.shape, boxes, dtype=dtype, device=device, generator=generator)
    if len(pieces) == 1:
        return pieces[0].view(local_shape).detach()  # a view made without gradients is one that nobody may write into
    local = torch.empty(local_shape, dtype=dtype, device=device)
    for place, piece in zip(layout.local_boxes(group.rank), pieces, strict=True):
        local[place.slices].copy_(piece.view(place.sizes))
    return local


def memory_order(local: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """The dims of the whole, outermost first, as the memory of this rank's local tensor tells them.

    Two dims of one stride are told apart by their sizes: in memory the longer one is the outer. A rank on which both
    are of length one or less cannot know, which is why the first rank's answer counts.
    """
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
    MKL, every device but CPU and CUDA) the whole is drawn and cut.

    Args:
        sample: fills a contiguous tensor of any shape in place with **one** torch random operation, from the generator
            it is given. Values may depend on the order of the elements, not on the shape; loops that reject and draw
            again are not allowed.
        boxes: ``(offsets, sizes)`` pairs within the global `shape`; they may be empty and may overlap.
        generator: of the device; None means its default one. Ranks that must agree bring it in one state.

    Returns:
        One contiguous tensor for each box, owning exactly its bytes.
    """
    shape, device = tuple(shape), torch.device(device)
    wanted = [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]
    is_whole = [box.sizes for box in wanted] == [shape]
    if math.prod(shape) > PIECE and not is_whole:
        results = _draw_pieces(sample, shape, wanted, dtype, device, generator)
        if results is not None:
            return results
    whole = torch.empty(shape, dtype=dtype, device=device)
    sample(whole, generator)
    return [whole] if is_whole else [whole[box.slices].clone(memory_format=torch.contiguous_format) for box in wanted]


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

    def is_wanted(start: int, stop: int) -> bool:
        return any(run.overlap(box) for run in runs(start, stop, shape) for box in boxes)

    pieces = None
    if device.type == "cpu":
        pieces = serial_pieces(sample, math.prod(shape), dtype=dtype, generator=generator)
    elif device.type == "cuda":
        pieces = philox_pieces(sample, math.prod(shape), is_wanted, dtype=dtype, device=device, generator=generator)
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
