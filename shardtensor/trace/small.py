"""A small model of the same structure as a large one: counts of heads, experts and groups stay, widths are divided."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_WIDTH = re.compile(
    r"(hidden|intermediate|embed|embd|inner|ffn|mlp|model|head|proj|lora|rope|latent|channel)\w*_?(size|dim|rank)s?$"
    r"|^(d_model|d_ff|d_kv|n_embd|n_inner|dim|hidden_dim|ffn_dim|\w+_ffn_dim|width|head_dim|\w+_rank|\w*intermediate\w*)$"
)
"""Keys of a configuration that are lengths of features."""

_KEPT = re.compile(r"num|count|^n_head|vocab|image|patch|window|kernel|position|state_size|group|chunk|per_layer_input")
"""Keys that are counts, or lengths of other things than features, although they may look like those above."""

_VOCABULARY = re.compile(r"vocab_size$")
_TOKEN = re.compile(r"(token_id|token_index)$")
_LAYERS = re.compile(r"(^|_)n?_?layers?$")
_HEADS = re.compile(r"(attention_heads|^n_heads?|^num_heads)$")
_INNER = re.compile(r"intermediate|ffn|d_ff|n_inner")
"""Widths inside of a feed-forward layer, on which no other width depends."""

_EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")

SMALLEST = 8
"""The smallest width. Rotary embeddings need even numbers, and halves of them."""

ROWS = 512
"""The size of a small vocabulary is this plus the remainder of the large one, so that it divides as the large one."""


def small_configs(config: Mapping[str, Any], ranks: int = 1) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield configurations of smaller models with the same structure, the smallest first, and their divisors.

    All widths are divided by one power of 2, those inside of feed-forward layers by a larger one. Numbers of heads and
    layers stay; experts stay a multiple of `ranks` and at least twice as many as a token uses. A model's code that does
    not accept one configuration may accept the next.

    Example:
        >>> config = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "vocab_size": 128256}
        >>> next(small_configs(config))
        ({'hidden_size': 256, 'num_attention_heads': 32, 'head_dim': 8, 'vocab_size': 768}, 16)
    """
    widths = [*_widths(config)]
    divisor = math.gcd(*widths) if widths else 1
    divisor &= -divisor
    while divisor > 1 and min(widths) // divisor < SMALLEST:
        divisor //= 2
    while divisor > 1:
        yield _divided(config, divisor, ranks), divisor
        divisor //= 2
    yield _divided(config, 1, ranks), 1


def with_layers(config: Mapping[Any, Any], layers: int, kept: int) -> dict[Any, Any]:
    """Return the configuration with the first `kept` of its layers: numbers of layers, and lists of a value for each.

    Example:
        >>> with_layers({"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "num_heads": 4}, 4, 2)
        {'num_hidden_layers': 2, 'layer_types': ['a', 'b'], 'num_heads': 4}
    """
    found: dict[Any, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found[key] = with_layers(value, layers, kept)
        elif isinstance(value, list) and len(value) == layers:
            found[key] = value[:kept]
        else:
            found[key] = kept if value == layers and type(value) is int and _LAYERS.search(str(key)) else value
    return found


def _widths(config: Mapping[Any, Any]) -> Iterator[int]:
    """Yield all widths, that of a head too, where it follows from the width of the model."""
    own = {str(key): value for key, value in config.items()}
    yield from (value for key, value in own.items() if _is_width(key, value))
    hidden = next((own[key] for key in ("hidden_size", "n_embd", "d_model", "embed_dim") if own.get(key)), None)
    for key, value in own.items():
        if isinstance(value, Mapping):
            yield from _widths(value)
        elif _HEADS.search(key) and not own.get("head_dim") and type(value) is type(hidden) is int and value > 0:
            yield from [hidden // value] if hidden % value == 0 else []


def _is_width(key: str, value: Any) -> bool:
    return type(value) is int and value >= SMALLEST and bool(_WIDTH.search(key)) and not _KEPT.search(key)


def _experts(count: int, config: Mapping[str, Any], ranks: int) -> int:
    chosen = config.get("num_experts_per_tok") or config.get("moe_top_k") or 1
    groups = config.get("n_group") or 1
    while count % 2 == 0 and count // 2 >= 2 * max(chosen, groups) and count // 2 % ranks == count // 2 % groups == 0:
        count //= 2
    return count


def _divided(config: Mapping[Any, Any], divisor: int, ranks: int) -> dict[Any, Any]:
    rows = {key: value for key, value in config.items() if _VOCABULARY.search(str(key)) and type(value) is int}
    least = min(rows.values(), default=0)
    found: dict[Any, Any] = {}
    for each, value in config.items():
        key = str(each)
        if isinstance(value, Mapping):
            value = _divided(value, divisor, ranks)
        elif _EXPERTS.search(key) and type(value) is int:
            value = _experts(value, config, ranks)
        elif _is_width(key, value):
            value //= divisor
            while _INNER.search(key) and value // 2 % (2 * ranks) == 0 and value > 8 * SMALLEST:
                value //= 2
        elif key in rows:
            value = min(value, ROWS + value % ROWS)
        elif _TOKEN.search(key) and type(value) is int and least:
            value = min(value, ROWS - 1)
        elif _TOKEN.search(key) and isinstance(value, list):
            value = [min(token, ROWS - 1) for token in value]
        found[each] = value
    return found
