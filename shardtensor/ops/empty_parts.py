"""Kernels on a rank whose part is empty: they compute one element more and give none of it.

Many of torch's kernels refuse an empty operand, or answer it on a way of their own: in another dtype under autocast,
out of the graph, without the terms of a second derivative. Backward is collective, so all ranks must go one way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS, rule_of


def takes_empty(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`func` of local operands, by the row of `name`, done alike by ranks whose part is empty."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if all(x.numel() for x in tensors):
            return func(*args, **kwargs)
        signature = ROWS[name].call
        operands = [args[i] if i < len(args) else kwargs.get(key)
                    for i, key in ((signature.place(key), key) for key in signature.operands)]  # fmt: skip
        present = [x for x in operands if x is not None]
        rule = rule_of(name, tuple(None if x is None else tuple(x.shape) for x in operands))
        assert rule is not None, "local operands fit the row as whole ones do"
        full = {id(x): y for x, y in zip(present, filled(rule, present), strict=True)}
        found = func(*(full.get(id(x), x) for x in args), **{key: full.get(id(x), x) for key, x in kwargs.items()})
        return emptied(rule, present, found)

    compute.__name__ = getattr(func, "__name__", name)
    compute.on_elements = func  # type: ignore[attr-defined]  # where every part has elements
    return compute


def filled(rule: Rule, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """Local operands with one element along each dim that is empty, but for those that the rule has whole.

    A whole dim has its global size here: what its being empty means is torch's to say.
    """
    full = []
    for letters, x in zip(rule.inputs, operands, strict=True):
        dims = [d for d, letter in enumerate(letters) if letter not in rule.whole]
        adds = any(x.shape[d] == 0 and letters[d] not in rule.output for d in dims)
        full.append(at_least_one(x, dims, 0.0 if adds else 1.0))  # what is summed is the sum of nothing
    return full


def emptied(rule: Rule, operands: list[torch.Tensor], found: Any) -> Any:
    """The results, or the one result, of `filled` operands without what was filled in."""
    none = {
        letter
        for letters, x in zip(rule.inputs, operands, strict=True)
        for letter, n in zip(letters, x.shape, strict=True)
        if n == 0
    }
    dims = [d for d, letter in enumerate(rule.output) if letter in none and letter not in rule.whole]

    def without(x: torch.Tensor) -> torch.Tensor:
        for d in dims:
            x = x.narrow(d, 0, 0)
        return x

    return without(found) if isinstance(found, torch.Tensor) else type(found)(map(without, found))


def at_least_one(x: torch.Tensor, dims: list[int] | range, value: float = 1.0) -> torch.Tensor:
    """`x` with one element, `value` (0 in indices), along each of `dims` where it has none. In its graph."""
    if x.numel():
        return x
    pads = [n for d in reversed(range(x.dim())) for n in (0, int(d in dims and x.shape[d] == 0))]
    return F.pad(x, pads, value=value if x.is_floating_point() or x.is_complex() else 0)
