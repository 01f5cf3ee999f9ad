"""What the names of a model's tensors tell of it."""

from __future__ import annotations

import re

from shardtensor.plan.models.model import Model


def ending(model: Model, end: str) -> str:
    """The first name that is `end`, or ends with it after a dot; empty when there is none."""
    return next((t.name for t in model.tensors if t.name == end or t.name.endswith(f".{end}")), "")


def shape_of(model: Model, end: str) -> tuple[int, ...]:
    """The shape of the first tensor whose name ends so."""
    return model.by_name[ending(model, end)].shape


def unnumbered(name: str) -> str:
    """A name without the numbers of layers and experts.

    Example:
        >>> unnumbered("h.11.attn.c_attn.weight")
        'h.#.attn.c_attn.weight'
    """
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1#", name)
