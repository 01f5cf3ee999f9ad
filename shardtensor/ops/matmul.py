"""Einstein sums: the equation is the rule.

If a contracted dim is sharded, the local products are partial sums and are summed at once (one all-reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from shardtensor.ops.engine import chosen_sharding
from shardtensor.ops.local_call import LocalCall, cached_call, local_by, on_empty, run
from shardtensor.rules.rule import einsum_rule
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.fallback import fall_back


def einsum(*args: Any) -> torch.Tensor:
    """Run ``torch.einsum(equation, *operands)``. The form without an equation gathers."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    rule = einsum_rule(equation, tuple(tuple(x.shape) for x in operands)) if isinstance(equation, str) else None
    result = None if rule is None else run("einsum", rule, operands, _summing(equation, operands))
    return fall_back(torch.einsum, args, {}) if result is None else result


def _einsum_locally(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    equation, *operands = args
    if not isinstance(equation, str) or not all(isinstance(x, torch.Tensor) for x in operands):
        return None
    rule = einsum_rule(equation, tuple(tuple(x.shape) for x in operands))
    chosen = None if rule is None else chosen_sharding("einsum", rule, operands, for_every_dtype=True)
    if chosen is None:
        return None
    compute, places = _summing(equation, operands), range(1, len(args))
    return local_by(on_empty(lambda _, *xs: compute(*xs), None, *chosen, places), *chosen, operands, places)


def _summing(equation: str, operands: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the local equation. Under autocast it has the global one's dtype: torch chooses by the sizes of dims."""
    kinds = tuple((tuple(min(n, 2) for n in x.shape), x.dtype) for x in operands)
    device = operands[0].device.type

    def compute(*xs: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled(device):
            return torch.einsum(equation, *xs)
        dtype = _dtype_under_autocast(equation, kinds, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return torch.einsum(equation, *(x.to(dtype) if x.is_floating_point() else x for x in xs))

    return compute


@cache
def _dtype_under_autocast(equation: str, kinds: tuple[tuple[Any, torch.dtype], ...], low: torch.dtype) -> torch.dtype:
    """Return the dtype of an equation of operands of these sizes and dtypes: that of torch's result for zeros."""
    with torch.no_grad(), torch.autocast("cpu", low):
        zeros = (torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in kinds)
        return torch.einsum(equation, *zeros).dtype


implements(torch.einsum)(cached_call(torch.einsum, _einsum_locally, einsum))
