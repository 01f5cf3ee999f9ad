"""Kinds of layers whose arithmetic is known: what the dims of their parameters are called, by the name of their class.

So ``[out: tp]`` means the same for every type of module, and what a layer gives follows from how its weight is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import attrs


@attrs.frozen
class LayerKind:
    """One kind of layer.

    Attributes:
        name: ``"linear"``: a product over the dim ``in``; ``"embedding"``: rows of ``vocab`` are looked up; ``"norm"``:
            values pass, each scaled along ``embed``; ``"conv"``: a convolution, whose channels are ``in`` and ``out``.
        dims: the names of each parameter's dims, in the order in which they are stored.
    """

    name: Literal["linear", "embedding", "norm", "conv"]
    dims: Mapping[str, tuple[str, ...]]


_LINEAR = LayerKind("linear", {"weight": ("out", "in"), "bias": ("out",)})
_TRANSPOSED = LayerKind("linear", {"weight": ("in", "out"), "bias": ("out",)})
_EMBEDDING = LayerKind("embedding", {"weight": ("vocab", "embed")})
_NORM = LayerKind("norm", {"weight": ("embed",), "bias": ("embed",)})
_CONV = LayerKind("conv", {"weight": ("out", "in", "height", "width"), "bias": ("out",)})

_BY_CLASS = {
    "Linear": _LINEAR,
    "Conv1D": _TRANSPOSED,  # GPT-2's, which stores (in, out)
    "Embedding": _EMBEDDING,
    "Conv2d": _CONV,
}


def kind_named(class_name: str) -> LayerKind | None:
    """The kind of the layers of a class, by its name; None where it is not known.

    Model libraries write norms of their own and call them ``LlamaRMSNorm``, ``T5LayerNorm``.

    Example:
        >>> kind_named("Conv1D").dims["weight"], kind_named("LlamaRMSNorm").name
        (('in', 'out'), 'norm')
    """
    is_norm = class_name.endswith(("RMSNorm", "LayerNorm"))
    return _BY_CLASS.get(class_name, _NORM if is_norm else None)


def kind_with(dims: tuple[str, ...] | None) -> LayerKind | None:
    """The kind of the layers whose weight has dims of these names.

    Example:
        >>> kind_with(("vocab", "embed")).name
        'embedding'
    """
    return next(
        (kind for kind in (_LINEAR, _TRANSPOSED, _EMBEDDING, _NORM, _CONV) if kind.dims["weight"] == dims), None
    )


Blocks = tuple[int, ...]
"""The lengths of results that one product gives laid end to end, and that the class takes apart again.

Only for the classes in `_FUSED` does a real module tell them: `query_key_value` of others has those of a head side by
side.
"""


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
