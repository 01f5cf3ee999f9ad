"""Random shards that are bit for bit the pieces of the unsharded random tensor.

A sharded ``rand`` with some seed must give the numbers that the plain ``rand`` gives with it, whatever the layout, and
leave the generator where the plain call leaves it. So every rank runs through the same stream and keeps what lies in
its boxes. Nothing is communicated, and the whole tensor is never held: scratch is 64k elements on the CPU and one pass
of the card's threads (about a million elements, three of them during the proof) on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import add, lt, mul, sub

import attrs
import torch
from torch import Generator, Tensor

from shardtensor.layout.box import runs
from shardtensor.tensor.random_streams import PIECE, philox_pieces, serial_pieces

Sample = Callable[[Tensor, Generator | None], object]
Ints = tuple[int, ...]


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

    The result is ``whole[box]`` for each box, where ``whole`` is what ``sample(torch.empty(shape), generator)`` gives
    from the generator's present state. The generator ends as after that call, also with no box or only empty ones.
    ``rand`` is ``uniform_``, ``randn`` is ``normal_`` and ``randint`` is ``random_`` on an empty tensor.

    Exact in pieces: ``uniform_``, ``normal_``, ``exponential_``, ``bernoulli_(p)``, ``random_``, ``cauchy_``,
    ``log_normal_``, ``geometric_``, and on CPU dropout masks. Each large draw first proves it on a few elements. Where
    that fails the whole tensor is drawn and cut, which is right too but needs its memory for a moment:
    ``bernoulli_(p)`` and dropout on Intel CPUs with MKL, and every device but CPU and CUDA.

    Args:
        sample: fills a contiguous tensor of any shape in place with **one** torch random operation, from the generator
            it is given. Values may depend on the order of the elements, not on the shape; loops that reject and draw
            again are not allowed.
        shape: the global shape.
        boxes: ``(offsets, sizes)`` pairs within ``shape``; they may be empty and may overlap.
        dtype: the dtype of the result. Low precision is drawn directly, as torch does.
        device: where the tensors are made; its random stream is used.
        generator: a generator of that device; None means its default one. Ranks that must agree bring it in one state.

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
    parts = [(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]
    is_whole = [sizes for _, sizes in parts] == [shape]
    if math.prod(shape) > PIECE and not is_whole:
        results = _draw_pieces(sample, shape, parts, dtype, device, generator)
        if results is not None:
            return results
    whole = torch.empty(shape, dtype=dtype, device=device)
    sample(whole, generator)
    if is_whole:
        return [whole]
    windows = [_window(whole, offsets, tuple(map(add, offsets, sizes))) for offsets, sizes in parts]
    return [window.clone(memory_format=torch.contiguous_format) for window in windows]


def _draw_pieces(
    sample: Sample,
    shape: Ints,
    boxes: Sequence[tuple[Ints, Ints]],
    dtype: torch.dtype,
    device: torch.device,
    generator: Generator | None,
) -> list[Tensor] | None:
    """Draw the boxes from pieces of the flat whole, or return None where the whole is to be drawn at once."""
    results = [torch.empty(sizes, dtype=dtype, device=device) for _, sizes in boxes]
    filled = [(*box, result) for box, result in zip(boxes, results, strict=True) if result.numel()]
    merged_shape, targets = _targets(shape, filled)

    def wanted(start: int, stop: int) -> bool:
        return any(target.meets(start, stop) for target in targets)

    pieces = None
    if device.type == "cpu":
        pieces = serial_pieces(sample, math.prod(shape), dtype=dtype, generator=generator)
    elif device.type == "cuda":
        pieces = philox_pieces(sample, math.prod(shape), wanted, dtype=dtype, device=device, generator=generator)
    if pieces is None:
        return None
    for start, values in pieces:
        near = [target for target in targets if target.meets(start, start + values.numel())]
        if near:
            _deliver(values, start, merged_shape, near)
    return results


@attrs.frozen(eq=False)
class _Target:
    """A box that is not empty, by its corners, and the memory to fill.

    The box holds the indices from ``lows`` up to, but without, ``highs``; ``[first, last)`` is the flat range it spans.
    """

    lows: Ints
    highs: Ints
    first: int
    last: int
    values: Tensor

    def meets(self, start: int, stop: int) -> bool:
        return self.first < stop and start < self.last


def _targets(shape: Ints, boxes: Sequence[tuple[Ints, Ints, Tensor]]) -> tuple[Ints, list[_Target]]:
    """Return the shape and the boxes with each dim that no box cuts merged into the dim before it.

    Row boxes of any tensor become flat ranges this way, and a piece is delivered in few copies.
    """
    kept = [dim for dim in range(len(shape)) if dim == 0 or any(sizes[dim] != shape[dim] for _, sizes, _ in boxes)]
    grains = [math.prod(shape[dim + 1 : following]) for dim, following in pairwise([*kept, len(shape)])]

    def merge(numbers: Ints) -> Ints:
        return tuple(numbers[dim] * grain for dim, grain in zip(kept, grains, strict=True))

    merged = merge(shape)
    strides = [math.prod(merged[dim + 1 :]) for dim in range(len(merged))]
    targets = []
    for offsets, sizes, values in boxes:
        lows, sizes = merge(offsets), merge(sizes)
        highs = tuple(map(add, lows, sizes))
        first = sum(map(mul, lows, strides))
        last = sum((high - 1) * stride for high, stride in zip(highs, strides, strict=True)) + 1
        targets.append(_Target(lows, highs, first, last, values.view(sizes)))
    return merged, targets


def _deliver(values: Tensor, start: int, shape: Ints, targets: Sequence[_Target]) -> None:
    """Copy the flat range of the whole that begins at ``start`` into the targets that it meets."""
    done = 0
    for box in runs(start, start + values.numel(), shape):
        slab = values[done : done + box.numel].view(box.sizes)
        done += box.numel
        for target in targets:
            lows, highs = tuple(map(max, box.offsets, target.lows)), tuple(map(min, box.ends, target.highs))
            if all(map(lt, lows, highs)):
                _window(target.values, lows, highs, target.lows).copy_(_window(slab, lows, highs, box.offsets))


def _window(values: Tensor, lows: Ints, highs: Ints, origin: Ints | None = None) -> Tensor:
    """Return the view of the indices ``lows`` to ``highs`` of a tensor whose first element has index ``origin``."""
    if origin is not None:
        lows, highs = tuple(map(sub, lows, origin)), tuple(map(sub, highs, origin))
    return values[tuple(map(slice, lows, highs))]
