"""What an optimizer class updates at a time: an element, a row, a whole parameter, or all parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import optim

UpdateUnit = Literal["element", "row", "parameter", "all"]

ELEMENTWISE = frozenset(
    getattr(optim, name) for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)
"""Classes whose update of an element depends only on that element; not their subclasses, which may differ."""


def update_unit(optimizer_class: Callable[..., Any]) -> UpdateUnit:
    """Return which elements an update of one element may depend on: itself, its row, its parameter, or all parameters.

    A class states it as its attribute ``update_unit``. A class that does not, and is none of torch's, depends on the
    whole parameter.

    Example:
        >>> import torch
        >>> class Signs(torch.optim.SGD):
        ...     update_unit = "element"
        >>> update_unit(torch.optim.AdamW), update_unit(torch.optim.LBFGS), update_unit(Signs)
        ('element', 'all', 'element')
    """
    cls: Any = getattr(optimizer_class, "func", optimizer_class)
    if cls in ELEMENTWISE:
        return "element"
    if cls is optim.LBFGS:
        return "all"
    return getattr(cls, "update_unit", "parameter")


def steps_apart(optimizer_class: Callable[..., Any]) -> bool:
    """Whether parameters are known to be updated independently of each other, so that each may be stepped by itself."""
    cls: Any = getattr(optimizer_class, "func", optimizer_class)
    is_known = cls.__module__.startswith("torch.optim.") or hasattr(cls, "update_unit")
    return is_known and update_unit(cls) != "all"
