"""What a checkpoint is loaded into: local tensors of models and optimizers, with the layouts that they have here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.checkpoint.contents import state_tensors
from shardtensor.checkpoint.manifest import TensorRecord
from shardtensor.checkpoint.reads import key_in
from shardtensor.checkpoint.stored import Stored
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError, some
from shardtensor.layout.explain import dtype_name
from shardtensor.layout.layout import Layout, replicated
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.dtensor import from_dtensor
from shardtensor.tensor.memory import put_in_place, with_memory
from shardtensor.tensor.placing import device_for, own_device
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of

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
