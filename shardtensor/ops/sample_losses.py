"""Losses of samples: ``n !c, n -> n``, then their mean or their sum. Samples may be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.ops.by_rule import by_rule
from shardtensor.ops.composed import reduced
from shardtensor.ops.empty_parts import takes_empty
from shardtensor.ops.ids import check_ids
from shardtensor.tensor.dispatch import HANDLERS
from shardtensor.tensor.fallback import fall_back


def _per_sample(func: Any) -> Callable[..., Any]:
    def losses(*args: Any, **kwargs: Any) -> torch.Tensor:
        return func(*args, **kwargs, reduction="none")

    found = by_rule(takes_empty(losses, func.__name__), func.__name__)

    def handler(*args: Any, **kwargs: Any) -> Any:
        reduction = kwargs.pop("reduction", "mean")
        older = {key: kwargs.pop(key, None) for key in ("size_average", "reduce")}
        if any(value is not None for value in older.values()):
            return fall_back(func, args, {**kwargs, **older, "reduction": reduction})
        if func is F.multi_margin_loss and args[0].dim():
            check_ids(args[1], 0, args[0].shape[-1], lambda _: RuntimeError("Target out of range"))
        return reduced(found(*args, **kwargs), reduction)

    return handler


for _func in (F.multi_margin_loss, F.multilabel_margin_loss, F.cosine_embedding_loss, F.triplet_margin_loss):
    HANDLERS[_func] = _per_sample(_func)
