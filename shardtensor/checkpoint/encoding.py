"""Values of a checkpoint as JSON and back: tensors and dtypes of torch, arrays of numpy, and what `values` knows.

Tensors with dims are written into files, and numbers in 0-d tensors stay where they are. Tensors are read later than
values, so a `StoredTensor` stands for each.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from shardtensor.checkpoint.items import Item, item_of
from shardtensor.checkpoint.values import decode, encode, tensor_name
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError
from shardtensor.layout.explain import dtype_name
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.sharded_tensor import ShardedTensor

_DTYPES = {dtype_name(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_CONTAINERS = (list, tuple, deque, set, frozenset)


@attrs.frozen
class StoredTensor:
    """A tensor that is still to be read: its name in the checkpoint, and whether it was an array of numpy."""

    name: str
    is_array: bool = False

    def final(self, tensor: torch.Tensor) -> Any:
        """Return the value for the tensor that was read."""
        return tensor.numpy() if self.is_array else tensor


def encoded(value: Any, path: str, items: dict[str, Item], group: Group | None, *, is_of_first: bool = False) -> Any:
    """Return a value as JSON, and add its tensors to `items`.

    Args:
        path: the name of the value; tensors are named ``<path>/<keys>``.
        group: the ranks that hold the plain tensors; None for values of this rank alone.
        is_of_first: of plain tensors the first rank's are saved.

    Raises:
        CheckpointError: a part of it is of a type that a checkpoint does not hold.
    """
    numbers: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, dict[str, Any]]]] = {}

    def replace(found: Any, name: str) -> Any:
        if not isinstance(found, torch.Tensor):
            return torch_json(found, name, add_item)
        if not (found.dim() or found.is_meta or isinstance(found, ShardedTensor) or is_dtensor(found)):
            made: dict[str, Any] = {}
            numbers.setdefault((found.device, found.dtype), []).append((found.detach(), made))
            return made
        return add_item(found, name)

    def add_item(tensor: torch.Tensor, name: str) -> Any:
        name = tensor_name(name, items)
        items[name] = item_of(name, tensor, group, is_of_first=is_of_first)
        return {"$tensor": name}

    found = encode(value, path, replace)
    for (_, dtype), pairs in numbers.items():  # each device is waited for once
        for (_, made), number in zip(pairs, torch.stack([x for x, _ in pairs]).tolist(), strict=True):
            made.update(scalar_json(dtype, number))
    return found


def torch_json(value: Any, path: str, array: Callable[[torch.Tensor, str], Any] | None = None) -> Any:
    """Return the JSON of a dtype, a device, a number of numpy, and with a function for its elements an array."""
    if isinstance(value, torch.dtype | torch.device):
        return {"$dtype" if isinstance(value, torch.dtype) else "$device": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic if array is None else numpy.ndarray | numpy.generic):
        return None
    elements = torch.from_numpy(numpy.array(value).astype(value.dtype.newbyteorder("=")))
    if array is None or isinstance(value, numpy.generic):
        return {"$numpy": scalar_json(elements.dtype, elements.item())}
    return {"$numpy": array(elements, path)}


def scalar_json(dtype: torch.dtype, number: complex) -> dict[str, Any]:
    """Return the JSON of a 0-d tensor."""
    return {"$scalar": [dtype_name(dtype), encode(number, "", lambda value, path: None)]}


def decoded(value: Any, known: Mapping[str, object]) -> Any:
    """Return the value of some JSON; `known` has the names that a tensor may have.

    Raises:
        CheckpointError: it is not what `contents` writes.
    """

    def tagged(tag: str, content: Any) -> Any:
        if tag == "$tensor" and content in known:
            return StoredTensor(content)
        if tag == "$scalar":
            dtype, number = content
            return torch.tensor(decode(number, tagged), dtype=dtype_named(dtype))
        if tag == "$dtype":
            return dtype_named(content)
        if tag == "$device":
            return torch.device(content)
        if tag == "$numpy":
            found = decode(content, tagged)
            return attrs.evolve(found, is_array=True) if isinstance(found, StoredTensor) else found.numpy()[()]
        raise CheckpointError("a value of the checkpoint cannot be read", {"value": f"{tag} {str(content)[:80]}"})

    return decode(value, tagged)


def dtype_named(name: Any) -> torch.dtype:
    """Return the torch dtype of a name."""
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise CheckpointError(f'there is no dtype "{str(name)[:40]}"')
    return dtype


def replaced(value: Any, function: Callable[[StoredTensor], Any]) -> Any:
    """Return a value with the result of `function` in place of each `StoredTensor`."""
    if isinstance(value, StoredTensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)({key: replaced(item, function) for key, item in value.items()})
    if isinstance(value, _CONTAINERS):
        return type(value)(replaced(item, function) for item in value)
    return value


def final(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a value with the tensors that were read, by name."""
    return replaced(value, lambda found: found.final(tensors[found.name]))


def stored_in(value: Any) -> Iterator[StoredTensor]:
    """Yield the stored tensors in a value."""
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, (dict, *_CONTAINERS)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from stored_in(item)
