"""Functions of torch that are Python all through: their own body, run on ShardedTensors, is their rule.

Such a function first asks whether an argument has handlers, and hands the call over if so. Its body is run here in a
copy that does not ask; what it calls does, and works on parts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

from shardtensor.tensor.dispatch import HANDLERS

ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def own_body(func: Any) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not hand its call over."""
    names = {**func.__globals__, **dict.fromkeys(ASKS, lambda *_: False)}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


for _func in (F.multi_head_attention_forward, F.triplet_margin_with_distance_loss):
    HANDLERS[_func] = own_body(_func)
