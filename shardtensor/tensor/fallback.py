"""The safety net: gather the operands, compute on wholes, lay the results out again.

Right for any operation that is a function of values, forward and backward. What it cannot do it refuses: an operation
that shows memory (``data_ptr``, ``numpy``), one that changes a tensor's shape in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardtensor.errors import RuleError
from shardtensor.tensor.dispatch import name_of, warn_of_gather
from shardtensor.tensor.drawing import agree_on_state, default_generator
from shardtensor.tensor.move import cut_part, part
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

SHOWS_MEMORY = frozenset(
    "data_ptr storage untyped_storage _typed_storage storage_type storage_offset stride numpy __array__ __dlpack__ "
    "__dlpack_device__ __cuda_array_interface__ is_set_to _storage set_ resize_ resize_as_ as_strided as_strided_ "
    "share_memory_ is_shared module_load map_ map2_ apply_ as_subclass _make_subclass _base __array_wrap__ "
    "rename rename_ refine_names align_to align_as _nested_tensor_size is_same_size unflatten_".split()
)
CHANGES_SHAPE = frozenset("t_ transpose_ squeeze_ unsqueeze_ swapaxes_ swapdims_ sparse_resize_ set_".split())


def gather_and_compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do `func` on whole tensors and lay out results of the first sharded operand's shape as that operand is.

    Other results are plain tensors, equal on every rank. All ranks of the group call it; it warns once for each
    function, and raises under `strict`.

    Raises:
        RuleError: the function shows memory or changes a shape in place; or `strict` is on.
    """
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    if name in SHOWS_MEMORY or name in CHANGES_SHAPE or name == "__set__":
        raise RuleError(
            f"{name_of(func)} is not supported for ShardedTensor: no rank holds the whole of it in memory",
            fix=["local_tensor() or local_shards() for this rank's part", "full_tensor() for the whole"],
        )
    out = kwargs.pop("out", None) if isinstance(kwargs.get("out"), torch.Tensor) else None
    leaves, tree = tree_flatten((args, kwargs))
    shells = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    if not shells:
        assert isinstance(out, ShardedTensor)
        shells = [out]
    warn_of_gather(func, sum(shell.numel() * shell.element_size() for shell in shells))
    first = shells[0]
    changes_first = _changes_its_operand(name) and bool(leaves) and leaves[0] is first

    def compute() -> tuple[Any, torch.Tensor | None]:
        wholes = [leaf.full_tensor() if isinstance(leaf, ShardedTensor) else leaf for leaf in leaves]
        target = None
        if changes_first:  # the whole may be the very bytes of a copy
            target = wholes[0] = wholes[0].clone()
        whole_args, whole_kwargs = tree_unflatten(wholes, tree)
        return func(*whole_args, **whole_kwargs), target

    result, target = _with_one_random_stream(compute, first)
    if target is not None:
        if target.shape != first.shape:
            raise RuleError(f"{name_of(func)} would change the shape of a ShardedTensor in place")
        first._local.copy_(part(target, first._layout.reduced(), first._group))
        return first if result is target else tree_map(lambda x: first if x is target else x, result)
    if out is not None:
        return out.copy_(result)
    return tree_map(lambda x: _lay_out(x, first) if isinstance(x, torch.Tensor) else x, result)


def _changes_its_operand(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


def _lay_out(value: torch.Tensor, like: ShardedTensor) -> torch.Tensor:
    """The whole `value` as `like` is laid out, where it has that shape and no rank holds a whole copy anyway."""
    layout = like._layout.reduced()
    if isinstance(value, ShardedTensor) or tuple(value.shape) != layout.shape or layout.is_replicated:
        return value
    return wrap(part(value, layout, like._group), layout, like._spec, like._group)


def _with_one_random_stream(compute: Any, first: ShardedTensor) -> Any:
    """Compute; if that drew random numbers, draw them anew from the first rank's state, the same on every rank."""
    if first._group.size == 1 or first.is_meta:
        return compute()
    generator = default_generator(first.device)
    before = generator.get_state()
    result = compute()
    if torch.equal(generator.get_state(), before):
        return result
    generator.set_state(before)
    agree_on_state(first._group, first.device, None)
    return compute()


__all__ = ["cut_part", "gather_and_compute"]
