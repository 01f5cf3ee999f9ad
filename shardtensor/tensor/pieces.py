"""Leaves that lie end to end in one tensor and get their gradients together: what they know of each other."""

from __future__ import annotations

import torch


class Pieces:
    """A flat tensor `whole` with the leaves of parameters in it, which begin at `starts`.

    Each leaf has this object and its number there as its attribute ``_piece``. The leaves get gradients that are the
    same pieces of one tensor like `whole`, so an optimizer may step all of it as one tensor: what lies between the
    leaves is zero there and in the gradient. Autograd does not run hooks of leaves that it gives no gradients; whoever
    gives those looks at `has_hooks`, whether a hook was ever given to a leaf.
    """

    __slots__ = ("has_hooks", "starts", "whole")

    def __init__(self, whole: torch.Tensor, starts: tuple[int, ...]) -> None:
        self.whole, self.starts = whole, starts
        self.has_hooks = False


def piece_of(leaf: torch.Tensor) -> tuple[Pieces, int] | None:
    """What `leaf` is a piece of, and its number there."""
    return vars(leaf).get("_piece")
