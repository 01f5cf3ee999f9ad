"""Values of a checkpoint to JSON; tensors with dims become items, numbers in 0-d tensors stay where they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardtensor.checkpoint.items import Item, dtype_name, item_of
from shardtensor.checkpoint.values import encode, tensor_name
from shardtensor.comm.group import Group
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.sharded_tensor import ShardedTensor


def encoded(value: Any, path: str, items: dict[str, Item], group: Group | None, *, is_of_first: bool = False) -> Any:
    """Return a value as JSON, and add its tensors to `items`.

    Args:
        path: the name of the value; tensors are named ``<path>/<keys>``.
        group: the ranks that hold the plain tensors; None for values of this rank alone.
        is_of_first: of plain tensors the first rank's are saved.

    Raises:
        CheckpointError: a part of it is of a type that a checkpoint does not hold.
    """
    scalars = _read_scalars(value)

    def replace(found: Any, name: str) -> Any:
        if isinstance(found, torch.dtype | torch.device):
            return {"$dtype" if isinstance(found, torch.dtype) else "$device": str(found).removeprefix("torch.")}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(found, numpy.ndarray | numpy.generic):
            native = numpy.array(found).astype(found.dtype.newbyteorder("="))
            tensor = torch.from_numpy(native)
            if isinstance(found, numpy.generic):
                scalars[id(tensor)] = tensor.item()
            return {"$numpy": replace(tensor, name)}
        if not isinstance(found, torch.Tensor):
            return None
        if id(found) in scalars:
            return {"$scalar": [dtype_name(found.dtype), encode(scalars[id(found)], name, replace)]}
        name = tensor_name(name, items)
        items[name] = item_of(name, found, group, is_of_first=is_of_first)
        return {"$tensor": name}

    return encode(value, path, replace)


def _read_scalars(value: Any) -> dict[int, Any]:
    """Return the numbers of all plain 0-d tensors in a value by id; those of one device in one copy for each dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in _tensors_in(value):
        if tensor.dim() == 0 and not isinstance(tensor, ShardedTensor) and not is_dtensor(tensor):
            found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    read: dict[int, Any] = {}
    for (device, _), tensors in found.items():
        numbers = torch.stack([each.detach() for each in tensors]).tolist() if device.type != "meta" else []
        read.update(zip(map(id, tensors), numbers, strict=False))
    return read


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 100 and isinstance(value, Mapping | list | tuple):  # deeper ones are refused later
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth + 1)
