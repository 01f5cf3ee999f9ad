"""The fallback for operations without a rule: gather the operands, compute on whole tensors, shard the results again.

It is correct for any operation that is a function of values, forward and backward, in place or into ``out=``. It
detects a change of a gathered operand by the version counter (by the values, where torch writes without counting) and
writes the change back to the shards. It raises for an operation that exposes memory (``data_ptr``, ``numpy``) and for
one that changes a tensor's shape in place.

A plain operand beside a sharded one is replicated: under `check_collectives` the ranks compare its checksum.

``torch.autograd.Function.apply`` uses it too. A Function connects its results to its arguments below the level of
tensor subclasses: on ShardedTensors it would connect the wrappers, and their leaves would have no history. It has no
override hook, so importing this module replaces ``Function.apply`` once. A call without ShardedTensors costs about 0.2
microseconds; torch.compile recognizes ``apply`` by its name and traces the Function itself.

* Sharded arguments are gathered, differentiably, and results of the first one's shape get its layout.
* Reentrant checkpointing, and in torch 2.11 the Function that saves the inputs of the other kind, get local tensors.
* Full backward hooks of modules get whole gradients: the tensors that they watch are gathered and stay whole.
* A Function that itself makes a ShardedTensor from plain arguments raises RuleError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from hashlib import sha256
from typing import Any

import torch
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from shardtensor.comm.call_site import call_site
from shardtensor.comm.checked import WHEN_CHECKED, CheckedGroup
from shardtensor.comm.redistribute import part
from shardtensor.comm.torch_group import bytes_of
from shardtensor.errors import RuleError
from shardtensor.tensor import dispatch
from shardtensor.tensor.copied import refuse_lost_write, version_of
from shardtensor.tensor.dispatch import ANY_OTHER, bare_name, implements, name_of, refuse_partial_write, warn_of_gather
from shardtensor.tensor.drawing import agree_on_state, default_generator
from shardtensor.tensor.sharded_tensor import WRAPPER_CLASSES, ShardedTensor, local_of, wrap

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
"""Families whose kernels write running statistics, one number for each channel, and count no version."""


@implements(ANY_OTHER)
def fall_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on whole tensors and give results of the first sharded operand's shape that operand's layout.

    Other results are plain tensors, equal on every rank. All ranks of the group call it; it warns once for each
    function, and raises under `strict`, and if the function exposes memory or changes a shape in place.
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
            fix=["pass local_tensor() to communicate shards", "full_tensor() or gather() for the whole"],
        )
    leaves, tree = tree_flatten((args, kwargs))
    wrappers = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, ShardedTensor)}.values())
    if not wrappers:
        raise RuleError(
            f"{name_of(func)} got a ShardedTensor inside of a container that is not a list, tuple or dict",
            fix="pass a list",
        )
    first = wrappers[0]
    size_bytes = sum(wrapper.numel() * wrapper.element_size() for wrapper in wrappers)
    warn_of_gather(
        func,
        size_bytes,
        [
            str(leaf.sharding_spec()) if isinstance(leaf, ShardedTensor) else "a plain tensor"
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
        ],
    )
    changes = is_in_place(name) or name.startswith(CHANGES_OPERANDS) or "out" in kwargs or kwargs.get("inplace") is True
    is_step = name.startswith("_fused_")  # its kernels count no version
    has_statistics = any(family in name for family in WRITES_STATISTICS)

    def compute() -> tuple[Any, dict[int, torch.Tensor], list[int | torch.Tensor | None]]:
        wholes = {id(wrapper): wrapper.full_tensor() for wrapper in wrappers}
        if changes:  # a whole tensor may share memory with a replica, or be a read-only view
            wholes = {key: whole.clone() for key, whole in wholes.items()}
        befores = [None if is_step else _before(whole, changes, has_statistics) for whole in wholes.values()]
        whole_args, whole_kwargs = tree_unflatten([wholes.get(id(leaf), leaf) for leaf in leaves], tree)
        return func(*whole_args, **whole_kwargs), wholes, befores

    generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    result, wholes, befores = _with_one_random_stream(compute, first, generator)
    returned = {id(whole): wrapper for whole, wrapper in zip(wholes.values(), wrappers, strict=True)}
    for wrapper, before in zip(wrappers, befores, strict=True):
        _write_back(func, wrapper, wholes[id(wrapper)], before, changes)
    return tree_map(
        lambda x: returned.get(id(x), _lay_out(x, first)) if isinstance(x, torch.Tensor) else x,
        result,
    )


def is_in_place(name: str) -> bool:
    """Return whether a function of this name writes to its first operand: ``add_``, ``__iadd__``, ``__setitem__``."""
    if name.startswith("__"):
        return name in _IN_PLACE
    return name.endswith("_")


def _before(whole: torch.Tensor, changes: bool, has_statistics: bool) -> int | torch.Tensor | None:
    """Return what detects a write to `whole`: its version, its values, or None to assume that it is written."""
    if has_statistics and whole.dim() == 1 and not whole.requires_grad:
        return whole.clone()
    return None if changes and whole.is_inference() else version_of(whole)


def _write_back(
    func: Any, wrapper: ShardedTensor, whole: torch.Tensor, before: int | torch.Tensor | None, changes: bool
) -> None:
    """Copy what the function changed in the gathered `whole` into the shards of `wrapper`."""
    if tuple(whole.shape) != wrapper._layout.shape:
        raise RuleError(
            f"{name_of(func)} would change the shape of a ShardedTensor in place",
            {"from": tuple(wrapper.shape), "to": tuple(whole.shape)},
            "use the form that returns a new tensor",
        )
    if torch.equal(whole, before) if isinstance(before, torch.Tensor) else before == version_of(whole):
        return
    refuse_lost_write(wrapper, name_of(func))
    refuse_partial_write(wrapper, name_of(func))
    local = part(whole, wrapper._layout, wrapper._group)
    # Empty tensors all have address 0, and must enter the graph as on other ranks: backward is collective.
    if not local.numel() or local.untyped_storage().data_ptr() != wrapper._local.untyped_storage().data_ptr():
        # A function that is not an in-place one writes leaves without autograd, as embedding does for max_norm.
        follows = changes or not wrapper._local.is_leaf
        with torch.set_grad_enabled(follows and torch.is_grad_enabled()):
            wrapper._local.copy_(local)


def _lay_out(value: torch.Tensor, like: ShardedTensor) -> torch.Tensor:
    """Return the whole `value` in the layout of `like`; unchanged if its shape differs or `like` is replicated."""
    layout = like._layout.reduced()
    if isinstance(value, ShardedTensor) or tuple(value.shape) != layout.shape or layout.is_replicated:
        return value
    if value.layout != torch.strided:  # only strided tensors are sharded
        return value
    local = part(value, layout, like._group)
    if local.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
        local = local.clone()  # else the whole stays in memory, and autograd refuses writes into the part
    return wrap(local, layout, None if like._layout.partial else like._spec, like._group)


def _with_one_random_stream(compute: Any, first: ShardedTensor, generator: torch.Generator | None) -> Any:
    """Compute; if that drew random numbers, compute again from the first rank's generator state on every rank."""
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


Function = torch.autograd.Function
_SaveInputs = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)
_torch_apply: Any = vars(Function)["apply"]  # a classmethod in Python up to torch 2.13, in C from 2.14
_plain_apply: Callable[..., Any] = getattr(_torch_apply, "__func__", _torch_apply)


@classmethod  # type: ignore[misc]
@functools.wraps(_plain_apply)
def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if cls is CheckpointFunction:
        return _checkpoint(*args)
    for x in args:
        if isinstance(x, ShardedTensor):
            if cls is BackwardHookFunction:
                return _watched_whole(args)
            if cls is _SaveInputs:
                return _saved(args)
            return fall_back(_on_plain(cls), args, kwargs)
    if kwargs:
        if any(isinstance(x, ShardedTensor) for x in kwargs.values()):
            return fall_back(_on_plain(cls), args, kwargs)
        out = _plain_apply(cls, *args, **kwargs)
    else:
        out = _plain_apply(cls, *args)
    kind = type(out)
    if kind in WRAPPER_CLASSES or (kind is tuple and not WRAPPER_CLASSES.isdisjoint(map(type, out))):
        _refuse_cut_off(cls, out)
    return out


def _on_plain(cls: type[Function]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return _refuse_cut_off(cls, _plain_apply(cls, *args, **kwargs))

    function.__name__ = f"{cls.__name__}.apply"
    return function


def _refuse_cut_off(cls: type[Function], out: Any) -> Any:
    """Return the results, unless one is a ShardedTensor that autograd would follow if it were plain."""
    for x in out if isinstance(out, tuple) else (out,):
        with torch._C.DisableTorchFunctionSubclass():  # the C-level body may be tied to a graph
            node = isinstance(x, ShardedTensor) and torch._C.TensorBase.grad_fn.__get__(x)  # type: ignore[union-attr]
        if node and x.grad_fn is None:
            raise RuleError(
                f"{cls.__name__} returns a ShardedTensor: its result would be cut off from autograd",
                {"result": f"{tuple(x.shape)} {x.dtype}"},
                ["return full_tensor() of it from forward", "return local_tensor() of it and wrap that outside"],
            )
    return out


def _checkpoint(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Run reentrant checkpointing on local tensors: the Function gets and returns plain tensors."""
    kinds_in = [_kind(x) for x in args]
    kinds_out: list[Any] = []  # not the ShardedTensors: their leaves own the graph that owns this

    def on_locals(*locals_: Any) -> Any:
        out = run(*map(_rewrapped, locals_, kinds_in))
        kinds_out[:] = map(_kind, _as_tuple(out))
        bare = tuple(map(local_of, _as_tuple(out)))
        return bare if isinstance(out, tuple) else bare[0]

    out = _plain_apply(CheckpointFunction, on_locals, preserve_rng_state, *map(local_of, args))
    shown = tuple(map(_rewrapped, _as_tuple(out), kinds_out))
    return shown if isinstance(out, tuple) else shown[0]


def _saved(args: tuple[Any, ...]) -> Any:
    """Save the local tensors; checkpointing reads them back as ShardedTensors."""
    saver = _plain_apply(_SaveInputs, *map(local_of, args))
    if saver.grad_fn is not None:
        kinds, get_args = [_kind(x) for x in args[1:]], saver.grad_fn.get_args  # the first is a dummy
        saver.grad_fn.get_args = lambda saved: list(map(_rewrapped, get_args(saved), kinds))
    return saver


def _watched_whole(tensors: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Gather what a module takes or returns, and attach the autograd node that its full backward hooks watch."""
    size = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, ShardedTensor))
    warn_of_gather(torch.nn.Module.register_full_backward_hook, size)
    wholes = (x.full_tensor() if isinstance(x, ShardedTensor) else x for x in tensors)
    return _plain_apply(BackwardHookFunction, *wholes)


def _kind(x: Any) -> Any:
    return (x._layout, x._spec, x._group) if isinstance(x, ShardedTensor) else None


def _rewrapped(local: Any, kind: Any) -> Any:
    return local if kind is None else wrap(local, *kind)


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


Function.apply = apply  # type: ignore[method-assign]


# -- plain operands ----------------------------------------------------------------------------------------------------

_inside: ContextVar[bool] = ContextVar("inside", default=False)
_OVERWRITTEN = ("copy_", "set_", "out", "__set__", "__get__")  # their targets need not be equal before


def compare_plain_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise DisagreementError on every rank if a plain operand differs between ranks. All ranks call it."""
    name = dispatch.name_of(func)
    leaves = tree_flatten_with_path((args, {key: value for key, value in kwargs.items() if key != "out"}))[0]
    group = next((x._group for _, x in leaves if isinstance(x, ShardedTensor)), None)
    if not isinstance(group, CheckedGroup) or group.index < 0 or name.rpartition(".")[2] in _OVERWRITTEN:
        return
    plain = {
        _operand_text(path): f"{' x '.join(map(str, x.shape)) or 'a number'} {x.dtype}, checksum {_checksum(x)}"
        for path, x in leaves
        if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and x.device.type != "meta"
    }
    if plain:
        group.compare(f"{name} in {call_site()}", plain)


def _operand_text(path: Any) -> str:
    where, *rest = path
    if where.idx == 1:
        return f"operand {rest[0].key}{keystr(tuple(rest[1:]))}"
    return f"operand {rest[0].idx + 1}{keystr(tuple(rest[1:]))}"


def _checksum(x: torch.Tensor) -> str:
    """Return a checksum of the bytes of a tensor in their order."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return sha256(bytes_of(flat)).hexdigest()[:16]


def _watch() -> None:
    """Make every operation of sharded tensors compare its plain operands first."""
    inner: Any = ShardedTensor.__torch_function__

    def __torch_function__(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _inside.get() or torch.compiler.is_compiling():
            return inner(func, types, args, kwargs)
        mark = _inside.set(True)
        try:
            compare_plain_operands(func, args, kwargs or {})
            return inner(func, types, args, kwargs)
        finally:
            _inside.reset(mark)

    ShardedTensor.__torch_function__ = classmethod(__torch_function__)  # type: ignore[method-assign, assignment]


WHEN_CHECKED.append(_watch)
