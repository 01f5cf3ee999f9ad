"""What ranks must agree on when they make an optimizer together, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def say_group(group: Mapping[str, Any]) -> str:
    """The names, global shapes and dtypes of a group's parameters, one a line."""
    return "\n".join(f"{name} {tuple(param.shape)} {param.dtype}" for name, param in group["params"]) or "(none)"


def say_options(optimizer_class: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A class and what it is called with; tensors by shape and dtype, so that nothing is read from a device.

    Example:
        >>> say_options(torch.optim.SGD, (0.1,), {"momentum": 0.9})
        'SGD(0.1, momentum=0.9)'
    """
    name = getattr(getattr(optimizer_class, "func", optimizer_class), "__name__", "")
    words = [_say(value) for value in args] + [f"{key}={_say(value)}" for key, value in sorted(kwargs.items())]
    return f"{name}({', '.join(words)})"


def _say(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_say, value))})"
    return repr(value) if isinstance(value, int | float | str | complex | None) else type(value).__name__
