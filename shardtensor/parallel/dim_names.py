"""The names of the dims of a module's parameters."""

from __future__ import annotations

from torch import nn

from shardtensor.plan.models.model import kind_named


def dim_names(module: nn.Module, parameter: str) -> tuple[str, ...] | None:
    """The names of a parameter's dims, or None for module types that are not known.

    Example:
        >>> dim_names(nn.Linear(2, 3), "weight")
        ('out', 'in')
    """
    for cls in type(module).__mro__:
        kind = kind_named(cls.__name__)
        if kind is not None and parameter in kind.dims:
            return kind.dims[parameter]
    return None
