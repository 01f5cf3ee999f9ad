"""Facts about an optimizer that must be equal on all ranks, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def params_text(group: Mapping[str, Any]) -> str:
    """Return the names, global shapes and dtypes of a group's parameters, one for each line."""
    return "\n".join(f"{name} {tuple(param.shape)} {param.dtype}" for name, param in group["params"]) or "(none)"


def options_text(optimizer_class: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return a class and its arguments; tensors by shape and dtype, so that nothing is read from a device.

    Example:
        >>> options_text(torch.optim.SGD, (0.1,), {"momentum": 0.9})
        'SGD(0.1, momentum=0.9)'
    """
    name = getattr(getattr(optimizer_class, "func", optimizer_class), "__name__", "")
    words = [_text(value) for value in args] + [f"{key}={_text(value)}" for key, value in sorted(kwargs.items())]
    return f"{name}({', '.join(words)})"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, int | float | str | complex | None) else type(value).__name__
