"""Kinds of layers whose arithmetic is known: what the dims of their parameters are called, by the name of their class.

So ``[out: tp]`` means the same for every type of module, and what a layer gives follows from how its weight is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
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
