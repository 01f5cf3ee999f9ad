"""Optimizer state by the parameters' names in a model, for checkpoints.

The names do not depend on how a model is wrapped, sharded or compiled, so the state can be loaded into any copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn, optim

from shardtensor.comm.agree import agree_in_groups
from shardtensor.errors import LayoutError, some
from shardtensor.imports import when_imported
from shardtensor.optim import state_dict as saved
from shardtensor.optim.named_params import ParamRecord, record_groups
from shardtensor.optim.sharded_optimizer import ShardedOptimizer, inner_optimizer
from shardtensor.optim.state import copied_value
from shardtensor.optim.update_units import update_unit
from shardtensor.optim.zero.optimizer import ZeroRedundancyOptimizer
from shardtensor.tensor.sharded_tensor import ShardedTensor
from shardtensor.tensor.trees import map_tensors

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names of submodules that torch.compile and other wrappers add; they are left out of parameters' names."""


def optim_state_dict(
    model: nn.Module | Mapping[str, nn.Module], optimizer: optim.Optimizer, *, full: bool = False
) -> dict[str, Any]:
    """Return an optimizer's state and groups by the names of the parameters in `model`.

    The names, and each tensor's global shape and values, are those of the unsharded model.

    Args:
        model: the model; the optimizer steps all or some of its parameters. Of a dict of models the names are
            ``<key>.<name>``.
        optimizer: a torch optimizer, a `ShardedOptimizer` or a `ZeroRedundancyOptimizer`. All ranks of the last call
            it; they exchange which rank holds what.
        full: gather every tensor, on every rank. Collective: all ranks of the parameters' groups call it.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], "lr": ..., ...}]}``. A tensor of a
        sharded parameter's state is a ShardedTensor with the parameter's layout; it shares memory with the optimizer,
        as in ``optimizer.state_dict()`` (a gathered one does not). Numbers, and 0-d tensors such as ``step``, are the
        same on every rank. Parameters that were never stepped have no entry in ``state``.

    Raises:
        LayoutError: (a ValueError) the optimizer holds parameters that the model does not have.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> _ = model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optim_state_dict(model, optimizer)["state"]["bias"]
        {'momentum_buffer': tensor([1.])}
    """
    names, _ = names_in(model)
    fault = _unknown_params(optimizer, names)
    if fault is not None:
        raise fault
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        named = optimizer.state_by_name(names)
    else:
        named = saved.by_name(optimizer, names)
    if full:
        state = named["state"]
        named["state"] = map_tensors(lambda x: x.full_tensor() if isinstance(x, ShardedTensor) else x, state)
    return named


def optim_state_dict_to_load(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: optim.Optimizer,
    state: Mapping[str, Any],
    is_named_optimizer: bool = False,
    *,
    copies: bool = True,
) -> dict[str, Any]:
    """Return the argument for ``optimizer.load_state_dict``, from the result of `optim_state_dict` of any model copy.

    State and hyperparameters are matched by name; the order of groups and names does not matter. All ranks of the
    parameters' groups call it; it sends only tensors whose layout is not their parameter's.

    Args:
        model: the model whose parameters the optimizer steps.
        optimizer: the optimizer that will load the state, or an equal one.
        state: by name; its tensors full or sharded with any layouts.
        is_named_optimizer: key the result by name rather than by torch's numbers. The keys for a `ShardedOptimizer` or
            a `ZeroRedundancyOptimizer` are always the names with which it was made.
        copies: False if `state` is not used any more: its tensors are then returned where they need no change.

    Returns:
        a state dict whose tensors have the layouts of the parameters, and share no memory with `state`.

    Raises:
        LayoutError: (a ValueError) names are missing or unknown, shapes differ, or one group's parameters were saved
            with different hyperparameters.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> named = {"state": {"bias": {"momentum_buffer": torch.ones(1)}},
        ...          "param_groups": [{"params": ["weight", "bias"], "lr": 0.5}]}
        >>> loaded = optim_state_dict_to_load(model, optimizer, named)
        >>> loaded["state"], loaded["param_groups"][0]["params"]
        ({1: {'momentum_buffer': tensor([1.])}}, [0, 1])
    """
    names, aliases = names_in(model)
    own = [[names.get(id(param), "") for param in group["params"]] for group in optimizer.param_groups]
    records = records_by_name(optimizer, names)
    # other states may have other shapes: Adafactor's row_var
    shapes = {name: tuple(h.param.shape) for name, h in records.items()} if is_elementwise(optimizer) else None
    found, options, fault = saved.match_and_check(state, own, aliases, shapes)
    fault = _unknown_params(optimizer, names) or fault
    agree_in_groups(record_groups(records), "optim_state_dict_to_load", {"state": saved.outline(found)}, fault)
    keys: dict[str, Any] = {name: name if is_named_optimizer else i for i, name in enumerate(records)}
    if isinstance(optimizer, ShardedOptimizer):
        keys = {names[id(param)]: name for name, param in optimizer.named_params.items()}
    elif isinstance(optimizer, ZeroRedundancyOptimizer):
        keys = {names[key]: record.name for key, record in optimizer.partitioned.records.items() if key in names}
    taken: dict[Any, dict[str, Any]] = {}
    groups = []
    for group, members, new in zip(optimizer.param_groups, own, options, strict=True):
        for name in members:
            if name in found:
                values = found.pop(name)
                taken[keys[name]] = {
                    key: copied_value(x, records[name], key, new, copies=copies) for key, x in values.items()
                }
        kept = {key: group[key] for key in ("param_names",) if key in group}
        options_of = new or {key: value for key, value in group.items() if key != "params"}  # an empty group, not saved
        groups.append({**options_of, **kept, "params": [keys[name] for name in members]})
    return {"state": taken | found, "param_groups": groups}


def records_by_name(optimizer: optim.Optimizer, names: Mapping[int, str]) -> dict[str, ParamRecord]:
    """Return the records of an optimizer's parameters by the names in `names`; those without a name are left out."""
    partitioned = optimizer.partitioned.records if isinstance(optimizer, ZeroRedundancyOptimizer) else {}
    params = (param for group in optimizer.param_groups for param in group["params"] if id(param) in names)
    named = ((names[id(param)], param) for param in params)
    return {name: partitioned.get(id(param)) or ParamRecord.of(name, param) for name, param in named}


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether the tensors of an optimizer's state have the shapes of its parameters."""
    return bool(getattr(optimizer, "_on_leaves", update_unit(type(inner_optimizer(optimizer))) == "element"))


def plain_name(name: str) -> str:
    """Return the name of a parameter without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_in(model: nn.Module | Mapping[str, nn.Module]) -> tuple[dict[int, str], dict[str, str]]:
    """Return the name of each parameter by its id, and that name by the other names of tied parameters."""
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    models = {"": model} if isinstance(model, nn.Module) else {f"{key}.": each for key, each in model.items()}
    for prefix, each in models.items():
        for full_name, param in each.named_parameters(remove_duplicate=False):
            name = prefix + plain_name(full_name)
            first = names.setdefault(id(param), name)
            if first != name:
                aliases[name] = first
    return names, aliases


def _unknown_params(optimizer: optim.Optimizer, names: Mapping[int, str]) -> LayoutError | None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    unknown = [str(i) for i, param in enumerate(params) if id(param) not in names]
    if not unknown:
        return None
    return LayoutError(
        "the optimizer holds parameters that the model does not have",
        {"their numbers in the optimizer": some(unknown)},
        "pass the model whose parameters() the optimizer was made with",
    )


def _extend(module: ModuleType) -> None:
    """Make torch's ``get_optimizer_state_dict`` work: it needs state dicts keyed by number."""
    method_of = module._state_dict_fn

    def numbered_method_of(obj: Any, api: str) -> Any:
        method = method_of(obj, api)
        if api == "state_dict" and isinstance(obj, ShardedOptimizer):
            return lambda: saved.numbered(method())
        if api == "state_dict" and isinstance(obj, ZeroRedundancyOptimizer):
            return lambda: saved.numbered(obj.state_by_name(obj.names))
        return method

    module._state_dict_fn = numbered_method_of  # type: ignore[attr-defined]


when_imported("torch.distributed.checkpoint.state_dict", _extend)
