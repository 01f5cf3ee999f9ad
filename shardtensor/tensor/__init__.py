"""Sharded tensors. Importing the package registers the methods of the class and the handlers of torch's functions.

`dispatch` has the table, `sharded_tensor` the class; each module below imports both and registers its handlers.
"""

from typing import Any

import torch

from shardtensor.tensor import convert as convert
from shardtensor.tensor import dtensor as dtensor
from shardtensor.tensor import fallback as fallback
from shardtensor.tensor import from_metadata as from_metadata
from shardtensor.tensor import gradient as gradient
from shardtensor.tensor import reshard as reshard
from shardtensor.tensor import state as state
from shardtensor.tensor.dispatch import HANDLERS
from shardtensor.tensor.metadata_methods import MetadataMethods
from shardtensor.tensor.sharded_tensor import ShardedTensor


def _register_unbound() -> None:
    """Register the methods and properties of `ShardedTensor` for torch's unbound forms too: ``torch.Tensor.size(x)``,
    ``torch.Tensor.grad.__get__(x)``, ``torch.numel(x)``."""
    for name in {*vars(MetadataMethods), *vars(ShardedTensor)} - {
        *vars(object),
        "__torch_function__",
        "__torch_dispatch__",
    }:
        theirs: Any = getattr(torch.Tensor, name, None)
        ours: Any = getattr(ShardedTensor, name)
        if theirs is not None and isinstance(ours, property):
            HANDLERS[theirs.__get__] = ours.fget  # type: ignore[assignment]
            if ours.fset is not None:
                HANDLERS[theirs.__set__] = lambda tensor, value, name=name: setattr(tensor, name, value)
        elif callable(ours) and callable(theirs) and theirs not in HANDLERS:
            HANDLERS[theirs] = ours
            if callable(function := getattr(torch, name, None)):
                HANDLERS.setdefault(function, ours)


_register_unbound()
