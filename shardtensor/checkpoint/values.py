"""Values of a checkpoint as JSON and back: numbers, texts, lists, dicts, and what the states of torch's objects hold.

JSON has no tuples, no keys that are not text, and no infinity; those become a dict with one key that starts with ``$``.
Tensors with dims are written into files, and numbers in 0-d tensors stay where they are. Tensors are read later than
values, so a `StoredTensor` stands for each. Reading makes plain values only: nothing is executed.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import attrs
import torch

from shardtensor.errors import CheckpointError
from shardtensor.layout.explain import dtype_name

_DEEPEST = 100
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


TensorJSON = Callable[[Any, str], Any]
"""Returns the JSON for a tensor, or for a `StoredTensor`, at a path."""


def encode(value: Any, path: str, tensor: TensorJSON, depth: int = 0) -> Any:
    """Return `value` as JSON values. `path` names it in errors: ``extra/metrics``.

    Raises:
        CheckpointError: a value, or a part of it, is of a type that a checkpoint does not hold.

    Example:
        >>> encode({"betas": (0.9, 0.99), 3: float("inf")}, "extra", lambda tensor, path: None)
        {'$dict': [['betas', {'$tuple': [0.9, 0.99]}], [3, {'$float': 'inf'}]]}
    """
    if depth > _DEEPEST:
        raise CheckpointError(f'"{path[:80]}..." is nested more than {_DEEPEST} levels deep, or contains itself')

    def inner(item: Any, key: object) -> Any:
        return encode(item, f"{path}/{key}", tensor, depth + 1)

    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [inner(item, i) for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(item, key) for key, item in value.items()}
    if kind in (dict, OrderedDict, defaultdict, Counter):
        tag = "$counter" if kind is Counter else "$dict"
        return {tag: [[inner(key, "key"), inner(item, key)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [inner(item, i) for i, item in enumerate(value)]}
    if kind in (set, frozenset):  # in an order that all ranks have
        return {f"${kind.__name__}": sorted((inner(item, "item") for item in value), key=repr)}
    if kind is deque:
        return {"$deque": [inner(item, i) for i, item in enumerate(value)]}
    if kind in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": [inner(value.real, "real"), inner(value.imag, "imag")]}
    if isinstance(value, torch.Tensor | StoredTensor):
        return tensor(value, path)
    if isinstance(value, torch.dtype | torch.device):
        return {"$dtype" if isinstance(value, torch.dtype) else "$device": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        elements = torch.from_numpy(numpy.array(value).astype(value.dtype.newbyteorder("=")))
        if elements.dim():
            return {"$numpy": tensor(elements, path)}
        number = scalar_json(elements.dtype, elements.item())
        return {"$numpy": number if isinstance(value, numpy.generic) else [number]}
    if isinstance(value, Mapping):
        return {"$dict": [[inner(key, "key"), inner(item, key)] for key, item in value.items()]}
    if isinstance(value, int | float | str):  # of a subclass: an enum, or numpy's float64
        return encode(next(base for base in (int, float, str) if isinstance(value, base))(value), path, tensor, depth)
    raise CheckpointError(
        f'"{path}" cannot be saved: a checkpoint holds no {kind.__module__}.{kind.__qualname__}',
        {"it holds": "numbers, text, bytes, tensors, and lists, tuples, sets and dicts of these"},
        "save what it is made of, and make it again after the load",
    )


def tensor_name(path: str, taken: Collection[str]) -> str:
    """Return the name of a tensor at a path of values, that none of `taken` has: ``optimizer/<parameter>/<key>``."""
    name = path.replace("/state/", "/", 1)
    while name in taken:
        name += "+"
    return name


def scalar_json(dtype: torch.dtype, number: complex) -> dict[str, Any]:
    """Return the JSON of a 0-d tensor."""
    return {"$scalar": [dtype_name(dtype), encode(number, "", lambda tensor, path: None)]}


def decode(value: Any, known: Collection[str]) -> Any:
    """Return what `encode` was given; `known` has the names that a tensor may have.

    Raises:
        CheckpointError: the JSON was not made by `encode`.
    """
    if isinstance(value, list):
        return [decode(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, known) for key, item in value.items()}
    [(tag, content)] = value.items()
    try:
        return _decoded(tag, content, known)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        shown = json.dumps(value)[:80]
        raise CheckpointError("a value of the checkpoint cannot be read", {"value": shown, "why": error}) from None


def _decoded(tag: str, content: Any, known: Collection[str]) -> Any:
    makers: dict[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$deque": deque}
    if tag in makers:
        return makers[tag](decode(item, known) for item in content)
    if tag in ("$dict", "$counter"):
        pairs = ((decode(key, known), decode(item, known)) for key, item in content)
        return dict(pairs) if tag == "$dict" else Counter(dict(pairs))
    if tag == "$float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
    if tag == "$int":
        return int(content, 16)
    if tag == "$bytes":
        return base64.b64decode(content, validate=True)
    if tag == "$complex":
        real, imag = (decode(part, known) for part in content)
        return complex(real, imag)
    if tag == "$scalar":
        dtype, number = content
        return torch.tensor(decode(number, known), dtype=dtype_named(dtype))
    if tag == "$dtype":
        return dtype_named(content)
    if tag == "$device":
        return torch.device(content)
    if tag == "$numpy":
        found = decode(content, known)
        if isinstance(found, list):  # an array without dims
            [found] = found
            return found.numpy()
        return attrs.evolve(found, is_array=True) if isinstance(found, StoredTensor) else found.numpy()[()]
    if tag == "$tensor" and content in known:
        return StoredTensor(content)
    raise CheckpointError("a value of the checkpoint cannot be read", {"value": f"{tag} {str(content)[:80]}"})


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
