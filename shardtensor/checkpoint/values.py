"""Values that are not tensors, as JSON: numbers, texts, lists, dicts, and what the states of torch's objects hold.

JSON has no tuples, no keys that are not text, and no infinity; those become a dict with one key that starts with ``$``.
Tensors are replaced by what a function returns for them. Reading makes plain values only: nothing is executed.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shardtensor.errors import CheckpointError

_DEEPEST = 100

Replace = Callable[[Any, str], Any]
"""Returns the JSON for a value that `encode` does not know, at a path; None if it does not know it either."""


def encode(value: Any, path: str, replace: Replace, depth: int = 0) -> Any:
    """Return `value` as JSON values. `path` names it in errors: ``extra/metrics``.

    Raises:
        CheckpointError: a value, or a part of it, is of a type that a checkpoint does not hold.

    Example:
        >>> encode({"betas": (0.9, 0.99), 3: float("inf")}, "extra", lambda value, path: None)
        {'$dict': [['betas', {'$tuple': [0.9, 0.99]}], [3, {'$float': 'inf'}]]}
    """
    if depth > _DEEPEST:
        raise CheckpointError(f'"{path[:80]}..." is nested more than {_DEEPEST} levels deep, or contains itself')

    def inner(item: Any, key: object) -> Any:
        return encode(item, f"{path}/{key}", replace, depth + 1)

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
    found = replace(value, path)
    if found is not None:
        return found
    if isinstance(value, Mapping):
        return {"$dict": [[inner(key, "key"), inner(item, key)] for key, item in value.items()]}
    if isinstance(value, int | float | str):  # of a subclass: an enum, or numpy's float64
        return encode(next(base for base in (int, float, str) if isinstance(value, base))(value), path, replace, depth)
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


def decode(value: Any, tensor: Callable[[str, Any], Any]) -> Any:
    """Return what `encode` was given. `tensor` returns the value for any other tag and its content.

    Raises:
        CheckpointError: the JSON was not made by `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, tensor) for key, item in value.items()}
    [(tag, content)] = value.items()
    try:
        return _decoded(tag, content, tensor)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        shown = json.dumps(value)[:80]
        raise CheckpointError("a value of the checkpoint cannot be read", {"value": shown, "why": error}) from None


def _decoded(tag: str, content: Any, tensor: Callable[[str, Any], Any]) -> Any:
    makers: dict[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$deque": deque}
    if tag in makers:
        return makers[tag](decode(item, tensor) for item in content)
    if tag in ("$dict", "$counter"):
        pairs = ((decode(key, tensor), decode(item, tensor)) for key, item in content)
        return dict(pairs) if tag == "$dict" else Counter(dict(pairs))
    if tag == "$float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
    if tag == "$int":
        return int(content, 16)
    if tag == "$bytes":
        return base64.b64decode(content, validate=True)
    if tag == "$complex":
        real, imag = (decode(part, tensor) for part in content)
        return complex(real, imag)
    return tensor(tag, content)
