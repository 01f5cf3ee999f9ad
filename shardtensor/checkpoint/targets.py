"""What a checkpoint is loaded into: local tensors of models and optimizers, with the layouts that they have here. Names
in the checkpoint are matched to theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

import attrs
import torch
from torch import nn, optim

from shardtensor.checkpoint.contents import module_of, state_tensors
from shardtensor.checkpoint.manifest import TensorRecord
from shardtensor.checkpoint.reads import key_in
from shardtensor.checkpoint.stored import Stored
from shardtensor.checkpoint.together import fault_of
from shardtensor.checkpoint.values import StoredTensor, dtype_named, replaced
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError, LayoutError, some
from shardtensor.layout.explain import dtype_name
from shardtensor.layout.layout import Layout, replicated
from shardtensor.optim.fqn import is_elementwise, names_in, optim_state_dict_to_load, records_by_name
from shardtensor.optim.named_params import ParamRecord
from shardtensor.optim.sharded_optimizer import ShardedOptimizer, inner_optimizer
from shardtensor.optim.state_dict import match
from shardtensor.optim.zero.optimizer import ZeroRedundancyOptimizer
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.dtensor import from_dtensor
from shardtensor.tensor.memory import put_in_place, with_memory
from shardtensor.tensor.placing import device_for, own_device
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of, wrap

_SHOWN = 8


@attrs.frozen(eq=False)
class ReadTarget:
    """A tensor to read: its name in the checkpoint and in a file, where it is, and this rank's local tensor, which has
    the layout `layout` for the global rank `rank`. If it `is_new`, nothing is lost when an error ends the load."""

    name: str
    key: str
    record: TensorRecord
    local: torch.Tensor
    layout: Layout
    rank: int
    is_new: bool


def target_of(
    name: str, record: TensorRecord, tensor: torch.Tensor, group: Group, *, is_new: bool = True
) -> ReadTarget:
    """Return the target for a sharded or plain tensor that has memory."""
    if is_dtensor(tensor):
        tensor = from_dtensor(tensor.detach())
    local = local_of(tensor).detach()
    layout: Layout = replicated(tuple(tensor.shape), group.ranks)
    rank = group.rank
    if isinstance(tensor, ShardedTensor):
        layout, rank = tensor._layout, tensor._group.rank
    if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
        raise CheckpointError(
            f'elements of tensor "{name}" share memory: nothing can be loaded into it', fix="load into a clone() of it"
        )
    if layout.partial:
        raise CheckpointError(
            f'tensor "{name}" is a partial sum: nothing can be loaded into it', fix="reduce it first: st.reshard"
        )
    return ReadTarget(name, key_in(record, name), record, local, layout, rank, is_new)


@attrs.define
class ModelTargets:
    """The tensors of a model that a checkpoint has values for.

    Attributes:
        targets: what to read.
        skipped: names that are missing, or extra, or of another shape, with ``strict=False``.
        rest: values of the state dict that are no tensors, by name.
        install: puts new tensors, which have memory but no values yet, into a model that is on the meta device.
    """

    targets: list[ReadTarget]
    skipped: list[str]
    rest: list[str]
    install: Callable[[], None]


def model_targets(section: str, model: Any, stored: Stored, group: Group, *, strict: bool, cast: bool) -> ModelTargets:
    """Match the tensors of a model with those of a checkpoint by name, and check their shapes and dtypes.

    Raises:
        CheckpointError: names are missing or extra, or shapes differ, and `strict` is set; or dtypes differ, and `cast`
            is not.
    """
    tensors, aliases, rest = state_tensors(model)
    records = {
        name.partition("/")[2]: record
        for name, record in stored.manifest.tensors.items()
        if name.partition("/")[0] == section
    }
    saved_aliases = {
        name.partition("/")[2]: first.partition("/")[2]
        for name, first in stored.manifest.aliases.items()
        if name.partition("/")[0] == section
    }
    if not records and strict and tensors:
        held = list(dict.fromkeys(name.partition("/")[0] for name in stored.manifest.tensors))
        raise CheckpointError(
            f'the checkpoint holds no model "{section}"', {"it holds": some(held) or "nothing"}, "save it with model="
        )
    other_names: dict[str, list[str]] = {}
    for name, first in aliases.items():
        other_names.setdefault(first, []).append(name)
    found: dict[str, str] = {}
    missing: list[str] = []
    for name in tensors:
        names = [name, *other_names.get(name, ())]
        names += [saved_aliases[each] for each in names if each in saved_aliases]
        match = next((each for each in names if each in records), None)
        if match is None:
            missing.append(name)
        else:
            found[name] = match
    known = {*tensors, *aliases, *found.values(), *rest}
    extra = [name for name in records if name not in known]
    shapes = [
        f"{name}: {_shape(records[other].shape)} saved, {_shape(tuple(tensors[name].shape))} here"
        for name, other in found.items()
        if records[other].shape != tuple(tensors[name].shape)
    ]
    if strict and (missing or extra or shapes):
        raise _mismatch(section, missing, extra, shapes, tensors, records)
    skipped = [*missing, *extra, *(line.partition(":")[0] for line in shapes)]
    found = {name: other for name, other in found.items() if records[other].shape == tuple(tensors[name].shape)}
    _check_dtypes({name: (records[other], tensors[name]) for name, other in found.items()}, cast)
    made, install = _with_memory(model, {name: tensors[name] for name in found}, group)
    targets = [
        target_of(f"{section}/{found[name]}", records[found[name]], each, group, is_new=each is not tensors[name])
        for name, each in made.items()
    ]
    return ModelTargets(targets, skipped, list(rest), install)


def _with_memory(
    model: Any, tensors: Mapping[str, torch.Tensor], group: Group
) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Return tensors with new ones for those on the meta device, and a function that puts these into the model."""
    on_meta = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
    if not on_meta:
        return dict(tensors), lambda: None
    if not isinstance(model, nn.Module):
        raise CheckpointError("tensors of a state dict are on the meta device: nothing can be loaded into them")
    _refuse_what_stays_on_meta(model, on_meta)
    new = {name: with_memory(tensor, device_to_be(tensor, group)) for name, tensor in on_meta.items()}

    def install() -> None:
        for name, tensor in on_meta.items():
            locations = [
                (owner, own)
                for owner in model.modules()
                for own, held in [*owner._parameters.items(), *owner._buffers.items()]
                if held is tensor
            ]
            put_in_place(tensor, new[name], locations)

    return {**tensors, **new}, install


def device_to_be(tensor: torch.Tensor, group: Group) -> torch.device:
    """Return the device of a tensor; of one on the meta device, that which it gets when it is loaded."""
    if not tensor.is_meta:
        return tensor.device
    like = own_device(group.device_type)
    return device_for(tensor.sharding_spec(), tensor._group, like) if isinstance(tensor, ShardedTensor) else like


def _refuse_what_stays_on_meta(model: nn.Module, loaded: Mapping[str, torch.Tensor]) -> None:
    ids = {id(tensor) for tensor in loaded.values()}
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    left = [name for name, tensor in own if tensor.is_meta and id(tensor) not in ids]
    if left:
        raise CheckpointError(
            "tensors on the meta device have no values in the checkpoint",
            {"tensors": some(left)},
            "call st.materialize(model) before the load, which computes what is not saved; for a model of transformers "
            "st.materialize(model, init=model._init_weights)",
        )


def _check_dtypes(pairs: Mapping[str, tuple[TensorRecord, torch.Tensor]], cast: bool) -> None:
    differing = [
        f"{name}: {record.dtype} saved, {dtype_name(tensor.dtype)} here"
        for name, (record, tensor) in pairs.items()
        if record.dtype != dtype_name(tensor.dtype)
    ]
    if differing and not cast:
        raise CheckpointError(
            f"{len(differing)} tensors have another dtype than in the checkpoint; nothing has been loaded",
            {"dtypes": _lines(differing)},
            ["load with cast=True", "convert the model first: model.to(dtype)"],
        )


def _mismatch(
    section: str,
    missing: list[str],
    extra: list[str],
    shapes: list[str],
    tensors: Mapping[str, Any],
    records: Mapping[str, Any],
) -> CheckpointError:
    facts = {}
    if missing:
        facts["missing"] = _lines([_with_nearest(name, extra or list(records)) for name in missing])
    if extra:
        facts["extra"] = _lines([_with_nearest(name, missing or list(tensors)) for name in extra])
    if shapes:
        facts["shapes"] = _lines(shapes)
    return CheckpointError(
        f'the checkpoint does not fit the model "{section}"; nothing has been loaded',
        facts,
        "load it into the model that was saved, or with strict=False, which leaves these tensors as they are",
    )


def _with_nearest(name: str, others: list[str]) -> str:
    near = get_close_matches(name, others, n=1)
    return f"{name} (nearest: {near[0]})" if near else name


def _lines(lines: list[str]) -> str:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([*lines[:_SHOWN], *more])


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


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
