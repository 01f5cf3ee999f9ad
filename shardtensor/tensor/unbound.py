"""``torch.Tensor.size(x)``, ``torch.Tensor.grad.__get__(x)``, ``torch.numel(x)``: what `ShardedTensor` answers itself,
asked the long way round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.tensor.answers import Answers
from shardtensor.tensor.dispatch import HANDLERS
from shardtensor.tensor.sharded_tensor import ShardedTensor


def _setter(name: str) -> Callable[[Any, Any], None]:
    return lambda tensor, value: setattr(tensor, name, value)


for _name in {*vars(Answers), *vars(ShardedTensor)} - {*vars(object), "__torch_function__", "__torch_dispatch__"}:
    _theirs = getattr(torch.Tensor, _name, None)
    if _theirs is None:
        continue
    _ours = getattr(ShardedTensor, _name)
    if isinstance(_ours, property):
        HANDLERS[_theirs.__get__] = _ours.fget  # type: ignore[assignment]
        if _ours.fset is not None:
            HANDLERS[_theirs.__set__] = _setter(_name)
    elif callable(_ours) and callable(_theirs) and _theirs not in HANDLERS:
        HANDLERS[_theirs] = _ours
        if (_function := getattr(torch, _name, None)) is not None and callable(_function):
            HANDLERS.setdefault(_function, _ours)
