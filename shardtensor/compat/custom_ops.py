"""Users' operations on ShardedTensors, registered as in ``torch.distributed._shard``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves

from shardtensor.tensor.dispatch import HANDLERS
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor


def custom_sharded_op_impl(func: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function ``f(types, args, kwargs, process_group)`` that implements `func` on ShardedTensors.

    It replaces the handler of the library. Its name and signature are torch's.

    Raises:
        TypeError: the function does not take these four.
    """

    return custom_sharding_spec_op(object, func)


def custom_sharding_spec_op(sharding_spec_class: type, func: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Do the same for one class of specs, that of the first sharded argument; others use the previous handler."""

    def register(user: Callable[..., Any]) -> Callable[..., Any]:
        _check_signature(user)
        otherwise = HANDLERS.get(func)

        def handler(*args: Any, **kwargs: Any) -> Any:
            first = _first_sharded(args, kwargs)
            if isinstance(first.sharding_spec(), sharding_spec_class):
                return user((type(first),), args, kwargs, first._process_group)
            return fall_back(func, args, kwargs) if otherwise is None else otherwise(*args, **kwargs)

        HANDLERS[func] = handler
        return user

    return register


def _check_signature(user: Callable[..., Any]) -> None:
    found = inspect.signature(user)
    if len(found.parameters) != 4:
        raise TypeError(
            f"Custom sharded op function expects signature: (types, args, kwargs, process_group), "
            f"but received signature: {found}"
        )


def _first_sharded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next(x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedTensor))
