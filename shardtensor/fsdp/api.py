"""`fully_shard`: the parameters of a module, kept in shards and gathered just in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardtensor.comm.agree import agree
from shardtensor.errors import LayoutError, ShardTensorError, WrappedTwiceError
from shardtensor.fsdp.domain import Domain
from shardtensor.fsdp.flat import Entry, Flat
from shardtensor.fsdp.fsdp_module import sharded_class
from shardtensor.fsdp.policy import ON_DEVICE, OWN_PRECISION, MixedPrecisionPolicy, OffloadPolicy, selects
from shardtensor.fsdp.unit import Unit, unit_of
from shardtensor.tensor.placing import own_device

_OWN_FLAT = 1 << 20  # elements; a part of a container with as many is reduced by itself


def fully_shard(
    module: nn.Module,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = OWN_PRECISION,
    offload_policy: OffloadPolicy = ON_DEVICE,
    ignored_params: Iterable[nn.Parameter] | None = None,
    policy: Callable[[nn.Module], bool] | None = None,
) -> nn.Module:
    """Shard the parameters of a module over data ranks; gather them just before it runs, reduce gradients after.

    Call it bottom up: what inner calls took stays theirs, and their modules are gathered by themselves.
    """
    ignored = {id(param) for param in ignored_params or ()}
    if policy is not None:
        for child in list(module.modules())[:0:-1]:
            if unit_of(child) is None and selects(policy, child):
                _shard_one(child, mesh, mp_policy, reshard_after_forward, ignored)
    return _shard_one(module, mesh, mp_policy, reshard_after_forward, ignored)


fully_shard.state = unit_of  # type: ignore[attr-defined]  # torch's name for what a module's sharding is kept in


def _shard_one(
    module: nn.Module,
    mesh: Any,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int | None,
    ignored: set[int],
) -> nn.Module:
    domain = Domain.of(mesh)
    device = own_device("cuda") if domain.whole.device_type == "cuda" else torch.device("cpu")
    fault: ShardTensorError | None = None
    entries: list[Entry] = []
    try:
        if unit_of(module) is not None:
            raise WrappedTwiceError(
                "Each distinct composable distributed API can only be applied to a module once. This module is fully "
                "sharded already",
                {"module": type(module).__name__},
                "call fully_shard once for each module",
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise LayoutError(
                "fully_shard does not support containers that do not implement forward: they are never called, so "
                "nothing says when to gather",
                {"module": type(module).__name__},
                "call it for each module in the container, or for the module that holds it",
            )
        entries = _entries(module, ignored)
    except ShardTensorError as error:
        fault = error
    said = "\n".join(f"{e.name} {tuple(e.param.shape)} {e.param.dtype} {e.param.requires_grad}" for e in entries)
    agree(domain.whole, f"fully_shard({type(module).__name__})", {"parameters": said}, fault)
    flats = [Flat(group, domain, device, mp_policy) for group in _groups(module, entries)]
    for flat in flats:
        flat.take_over()
    _move_rest(module, device)
    vars(module)["_fsdp_unit"] = Unit(module, flats, domain, mp_policy, reshard_after_forward, device)
    module.__class__ = sharded_class(type(module))
    return module


def _entries(module: nn.Module, ignored: set[int]) -> list[Entry]:
    """The parameters that no inner unit has taken, each once, in name order as modules give it."""
    found: dict[int, Entry] = {}
    for prefix, owner in _own_modules(module, ""):
        for name, param in owner._parameters.items():
            if param is None or id(param) in ignored:
                continue
            entry = found.setdefault(id(param), Entry(f"{prefix}{name}", param, []))
            entry.homes.append((owner, name))
    return list(found.values())


def _own_modules(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    yield prefix, module
    for name, child in module.named_children():
        if unit_of(child) is None:
            yield from _own_modules(child, f"{prefix}{name}.")


def _groups(module: nn.Module, entries: list[Entry]) -> list[list[Entry]]:
    """Entries that are gathered and reduced as one: alike in dtype, frozen or not; large parts of a container alone."""
    is_container = any(unit_of(child) is not None for child in module.modules())
    sizes: dict[int, int] = {}
    for entry in entries:
        owner = entry.homes[0][0]
        sizes[id(owner)] = sizes.get(id(owner), 0) + entry.param.numel()
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        owner = entry.homes[0][0]
        is_apart = is_container and len(entry.homes) == 1 and sizes[id(owner)] >= _OWN_FLAT
        key = (entry.param.dtype, entry.param.requires_grad, id(owner) if is_apart else None)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _move_rest(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)
