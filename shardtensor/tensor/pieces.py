"""Leaves that lie end to end in one tensor and get their gradients together: what they know of each other."""

from __future__ import annotations

import torch


class Pieces:
    """A flat tensor whose pieces are the leaves of parameters.

    Whoever makes such leaves gives each of them, as its attribute ``_piece``, this object and the leaf's number; and
    gives them gradients that are the same pieces of one tensor like `whole`. Then an optimizer may step all of it as
    one tensor: what lies between the leaves belongs to nobody, and is zero there and in the gradient.

    Args:
        whole: the flat tensor.
        starts: where the leaves begin, in order.

    Attributes:
        has_hooks: whether a hook was ever given to a leaf. Autograd does not run hooks of leaves that it gives no
            gradients; whoever does so looks here.
    """

    __slots__ = ("has_hooks", "starts", "whole")

    def __init__(self, whole: torch.Tensor, starts: tuple[int, ...]) -> None:
        self.whole, self.starts = whole, starts
        self.has_hooks = False


def piece_of(leaf: torch.Tensor) -> tuple[Pieces, int] | None:
    """What `leaf` is a piece of, and its number there."""
    return vars(leaf).get("_piece")
