"""A small model of the same code as a large one of transformers: few layers, short dims, one step of it."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

SMALL = 1 << 21
"""The number of parameters up to which a model is small."""

VOCABULARY = 96

_LAYERS = re.compile(r"(num_|n_)?(hidden_|encoder_|decoder_)*layers?|n_layer")
_WIDTHS = re.compile(r"hidden_size|\w*intermediate_size\w*|n_embd|n_inner|d_model|d_ff|dim|hidden_dim|\w*ffn_\w*dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_SHARED = ("num_key_value_heads", "num_kv_heads")
_LENGTHS = ("head_dim", "d_kv", "kv_channels")
_EXPERTS = re.compile(r"(num|n)_(\w+_)?experts|moe_num_experts")


def small_config(model: Any) -> Any:
    """Return a configuration of the model's class with small sizes; its own if the model is small."""
    config = copy.deepcopy(model.config)
    if sum(parameter.numel() for parameter in model.parameters()) > SMALL:
        for part in (config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))):
            _shrink(part)
    for part in (config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))):
        part._experts_implementation = "eager"  # the others do not know float64
    return config


def _shrink(config: Any) -> None:
    """Write small sizes in a configuration: two layers of each kind, eight heads of 16, and widths in proportion."""
    keys = {key: value for key, value in config.to_dict().items() if type(value) is int and value > 0}
    layers = next((value for key, value in keys.items() if _LAYERS.fullmatch(key)), 0)
    small = _small_heads(keys)
    kinds = getattr(config, "layer_types", None)
    kept = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values()) if kinds else []
    count = max(2, len(kept))
    for key, value in keys.items():
        if _LAYERS.fullmatch(key):
            small[key] = min(value, count)
        elif key.endswith("_token_id"):
            small[key] = min(value, VOCABULARY - 1)
        elif key == "vocab_size":
            small[key] = min(value, VOCABULARY)
        elif _EXPERTS.fullmatch(key):
            small[key] = min(value, max(8, keys.get("num_experts_per_tok", 0)))
    for key, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == layers and layers > count:
            small[key] = [value[i] for i in (*kept, *range(layers)) if i not in kept[:0]][:count] if kept else value[:2]
    for key, value in small.items():
        setattr(config, key, value)


def _small_heads(keys: Mapping[str, int]) -> dict[str, Any]:
    """Return small numbers of heads and widths in proportion; none where the configuration has no heads."""
    names = [key for key in _HEADS if key in keys]
    width = next((keys[key] for key in ("hidden_size", "n_embd", "d_model", "dim") if key in keys), 0)
    if not names or not width:
        return {}
    heads = keys[names[0]]
    shared = next((keys[key] for key in _SHARED if key in keys), heads)
    size = next((keys[key] for key in _LENGTHS if key in keys), width // heads)
    few_shared = 8 if shared == heads else min(shared, 2)
    few = few_shared * (heads // shared) if heads % shared == 0 else heads
    short = min(size, 16)
    times = max(1, width // (heads * size) if width > heads * size else 1)
    small: dict[str, Any] = dict.fromkeys(names, few) | {key: few_shared for key in _SHARED if key in keys}
    small |= {key: short for key in _LENGTHS if key in keys}
    for key, value in keys.items():
        if _WIDTHS.fullmatch(key):
            small[key] = few * short * times * max(1, min(4, value // width))
    return small


def make_small(kind: Any, config: Any) -> Any:
    """Return a model of a class with a configuration, with values that are not those of its initialization: biases that
    are zero would hide mistakes."""
    model = kind._from_config(copy.deepcopy(config), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def small_step(module: Any, sample: int) -> torch.Tensor:
    """Return the loss of a few random samples, seeded by `sample`, for the inputs that the model's forward takes."""
    g = torch.Generator().manual_seed(sample)
    names, config = inspect.signature(module.forward).parameters, module.config
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    part = getattr(config, "vision_config", config)
    given: dict[str, Any] = {}
    text = config.get_text_config()
    ids = torch.randint(3, max(getattr(text, "vocab_size", 0) or 0, 5), (2, 8), generator=g)
    main = module.main_input_name
    if main == "input_features":
        length = 2 * getattr(config, "max_source_positions", 8)
        given[main] = torch.randn(2, config.num_mel_bins, length, generator=g, dtype=dtype)
    elif main == "input_ids":
        given[main] = ids
    if main == "pixel_values" or ("pixel_values" in names and hasattr(config, "vision_config")):
        size, channels = getattr(part, "image_size", 32), getattr(part, "num_channels", 3)
        size = size if isinstance(size, int) else size[0]
        given["pixel_values"] = torch.randn(2, channels, size, size, generator=g, dtype=dtype)
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = ids
    if "use_cache" in names or "kwargs" in names:
        given["use_cache"] = False
    output = module(**{name: value for name, value in given.items() if name in names or name == "use_cache"})
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    terms = [_weighted_mean(y) for y in leaves if isinstance(y, torch.Tensor) and y.requires_grad]
    return torch.stack(terms).sum()


def _weighted_mean(y: torch.Tensor) -> torch.Tensor:
    """Return a mean of squares with other weights along the last dim, in which no mistake cancels."""
    weights = torch.linspace(0.5, 1.5, y.shape[-1], dtype=y.dtype, device=y.device) if y.dim() else 1.0
    return (y.square() * weights).mean()
