"""`fully_shard`: shards the parameters of a module over data ranks and gathers them just before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardtensor.comm.agree import agree
from shardtensor.errors import LayoutError, ShardTensorError, WrappedTwiceError
from shardtensor.fsdp.checks import after_load, check
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.module import sharded_class
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.param_info import ParamInfo, TPSpec
from shardtensor.fsdp.policy import (
    ON_DEVICE,
    OWN_PRECISION,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Reshard,
    read_reshard,
    selects,
)
from shardtensor.fsdp.state import FSDPState, state_of
from shardtensor.layout.ranges import ANYWHERE, ShardPlacement, name_order, parameter_groups
from shardtensor.tensor.gradient import grad_dtype_of
from shardtensor.tensor.memory import load_keeps_layouts
from shardtensor.tensor.placing import own_device


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = OWN_PRECISION,
    offload_policy: OffloadPolicy = ON_DEVICE,
    ignored_params: Iterable[nn.Parameter] | None = None,
    policy: Callable[[nn.Module], bool] | None = None,
    find_unused: bool = False,
) -> Any:
    """Shard the parameters of a module over data ranks; gather them just before it runs, reduce gradients after.

    Call it bottom up: parameters of inner calls stay in their own units, each of which is gathered separately. A list
    of modules is one unit, gathered when any of them runs. The parameter objects stay and become ShardedTensors; each
    rank holds one range of the unit. While the module runs, it holds unsharded plain tensors in their place. The
    module's class becomes a subclass that is also a `FSDPModule`, with torch's methods. All ranks call it, with the
    same values in the module; they compare names, shapes and options, and send no parameter.

    All ranks must call the units in one order, which they compare while the first pass records it. Later passes send
    nothing to compare: if ranks call different units then, all raise a CallMismatchError that names modules and ranks,
    within the timeout of the group. A rank that does not use a parameter in its unit's forward, or skips a unit after
    the first pass, adds a zero gradient. A rank whose loss reaches no unit runs no backward: the others wait for it.

    Args:
        module: on any device, the meta device too; parameters of global shape.
        reshard_after_forward: True: gather again in backward. False: keep parameters gathered from forward to backward.
            A number n: every n consecutive ranks keep the unit sharded among them, and gather from these. None: True,
            except for units that contain others and for units of 64 KiB or less.
        mp_policy, offload_policy: see `MixedPrecisionPolicy` and `CPUOffloadPolicy`.
        ignored_params: parameters that stay whole and plain on every rank.
        policy: first makes units of the modules inside for which it returns True, as `ModuleWrapPolicy` does.
        mesh: the data ranks: a DeviceMesh or a part of one (``mesh["dp"]``), of two axes to replicate along the first;
            a process group; names of axes of the default mesh (``"dp"``, or ``"rep*dp"`` to replicate along the first);
            None for the default group. Parameters that are sharded over other axes of the same mesh, as in tensor
            parallelism, are sharded further: `[tp, -] flat(dp)`. DTensors, as from torch's ``parallelize_module(module,
            mesh["tp"], plan)``, are replaced by ShardedTensors; while the module runs, it holds DTensors as before.
        shard_placement_fn: how a parameter is sharded over the data ranks. None or ``"flat(dp)"``: a range ends
            anywhere; ``"flat(dp, unit=row)"`` or torch's ``Shard(0)``: between rows; ``"flat(dp, unit=16)"``: at
            multiples of 16 elements; ``Shard(d)``: between slices of dim d.
        find_unused: exchange in each backward which parameters each rank used; the host waits for it. All ranks then
            have a gradient of each parameter that any rank used, and of no other. If False, all ranks must use the same
            parameters; if they do not, the next step raises a RuleError that names the parameters.

    Returns:
        `module`.

    Raises:
        LayoutError: (a ValueError) a module is sharded already, a parameter belongs to another unit, or the mesh does
            not fit. Nothing has changed.
        DisagreementError: (a ValueError) ranks passed other parameters or options. Nothing has changed.

    Example:
        >>> import shardtensor as st
        >>> def train():
        ...     model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        ...     fully_shard(model[0])
        ...     fully_shard(model)
        ...     model(torch.ones(2, 4)).sum().backward()
        ...     return tuple(model[0].weight.grad.shape), model[0].weight.local_tensor().numel()
        >>> st.simulate(2, train)
        [((8, 4), 16), ((8, 4), 16)]

    References:
        Zhao et al., PyTorch FSDP (arXiv:2304.11277); Rajbhandari et al., ZeRO (arXiv:1910.02054), stage 3.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    ignored = {id(param) for param in ignored_params or ()}
    options = mesh, mp_policy, offload_policy, reshard_after_forward, ignored, shard_placement_fn, find_unused
    if policy is not None:
        for child in [child for each in modules for child in list(each.modules())[:0:-1]]:
            if state_of(child) is None and selects(policy, child):
                _shard_one([child], *options)
    _shard_one(modules, *options)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]  # torch's name for the function that returns the state


def _shard_one(
    modules: list[nn.Module],
    mesh: Any,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    reshard_after_forward: Reshard,
    ignored: set[int],
    placement: Callable[[nn.Parameter], Any] | None,
    find_unused: bool,
) -> None:
    data_mesh = DataMesh.of(mesh)
    kind = data_mesh.whole.device_type
    device = own_device(kind if kind in ("cuda", "meta") else "cpu")
    fault: ShardTensorError | None = None
    params_info: list[ParamInfo] = []
    try:
        reshard_after_forward = read_reshard(reshard_after_forward, data_mesh.shard)
        _check_modules(modules)
        params_info = _params_info(modules, ignored)
        check(modules, params_info, mp_policy)
        for info in params_info:
            info.tp_spec = TPSpec.of(info.name, info.param, data_mesh, mesh, info.dtensor)
            info.placement = _placement(info, data_mesh, placement)
    except ShardTensorError as error:
        fault = error
    params_text = "\n".join(
        f"{info.name} {tuple(info.param.shape)} {info.param.dtype} {info.param.requires_grad} "
        f"{grad_dtype_of(info.param)} {info.placement}"
        for info in params_info
    )
    options = f"reshard_after_forward={reshard_after_forward}, {mp_policy}, {offload_policy}, find_unused={find_unused}"
    call = f"fully_shard({', '.join(type(module).__name__ for module in modules)})"
    agree(data_mesh.whole, call, {"parameters": params_text, "options": options}, fault)
    param_groups: list[ParamGroup] = []
    for members in _groups(params_info):
        group = ParamGroup(members, data_mesh, device, mp_policy, offload_policy)
        group.take_over()
        if any(info.dtensor is not None for info in members):
            group.show_sharded()
        param_groups.append(group)
    move_rest(modules, device, ignored)
    for module in modules:
        for _, owner in _own_modules(module, ""):
            load_keeps_layouts(owner, data_mesh.whole)
    state = FSDPState(modules, param_groups, data_mesh, mp_policy, reshard_after_forward, find_unused, device)
    for module in modules:
        vars(module)["_fsdp_state"] = state
        module.__class__ = sharded_class(type(module))
        module.register_load_state_dict_post_hook(after_load)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if state_of(module) is not None:
            raise WrappedTwiceError(
                "Each distinct composable distributed API can only be applied to a module once. This module is fully "
                "sharded already",
                {"module": type(module).__name__},
                "call fully_shard once for each module",
            )
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):
            raise LayoutError(
                "fully_shard does not support containers that do not implement forward: they are never called, so "
                "nothing says when to gather",
                {"module": type(module).__name__},
                "call it for each module in the container, or for the module that holds it",
            )
    if not modules:
        raise LayoutError("fully_shard got an empty list of modules")


def _params_info(modules: Sequence[nn.Module], ignored: set[int]) -> list[ParamInfo]:
    """Return the parameters that are in no inner unit, each once, sorted by `name_order`."""
    found: dict[int, ParamInfo] = {}
    roots = [(module, f"{i}." if len(modules) > 1 else "") for i, module in enumerate(modules)]
    for prefix, owner in dict.fromkeys(item for module, start in roots for item in _own_modules(module, start)):
        for name, param in owner._parameters.items():
            if param is None or id(param) in ignored:
                continue
            info = found[id(param)] = found.get(id(param)) or ParamInfo.of(f"{prefix}{name}", param)
            if (owner, name) not in info.locations:
                info.locations.append((owner, name))
    return sorted(found.values(), key=lambda info: name_order(info.name))


def _placement(info: ParamInfo, data_mesh: DataMesh, placement: Callable[[nn.Parameter], Any] | None) -> ShardPlacement:
    """Return how to shard a parameter over the data ranks."""
    if placement is None:
        return ANYWHERE
    shape, tp_spec = tuple(info.values.shape), info.tp_spec
    axis, is_named = (data_mesh.axis, data_mesh.is_named) if tp_spec is None else (tp_spec.axis, True)
    requested = placement(info.param)  # type: ignore[arg-type]
    found = ShardPlacement.of(requested, info.name, shape, axis, is_named)
    if found.dim is not None and tp_spec is not None and tp_spec.layout.dims[found.dim] is not None:
        raise LayoutError(
            f"shard_placement_fn cuts dim {found.dim} of `{info.name}`, which is cut already",
            {"spec": str(tp_spec.spec)},
            "cut another dim, or return flat(dp)",
        )
    return found


def _own_modules(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    yield prefix, module
    for name, child in module.named_children():
        if state_of(child) is None:
            yield from _own_modules(child, f"{prefix}{name}.")


def _groups(params_info: list[ParamInfo]) -> list[list[ParamInfo]]:
    """Return the parameter groups, each gathered and reduced as one: of one dtype, and all frozen or all trained.

    A parameter whose parts differ in size between ranks gets its own group.
    """
    kinds = [(info.param.dtype, info.param.requires_grad, info.is_alone and id(info)) for info in params_info]
    return [[params_info[i] for i in members] for members in parameter_groups(kinds)]


def move_rest(modules: Sequence[nn.Module], device: torch.device, ignored: set[int]) -> None:
    """Move buffers and ignored parameters to the device; a tensor that two modules share is moved once."""
    moved: dict[int, torch.Tensor] = {}
    for owner in [owner for module in modules for owner in module.modules()]:
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                owner._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
        for param in owner._parameters.values():
            if param is not None and id(param) in ignored and param.device != device and not param.is_meta:
                param.data = param.data.to(device)
