"""Products of public classes that give several results laid end to end, which the class takes apart again.

Only by these does a real module tell its blocks: the `query_key_value` of other classes has those of a head side by
side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Blocks = tuple[int, ...]


def blocks_of(class_name: str, child: str, width: int, counts: Mapping[str, int]) -> Blocks:
    """The length of each block of what a linear layer in a module gives; empty where it is one, or not known.

    Args:
        class_name: of the module that holds the layer.
        child: the name of the layer in it.
        width: of what the layer gives.
        counts: attributes of the module that are whole numbers.

    Example:
        >>> blocks_of("GPT2Attention", "c_attn", 24, {"split_size": 8}), blocks_of("GPTNeoXAttention", "qkv", 24, {})
        ((8, 8, 8), ())
    """
    fused = _FUSED.get((class_name, child))
    found = fused(width, counts) if fused is not None else ()
    return found if len(found) > 1 and min(found) > 0 and sum(found) == width else ()


def _by_split_size(width: int, counts: Mapping[str, int]) -> Blocks:
    size = counts.get("split_size", 0)
    return (size,) * (width // size) if size > 0 else ()


def _queries_keys_values(width: int, counts: Mapping[str, int]) -> Blocks:
    kv = counts.get("num_key_value_heads", 0) * counts.get("head_dim", 0)
    return (width - 2 * kv, kv, kv)


def _halves(width: int, counts: Mapping[str, int]) -> Blocks:
    return (width // 2, width // 2)


_FUSED: dict[tuple[str, str], Callable[[int, Mapping[str, int]], Blocks]] = {
    ("GPT2Attention", "c_attn"): _by_split_size,
    ("Phi3Attention", "qkv_proj"): _queries_keys_values,
    ("Phi3MLP", "gate_up_proj"): _halves,
}
