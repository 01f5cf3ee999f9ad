"""A step of a module of which only the inputs' shapes matter: random samples, and a loss of all results."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping
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
    names = inspect.signature(module.forward).parameters
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        given = _inputs_of_transformers(module, names, (samples, length), g, dtype)
    else:
        given = _inputs(module, names, (samples, length), g, dtype)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    given = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in given.items()}
    return _loss(module(given.pop(""), **given) if "" in given else module(**given))


Shape = tuple[int, int]
"""Samples, and tokens of each."""


def _inputs(
    module: nn.Module, names: Collection[str], shape: Shape, g: torch.Generator, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of a module; that with the empty name is the first one."""
    first = next((m for m in module.modules() if isinstance(m, nn.Embedding | nn.Linear | nn.Conv2d)), None)
    given: dict[str, Any] = {}
    if isinstance(first, nn.Embedding):
        x = torch.randint(0, first.num_embeddings, shape, generator=g)
        given = {"labels": x} if "labels" in names else {}
        given |= {"decoder_input_ids": x} if "decoder_input_ids" in names and not given else {}
    elif isinstance(first, nn.Conv2d):
        size = getattr(getattr(module, "config", None), "image_size", 4 * max(first.kernel_size))
        x = torch.randn(shape[0], first.in_channels, size, size, generator=g, dtype=dtype)
    elif isinstance(first, nn.Linear):
        x = torch.randn(*shape, first.in_features, generator=g, dtype=dtype)
    else:
        raise PlanError(
            f"it is not known how to call {type(module).__name__}",
            {"forward takes": ", ".join(names)},
            "give its step, too: let the function return (module, step), with step(module, sample) -> loss",
        )
    return {next((n for n in (*_IDS, *_IMAGES) if n in names), ""): x, **given}


def _inputs_of_transformers(
    module: Any, names: Collection[str], shape: Shape, g: torch.Generator, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of a model of transformers, which names its main input."""
    config, main = module.config, module.main_input_name
    vision, text = getattr(config, "vision_config", config), config.get_text_config()
    rows = max(getattr(text, "vocab_size", 0) or 0, 5)
    ids = torch.randint(min(3, rows - 1), rows, shape, generator=g)
    given: dict[str, Any] = {}
    if main == "input_features":
        length = 2 * getattr(config, "max_source_positions", 8)
        given[main] = torch.randn(shape[0], config.num_mel_bins, length, generator=g, dtype=dtype)
    elif main == "input_ids":
        given[main] = ids
    if main == "pixel_values" or ("pixel_values" in names and vision is not config):
        size, channels = getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3)
        size = size if isinstance(size, int) else size[0]
        given["pixel_values"] = torch.randn(shape[0], channels, size, size, generator=g, dtype=dtype)
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = ids
    elif "labels" in names and main == "input_ids":
        given["labels"] = ids
    on_meta = any(each.is_meta for each in module.parameters())  # without a cache, the code reads values of positions
    if ("use_cache" in names or "kwargs" in names) and not on_meta:
        given["use_cache"] = False
    return given


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


def with_noise(module: nn.Module) -> nn.Module:
    """Add random numbers to all parameters of a module, and return it: biases of zeros would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return module
