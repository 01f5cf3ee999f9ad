"""What the dims of a module's parameters are called, so that ``[out: tp]`` means the same for every module type."""

from __future__ import annotations

from torch import nn

_BY_TYPE: dict[str, dict[str, tuple[str, ...]]] = {
    "Linear": {"weight": ("out", "in"), "bias": ("out",)},
    "Conv1D": {"weight": ("in", "out"), "bias": ("out",)},  # GPT-2's, which stores (in, out)
    "Embedding": {"weight": ("vocab", "embed")},
    "LayerNorm": {"weight": ("embed",), "bias": ("embed",)},
    "RMSNorm": {"weight": ("embed",)},
}


def dim_names(module: nn.Module, parameter: str) -> tuple[str, ...] | None:
    """The names of a parameter's dims, or None for module types that are not known.

    Example:
        >>> dim_names(nn.Linear(2, 3), "weight")
        ('out', 'in')
    """
    for cls in type(module).__mro__:
        names = _BY_TYPE.get(cls.__name__, {}).get(parameter)
        if names is not None:
            return names
    return None
