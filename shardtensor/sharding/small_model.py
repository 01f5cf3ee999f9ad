"""A small model of the same code as a large one of transformers: few layers, short dims, one step of it."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

SMALL, MOST = 1 << 21, 1 << 25
"""The number of parameters up to which a model is small; and up to which a smaller one of its kind may be run."""

VOCABULARY = 96

_LAYERS = re.compile(r"(num_|n_)?(hidden_|encoder_|decoder_)*layers?|n_layer")
_WIDTHS = re.compile(r"hidden_size|\w*intermediate_size\w*|n_embd|n_inner|d_model|d_ff|dim|hidden_dim|\w*ffn_\w*dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_SHARED = ("num_key_value_heads", "num_kv_heads")
_LENGTHS = ("head_dim", "d_kv", "kv_channels", "mamba_d_head")
_EXPERTS = re.compile(r"(num|n)_(\w+_)?experts|moe_num_experts")


def small_configs(model: Any) -> Iterator[Any]:
    """Yield configurations of the model's class with small sizes, the most promising first; its own if it is small."""
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= SMALL
    for sizes in (None,) if is_small else (_few_heads, _short_heads):
        config = copy.deepcopy(model.config)
        for part in (config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))):
            part._experts_implementation = "eager"  # the others do not know float64
            if sizes is not None:
                _shrink(part, sizes)
        yield config


Sizes = Callable[[Mapping[str, int]], dict[str, Any]]


def _shrink(config: Any, sizes: Sizes) -> None:
    """Write small sizes in a configuration: two layers, or one of each kind, and few experts and words."""
    keys = {key: value for key, value in config.to_dict().items() if type(value) is int and value > 0}
    layers = next((value for key, value in keys.items() if _LAYERS.fullmatch(key)), 0)
    small = sizes(keys)
    kinds = getattr(config, "layer_types", None) or []
    kept = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    kept = kept if len(kept) > 1 else [0, 1]
    most = max(8, keys.get("num_experts_per_tok", 0), 4 * keys.get("n_group", 0))
    for key, value in keys.items():
        if _LAYERS.fullmatch(key):
            small[key] = min(value, len(kept))
        elif key.endswith("_token_id"):
            small[key] = min(value, VOCABULARY - 1)
        elif key == "vocab_size":
            small[key] = min(value, VOCABULARY)
        elif key == "max_source_positions":
            small[key] = min(value, 16)
        elif _EXPERTS.fullmatch(key):
            small[key] = min(value, most)
    for key, listed in vars(config).items():
        if isinstance(listed, list | tuple) and len(listed) == layers > len(kept):
            small[key] = [listed[i] for i in kept]
    for key, size in small.items():
        setattr(config, key, size)


def _few_heads(keys: Mapping[str, int]) -> dict[str, Any]:
    """Return eight heads, or few that share two of keys, of a length of 16 at most, and widths in proportion."""
    names = [key for key in _HEADS if key in keys]
    width = next((keys[key] for key in ("hidden_size", "n_embd", "d_model", "dim") if key in keys), 0)
    if not names or not width:
        return {}
    heads = keys[names[0]]
    shared = next((keys[key] for key in _SHARED if key in keys), heads)
    length = next((keys[key] for key in _LENGTHS if key in keys), width // heads)
    few_shared = 8 if shared == heads else min(shared, 2)
    few = few_shared * (heads // shared) if heads % shared == 0 else heads
    small: dict[str, Any] = dict.fromkeys(names, few) | {key: few_shared for key in _SHARED if key in keys}
    short = min(length, 16)
    if "qk_rope_head_dim" not in keys:  # latent attention has lengths of its own
        small |= {key: short for key in _LENGTHS if key in keys}
    for key, value in keys.items():
        if _WIDTHS.fullmatch(key):
            small[key] = few * short * max(1, width // (heads * length)) * max(1, min(4, value // width))
    return small


def _short_heads(keys: Mapping[str, int]) -> dict[str, Any]:
    """Return all heads, of a length of 16, and widths in proportion."""
    length = next((keys[key] for key in _LENGTHS if key in keys), 0)
    heads = next((keys[key] for key in _HEADS if key in keys), 0)
    times = (length or keys.get("hidden_size", 0) // max(heads, 1)) // 16
    names = [key for key, value in keys.items() if _WIDTHS.fullmatch(key) or key in _LENGTHS]
    return {key: keys[key] // times for key in names if times > 1 and keys[key] % times == 0}


def make_small(kind: Any, config: Any) -> Any:
    """Return a model of a class with a configuration, with values that are not those of its initialization: biases that
    are zero would hide mistakes.

    Raises:
        ValueError: it would be too large for simulated ranks.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind._from_config(copy.deepcopy(config)).parameters())
    if size > MOST:
        raise ValueError(f"it has {size:,} parameters")
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
