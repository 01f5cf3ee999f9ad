"""``scaled_dot_product_attention``: ``b h !l !e, b h !s !e, b h !s !f, b h !l !s -> b h l f``; multi-head attention.

Batches and heads may be cut; sequences and features are whole. Grouped queries keep cut heads where a rank's query
heads belong to its key heads. Dropout gathers, so that the mask is the dense one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.empty_parts import takes_empty
from shardtensor.ops.engine import computed, finish, group_of, run
from shardtensor.ops.local_call import LocalCall, layouts_of, local_by, remembered
from shardtensor.rules.propagate import propagate, with_dims
from shardtensor.rules.table import rule_of
from shardtensor.rules.views import heads_fit
from shardtensor.tensor.dispatch import HANDLERS, implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor

# -- functions of torch that are Python all through --------------------------------------------------------------------


ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def own_body(func: Any) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not hand its call over."""
    names = {**func.__globals__, **dict.fromkeys(ASKS, lambda *_: False)}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


for _func in (F.multi_head_attention_forward, F.triplet_margin_with_distance_loss):
    HANDLERS[_func] = own_body(_func)


# -- attention ---------------------------------------------------------------------------------------------------------


# Torch's kernels divide by the number of heads.
attend = takes_empty(F.scaled_dot_product_attention, "scaled_dot_product_attention")
attend_groups = takes_empty(F.scaled_dot_product_attention, "grouped_query_attention")


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of query ``(..., h, l, e)``, key ``(..., h, s, e)`` and value ``(..., h, s, f)``."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    everything = {"attn_mask": attn_mask, "dropout_p": dropout_p, **options}
    operands = [query, key, value] + ([] if attn_mask is None else [attn_mask])

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        return (attend_groups if enable_gqa else attend)(q, k, v, mask[0] if mask else None, **options)

    if dropout_p or len({x.dim() for x in operands[:3]}) > 1 or query.dim() < 3:
        return fall_back(F.scaled_dot_product_attention, (query, key, value), everything)
    groups = query.shape[-3] // max(key.shape[-3], 1) if enable_gqa else 1
    if groups > 1 and attn_mask is None and _heads_fit(query, key, value, groups):
        q, k, v = query, key, value
        layout = q._layout  # type: ignore[attr-defined]
        given = with_dims(layout, (*q.shape[:-1], v.shape[-1]), layout.dims)
        group = group_of("scaled_dot_product_attention", operands)
        return finish(computed(compute, [x._local for x in (q, k, v)]), given, group)  # type: ignore[attr-defined]
    shapes = (*(tuple(x.shape) for x in operands), None)[:4]
    rule = rule_of("grouped_query_attention" if groups > 1 else "scaled_dot_product_attention", shapes)
    out = None if rule is None else run("scaled_dot_product_attention", rule, operands, compute)
    return fall_back(F.scaled_dot_product_attention, (query, key, value), everything) if out is None else out


def _locally(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """How to do a call on local tensors alone; grouped queries and dropout go the long way."""
    if len(args) != 3 or kwargs.get("dropout_p") or kwargs.get("enable_gqa"):
        return None
    mask = kwargs.get("attn_mask")
    operands = [*args] if mask is None else [*args, mask]
    if args[0].dim() < 3 or len({x.dim() for x in args}) > 1:
        return None
    rule = rule_of("scaled_dot_product_attention", (*(tuple(x.shape) for x in operands), None)[:4])
    recipe = None if rule is None else propagate(rule, layouts_of(operands))
    return local_by(attend, recipe, operands, (0, 1, 2, "attn_mask")[: len(operands)])


implements(F.scaled_dot_product_attention)(
    remembered(F.scaled_dot_product_attention, _locally, scaled_dot_product_attention, "scaled_dot_product_attention")
)


def _heads_fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: int) -> bool:
    """Whether all three are sharded on one group, every rank's query heads with their key and value heads."""
    shells = [x for x in (query, key, value) if isinstance(x, ShardedTensor) and isinstance(x._layout, CutLayout)]
    if len(shells) < 3 or len({id(x._group) for x in shells}) > 1:
        return False
    q, k, v = (x._layout for x in shells)
    return heads_fit(q, k, v, groups)  # type: ignore[arg-type]
