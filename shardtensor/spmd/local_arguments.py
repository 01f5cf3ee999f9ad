"""The arguments of an operation on one rank: sizes of its part of the batch, numbers of the whole batch."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardtensor.rules.batch import Refused
from shardtensor.spmd.sizes import BatchPart, growth, map_pairs, plain

_SIZES = frozenset(
    "size shape sizes repeats input_sizes input_size N n stride split_size split_sizes output_size end "
    "output_split_sizes input_split_sizes".split()
)
"""Arguments that count elements of the result or of an operand: a rank has its part of them."""


def given_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by name, in the order of the schema, with the defaults of those not passed."""
    target: Any = node.target
    listed = target._schema.arguments
    passed = dict(zip([x.name for x in listed], node.args, strict=False)) | dict(node.kwargs)
    return {x.name: passed.get(x.name, x.default_value) for x in listed}


def local_number(node: fx.Node, key: str, whole: Any, doubled: Any, part: BatchPart) -> Any:
    """Return a number, or nested ones, for this rank; `whole` and `doubled` are those of the two traces.

    Raises:
        Refused: it depends on the batch size, but is neither a size nor a value to compute with.
    """
    target: Any = node.target
    kind = next(str(x.type) for x in target._schema.arguments if x.name == key)
    is_value = any(word in kind for word in ("number", "Scalar", "float", "Tensor"))

    def one(x: Any, y: Any) -> Any:
        if isinstance(x, bool) or not isinstance(x, int | float) or x == y:
            return x
        if is_value:  # the dense value is computed with the number of the whole batch
            power = local_power(node, key, x, y)
            return plain(x * part.share**power) if isinstance(x, int) else x * float(part.share) ** power
        size = part.size(x, y) if key in _SIZES and isinstance(x, int) else None
        if size is None:
            raise Refused(f"the number {x} is neither a part of the batch size nor independent of it")
        return size

    return map_pairs(one, whole, doubled)


def local_power(node: fx.Node, key: str, whole: Any, doubled: Any) -> int:
    """Return the power of the batch size in a factor or divisor that each rank replaces by its own.

    A mean is computed so: each rank divides by its own number of samples.
    """
    target: Any = node.target
    scales = target._schema.name in ("aten::mul", "aten::div") and key == "other"
    if not scales or isinstance(whole, fx.Node) or node.kwargs.get("rounding_mode"):
        return 0
    if not node.meta["val"].is_floating_point():
        return 0
    return growth(whole, doubled) or 0


def clamped(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a slice, or of its backward, with the ends inside of the dim: a slice that is all of the
    dim ends with it for each size."""
    shape = given["input_sizes"] if "input_sizes" in given else given["self"].meta["val"].shape
    dim_size = shape[given["dim"]]
    found = dict(given)
    for key in ("start", "end"):
        x = found.get(key)
        x = {"start": 0, "end": dim_size}[key] if x is None else x
        found[key] = max(0, min(x + dim_size if x < 0 else x, dim_size))
    return found
