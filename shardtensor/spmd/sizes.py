"""Which numbers of a step depend on the batch, from two traces: of the whole batch, and of twice as many samples.

A number that is equal in both does not depend on the batch. One that doubles grows with it: for a rank's part it is
multiplied by the part's share. All others have no meaning for a part.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import attrs
import torch
from torch import fx

from shardtensor.errors import RuleError

Shape = tuple[int, ...]


@attrs.frozen
class BatchPart:
    """This rank's part of the batch: `own` of `total` samples, from number `start` on, of `ranks` ranks."""

    own: int
    total: int
    start: int
    ranks: int
    is_even: bool

    @property
    def share(self) -> Fraction:
        """This rank's samples, divided by all."""
        return Fraction(self.own, self.total)

    def size(self, whole: int, doubled: int) -> int | None:
        """Return a size for this part; None if it has none."""
        if whole == doubled:
            return whole
        local = whole * self.share
        return int(local) if doubled == 2 * whole and local.denominator == 1 else None

    def shape(self, whole: Shape, doubled: Shape) -> Shape | None:
        """Return a shape for this part."""
        found = [self.size(a, b) for a, b in zip(whole, doubled, strict=True)]
        return None if None in found else tuple(x for x in found if x is not None)


def growth(whole: Any, doubled: Any) -> int | None:
    """Return the power of the batch size that a number grows with; None if it is none.

    Example:
        >>> growth(8, 8), growth(8, 16), growth(0.25, 0.125), growth(7, 15)
        (0, 1, -1, None)
    """
    if whole == doubled:
        return 0
    if not whole:
        return None
    ratio = doubled / whole
    return {2.0: 1, 0.5: -1, 4.0: 2, 0.25: -2}.get(ratio)


def batch_dims(whole: torch.Tensor, doubled: torch.Tensor) -> tuple[int, ...]:
    """Return the dims that differ between the traces."""
    return tuple(d for d, (a, b) in enumerate(zip(whole.shape, doubled.shape, strict=True)) if a != b)


def paired(whole: fx.Graph, doubled: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Return the nodes of both traces in pairs.

    Raises:
        RuleError: the step runs other operations for another batch size.
    """
    a, b = list(whole.nodes), list(doubled.nodes)
    for x, y in zip(a, b, strict=False):
        if (x.op, x.target if x.op == "call_function" else "") != (y.op, y.target if y.op == "call_function" else ""):
            raise _differs(x)
    if len(a) != len(b):
        raise _differs((a if len(a) > len(b) else b)[min(len(a), len(b))])
    return list(zip(a, b, strict=True))


def where(node: fx.Node) -> str:
    """Return the user's line that a node belongs to."""
    return str((node.meta.get("custom") or {}).get("where", ""))


def _differs(node: fx.Node) -> RuleError:
    return RuleError(
        "the train step runs other operations for another batch size",
        {"at": where(node), "operation": str(node.target)},
        "let its control flow not depend on the batch size, and do not loop over samples",
    )


def map_pairs(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Return nested arguments with `function` applied to the pairs of what is no list, tuple or slice."""
    if isinstance(a, list | tuple):
        return [map_pairs(function, x, y) for x, y in zip(a, b, strict=True)]
    return function(a, b)


def plain(x: Any) -> float:
    """Return a fraction as the number that a graph has.

    Example:
        >>> plain(Fraction(3, 4)), plain(Fraction(4, 2))
        (0.75, 2.0)
    """
    return x if isinstance(x, int) else float(x)
