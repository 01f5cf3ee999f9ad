"""`shard_parameter` shards one parameter of a module in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.comm.redistribute import part_of
from shardtensor.errors import LayoutError, MissingParameterError, RuleError, ShardTensorError
from shardtensor.layout.layout import Layout
from shardtensor.plan.models.model import kind_named
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.convert import drop_weak_references
from shardtensor.tensor.memory import become, load_keeps_layouts
from shardtensor.tensor.placing import bind_named, device_for, mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec | str,
    src_rank: int = 0,
    process_group: Any = None,
) -> None:
    """Shard a parameter in place. The module's own forward then gives the dense output and gradients.

    All ranks of the group call it. They first compare the call in one small exchange; then `src_rank` sends every rank
    its part, and nothing else is sent. The parameter stays the same Python object, so it is sharded in all
    modules and name tables that hold it; `requires_grad` stays, a gradient is dropped.

    Args:
        module: owns the parameter, at any depth.
        param_name: its name, dotted for a submodule's; of global shape, contiguous. A buffer or a tensor attribute
            is sharded too. One on the meta device stays there, and nothing is sent: see `materialize`.
        sharding_spec: a spec or its text; dims may be named, ``[out: tp]`` for a Linear.
        src_rank: the group rank whose values are used.
        process_group: a process group, a DeviceMesh whose axes the spec names, or None for the default group.

    Raises:
        MissingParameterError: (an AttributeError) there is no such parameter.
        LayoutError: (a ValueError) the spec does not fit; every rank raises it, and nothing has changed.
        DisagreementError: (a ValueError) ranks pass different specs, shapes or sources; nothing was sent.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> shard_parameter(mlp, "0.weight", "[tp, -]")
        >>> shard_parameter(mlp, "2.weight", "[-, tp]")
        >>> mlp(torch.ones(2, 4)).shape, mlp[0].weight.sharding_spec()
        (torch.Size([2, 4]), parse_spec('[tp, -]'))
    """
    wrapper, tensor = _sharded(
        f'shard_parameter("{param_name}")', lambda: find(module, param_name), sharding_spec, src_rank, process_group
    )
    owner = module.get_submodule(param_name.rpartition(".")[0])
    drop_weak_references(owner, [tensor])
    become(tensor, wrapper)
    if tensor.is_meta:
        load_keeps_layouts(owner, as_group(process_group))


def shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec | str, src_rank: int = 0, process_group: Any = None
) -> ShardedTensor:
    """Shard a tensor of global shape with the values of `src_rank`. All ranks of the group call it.

    In contrast, `distribute` sends nothing and uses each rank's own copy. A user's own spec with a `shard` method
    does the sharding itself. Arguments and errors as in `shard_parameter`.

    Example:
        >>> shard_tensor(torch.arange(4.0), "[tp]").full_tensor()
        tensor([0., 1., 2., 3.])
    """
    wrapper, _ = _sharded(
        "shard_tensor", lambda: (None, checked(tensor, "tensor")), sharding_spec, src_rank, process_group
    )
    return wrapper


def _shard(spec: ShardingSpec, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> ShardedTensor:
    """Call `shard_tensor`: the `shard` method of specs, set here because their modules do not import torch."""
    return shard_tensor(tensor, spec, src_rank, process_group)


for _kind in (Spec, ChunkShardingSpec, GridShardingSpec, EnumerableShardingSpec):
    _kind.shard = _shard  # type: ignore[method-assign,assignment]


def shards_itself(spec: ShardingSpec) -> bool:
    """Return whether this is a spec of a user's own class with a `shard` method."""
    return type(spec).shard not in (ShardingSpec.shard, _shard)


def _sharded(
    call: str,
    find: Callable[[], tuple[tuple[str, ...] | None, torch.Tensor]],
    sharding_spec: ShardingSpec | str,
    src_rank: int,
    process_group: Any,
) -> tuple[ShardedTensor, torch.Tensor]:
    """Agree on the call, then receive this rank's part from the source; return the wrapper and the dense tensor."""
    group = as_group(process_group)
    facts: dict[str, str] = {"src_rank": str(src_rank), "sharding_spec": str(sharding_spec)}
    fault, layout = None, None
    try:
        spec = as_spec(sharding_spec)
        facts["sharding_spec"] = str(spec)
        names, tensor = find()
        facts |= {"shape": str(tuple(tensor.shape)), "dtype": str(tensor.dtype)}
        facts |= {"requires_grad": str(tensor.requires_grad), "on meta": str(tensor.is_meta)}
        if shards_itself(spec):
            return spec.shard(tensor, src_rank=src_rank, process_group=process_group), tensor
        layout = bound(spec, tensor, group, names, src_rank)
        device = device_for(spec, group, tensor.device)
    except ShardTensorError as error:
        fault = error
    agree(group, call, facts, fault)
    assert layout is not None
    return scatter(tensor, spec, layout, group, src_rank, device), tensor


def find(module: nn.Module, param_name: str) -> tuple[tuple[str, ...] | None, torch.Tensor]:
    """Return the names of the parameter's dims (None for unknown module types), and the parameter."""
    path, _, name = param_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
        found = getattr(owner, name)
    except AttributeError:
        names = [name for name, _ in module.named_parameters()]
        raise MissingParameterError(
            f"{type(module).__name__} has no attribute `{param_name}`",
            {"parameters": ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")},
            "name one of its parameters",
        ) from None
    return dim_names(owner, name), checked(found, f"{type(owner).__name__}.{name}")


def checked(found: Any, what: str) -> torch.Tensor:
    """Return `found` if it is a plain contiguous tensor, else raise."""
    if not isinstance(found, torch.Tensor):
        raise LayoutError(f"Expected {what} to be a Tensor, but found {type(found).__name__}", fix="name a parameter")
    if isinstance(found, ShardedTensor):
        raise RuleError(
            f"{what} is sharded already",
            {"spec": str(found.sharding_spec())},
            "set it to nn.Parameter(distribute(param.full_tensor(), spec)) to lay it out anew",
        )
    if not found.is_contiguous():
        raise LayoutError(f"{what} is not a contiguous Tensor", fix="call contiguous() on it first")
    return found


def bound(
    spec: ShardingSpec, tensor: torch.Tensor, group: Group, names: tuple[str, ...] | None, src_rank: int
) -> Layout:
    layout = bind_named(spec, tuple(tensor.shape), mesh_of(group), names)
    if layout.partial:
        raise LayoutError("a parameter cannot be partial", {"spec": str(spec)}, "leave partial(...) out")
    if not 0 <= src_rank < group.size:
        raise LayoutError(f"src_rank={src_rank} is not a rank of this group", {"group ranks": f"0 to {group.size - 1}"})
    return layout


def scatter(
    tensor: torch.Tensor, spec: ShardingSpec, layout: Layout, group: Group, src_rank: int, device: torch.device
) -> ShardedTensor:
    """Scatter the tensor of `src_rank`; each rank has its part in own memory on `device`. On meta, send nothing."""
    shape, values = layout.local_shape(group.rank), tensor.detach()
    if tensor.is_meta:
        local = torch.empty(shape, dtype=tensor.dtype, device="meta")
    else:
        sent, received = [0] * group.size, [0] * group.size
        flat, received[src_rank] = values.new_empty(0, device=device), layout.numel(group.rank)
        if group.index == src_rank:
            parts = [part_of(values, layout, rank).reshape(-1) for rank in group.ranks]
            flat, sent = torch.cat(parts).to(device), [len(part) for part in parts]
        # All-to-all with one sender: the only collective for parts of unequal sizes on every backend.
        local = group.all_to_all(flat, sent, received).view(shape)
    return wrap(local.requires_grad_(tensor.requires_grad), layout, spec, group)


def dim_names(module: nn.Module, parameter: str) -> tuple[str, ...] | None:
    """Return the names of a parameter's dims, or None for module types that are not known.

    Example:
        >>> dim_names(nn.Linear(2, 3), "weight")
        ('out', 'in')
    """
    for cls in type(module).__mro__:
        kind = kind_named(cls.__name__)
        if kind is not None and parameter in kind.dims:
            return kind.dims[parameter]
    return None


def reshard_output(module: nn.Module, spec: ShardingSpec | str) -> nn.Module:
    """Redistribute the ShardedTensor that `module` returns to `spec`; return the module.

    Other results stay as they are. All ranks that call the module take part in the reshard.

    Example:
        >>> import torch, shardtensor as st
        >>> double = reshard_output(nn.Identity(), "[-, tp]")
        >>> str(double(st.distribute(torch.ones(2, 2), "[tp, -]")).sharding_spec())
        '[-, tp]'
    """
    module.register_forward_hook(partial(resharded, as_spec(spec)))
    return module


def collect_local_shard(module: nn.Module) -> nn.Module:
    """Replace the ShardedTensor that `module` returns by this rank's part, a plain tensor; return the module.

    A chunk of one row loses the dim of the rows, as if it were indexed by an integer.
    """
    module.register_forward_hook(collecting)
    return module


def resharded(spec: ShardingSpec, module: nn.Module, args: Any, output: Any) -> Any:
    """Return a ShardedTensor in the layout of `spec`: the hook of `reshard_output`."""
    return output.reshard(spec) if isinstance(output, ShardedTensor) else output


def collecting(module: nn.Module, args: Any, output: Any) -> torch.Tensor | Any:
    """Return this rank's part of a ShardedTensor: the hook of `collect_local_shard`."""
    if not isinstance(output, ShardedTensor):
        return output
    local, spec = output.local_tensor(), output.sharding_spec()
    is_row = isinstance(spec, ChunkShardingSpec) and local.shape[spec.dim] == 1
    return local.squeeze(spec.dim) if is_row else local  # type: ignore[attr-defined]
