"""The safety net: gather the operands, compute on wholes, lay the results out again.

Right for any operation that is a function of values, forward and backward, in place or into ``out=``: what it changed
of a gathered operand, told by the version counter (by the values, where torch writes without counting), is written back
to the shards. What it cannot do it refuses: an operation that shows memory (``data_ptr``, ``numpy``), one that changes
a tensor's shape in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardtensor.errors import RuleError
from shardtensor.tensor.copied import refuse_lost_write
from shardtensor.tensor.dispatch import ANY_OTHER, bare_name, implements, name_of, refuse_partial_write, warn_of_gather
from shardtensor.tensor.drawing import agree_on_state, default_generator
from shardtensor.tensor.move import part
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

SHOWS_MEMORY = frozenset(
    """
    data_ptr const_data_ptr storage untyped_storage _typed_storage storage_type storage_offset numpy is_set_to _storage
    resize_ resize_as_ as_strided as_strided_ as_strided_scatter share_memory_ is_shared map_ map2_ apply_ as_subclass
    _make_subclass rename rename_ refine_names align_to align_as unflatten_
    sparse_resize_ set_ to_mkldnn _use_count _cdata dim_order
    __array__ __array_wrap__ __dlpack__ __dlpack_device__ __cuda_array_interface__
    """.split()
)
CHANGES_SHAPE = ("squeeze_", "unsqueeze_")
_OPERATORS = "add sub mul matmul div truediv floordiv mod pow and or xor lshift rshift".split()
_IN_PLACE = frozenset(("__setitem__", *(f"__i{name}__" for name in _OPERATORS)))
CHANGES_OPERANDS = ("_foreach_", "_fused_", "_amp_")
"""Families of operations that change lists of operands in place; other such operations end in an underscore."""
WRITES_STATISTICS = ("batch_norm", "instance_norm")
"""Families whose kernels write running statistics, one number a channel, past the version counter."""


@implements(ANY_OTHER)
def fall_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do `func` on whole tensors and lay out results of the first sharded operand's shape as that operand is.

    Other results are plain tensors, equal on every rank. All ranks of the group call it; it warns once for each
    function, and raises under `strict`, and where the function shows memory or changes a shape in place.
    """
    name = bare_name(func)
    if name in CHANGES_SHAPE:
        raise RuleError(
            f"{name_of(func)} would change the shape of a ShardedTensor in place",
            fix=f"use {name.removesuffix('_')}, which returns a new tensor",
        )
    if name in SHOWS_MEMORY or getattr(func, "__name__", "") == "__set__":
        raise RuleError(
            f"{name_of(func)} is not supported for ShardedTensor: no rank holds the whole of it in memory",
            fix=[
                "local_tensor() or local_shards() for this rank's part",
                "full_tensor() for the whole",
                "shardtensor.full_state_dict(model), called by all ranks, to save a model whole",
            ],
        )
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed"):
        raise RuleError(
            f"{name_of(func)} is not supported for ShardedTensor: it moves memory that each process has for itself",
            fix=["pass local_tensor() to communicate shards", "full_tensor() or gather() to bring them together"],
        )
    leaves, tree = tree_flatten((args, kwargs))
    shells = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, ShardedTensor)}.values())
    if not shells:
        raise RuleError(
            f"{name_of(func)} got a ShardedTensor inside of a container that is not a list, tuple or dict",
            fix="pass a list",
        )
    first = shells[0]
    size_bytes = sum(shell.numel() * shell.element_size() for shell in shells)
    warn_of_gather(func, size_bytes, [_laid_out(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)])
    changes = _changes_operands(name) or "out" in kwargs or kwargs.get("inplace") is True

    has_statistics = any(family in name for family in WRITES_STATISTICS)

    def compute() -> tuple[Any, dict[int, torch.Tensor], list[int | torch.Tensor | None]]:
        wholes = {id(shell): shell.full_tensor() for shell in shells}
        if changes:  # a whole may be the very bytes of a copy, or a view that may not be written
            wholes = {key: whole.clone() for key, whole in wholes.items()}
        befores = [_before(whole, changes, has_statistics) for whole in wholes.values()]
        whole_args, whole_kwargs = tree_unflatten([wholes.get(id(leaf), leaf) for leaf in leaves], tree)
        return func(*whole_args, **whole_kwargs), wholes, befores

    generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    result, wholes, befores = _with_one_random_stream(compute, first, generator)
    returned = {id(whole): shell for whole, shell in zip(wholes.values(), shells, strict=True)}
    for shell, before in zip(shells, befores, strict=True):
        _write_back(func, shell, wholes[id(shell)], before, changes)
    return tree_map(
        lambda x: returned.get(id(x), _lay_out(x, first)) if isinstance(x, torch.Tensor) else x,
        result,
    )


def _laid_out(x: torch.Tensor) -> str:
    return str(x.sharding_spec()) if isinstance(x, ShardedTensor) else "a plain tensor"


def is_in_place(name: str) -> bool:
    """Whether a torch function of this name writes to its first operand: ``add_``, ``__iadd__``, ``__setitem__``."""
    if name.startswith("__"):
        return name in _IN_PLACE
    return name.endswith("_")


def _changes_operands(name: str) -> bool:
    return is_in_place(name) or name.startswith(CHANGES_OPERANDS)


def _before(whole: torch.Tensor, changes: bool, has_statistics: bool) -> int | torch.Tensor | None:
    """What tells whether `whole` gets written: its version, its values, or None for "take it that it is"."""
    if has_statistics and whole.dim() == 1 and not whole.requires_grad:
        return whole.clone()
    return (None if changes else 0) if whole.is_inference() else whole._version


def _is_unchanged(whole: torch.Tensor, before: int | torch.Tensor | None) -> bool:
    if isinstance(before, torch.Tensor):
        return torch.equal(whole, before)
    return before is not None and before == (0 if whole.is_inference() else whole._version)


def _write_back(
    func: Any, shell: ShardedTensor, whole: torch.Tensor, before: int | torch.Tensor | None, changes: bool
) -> None:
    """Bring what the function changed of the gathered `whole` back to the shards of `shell`."""
    if tuple(whole.shape) != shell._layout.shape:
        raise RuleError(
            f"{name_of(func)} would change the shape of a ShardedTensor in place",
            {"from": tuple(shell.shape), "to": tuple(whole.shape)},
            "use the form that returns a new tensor",
        )
    if _is_unchanged(whole, before):
        return
    refuse_lost_write(shell, name_of(func))
    refuse_partial_write(shell, name_of(func))
    local = part(whole, shell._layout, shell._group)
    # Empty ones all have address 0, and must enter the graph as on other ranks, whose backward is collective.
    if not local.numel() or local.untyped_storage().data_ptr() != shell._local.untyped_storage().data_ptr():
        # A leaf that autograd follows is written by what torch does without it, as the scaling of an embedding's rows.
        follows = changes or not shell._local.is_leaf
        with torch.set_grad_enabled(follows and torch.is_grad_enabled()):
            shell._local.copy_(local)


def _lay_out(value: torch.Tensor, like: ShardedTensor) -> torch.Tensor:
    """The whole `value` as `like` is laid out, where it has that shape and no rank holds a whole copy anyway."""
    layout = like._layout.reduced()
    if isinstance(value, ShardedTensor) or tuple(value.shape) != layout.shape or layout.is_replicated:
        return value
    if value.layout != torch.strided:  # nothing is cut of what is not laid out in memory
        return value
    local = part(value, layout, like._group)
    if local.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
        local = local.clone()  # else the whole stays in memory, and autograd lets nobody write into the part
    return wrap(local, layout, None if like._layout.partial else like._spec, like._group)


def _with_one_random_stream(compute: Any, first: ShardedTensor, generator: torch.Generator | None) -> Any:
    """Compute; if that drew random numbers, draw them anew from the first rank's state, the same on every rank."""
    if first._group.size == 1 or first.is_meta:
        return compute()
    generator = default_generator(first.device) if generator is None else generator
    before = generator.get_state()
    result = compute()
    if torch.equal(generator.get_state(), before):
        return result
    generator.set_state(before)
    agree_on_state(first._group, first.device, generator)
    return compute()
