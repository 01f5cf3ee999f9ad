"""The model of a plan: names and shapes of tensors, modules, and the known kinds of layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import attrs


@attrs.frozen
class LayerKind:
    """One kind of layer.

    Attributes:
        name: ``"linear"``: a product over the dim ``in``; ``"embedding"``: a look-up of rows of ``vocab``; ``"norm"``:
            scales values along ``embed``; ``"conv"``: a convolution with channels ``in`` and ``out``.
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
    """Return the kind of the layers of a class, by its name; None if it is not known.

    Model libraries have their own norms, with names such as ``LlamaRMSNorm``, ``T5LayerNorm``.

    Example:
        >>> kind_named("Conv1D").dims["weight"], kind_named("LlamaRMSNorm").name
        (('in', 'out'), 'norm')
    """
    is_norm = class_name.endswith(("RMSNorm", "LayerNorm"))
    return _BY_CLASS.get(class_name, _NORM if is_norm else None)


def kind_with(dims: tuple[str, ...] | None) -> LayerKind | None:
    """Return the kind of the layers whose weight has dims of these names; None if there is none.

    Example:
        >>> kind_with(("vocab", "embed")).name
        'embedding'
    """
    return next(
        (kind for kind in (_LINEAR, _TRANSPOSED, _EMBEDDING, _NORM, _CONV) if kind.dims["weight"] == dims), None
    )


Blocks = tuple[int, ...]
"""The lengths of consecutive results of one product, which the class splits again.

A real module has them only if its class is in `_FUSED`: in `query_key_value` of others the results of each head are
adjacent.
"""


def blocks_of(class_name: str, child: str, width: int, counts: Mapping[str, int]) -> Blocks:
    """Return the lengths of the blocks in the result of a linear layer in a module; empty if it is one, or unknown.

    Args:
        class_name: of the module that holds the layer.
        child: the name of the layer in it.
        width: of the layer's result.
        counts: attributes of the module that are whole numbers.

    Example:
        >>> blocks_of("GPT2Attention", "c_attn", 24, {"split_size": 8}), blocks_of("GPTNeoXAttention", "qkv", 24, {})
        ((8, 8, 8), ())
    """
    fused = _FUSED.get((class_name, child))
    found = fused(width, counts) if fused is not None else ()
    return found if len(found) > 1 and min(found) > 0 and sum(found) == width else ()


def _queries_keys_values(width: int, counts: Mapping[str, int]) -> Blocks:
    kv = counts.get("num_key_value_heads", 0) * counts.get("head_dim", 0)
    return (width - 2 * kv, kv, kv)


_FUSED: dict[tuple[str, str], Callable[[int, Mapping[str, int]], Blocks]] = {
    ("GPT2Attention", "c_attn"): lambda width, counts: (n := counts.get("split_size", 0),) * (width // max(n, 1)),
    ("Phi3Attention", "qkv_proj"): _queries_keys_values,
    ("Phi3MLP", "gate_up_proj"): lambda width, counts: (width // 2, width // 2),
}


BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""The bytes of one element, by the name of its dtype."""


@attrs.frozen
class TensorInfo:
    """One tensor of a model, under one of its names.

    Attributes:
        name: dotted, without the segments of wrapper modules.
        shape: global.
        dims: the names of its dims, such as ``("out", "in")``; None if they are not known.
        dtype: as torch spells it, without ``torch.``.
        is_buffer: a buffer that is saved, not a parameter.
        requires_grad: whether it is a parameter in training.
        blocks: dims of several consecutive blocks, such as a fused q, k and v, with the length of each block.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...] | None = None
    dtype: str = "float32"
    is_buffer: bool = False
    requires_grad: bool = True
    blocks: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the full tensor."""
        return self.numel * BYTES[self.dtype]


@attrs.frozen
class ModuleInfo:
    """The facts of a real module beyond its tensors.

    Attributes:
        class_name: of its type.
        arguments: the names of its forward's arguments.
        counts: attributes that are whole numbers.
    """

    class_name: str
    arguments: tuple[str, ...] = ()
    counts: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class Model:
    """The tensors of a model, in its order, tied ones under each of their names.

    Attributes:
        source: the file it was read from, for messages: ``models/llama3-8b/config.json``.
        modules: by path, if it was made from a real module; else empty, and the modules are the prefixes of names.
        tied: names that are one tensor; known only from a real module.
        config: the keys of its config.json.
    """

    tensors: tuple[TensorInfo, ...]
    source: str = ""
    modules: Mapping[str, ModuleInfo] = attrs.field(factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    config: Mapping[str, object] = attrs.field(factory=dict)

    @property
    def class_name(self) -> str:
        """The class of the model; empty if it is not known."""
        architectures: Any = self.config.get("architectures") or ("",)
        return self.modules[""].class_name if "" in self.modules else str(architectures[0])

    def cast(self, dtype: str | None) -> Model:
        """Return the model with another dtype of floating-point tensors; None: as it is."""
        if dtype is None:
            return self
        tensors = (attrs.evolve(each, dtype=dtype) if "float" in each.dtype else each for each in self.tensors)
        return attrs.evolve(self, tensors=tuple(tensors))

    @cached_property
    def by_name(self) -> Mapping[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def dtype(self) -> str:
        """The dtype of most elements of its parameters."""
        sizes = Counter({"float32": 0})
        for tensor in self.tensors:
            sizes[tensor.dtype] += 0 if tensor.is_buffer else tensor.numel
        return sizes.most_common(1)[0][0]

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths of all modules, parents first; the root is the empty one."""
        if self.modules:
            return tuple(self.modules)
        found = {"": None}
        for tensor in self.tensors:
            path, new = tensor.name.rpartition(".")[0], []
            while path not in found:
                new.append(path)
                path = path.rpartition(".")[0]
            found |= dict.fromkeys(reversed(new))
        return tuple(found)

    def kind(self, path: str) -> LayerKind | None:
        """Return the kind of the layer at a path, by its class or its weight's dim names; None if not known."""
        if path in self.modules:
            return kind_named(self.modules[path].class_name)
        weight = self.by_name.get(f"{path}.weight" if path else "weight")
        return kind_with(weight.dims) if weight is not None else None

    def blocks(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Return the dims of a tensor that are several consecutive blocks, by name, with the length of each block;
        empty if not known."""
        tensor = self.by_name[name]
        path = name.rpartition(".")[0]
        owner = self.modules.get(path.rpartition(".")[0]) if path else None
        if tensor.blocks or owner is None or "out" not in (tensor.dims or ()):
            return dict(tensor.blocks)
        width = tensor.shape[tensor.dims.index("out")]  # type: ignore[union-attr]
        found = blocks_of(owner.class_name, path.rpartition(".")[2], width, owner.counts)
        return {"out": found} if found else {}
