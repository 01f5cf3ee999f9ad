"""Random values for a sharded tensor: one generator state for all ranks, and each rank's part of the unsharded draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.layout import Layout, replicated
from shardtensor.tensor.move import take
from shardtensor.tensor.random import draw_boxes
from shardtensor.tensor.random_streams import Sample


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
