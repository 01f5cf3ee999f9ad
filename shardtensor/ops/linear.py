"""``F.linear`` on sharded weights: ``b k, n k, n -> b n``.

Column-parallel (n cut): a plain input meets cut values, so its gradient is summed over the ranks; the gradient of a
plain bias is known only in pieces. Both travel in one all-reduce. Row-parallel (k cut): products are addends, summed at
once; the bias is added after, once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm.function_call import caller
from shardtensor.layout.layout import CutLayout
from shardtensor.ops.by_rule import by_rule, decided
from shardtensor.ops.fused_linear import ColumnLinear, RowLinear, cast
from shardtensor.ops.local_call import LocalCall, remembered
from shardtensor.rules.propagate import with_dims
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.move import along
from shardtensor.tensor.sharded_tensor import ShardedTensor

_column_linear, _row_linear = caller(ColumnLinear), caller(RowLinear)


def _decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """How to do a product on local tensors and one collective; None for the general way."""
    x, weight, bias = (*args, None)[:3]
    if kwargs or isinstance(bias, ShardedTensor) or weight.dim() != 2:
        return None
    if _is_column_parallel(x, weight) and (bias is None or bias.shape == weight.shape[:1]):
        return _column_parallel(x, weight)
    if isinstance(x, ShardedTensor) and isinstance(x._layout, CutLayout) and any(x._layout.dims[-1:]):
        return _row_parallel(x, weight, bias)
    return decided(F.linear, "linear", args, kwargs)


def _is_column_parallel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this is a plain input on a weight cut along its rows, each rank one stretch of them."""
    if isinstance(x, ShardedTensor) or not isinstance(weight, ShardedTensor):
        return False
    layout = weight._layout
    return (
        isinstance(layout, CutLayout)
        and not layout.partial
        and layout.cut_dims == (0,)
        and not layout.is_blocked(0)
        and x.dim() > 0
        and x.shape[-1] == weight.shape[-1]
    )


def _column_parallel(x: torch.Tensor, weight: ShardedTensor) -> LocalCall:
    layout, group = weight._layout, weight._group
    assert isinstance(layout, CutLayout)
    cut = layout.dims[0]
    assert cut is not None
    start = layout.start(group.rank, 0)
    team = along(group, layout, cut.axes)

    def columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not x.requires_grad and (bias is None or not bias.requires_grad):  # nothing to sum: torch's own backward
            return F.linear(x, weight, None if bias is None else bias[start : start + weight.shape[0]])
        return _column_linear(*cast(x, weight, bias), team, start)

    dims = (*(None,) * (x.dim() - 1), cut)
    return LocalCall(columns, with_dims(layout, (*x.shape[:-1], layout.shape[0]), dims))


def _row_parallel(x: ShardedTensor, weight: torch.Tensor, bias: torch.Tensor | None) -> LocalCall | None:
    """Addends, summed, and then a plain bias, where every rank has the whole sum."""
    layout = x._layout
    assert isinstance(layout, CutLayout)
    cut = layout.dims[-1]
    found = decided(F.linear, "linear", (x, weight), {})
    if found is None or found.moves or cut is None:
        return None
    if bias is not None and (found.layout is not None or bias.shape != weight.shape[:1]):
        return None
    team = along(x._group, layout, cut.axes)

    def rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x, weight, bias = cast(x, weight, bias)
        if bias is not None and bias.dtype != x.dtype:
            F.linear(x, weight, bias)  # torch's error
        return _row_linear(x, weight, bias, team)

    return found._replace(call=rows)


implements(F.linear)(remembered(F.linear, _decide, by_rule(F.linear, "linear"), "linear"))
