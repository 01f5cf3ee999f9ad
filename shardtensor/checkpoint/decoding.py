"""The values of a checkpoint, read from JSON; tensors in them are read later, so a `StoredTensor` stands for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from shardtensor.checkpoint.values import decode
from shardtensor.errors import CheckpointError

_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


_CONTAINERS = (list, tuple, deque, set, frozenset)


@attrs.frozen
class StoredTensor:
    """A tensor that is still to be read: its name in the checkpoint, and whether it was an array of numpy."""

    name: str
    is_array: bool = False

    def final(self, tensor: torch.Tensor) -> Any:
        """Return the value for the tensor that was read."""
        return tensor.numpy() if self.is_array else tensor


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
