"""Random shards that are bit for bit the pieces of the unsharded random tensor.

A sharded ``rand`` with some seed must give the numbers that the plain ``rand`` gives with it, whatever the layout, and
leave the generator where the plain call leaves it. So every rank runs through the same stream and keeps what lies in
its boxes. Nothing is communicated, and the whole tensor is never held: scratch is 64k elements on the CPU and one pass
of the card's threads (about a million elements, three of them during the proof) on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Generator, Tensor

from shardtensor.layout.box import Box, runs
from shardtensor.tensor.random_streams import PIECE, Sample, philox_pieces, serial_pieces


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

    The generator ends as after the unsharded call, also with no box or only empty ones. ``uniform_``, ``normal_``,
    ``exponential_``, ``bernoulli_(p)``, ``random_``, ``cauchy_``, ``log_normal_``, ``geometric_``, and on CPU dropout
    masks are drawn in pieces. Each large draw first proves on a few elements that pieces are exact. Where that fails
    (``bernoulli_(p)`` and dropout on Intel CPUs with MKL, every device but CPU and CUDA) the whole is drawn and cut.

    Args:
        sample: fills a contiguous tensor of any shape in place with **one** torch random operation, from the generator
            it is given. Values may depend on the order of the elements, not on the shape; loops that reject and draw
            again are not allowed.
        shape: the global shape.
        boxes: ``(offsets, sizes)`` pairs within ``shape``; they may be empty and may overlap.
        generator: a generator of the device; None means its default one. Ranks that must agree bring it in one state.

    Returns:
        One contiguous tensor for each box, owning exactly its bytes.

    Example:
        >>> state = torch.manual_seed(0).get_state()
        >>> last_column = [((0, 299), (300, 1))]
        >>> (part,) = draw_boxes(lambda t, g: t.normal_(generator=g), (300, 300), last_column,
        ...                      dtype=torch.float32, device="cpu")
        >>> torch.set_rng_state(state)
        >>> torch.equal(part, torch.randn(300, 300)[:, 299:])
        True
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
