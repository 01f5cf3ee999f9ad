"""`shard_module` shards the tensors of a module by rules, all or none; `unshard_module` undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.errors import PlanError, ShardTensorError
from shardtensor.fsdp.api import move_rest
from shardtensor.parallel import expert_dispatch  # noqa: F401  (its hook registers itself)
from shardtensor.parallel.job import ShardingJob, Target, count_as_before, work_of
from shardtensor.parallel.module_changes import Binder, ModuleChange, restore_class
from shardtensor.parallel.parameter import collecting, resharded, scatter
from shardtensor.parallel.sharding_plan import Sharder, ShardingPlan
from shardtensor.parallel.stores import is_called, keep_as_before
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.patterns import WRAPPERS
from shardtensor.plan.plan import Plan
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.tensor.convert import drop_weak_references, flatten_again
from shardtensor.tensor.memory import become, load_keeps_layouts, owned
from shardtensor.tensor.placing import own_device
from shardtensor.tensor.sharded_tensor import ShardedTensor

PlanLike = Plan | ShardingPlan | Mapping[str, ShardingSpec | str | Sharder] | str | Path


def shard_module(module: nn.Module, plan: PlanLike, src_rank: int = 0, process_group: Any = None) -> nn.Module:
    """Shard the tensors of a module in place, by rules, and return it. Its forward then returns the dense results.

    Every rank raises the errors of the plan before anything changes. The ranks then compare all of it in one small
    exchange, `src_rank` sends every rank its shards, and only then does the module change. Parameters stay the same
    Python objects, tied ones stay tied; a tensor without a rule stays as it is.

    Args:
        module: of dense parameters, equal on all ranks in names, shapes and dtypes. One on the meta device stays there,
            and nothing is sent: `materialize` then gives it memory and first values, ``load_state_dict`` those of a
            checkpoint.
        plan: a `Plan`, as ``load_plan`` reads it from a file and `Plan.from_rules` makes it. It gives each tensor's
            layout on a mesh over all ranks, and more: stored parameters are fully sharded, gradients are averaged over
            its data axes, hooks are set. Tensors that it keeps whole stay plain ones.
            Or the path or the name of a plan file, such as ``"llama"``, which is read for ``module.config``. Or
            ``"auto"``, for a model of transformers: the package's plan for its type if that fits, else the plan that
            ``shardtensor import hf`` prints. If peft has added LoRA layers, they are sharded with their layers.
            Or a `ShardingPlan`, or a dict of its rules, which leave tensors without a rule unchanged: from a pattern
            of names to a spec, its text, or a `Sharder`. ``*`` matches one segment of a name, ``**`` any number,
            ``{a,b}`` one of these. The pattern of a module applies to all tensors below it, and may also map to a dict
            of rules for names below it. In such a dict ``"in"``, ``"in NAME"`` (an argument), ``"out"`` and
            ``"out NAME"`` (a result) redistribute values that enter or leave: ``"[-, tp, ...] -> replicate"``;
            ``"local NAME"`` names an attribute that becomes the rank's share, ``"use"`` a hook (see `register_hook`).
            Modules with flows take and return plain local tensors; `colwise`, `rowwise`, `along`, `vocab_embedding`
            and `vocab_head` are the usual ones. ``"optional bias"`` may match nothing. Flows are checked as a plan's
            are, but modules without a rule may return values in any layout that rules expect of them.
        src_rank: the group rank whose values are used.
        process_group: a process group, a DeviceMesh whose axes the specs name, or None for the default group. All its
            ranks call this. A `Plan` makes its mesh over them by itself.

    Raises:
        SpecError: (a ValueError) a plan file cannot be read, or does not fit this module's configuration.
        PlanError: (a TypeError, KeyError and RuntimeError) an entry is not a spec, two rules contradict each other, a
            flow contradicts a weight, or a local value would reach a module that does not expect it.
        MissingParameterError: (an AttributeError) a pattern matches nothing.
        LayoutError: (a ValueError) a spec does not fit its tensor; the error names the tensor.
        DisagreementError: (a ValueError) ranks have different plans or modules; nothing was sent.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> mlp = shard_module(mlp, {"0.weight": "[tp, -]", "0.bias": "[tp]", "2.weight": "[-, tp]"})
        >>> mlp(torch.ones(2, 4)).shape, str(mlp[2].weight.sharding_spec())
        (torch.Size([2, 4]), '[-, tp]')
    """
    group, found, facts, fault = as_group(process_group), None, {"src_rank": str(src_rank)}, None
    given, module = module, _without_peft(module, plan)
    try:
        found = job_of(module, plan, group, src_rank)
        facts |= found.facts()
    except ShardTensorError as error:
        fault = error
    agree(group, f"shard_module({type(module).__name__})", facts, fault)
    assert found is not None
    group = found.group
    for path, sharder in found.rules.sharders:
        _replace(module, path, sharder)
    wrappers = [_wrapper(target, group, src_rank, process_group) for target in found.targets]
    changes = found.changes(Binder(group))
    drop_weak_references(module, [target.tensor for target in found.targets])
    swap_all([target.tensor for target in found.targets], wrappers)
    if not found.rules.plan.is_part and group.device_type == "cuda":  # where the sharded ones are
        move_rest([module], own_device("cuda"), {id(whole) for _, whole in found.wholes})
    for _, tensor in found.wholes:
        if not tensor.is_meta:
            group.broadcast(tensor.data, src_rank)
    install_plan(module, found, changes)
    return given


def job_of(module: nn.Module, plan: PlanLike, group: Group, src_rank: int = 0) -> ShardingJob:
    """Return what a plan changes in a module. Pure: raises the errors of `shard_module`, changes and sends nothing."""
    if isinstance(plan, str | Path):
        plan = _named_plan(module, plan, group.size)
    found = work_of(module, plan, group, src_rank)
    found.changes(Binder(found.group, is_dry=True))
    return found


def install_plan(module: nn.Module, found: ShardingJob, changes: Iterable[ModuleChange]) -> None:
    """Set what a plan changes in a module whose tensors have its layouts: ties, flows, counts, hooks, full sharding.
    All ranks of the plan call it."""
    for name, other in found.ties:
        (owner, last), (source, of_source) = (_place(module, each) for each in (name, other))
        owner._parameters[last] = source._parameters[of_source]
    for each in changes:
        each.apply(_HANDLES)
    for each_count in found.counts:
        each_count.apply()
    _hook(module, found)
    _fill_on_load(module, found.group)
    if found.fsdp_config is not None:
        found.fsdp_config.apply(module, found.group)


def _named_plan(module: nn.Module, plan: str | Path, world: int) -> Plan:
    model = _wrapped(module)
    if plan == "auto":  # imported here, because it runs `shard_module` on small models
        found: Plan = import_module("shardtensor.trace.imported").automatic_plan(model, world)
        return found
    return load_plan(plan, config=_config(model), world=world)


def _wrapped(module: nn.Module) -> nn.Module:
    """Return the module in wrappers that have no configuration of their own, as that of ``torch.compile``."""
    inner = next((each for name in WRAPPERS if (each := module._modules.get(name)) is not None), None)
    return module if inner is None or "config" in vars(module) else _wrapped(inner)


def _config(module: nn.Module) -> Any:
    """Return the configuration that a module keeps, as those of Hugging Face do; None if it keeps none."""
    config = getattr(module, "config", None)
    return config if isinstance(config, Mapping) or hasattr(config, "to_dict") else None


def _without_peft(module: nn.Module, plan: PlanLike) -> nn.Module:
    """Return the model in a model of peft, whose names a plan has; the module itself if it is another."""
    base = getattr(module, "get_base_model", None)
    if base is None or not hasattr(module, "peft_config") or isinstance(plan, ShardingPlan | Mapping):
        return module
    if isinstance(plan, Plan) and any(line.pattern.startswith("base_model.") for line in plan.lines):
        return module
    return base()


def unshard_module(module: nn.Module) -> nn.Module:
    """Gather each sharded tensor of a module on every rank, in place, and return the module.

    Gradients are gathered too; flows, hooks, counts and full sharding by a plan are undone. What a `Sharder` put in
    place stays. Parameters stay the same Python objects. All ranks call it.

    Example:
        >>> linear = shard_module(nn.Linear(4, 2), {"weight": "[-, tp]"})
        >>> type(unshard_module(linear).weight).__name__
        'Parameter'
    """
    wrappers: dict[int, ShardedTensor] = {}
    keep_as_before(module)
    take_off(module)
    for owner in module.modules():
        for value in (*owner._parameters.values(), *owner._buffers.values(), *vars(owner).values()):
            if isinstance(value, ShardedTensor):
                wrappers[id(value)] = value
    wholes, grads = [], []
    for wrapper in wrappers.values():
        with torch.no_grad():
            whole = wrapper.full_tensor()
            grads.append(None if wrapper.grad is None else wrapper.grad.full_tensor().clone())
        whole = whole.clone() if whole is wrapper._local or whole._is_view() else whole
        is_parameter = isinstance(wrapper, nn.Parameter)
        wholes.append(nn.Parameter(whole, wrapper.requires_grad) if is_parameter else whole.detach())
    drop_weak_references(module, wrappers.values())
    swap_all(list(wrappers.values()), wholes)
    flatten_again(module)
    for tensor, grad in zip(wrappers.values(), grads, strict=True):
        tensor.grad = grad
    return module


def take_off(module: nn.Module) -> None:
    """Undo the flows, counts and hooks of a plan; tensors stay as they are."""
    for owner in module.modules():
        restore_class(owner)
        count_as_before(owner)
        for handle in owner.__dict__.pop(_HANDLES, ()):
            handle.remove()


_HANDLES = "_sharding_hooks"
"""The attribute in which a module keeps the handles of the hooks of its plan."""


def _replace(module: nn.Module, path: str, sharder: Sharder) -> None:
    parent, name = _place(module, path)
    old = module.get_submodule(path)
    made = sharder.shard(old)
    if not isinstance(made, nn.Module):
        raise PlanError(
            f"{type(sharder).__name__}.shard returned no module for `{path}`",
            {"found": type(made).__name__},
            "return the module that takes its place",
        )
    if is_called(made) or not is_called(old):
        setattr(parent, name, made)


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a dotted name, and the last part of the name."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _wrapper(target: Target, group: Group, src_rank: int, process_group: Any) -> ShardedTensor:
    """Return the wrapper over this rank's part of a tensor, with the source's values."""
    tensor, spec, layout = target.tensor, target.spec, target.layout
    if layout is None:
        return spec.shard(tensor, src_rank=src_rank, process_group=process_group)
    return scatter(tensor, spec, layout, group, src_rank, target.device)


def swap_all(
    tensors: Sequence[Any], others: Sequence[Any], agreed: Callable[[ShardTensorError | None], None] | None = None
) -> None:
    """Turn each tensor into the other at its position; those that were changed are turned back if one cannot be.

    `agreed` gets the error, or None, and may raise that of another rank.
    """
    done: list[tuple[Any, Any, Any]] = []
    fault: ShardTensorError | None = None
    try:
        try:
            for tensor, other in zip(tensors, others, strict=True):
                grad = tensor.grad
                become(tensor, other)
                done.append((tensor, other, grad))
        except ShardTensorError as error:
            fault = error
        if agreed is not None:
            agreed(fault)
        elif fault is not None:
            raise fault
    except BaseException:
        for tensor, other, grad in reversed(done):
            torch.utils.swap_tensors(tensor, other)
            tensor.grad = grad
        raise


def _hook(module: nn.Module, found: ShardingJob) -> None:
    """Set the hooks of a plan; each module keeps the handles of its own."""
    hooks: list[tuple[str, Any]] = [(path, partial(resharded, spec)) for path, spec in found.rules.outputs]
    for path, hook in [*hooks, *((path, collecting) for path in found.rules.local_outputs)]:
        owner = module.get_submodule(path)
        owner.__dict__.setdefault(_HANDLES, []).append(owner.register_forward_hook(hook))
    for (path, _), use in zip(found.hooks, found.uses, strict=True):
        made = use.apply()
        kept = module.get_submodule(path).__dict__.setdefault(_HANDLES, [])
        kept += made if isinstance(made, list | tuple) else [made] if hasattr(made, "remove") else []


def _fill_on_load(module: nn.Module, group: Group) -> None:
    """Make ``load_state_dict`` allocate the tensors on the meta device."""
    for owner in module.modules():
        if any(tensor.is_meta for _, tensor in owned(owner)):
            handle = load_keeps_layouts(owner, group)
            if handle is not None:
                owner.__dict__.setdefault(_HANDLES, []).append(handle)
