"""Long lists of tensors worked on in lanes beside each other, where a CUDA graph is being captured.

torch's kernels over lists of tensors (``_foreach_*``, ``_fused_*``) are launched in pieces, one after the other, and
the last blocks of each leave most of a large GPU idle. In a graph the pieces of two lanes fill each other's gaps, and
the second lane costs the host nothing. Every tensor meets the same kernel in the same chunks, so that its values are
those of a single lane, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")

LANES = 2
ONE_LAUNCH = 320 * 65536
"""Elements of the longest list that torch works on in one launch: 320 blocks, each with a chunk of 65536."""


def in_lanes(tensors: Sequence[torch.Tensor], work: Callable[[list[int]], T]) -> list[T]:
    """Call ``work(places)`` for lists of places in `tensors` that have each place once; return what the calls return.

    One call with all places, unless a CUDA graph is being captured and the tensors are too large for one launch. Then
    there are up to `LANES` calls, each in a stream of its own that starts after what came before and that all that
    comes later waits for.

    Args:
        tensors: plain ones, on one device.
        work: elementwise in the tensors: it may write those at its places and reads no others.

    Example:
        >>> in_lanes([torch.ones(2), torch.ones(3)], lambda places: places)
        [[0, 1]]
    """
    lanes = _split([x.numel() for x in tensors]) if len(tensors) > 1 and _are_recorded(tensors[0]) else []
    if len(lanes) < 2:
        return [work(list(range(len(tensors))))]
    device = tensors[0].device
    sides = _side_streams(device)[: len(lanes) - 1]
    current = _current_stream(device)
    for side in sides:
        side.wait_stream(current)
    results = []
    for side, places in zip([current, *sides], lanes, strict=True):
        with _entered(side):
            results.append(work(places))
    for side in sides:
        current.wait_stream(side)
    return results


def step_in_lanes(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
    """Call ``step()``, in lanes with a part of the parameters in the optimizer's groups each.

    Args:
        optimizer: of plain tensors on one device, each stepped without a look at others.
        step: steps the parameters that the groups have.
    """
    groups = optimizer.param_groups
    lists = [group["params"] for group in groups]
    params = [param for each in lists for param in each]

    def work(places: list[int]) -> None:
        if len(places) < len(params):
            chosen = {id(params[i]) for i in places}
            for group, each in zip(groups, lists, strict=True):
                group["params"] = [param for param in each if id(param) in chosen]
        step()

    try:
        in_lanes(params, work)
    finally:
        for group, each in zip(groups, lists, strict=True):
            group["params"] = each


def _split(sizes: Sequence[int]) -> list[list[int]]:
    """Places in lanes of about equal sums of sizes, each in order; one lane where all fit into one launch."""
    if sum(sizes) <= ONE_LAUNCH:
        return [list(range(len(sizes)))]
    loads = [0] * LANES
    lanes: list[list[int]] = [[] for _ in loads]
    for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lane = loads.index(min(loads))
        lanes[lane].append(place)
        loads[lane] += sizes[place]
    return [sorted(lane) for lane in lanes if lane]


def _are_recorded(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured from what is done with `x`."""
    return x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


@cache
def _side_streams(device: torch.device) -> list[Any]:
    return [torch.cuda.Stream(device) for _ in range(LANES - 1)]


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


def _entered(stream: Any) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream)
