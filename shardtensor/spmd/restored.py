"""What a trace replaces in modules and optimizers while it runs, and puts back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardtensor.errors import RuleError
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.state import state_of
from shardtensor.spmd.arguments import Held, StepArguments
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap
from shardtensor.tensor.trees import cast_floats


def computed_with(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory like the one that a rank computes with: unsharded, or the part on this rank.

    It is that of a parameter's gradient, too.
    """
    if not isinstance(tensor, ShardedTensor):
        return tensor
    group, i = _unit_of(tensor)
    if group is None:
        return tensor._local
    return torch.empty(group.shapes[i], dtype=group.compute_dtype, device=group.device)


def _unit_of(tensor: ShardedTensor) -> tuple[Any, int]:
    """Return the parameter group of a fully sharded parameter, and its number there; None without one."""
    group: Any = tensor._param_group
    if group is None:
        return None, -1
    return group, next(i for i, other in enumerate(group.sharded_params) if other is tensor)


def is_sharded_inside(tensor: torch.Tensor) -> bool:
    """Whether modules compute with a ShardedTensor, as layers of tensor parallelism do."""
    if not isinstance(tensor, ShardedTensor):
        return False
    group, i = _unit_of(tensor)
    return group is None or group.params_info[i].tp_spec is not None


def shown_over(tensor: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Return what modules hold for a parameter while they run, over its leaf."""
    if not isinstance(tensor, ShardedTensor):
        return leaf
    group, i = _unit_of(tensor)
    if group is None:
        return wrap(leaf, tensor._layout, tensor._spec, tensor._group)
    tp_spec = group.params_info[i].tp_spec
    return leaf if tp_spec is None else tp_spec.around(leaf)


@contextlib.contextmanager
def compiling(is_on: bool) -> Iterator[None]:
    """Let layers that are sharded over other axes send by functional collectives, which a trace records."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = before or is_on
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def restored(call: StepArguments, held: Sequence[Held]) -> Iterator[None]:
    """Put the user's tensors, classes and hyperparameters back; raise if the step changed hyperparameters."""
    places = [(place, key, each.tensor) for each in held for place, key in each.places]
    groups = [(o, [(group, dict(group), list(group["params"])) for group in o.param_groups]) for o in call.optimizers]
    modules = {id(m): m for module in call.modules for m in module.modules()}
    classes = [(m, type(m)) for m in modules.values()]
    training = [(m, m.training) for m in modules.values()]
    states = {id(o): o.state for o in call.optimizers}
    handles: list[Any] = []
    for module, kind in classes:
        state = state_of(module)
        if state is not None:  # the graph gathers its parameters; what remains of its call are the casts of its policy
            module.__class__ = kind.__mro__[2]
            handles += _casts(module, state.policy)
    changed: list[str] = []
    try:
        yield
    finally:
        for place, key, tensor in places:
            place[key] = tensor
        for handle in handles:
            handle.remove()
        for module, kind in classes:
            module.__class__ = kind
        for module, was in training:
            module.training = was
        for optimizer, listed in groups:
            optimizer.state = states[id(optimizer)]
            for group, before, params in listed:
                now = {key: value for key, value in group.items() if key != "params"}
                changed += [key for key, value in now.items() if value is not before.get(key)]
                group.clear()
                group.update(before)
                group["params"] = params
    if changed:
        raise RuleError(
            f"the train step changes hyperparameters of an optimizer: {', '.join(sorted(set(changed)))}",
            {"because": "it is traced once, so later steps would not change them"},
            "call the scheduler after the compiled step: its new values are used without compiling again",
        )


def _casts(module: nn.Module, policy: MixedPrecisionPolicy) -> Iterator[Any]:
    """Cast inputs and outputs of a module as a policy of `fully_shard` says."""
    inputs, outputs = policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype
    if inputs is not None:
        yield module.register_forward_pre_hook(
            lambda _, args, kwargs: cast_floats((args, kwargs), inputs), with_kwargs=True
        )
    if outputs is not None:
        yield module.register_forward_hook(lambda _, args, output: cast_floats(output, outputs))
