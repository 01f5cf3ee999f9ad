"""Sharded tensors. Importing the package registers the methods of the class and the handlers of torch's functions.

`dispatch` has the table, `sharded_tensor` the class; each module below imports both and registers its handlers.
"""

from typing import Any

import torch

from shardtensor.tensor import convert as convert
from shardtensor.tensor import dcp as dcp
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
    own = {*vars(MetadataMethods), *vars(ShardedTensor)}
    for name in own - {*vars(object), "__torch_function__", "__torch_dispatch__"}:
        torch_attr: Any = getattr(torch.Tensor, name, None)
        own_attr: Any = getattr(ShardedTensor, name)
        if torch_attr is not None and isinstance(own_attr, property):
            HANDLERS[torch_attr.__get__] = own_attr.fget  # type: ignore[assignment]
            if own_attr.fset is not None:
                HANDLERS[torch_attr.__set__] = lambda tensor, value, name=name: setattr(tensor, name, value)
        elif callable(own_attr) and callable(torch_attr) and torch_attr not in HANDLERS:
            HANDLERS[torch_attr] = own_attr
            if callable(function := getattr(torch, name, None)):
                HANDLERS.setdefault(function, own_attr)


_register_unbound()
