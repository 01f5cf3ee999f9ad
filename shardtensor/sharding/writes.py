"""Which memory is written to, seen below everything that writes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor.tensor.sharded_tensor import ShardedTensor


class Writes(TorchDispatchMode):
    """Notes the storages that operations write to, through any view, ``.data`` or list of tensors.

    Version counters would miss what is written through ``.data``.

    Attributes:
        storages: the storages written to, by the address of the object; valid while they live.

    Example:
        >>> x, y = torch.zeros(2, 2), torch.zeros(2)
        >>> with Writes() as writes:
        ...     _ = x.data[0].normal_(), y + 1
        >>> [t.untyped_storage()._cdata in writes.storages for t in (x, y)]
        [True, False]
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for place, name in _written(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            self.storages.update(tensor.untyped_storage()._cdata for tensor in _tensors(value))
        return func(*args, **kwargs)


@lru_cache(maxsize=1024)
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes to; the collectives of c10d do not say, so all of theirs."""
    arguments = enumerate(func._schema.arguments)
    says = func.namespace != "c10d"
    return tuple((i, a.name) for i, a in arguments if not says or (a.alias_info is not None and a.alias_info.is_write))


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return () if isinstance(value, ShardedTensor) else (value,)
    return (tensor for each in value for tensor in _tensors(each)) if isinstance(value, list | tuple) else ()
