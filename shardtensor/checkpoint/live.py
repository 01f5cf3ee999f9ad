"""`reshard_module` brings a module and its optimizers to another plan, mesh or number of ranks while training.

It does the same as a checkpoint that is saved under the old plan and loaded under the new one, without files: each rank
gets the elements that it lacks from the ranks that have them, one tensor after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim

from shardtensor.checkpoint.live_module import Outline, facts_of, job_as_dense, outline_of, tensors_of
from shardtensor.checkpoint.live_ranks import RankChange, rank_change
from shardtensor.checkpoint.live_state import FollowingOptimizer
from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.errors import ShardTensorError
from shardtensor.fsdp.module import FSDPModule
from shardtensor.layout.layout import replicated
from shardtensor.parallel.job import Target
from shardtensor.parallel.module_changes import Binder
from shardtensor.parallel.shard_module import PlanLike, install_plan, swap_all, take_off
from shardtensor.parallel.stores import keep_as_before
from shardtensor.spec.nodes import Replicate
from shardtensor.tensor.convert import drop_weak_references, flatten_again
from shardtensor.tensor.memory import become
from shardtensor.tensor.placing import own_device
from shardtensor.tensor.reshard import reshard_on
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of, wrap


def reshard_module(
    module: nn.Module, plan: PlanLike, *optimizers: optim.Optimizer, process_group: Any = None
) -> nn.Module:
    """Redistribute a module and its optimizers to the layouts of another plan, in place, and return the module.

    Parameters, buffers, gradients and all optimizer state are redistributed, one tensor after another: each rank
    receives the elements that it lacks, and holds at most the old and the new part of one tensor beside its parts of
    the others. Flows, hooks and counts of the old plan are undone, those of the new one are set. The next step is then,
    bit for bit, that of a program that saved a checkpoint before and loaded it under the new plan. Parameters stay the
    same Python objects; hooks that users registered on them are dropped. Every rank raises the errors of the plan and
    of the optimizers before anything changes.

    The new ranks may be fewer or more than the old ones. A rank that leaves keeps the module, with empty tensors, and
    must not call it. A rank that joins, after it left or with a new module and new optimizers, gets its parts of the
    values, the state and the hyperparameters. All ranks of the old and the new group call this, between two steps. On
    others, and outside of the new group if no tensor is sharded, it returns the module unchanged.

    Args:
        module: sharded by `shard_module`, `shard_parameter` or `fully_shard`, or not sharded; a plain tensor is equal
            on all ranks. Buffers that are not saved stay as they are.
        plan: as `shard_module` takes it; without `Sharder`. A tensor without a rule becomes a plain one.
        optimizers: each a `ShardedOptimizer`, or a torch optimizer over the parameters themselves.
        process_group: the new ranks: a process group, a DeviceMesh whose axes the specs name, or None for the default
            group. The old ranks contain the new ones, or the new ones the old ones. On a rank outside it may be
            torch's NON_GROUP_MEMBER.

    Raises:
        SpecError, PlanError, MissingParameterError, LayoutError: as `shard_module` does for the plan; or no group
            contains the old and the new ranks.
        StaleParameterError: (a RuntimeError) an optimizer steps no parameter of the module.
        RuleError: (a RuntimeError) tensors are on the meta device; something else refers to a parameter that becomes
            sharded; or an optimizer is a ZeroRedundancyOptimizer.
        DisagreementError: (a ValueError) ranks have different plans, modules or optimizers.

    Example:
        >>> import shardtensor as st
        >>> mlp = st.shard_module(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), {"0": "[tp, ...]"})
        >>> optimizer = st.ShardedOptimizer(mlp, torch.optim.AdamW)
        >>> mlp = reshard_module(mlp, {"0.weight": "[-, tp]", "1.weight": "[tp, -]"}, optimizer)
        >>> [type(p).__name__ for p in mlp.parameters()]
        ['ShardedTensor', 'Parameter', 'ShardedTensor', 'Parameter']
    """
    call = f"reshard_module({type(module).__name__})"
    for owner in module.modules():
        if isinstance(owner, FSDPModule):
            owner.reshard()  # the module then holds the sharded parameters
    tensors = tensors_of(module)
    ranks = rank_change(tensors, process_group)
    both = ranks.both
    if both.index < 0:
        return module
    names = {id(tensor): name for name, tensor in tensors.items()}
    job, outline, following, fault = None, None, list[FollowingOptimizer](), None
    try:
        following = [FollowingOptimizer(optimizer, names) for optimizer in optimizers]
        if not ranks.joins:
            outline = outline_of(module, tensors, ranks, following)
        job, originals = job_as_dense(module, plan, ranks)
    except ShardTensorError as error:
        fault = error
    if not ranks.is_same:
        outline = next(filter(None, both.exchange_objects(outline if ranks.old.index == 0 else None)), None)
    agree(both, call, facts_of(job, outline, following, tensors, ranks) if job and outline else {}, fault)
    assert job is not None and outline is not None
    targets = {id(originals[id(target.tensor)][1]): target for target in job.targets}
    moving = {name: tensors[name] for name in (*outline.tensors, *(names[key] for key in targets))}
    _shard_as_they_are(module, moving, targets, outline, ranks, lambda fault: agree(both, call, {}, fault))
    if ranks.joins:
        for optimizer, state in zip(following, outline.states, strict=True):
            optimizer.join(state, ranks.old)
    keep_as_before(module)
    take_off(module)
    for tensor in moving.values():
        if isinstance(tensor, ShardedTensor):
            _move(tensor, targets.get(id(tensor)), job.group, ranks, following)
    if ranks.new.index >= 0:
        install_plan(module, job, job.changes(Binder(job.group)))
    flatten_again(module)
    for optimizer in following:
        optimizer.finish()
    return module


def _move(
    tensor: ShardedTensor,
    target: Target | None,
    group: Group,
    ranks: RankChange,
    following: Sequence[FollowingOptimizer],
) -> None:
    """Redistribute a tensor, its gradient and its state to `group`; without a target, make it plain on these ranks."""
    _for_each(following, FollowingOptimizer.follow, tensor)  # it may have been plain
    source = ranks.layout_of(tensor)
    if source is not tensor._layout:
        tensor._layout, tensor._group, tensor._spec, tensor._grad_wrapper = source, ranks.old, None, None
        _for_each(following, FollowingOptimizer.relabel, tensor)
    if target is not None:
        assert target.layout is not None
        reshard_on(tensor, target.spec, target.layout, group)
    else:
        grid = source.grid if ranks.is_same else None
        reshard_on(tensor, Replicate(), replicated(source.shape, source.ranks if grid else group.ranks, grid), group)
    _for_each(following, FollowingOptimizer.follow, tensor)
    if target is None and group.index >= 0:
        local, grad = tensor._local.detach(), tensor._local.grad
        become(tensor, nn.Parameter(local, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else local)
        tensor.grad = grad
        _for_each(following, FollowingOptimizer.follow, tensor)


def _for_each(
    following: Sequence[FollowingOptimizer],
    do: Callable[[FollowingOptimizer, torch.Tensor], None],
    tensor: torch.Tensor,
) -> None:
    for optimizer in following:
        do(optimizer, tensor)


def _shard_as_they_are(
    module: nn.Module,
    moving: Mapping[str, torch.Tensor],
    targets: Mapping[int, Target],
    outline: Outline,
    ranks: RankChange,
    agreed: Callable[[ShardTensorError | None], None],
) -> None:
    """Turn plain tensors that change into ShardedTensors, replicated on the old ranks; sharded ones stay.

    On a rank that joins, turn all into empty parts. If one cannot be turned on some rank, they stay on all ranks.
    """
    found, made = [], []
    for name, tensor in moving.items():
        changes = not isinstance(tensor, ShardedTensor) and (id(tensor) in targets or not ranks.is_same)
        if not (changes or ranks.joins):
            continue
        part = outline.tensors.get(name)
        source = None if part is None else part.layout
        source = replicated(tuple(tensor.shape), ranks.old.ranks) if source is None else source
        local, grad = local_of(tensor).detach(), local_of(tensor).grad
        if ranks.joins:
            device = own_device(ranks.new.device_type) if local.is_meta else local.device
            local = torch.empty(source.local_shape(ranks.old.rank), dtype=tensor.dtype, device=device)
            grad = torch.empty_like(local) if name in outline.with_grad else None
        local.requires_grad_(tensor.requires_grad)
        local.grad = grad
        found.append(tensor)
        made.append(wrap(local, source, None, ranks.old))
    drop_weak_references(module, found)
    try:
        swap_all(found, made, agreed)
    except ShardTensorError:
        flatten_again(module)
        raise
