"""``scaled_dot_product_attention``: ``b h !l !e, b h !s !e, b h !s !f, b h !l !s -> b h l f``; functions in Python.

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
from shardtensor.ops.by_rule import by_rule, decided
from shardtensor.ops.empty_parts import computed_alike
from shardtensor.ops.engine import finish, group_of
from shardtensor.ops.local_call import LocalCall, remembered
from shardtensor.rules.propagate import with_dims
from shardtensor.rules.table import rule_of
from shardtensor.rules.views import heads_fit
from shardtensor.tensor.dispatch import HANDLERS
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor

# -- functions of torch that are Python all through --------------------------------------------------------------------


ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def own_body(func: Any) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not ask its operands for a handler."""
    names = {**func.__globals__, **dict.fromkeys(ASKS, lambda *_: False)}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


for _func in (F.multi_head_attention_forward, F.normalize):
    HANDLERS[_func] = own_body(_func)


# -- attention ---------------------------------------------------------------------------------------------------------

attend = F.scaled_dot_product_attention
_ALONE, _GROUPED = (by_rule(attend, name) for name in ("scaled_dot_product_attention", "grouped_query_attention"))


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
    operands = (query, key, value, attn_mask)
    if dropout_p or len({x.dim() for x in operands[:3]}) > 1 or query.dim() < 3:
        return fall_back(attend, operands, {"dropout_p": dropout_p, **options})
    groups = query.shape[-3] // max(key.shape[-3], 1) if enable_gqa else 1
    if groups == 1:
        return _ALONE(*operands, **options)
    qkv = [x for x in operands[:3] if isinstance(x, ShardedTensor) and isinstance(x._layout, CutLayout)]
    layouts: Any = [x._layout for x in qkv]
    if attn_mask is not None or len(qkv) < 3 or not heads_fit(layouts[0], layouts[1], layouts[2], groups):
        return _GROUPED(*operands, **options)
    group = group_of("scaled_dot_product_attention", qkv)
    shapes = tuple(tuple(x.shape) for x in qkv)
    rule = rule_of("grouped_query_attention", (*shapes, None))
    local = computed_alike(lambda *xs: attend(*xs, **options), rule, layouts, [x._local for x in qkv])
    return finish(local, with_dims(layouts[0], (*query.shape[:-1], value.shape[-1]), layouts[0].dims), group)


def _locally(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """How to do a call on local tensors alone; grouped queries and dropout go the long way."""
    if len(args) != 3 or kwargs.get("dropout_p") or kwargs.get("enable_gqa"):
        return None
    if args[0].dim() < 3 or len({x.dim() for x in args}) > 1:
        return None
    return decided(attend, "scaled_dot_product_attention", args, kwargs)


HANDLERS[attend] = remembered(attend, _locally, scaled_dot_product_attention, "scaled_dot_product_attention")
