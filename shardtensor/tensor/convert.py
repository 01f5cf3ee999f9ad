"""What torch's modules call on tensors: other dtypes and devices, loads, flat RNN weights, DistributedDataParallel.

``to`` and its short forms apply torch's function to the leaf: they are differentiable where torch's are, and return the
same object where torch does. They send nothing, except that a partial tensor is reduced before its dtype changes: sums
of rounded partial sums differ.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

import shardtensor
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import MeshState, RankInfo, as_group, mesh_state, rank_info, unpickle_group
from shardtensor.errors import LayoutError, RuleError
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import same_boxes
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec
from shardtensor.spec.nodes import Replicate, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor import placing
from shardtensor.tensor.dispatch import implements, implements_each, own_body
from shardtensor.tensor.gradient import gradient_of
from shardtensor.tensor.placing import moved
from shardtensor.tensor.sharded_tensor import ShardedTensor, reduced, view_of, wrap


def converted(tensor: ShardedTensor, change: Callable[[torch.Tensor], torch.Tensor], group: Group) -> ShardedTensor:
    """Return `tensor` with ``change(leaf)`` as its leaf, on `group`; itself when neither differs. A move to another
    kind of device rewrites the placements of the spec; `change` must keep the leaf's shape."""
    local = change(tensor._local)
    if tensor._layout.partial and local.dtype != tensor.dtype:
        tensor = reduced(tensor)
        local = change(tensor._local)
    if local is tensor._local and group is tensor._group:
        return tensor
    if group is not tensor._group:
        _check_members(tensor, group)
    stays = local.device == tensor.device
    spec = tensor._spec if stays else moved(tensor._spec, tensor._layout, local.device)
    return wrap(local, tensor._layout, spec, group)


def _check_members(tensor: ShardedTensor, group: Group) -> None:
    absent = [rank for rank in tensor._layout.ranks if rank not in group.ranks]
    if absent and group.index >= 0:
        raise LayoutError(
            "the new process group lacks ranks that hold shards",
            {"absent ranks": ", ".join(map(str, absent[:8])), "the group": f"{group.size} ranks"},
            "pass a group of all ranks that hold the tensor",
        )


def to(tensor: torch.Tensor, *args: Any, process_group: Any = None, **kwargs: Any) -> torch.Tensor:
    """Run ``Tensor.to`` in all its forms, and ``process_group=``. Either tensor of ``to(other)`` may be sharded."""
    args = tuple(_example(x) for x in args)
    if "other" in kwargs:
        kwargs["other"] = _example(kwargs["other"])
    if not isinstance(tensor, ShardedTensor):
        return tensor.to(*args, **kwargs)
    _check_memory_format(kwargs.get("memory_format"))
    group = tensor._group if process_group is None else as_group(process_group)
    return converted(tensor, lambda local: local.to(*args, **kwargs), group)


def _example(value: Any) -> Any:
    """Return a plain empty tensor of the dtype and device of a sharded one; return other values unchanged."""
    if isinstance(value, ShardedTensor):
        return torch.empty(0, dtype=value.dtype, device=value.device)
    return value


def _check_memory_format(memory_format: Any) -> None:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError("Only `torch.contiguous_format` or `torch.preserve_format` is supported!")


def _short_form(function: Any) -> Callable[..., ShardedTensor]:
    def handler(
        tensor: ShardedTensor, *args: Any, memory_format: Any = None, process_group: Any = None, **kwargs: Any
    ) -> ShardedTensor:
        _check_memory_format(memory_format)
        group = tensor._group if process_group is None else as_group(process_group)
        return converted(tensor, lambda local: function(local, *args, **kwargs), group)

    return handler


_on_gpu = _short_form(torch.Tensor.cuda)


def cuda(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    """Run ``Tensor.cuda``, and ``process_group=``. Like torch's ShardedTensor, return a new object, over the same
    leaf if that is on the device already."""
    found = _on_gpu(tensor, *args, **kwargs)
    return wrap(found._local, found._layout, found._spec, found._group) if found is tensor else found


implements(torch.Tensor.type_as)(to)
for name, handler in (("to", to), ("cpu", _short_form(torch.Tensor.cpu)), ("cuda", cuda)):
    implements(getattr(torch.Tensor, name))(handler)
    setattr(ShardedTensor, name, handler)  # torch's own methods take no process_group=

_SHORT = "half float double bfloat16 cfloat cdouble chalf byte char short int long bool pin_memory"
implements_each([getattr(torch.Tensor, name) for name in _SHORT.split()], _short_form)


@implements(torch.Tensor.type)
def type_(tensor: ShardedTensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Run ``Tensor.type``: return the name of the tensor type, or convert."""
    if dtype is None:
        return tensor._local.type()
    return converted(tensor, lambda local: local.type(dtype, non_blocking=non_blocking), tensor._group)


def set_(tensor: torch.Tensor, source: Any = None, *place: Any) -> ShardedTensor:
    """Make `tensor` share the bytes of another ShardedTensor of its layout; this object and its leaf stay. Raise
    RuleError for any other source: a storage or a plain tensor would be that of one shard."""
    if (
        not isinstance(tensor, ShardedTensor)
        or not isinstance(source, ShardedTensor)
        or source._layout != tensor._layout
        or place
    ):
        raise RuleError(
            "set_ needs two ShardedTensors of one layout",
            {"this": type(tensor).__name__, "source": type(source).__name__},
            "use copy_(source) to take its values",
        )
    tensor._local.set_(source._local)  # type: ignore[call-overload]
    tensor._sync_body()
    tensor._record_change()
    return tensor


ShardedTensor.set_ = set_  # type: ignore[method-assign,assignment]  # torch calls no override for it


implements(torch.Tensor.module_load)(own_body(torch.Tensor.module_load))


@implements(torch._has_compatible_shallow_copy_type)
def has_compatible_shallow_copy_type(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether ``a.data = b`` works; modules call this before they convert a parameter in place."""
    if not isinstance(a, ShardedTensor) or not isinstance(b, ShardedTensor) or a._layout != b._layout:
        return False
    return torch._has_compatible_shallow_copy_type(a._local, b._local)


def drop_weak_references(module: nn.Module, params: Iterable[torch.Tensor]) -> None:
    """Drop the weak references that each LSTM, GRU and RNN in `module` keeps to some of `params`, to shard these. It
    makes new ones in its next forward, and no longer moves its parameters into one buffer for cuDNN."""
    ids = set(map(id, params))
    for owner in module.modules():
        if isinstance(owner, nn.RNNBase) and any(id(p) in ids for p in owner._parameters.values()):
            owner._flat_weight_refs = [
                ref and weakref.ref(nn.Parameter(torch.empty(0))) for ref in owner._flat_weight_refs
            ]
            owner.flatten_parameters = _skip_flattening  # type: ignore[method-assign]


def _skip_flattening() -> None:
    """Do nothing: this replaces ``flatten_parameters`` of a sharded module."""


def flatten_again(module: nn.Module) -> None:
    """Restore ``flatten_parameters`` of each LSTM, GRU and RNN in `module` whose parameters are plain. Its next
    forward finds that its weak references are gone, makes new ones, and flattens."""
    for owner in module.modules():
        is_sharded = any(isinstance(p, ShardedTensor) for p in owner._parameters.values())
        if not is_sharded and vars(owner).get("flatten_parameters") is _skip_flattening:
            del owner.flatten_parameters


def _refuse_ddp(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Raise RuleError when a DistributedDataParallel registers a module with sharded parameters, before it sends.

    Its C++ part would reduce bodies without elements, and without a first broadcast it would raise no error.
    """
    if name != "module" or not isinstance(parent, DistributedDataParallel):
        return
    delayed = {id(param) for param in parent._delay_all_reduce_params}
    held = [
        key
        for key, value in (*module.named_parameters(), *module.named_buffers())
        if isinstance(value, ShardedTensor) and (key not in parent.parameters_to_ignore or id(value) in delayed)
    ]
    if held:
        shown = ", ".join(held[:6]) + (f" and {len(held) - 6} more" if len(held) > 6 else "")
        raise RuleError(
            "DistributedDataParallel cannot hold sharded parameters; nothing was sent",
            {"sharded": shown},
            [
                'shardtensor.data_parallel(module, "dp", mesh) averages gradients over the data ranks of a mesh',
                "before it is made: DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(\n"
                "    module, names)",
            ],
        )


register_module_module_registration_hook(_refuse_ddp)


# -- copies ------------------------------------------------------------------------------------------------------------

OWN = frozenset({*ShardedTensor.__annotations__, "_owner"})
"""A wrapper's own attributes; any other is the user's (``_is_param`` is nn.Parameter's)."""


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that users, and nn.Parameter, have set."""
    return {name: value for name, value in vars(tensor).items() if name not in OWN}


def shallow_copy(tensor: ShardedTensor) -> ShardedTensor:
    """Return another ShardedTensor over the same leaf, with the same attributes."""
    copied = view_of(tensor, tensor._local, tensor._layout, tensor._spec)
    own = "_owner", "_param_group"
    vars(copied).update((name, value) for name, value in vars(tensor).items() if name not in own)
    return copied


def deepcopy_tensor(tensor: ShardedTensor, memo: dict[int, Any]) -> ShardedTensor:
    """Return an independent copy on the same ranks: own bytes, own attributes; ties within one deepcopy stay ties.
    As in torch, the gradient of a plain tensor is copied, not that of a parameter; hooks are not copied."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    is_param = getattr(tensor, "_is_param", False)
    local = copy_of_leaf(tensor._local, memo, with_grad=not is_param)
    copied = wrap(local, tensor._layout, tensor._spec, tensor._group)
    copied._placements = copy.deepcopy(tensor._placements, memo)
    memo[id(tensor)] = copied
    if (cached := tensor._grad_wrapper) is not None and local.grad is not None:
        copied._grad_wrapper = (local.grad, gradient_of(copied, local.grad))
        memo[id(cached[1])] = copied._grad_wrapper[1]
    vars(copied).update(copy.deepcopy(attributes_of(tensor), memo))
    return copied


def copy_of_leaf(local: torch.Tensor, memo: dict[int, Any], *, with_grad: bool = True) -> torch.Tensor:
    """Return an independent copy of a local tensor that owns exactly its bytes, whatever it is a view of."""
    if id(local) in memo:
        return memo[id(local)]
    if not local.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
        )
    copied = local.detach().clone(memory_format=torch.preserve_format)
    if isinstance(local, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, local.requires_grad)
    else:
        copied.requires_grad_(local.requires_grad)
    memo[id(local)] = copied
    if with_grad and local.grad is not None:
        copied.grad = local.grad.detach().clone(memory_format=torch.preserve_format)
    return copied


ShardedTensor.__copy__ = shallow_copy  # type: ignore[attr-defined]
ShardedTensor.__deepcopy__ = deepcopy_tensor  # type: ignore[method-assign,assignment]


PICKLED_AS_TEXT = (Spec, Replicate, ChunkShardingSpec, GridShardingSpec, EnumerableShardingSpec)


def reduce(tensor: ShardedTensor, protocol: int = 2) -> tuple[Any, ...]:
    """Return what pickle writes. It contains the leaf itself, so tensors that share it still do after loading."""
    group, local = tensor._group, tensor._local
    if local.untyped_storage().nbytes() > local.numel() * local.element_size():  # a view: write only its own elements
        local = local.detach().clone().requires_grad_(local.requires_grad)
    where = mesh_state(group), rank_info(group)
    state = (local, _spec_to_write(tensor), tuple(tensor._layout.shape), *where, attributes_of(tensor))
    return shardtensor._rebuild, state


def _spec_to_write(tensor: ShardedTensor) -> str | ShardingSpec:
    """Return a spec that binds to this layout again: its text, or a user's own spec object."""
    mesh = placing.mesh_of(tensor._group)
    for spec in (tensor.sharding_spec(), placing.spec_of(tensor._layout, tensor.device)):
        try:
            layout = bind(spec, tensor._layout.shape, mesh)
        except LayoutError:  # for example names of dims, which only the module has
            continue
        if same_boxes(layout, tensor._layout):
            return str(spec) if type(spec) in PICKLED_AS_TEXT else spec
    raise RuleError(
        "no spec says how this tensor lies, so it cannot be pickled",
        {"layout": str(tensor._layout)},
        "pickle a leaf made from a spec, or full_tensor()",
    )


def rebuild(
    local: torch.Tensor,
    spec: str | ShardingSpec,
    shape: tuple[int, ...],
    mesh: MeshState | None,
    place: RankInfo | None,
    attributes: dict[str, Any],
) -> ShardedTensor:
    """Make the tensor that `reduce` wrote, in a process with the same place in a process group."""
    group = unpickle_group(place, mesh)
    bound = as_spec(spec)
    layout = bind(bound, tuple(shape), placing.mesh_of(group))
    expected = layout.local_shape(group.rank)
    if tuple(local.shape) != expected:
        raise LayoutError(
            "a pickled shard does not have the shape that its spec gives this rank",
            {"rank": group.rank, "found": tuple(local.shape), "needed": expected},
        )
    written = placing.placement_of(bound, group.rank)
    if written is not None and written.device_type != local.device.type:  # map_location
        bound = placing.moved(bound, layout, local.device)  # type: ignore[assignment]
    tensor = wrap(local, layout, bound, group)
    vars(tensor).update(attributes)
    return tensor


ShardedTensor.__reduce_ex__ = reduce  # type: ignore[method-assign,assignment]
torch.serialization.add_safe_globals([shardtensor._rebuild])
