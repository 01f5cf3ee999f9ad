"""Match the saved state of an optimizer to the parameters that it steps here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import optim

from shardtensor.checkpoint.contents import module_of
from shardtensor.checkpoint.manifest import TensorRecord
from shardtensor.checkpoint.targets import ReadTarget, device_to_be, target_of
from shardtensor.checkpoint.together import fault_of
from shardtensor.checkpoint.values import StoredTensor, dtype_named, replaced
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError, LayoutError
from shardtensor.optim.fqn import is_elementwise, names_in, optim_state_dict_to_load, records_by_name
from shardtensor.optim.named_params import ParamRecord
from shardtensor.optim.sharded_optimizer import ShardedOptimizer, inner_optimizer
from shardtensor.optim.state_dict import match
from shardtensor.optim.zero.optimizer import ZeroRedundancyOptimizer
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.dtensor import from_dtensor
from shardtensor.tensor.sharded_tensor import wrap


def optimizer_targets(
    optimizer: optim.Optimizer,
    models: Mapping[str, Any],
    saved: Mapping[str, Any],
    stored: Mapping[str, TensorRecord],
    group: Group,
    *,
    strict: bool,
) -> tuple[list[ReadTarget], Callable[[], Any]]:
    """Return the tensors to read, and a function that then returns the state by name, for `load_by_name`.

    Raises:
        CheckpointError: the state is that of other parameters, shapes or, if `strict` is set, another class.
    """
    module = module_of(models, optimizer)
    if module is None:
        assert isinstance(optimizer, ShardedOptimizer), "others need their model"
        names, aliases = {id(param): name for name, param in optimizer.named_params.items()}, dict[str, str]()
    else:
        names, aliases = names_in(module)
    own = [[names.get(id(param), "") for param in each["params"]] for each in optimizer.param_groups]
    unnamed = sum(members.count("") for members in own)
    if unnamed:
        raise CheckpointError(
            f"{unnamed} parameters of the optimizer are not in the model; nothing has been loaded",
            fix="pass the model whose parameters() the optimizer was made with",
        )
    if not strict:
        saved = _of_these(saved, optimizer, own, aliases)
    try:
        state, _ = match(saved, own, aliases)
    except LayoutError as error:
        raise fault_of(error) from None
    groups = saved["param_groups"]
    if saved["class"] != (own_class := type(inner_optimizer(optimizer)).__name__):
        if strict:
            raise CheckpointError(
                "the saved state is that of another class of optimizer; nothing has been loaded",
                {"saved": saved["class"], "here": own_class},
                "make the optimizer that was saved, or load with strict=False, which takes what both have",
            )
        state, groups = _in_common(state, groups, optimizer)
    records = records_by_name(optimizer, names)
    if is_elementwise(optimizer):
        _check_shapes(state, records, stored)
    targets: list[ReadTarget] = []
    filled: dict[Any, dict[str, Any]] = {}
    for name, values in state.items():
        make = partial(_new, record=records.get(name), stored=stored, targets=targets, group=group)
        filled[name] = {key: replaced(value, make) for key, value in values.items()}

    make = partial(_new, record=None, stored=stored, targets=targets, group=group)
    groups = [{key: replaced(value, make) for key, value in each.items()} for each in groups]
    return targets, lambda: {"state": filled, "param_groups": groups}


def load_by_name(optimizer: optim.Optimizer, models: Mapping[str, Any], named: dict[str, Any]) -> None:
    """Load a state by the names of parameters; its tensors are not used elsewhere. Collective."""
    module = module_of(models, optimizer)
    if module is not None:
        named = optim_state_dict_to_load(module, optimizer, named, copies=False)
    if isinstance(optimizer, ShardedOptimizer | ZeroRedundancyOptimizer):
        optimizer.load_state_dict(named, copies=False)
    else:
        optimizer.load_state_dict(named)


def _new(
    found: StoredTensor,
    record: ParamRecord | None,
    stored: Mapping[str, TensorRecord],
    targets: list[ReadTarget],
    group: Group,
) -> torch.Tensor:
    """Return a new tensor for a stored one, and add it to the targets: with the layout of its parameter if it has the
    parameter's shape, else whole on every rank."""
    saved = stored[found.name]
    dtype = dtype_named(saved.dtype)
    device = torch.device("cpu") if record is None else device_to_be(record.param, group)
    if record is None or tuple(record.param.shape) != saved.shape:
        tensor = torch.empty(saved.shape, dtype=dtype, device=device)
    elif is_dtensor(record.param):
        like = from_dtensor(record.param.detach())
        tensor = wrap(torch.empty_like(like._local, dtype=dtype), like._layout, like._spec, like._group)
        targets.append(target_of(found.name, saved, tensor, group))
        return tensor.to_dtensor(record.param.device_mesh)  # type: ignore[attr-defined]
    elif record.layout is not None and record.group is not None:
        local = torch.empty(record.layout.local_shape(record.group.rank), dtype=dtype, device=device)
        tensor = wrap(local, record.layout, None, record.group)
    else:
        tensor = torch.empty(saved.shape, dtype=dtype, device=device)
    targets.append(target_of(found.name, saved, tensor, group))
    return tensor


def _check_shapes(
    state: Mapping[Any, Mapping[str, Any]], records: Mapping[str, ParamRecord], stored: Mapping[str, TensorRecord]
) -> None:
    """Raise CheckpointError unless all stored tensors have the shapes of their parameters."""
    for name, values in state.items():
        needed = tuple(records[name].param.shape) if name in records else None
        for key, value in values.items():
            if isinstance(value, StoredTensor) and stored[value.name].shape != needed:
                raise CheckpointError(
                    f'the saved "{key}" of parameter "{name}" has another shape; nothing has been loaded',
                    {"saved": stored[value.name].shape, "here": needed or "no such parameter"},
                    "load it into the model that was saved",
                )


def _in_common(
    state: Mapping[Any, dict[str, Any]], groups: list[dict[str, Any]], optimizer: optim.Optimizer
) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
    """Return the state and options of another class that this one has, too.

    State is taken only if all that this class needs is there: Adam's for AdamW, but not SGD's for Adam.
    """
    kept = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "param_names")}
    merged = [{**kept, **{key: value for key, value in each.items() if key in ("params", *kept)}} for each in groups]
    taken: dict[Any, dict[str, Any]] = {}
    for group in merged:
        needed = _state_keys(optimizer, group)
        for name in group["params"]:
            if needed <= set(state.get(name, {})):
                taken[name] = {key: state[name][key] for key in needed}
    return taken, merged


def _state_keys(optimizer: optim.Optimizer, options: Mapping[str, Any]) -> set[str]:
    """Return the keys of the state that an optimizer's class needs with some options, from a step of one number."""
    inner = inner_optimizer(optimizer)
    probe = torch.zeros((1, 1), requires_grad=True)
    known = {key: value for key, value in options.items() if key in optimizer.defaults}
    for key in ("fused", "capturable"):  # they need parameters on GPUs
        if known.get(key):
            known[key] = False
    trial = cast(Any, type(inner))([{"params": [probe], **known}])
    probe.grad = torch.zeros_like(probe)
    trial.step()
    return set(trial.state[probe])


def _of_these(
    saved: Mapping[str, Any], optimizer: optim.Optimizer, own: list[list[str]], aliases: Mapping[str, str]
) -> dict[str, Any]:
    """Return a saved state without unknown parameters, and with those that are missing in it, without state.

    They get the options of the saved parameters of their group, or keep those that they have.
    """
    names = {name for members in own for name in members}
    groups = [
        {**each, "params": [aliases.get(n, n) for n in each["params"] if aliases.get(n, n) in names]}
        for each in saved["param_groups"]
    ]
    found = {name: each for each in groups for name in each["params"]}
    for group, members in zip(optimizer.param_groups, own, strict=True):
        missing = [name for name in members if name not in found]
        beside = next((found[name] for name in members if name in found), None)
        if beside is not None:
            beside["params"] += missing
        elif missing:
            groups.append({**{k: v for k, v in group.items() if k != "param_names"}, "params": missing})
    state = {name: each for name, each in saved["state"].items() if aliases.get(name, name) in names}
    return {**saved, "state": state, "param_groups": groups}
