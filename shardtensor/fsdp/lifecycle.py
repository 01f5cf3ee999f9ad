"""Deep copies fully sharded modules, undoes `fully_shard`, and frees the memory that modules are gathered into."""

from __future__ import annotations

import copy
from typing import Any

import attrs
from torch import nn

from shardtensor.comm.primitives import becomes_true
from shardtensor.errors import RuleError
from shardtensor.fsdp.checks import after_load
from shardtensor.fsdp.outside import leave_group
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.runtime import Runtime
from shardtensor.fsdp.state import FSDPState, plain_class, state_of, states_in


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return an independent copy of a fully sharded module, with its own parameters and shards; ties stay ties.

    The recorded execution order is not copied: the first forward of the copy records it anew, on all ranks.
    """
    copied = object.__new__(type(module))
    memo[id(module)] = copied
    kind: Any = plain_class(module)
    is_by_itself = hasattr(kind, "__deepcopy__") or not hasattr(kind, "__getstate__")  # such as parametrized modules
    state = vars(module) if is_by_itself else module.__getstate__()
    state = copy.deepcopy({**state, "_fsdp_state": vars(module)["_fsdp_state"]}, memo)
    copied.__setstate__(state)
    return copied


def copy_state(state: FSDPState, memo: dict[int, Any]) -> FSDPState:
    """Return the state of a module's copy."""
    copied = object.__new__(FSDPState)
    memo[id(state)] = copied
    vars(copied).update(vars(state))
    copied.modules = [copy.deepcopy(module, memo) for module in state.modules]
    copied.module, copied.ahead = copied.modules[0], list(state.ahead)
    copied.param_groups = [_copy_param_group(group, memo) for group in state.param_groups]
    if state.post_forward_mesh is not None:
        copied.post_forward_mesh = state.post_forward_mesh.over(copied.param_groups)
    copied.refer()
    return copied


def _copy_param_group(group: ParamGroup, memo: dict[int, Any]) -> ParamGroup:
    copied = object.__new__(ParamGroup)
    vars(copied).update(vars(group))
    copied.params_info = [
        attrs.evolve(
            info,
            param=copy.deepcopy(info.param, memo),
            locations=[(copy.deepcopy(owner, memo), name) for owner, name in info.locations],
        )
        for info in group.params_info
    ]
    copied.sharded_params = [info.param for info in copied.params_info]  # type: ignore[misc]
    copied.gradients = group.gradients.over(copied.sharded_params)
    copied.repack()
    return copied


FSDPState.__deepcopy__ = copy_state  # type: ignore[attr-defined]


def release(module: nn.Module) -> None:
    """Undo `fully_shard` on a module and all modules in it. Sends nothing; all ranks call it, between passes.

    Parameters are no longer gathered: `ShardedTensor.full_tensor` returns their values. Parameters keep gradients.

    Example:
        >>> from shardtensor.fsdp import FSDPModule, fully_shard
        >>> linear = fully_shard(nn.Linear(2, 2))
        >>> release(linear)
        >>> isinstance(linear, FSDPModule), type(linear.weight).__name__
        (False, 'ShardedTensor')
    """
    for owner in module.modules():
        state = state_of(owner)
        if state is not None:
            _release_state(state)
            owner.__class__ = plain_class(owner)
            del vars(owner)["_fsdp_state"]
            for key in [key for key, hook in owner._load_state_dict_post_hooks.items() if hook is after_load]:
                del owner._load_state_dict_post_hooks[key]


def _release_state(state: FSDPState) -> None:
    for group in state.param_groups:
        group.show_sharded()
        for sharded in group.sharded_params:
            leave_group(sharded)


def free_gathered(module: nn.Module) -> None:
    """Free the memory that units of a module are gathered into, and that their gradients are reduced in.

    Otherwise it stays allocated between passes: call this, for example, after evaluation. The next forward allocates it
    again. Sends nothing; all ranks call it on the outermost fully sharded module, between passes.

    Raises:
        RuleError: a forward or a backward is running, or a graph has saved a tensor in that memory. Nothing has
            changed. A graph that saved none there raises in its own backward.

    Example:
        >>> import torch
        >>> from shardtensor.fsdp import free_gathered, fully_shard
        >>> layer = fully_shard(nn.Linear(2, 2))
        >>> with torch.no_grad():
        ...     y = layer(torch.ones(1, 2))
        >>> free_gathered(layer)
    """
    found = (state.runtime for _, state in states_in(module))
    runtimes = {id(runtime): runtime for runtime in found if runtime is not None}.values()
    for runtime in runtimes:
        if runtime.is_running() or not becomes_true(runtime.is_idle):
            raise RuleError(
                "the memory of gathered parameters is in use: the backward of a forward has not run yet",
                {"module": runtime.states[0].title},
                "call backward first, or drop the results of that forward",
            )
    for runtime in runtimes:
        _free(runtime)


def _free(runtime: Runtime) -> None:
    for state in runtime.states:
        runtime.reshard(state)
        state.finish()
    runtime.gathers.join()
    allocations = {id(state.buffer.allocation): state.buffer.allocation for state in runtime.states}.values()
    runtime.reducer.resize(runtime.reducer.buffers)
    runtime.is_current = False
    for state in runtime.states:
        state.forget()
    for allocation in allocations:
        allocation.end()
