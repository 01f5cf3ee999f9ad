"""Random values for a sharded tensor: one generator state for all ranks, and each rank's part of the unsharded draw."""

from __future__ import annotations

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.layout import Layout
from shardtensor.tensor.random import Sample, draw_boxes


def agree_on_state(group: Group, device: torch.device, generator: torch.Generator | None) -> None:
    """Give every rank the generator state of the group's first rank. All ranks of the group call it: one broadcast."""
    if group.size == 1:
        return
    if generator is None:
        generator = default_generator(device)
    state = generator.get_state()
    sent = group.broadcast(state.clone(), 0)
    if not torch.equal(sent, state):
        generator.set_state(sent)


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
) -> torch.Tensor:
    """Return this rank's local tensor of the draw that ``sample`` makes of the whole. All ranks of the group call it.

    Bit for bit the part of the unsharded draw from the first rank's state; every rank's generator ends where that call
    leaves it. See `shardtensor.tensor.random.draw_boxes` for what `sample` may be.
    """
    if group.index < 0:
        return torch.empty(layout.local_shape(group.rank), dtype=dtype, device=device)
    if device.type == "meta":
        return torch.empty(layout.local_shape(group.rank), dtype=dtype, device=device)
    agree_on_state(group, device, generator)
    boxes = layout.boxes(group.rank)
    pieces = draw_boxes(sample, layout.shape, boxes, dtype=dtype, device=device, generator=generator)
    if len(pieces) == 1:
        return pieces[0].view(layout.local_shape(group.rank))
    local = torch.empty(layout.local_shape(group.rank), dtype=dtype, device=device)
    for place, piece in zip(layout.local_boxes(group.rank), pieces, strict=True):
        local[place.slices].copy_(piece.view(place.sizes))
    return local
