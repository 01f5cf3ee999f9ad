"""A step of a module of which only the inputs' shapes matter: random samples, and a loss of all results."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardtensor.errors import PlanError

_IDS = ("input_ids", "ids", "idx", "tokens", "input")
_IMAGES = ("pixel_values", "images", "image")


def example_step(module: nn.Module, sample: int, length: int, samples: int = 2) -> torch.Tensor:
    """Return the loss of a few random samples of `length` tokens, seeded by `sample`; equal on every rank.

    A module whose first layer is an embedding gets ids, also as labels if its forward takes labels; one that begins
    with a convolution gets images; any other gets floats with the number of features of its first linear layer. The
    loss is the one that the module returns, else a weighted mean of its squared results.

    Example:
        >>> example_step(nn.Linear(3, 2), 0, 4).shape
        torch.Size([])
    """
    g = torch.Generator().manual_seed(sample)
    names = list(inspect.signature(module.forward).parameters)
    first = next((m for m in module.modules() if isinstance(m, nn.Embedding | nn.Linear | nn.Conv2d)), None)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    given: dict[str, Any] = {}
    if isinstance(first, nn.Embedding):
        x = torch.randint(0, first.num_embeddings, (samples, length), generator=g)
        given = {"labels": x} if "labels" in names else {}
        given |= {"decoder_input_ids": x} if "decoder_input_ids" in names and not given else {}
    elif isinstance(first, nn.Conv2d):
        size = getattr(getattr(module, "config", None), "image_size", 4 * max(first.kernel_size))
        x = torch.randn(samples, first.in_channels, size, size, generator=g, dtype=dtype)
    elif isinstance(first, nn.Linear):
        x = torch.randn(samples, length, first.in_features, generator=g, dtype=dtype)
    else:
        raise PlanError(
            f"it is not known how to call {type(module).__name__}",
            {"forward takes": ", ".join(names)},
            "give its step, too: let the function return (module, step), with step(module, sample) -> loss",
        )
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    x, given = x.to(device), {key: value.to(device) for key, value in given.items()}
    name = next((n for n in (*_IDS, *_IMAGES) if n in names), None)
    output = module(**{name: x}, **given) if name else module(x, **given)
    return _loss(output)


def _loss(output: Any) -> torch.Tensor:
    named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    if isinstance(named.get("loss"), torch.Tensor):
        return named["loss"]
    parts = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    terms = [_weighted_mean(y) for y in parts if isinstance(y, torch.Tensor) and y.is_floating_point()]
    return torch.stack([term for term in terms if term.requires_grad] or terms).sum()


def _weighted_mean(y: torch.Tensor) -> torch.Tensor:
    """Return a mean of squares with different weights along the last dim, so that no mistake cancels in the sum."""
    weights = torch.linspace(0.5, 1.5, max(y.shape[-1], 1), dtype=y.dtype, device=y.device) if y.dim() else 1.0
    return (y.square() * weights).sum() / max(math.prod(y.shape), 1)
