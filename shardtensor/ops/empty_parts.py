"""Ranks whose part is empty: they go the way of the others.

Many of torch's kernels refuse an empty operand, or answer it on a way of their own: in another dtype under autocast,
out of the graph, without the terms of a second derivative. Backward is collective: a rank with an empty part must go
through the same nodes as the others. So it computes one element more along each dim that is empty on it alone, and
gives none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.layout.layout import CutLayout
from shardtensor.rules.rule import Rule


def computed(compute: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Any:
    """The local result, or results; one that is empty is in the graph of all its operands."""
    local = compute(*operands)
    if isinstance(local, torch.Tensor):
        return local if local.numel() else _in_graph(local, operands)
    if all(x.numel() for x in local):
        return local
    found = [x if x.numel() else _in_graph(x, operands) for x in local]
    return type(local)(found) if isinstance(local, tuple) else found


def _in_graph(local: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    for x in operands:
        if x.requires_grad and (local.is_floating_point() or local.is_complex()):
            link = x.sum()
            link = link.real if link.is_complex() and not local.is_complex() else link
            local = local + link.to(local.dtype) * 0
    return local


def computed_alike(
    compute: Callable[..., Any], rule: Rule | None, layouts: Sequence[CutLayout], operands: Sequence[torch.Tensor]
) -> Any:
    """The local result, or results, of operands of these layouts; with one element more where a part is empty.

    Args:
        rule: of the call; None for one that torch does on empty operands as on others.
    """
    if rule is None or all(x.numel() for x in operands):
        return computed(compute, operands)
    none = {
        letter
        for letters, layout, x in zip(rule.inputs, layouts, operands, strict=True)
        for letter, here, size in zip(letters, x.shape, layout.shape, strict=True)
        if size and not here
    }
    full = []
    for letters, x in zip(rule.inputs, operands, strict=True):
        dims = [d for d, letter in enumerate(letters) if letter in none]
        adds = any(letters[d] not in rule.output for d in dims)
        full.append(at_least_one(x, dims, 0.0 if adds else 1.0))  # what is summed is the sum of nothing
    found = computed(compute, full)
    dims = [d for d, letter in enumerate(rule.output) if letter in none]

    def without(x: torch.Tensor) -> torch.Tensor:
        for d in dims:
            x = x.narrow(d, 0, 0)
        return x

    if isinstance(found, torch.Tensor):
        return without(found)
    parts = [without(x) for x in found]
    return type(found)(parts) if isinstance(found, tuple) else parts


def at_least_one(x: torch.Tensor, dims: list[int] | range, value: float = 1.0) -> torch.Tensor:
    """`x` with one element, `value` (0 in indices), along each of `dims` where it has none. In its graph."""
    if x.numel():
        return x
    pads = [n for d in reversed(range(x.dim())) for n in (0, int(d in dims and x.shape[d] == 0))]
    return F.pad(x, pads, value=value if x.is_floating_point() or x.is_complex() else 0)
