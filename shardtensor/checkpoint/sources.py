"""Checkpoints of several kinds that are converted: what they hold, and their tensors, read when they are asked for."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from shardtensor.checkpoint.manifest import NAME, TensorRecord
from shardtensor.checkpoint.reading import OpenFiles, Reading, fill, verify
from shardtensor.checkpoint.storage import Folder
from shardtensor.checkpoint.stored import open_checkpoint
from shardtensor.checkpoint.targets import target_of
from shardtensor.checkpoint.torch_trees import ConvertedState, sorted_out
from shardtensor.checkpoint.values import StoredTensor, decode, dtype_named
from shardtensor.comm.group import SingleRankGroup
from shardtensor.errors import CheckpointError
from shardtensor.layout.explain import dtype_name

CONFIG = "config.json"


@attrs.frozen(eq=False)
class SourceCheckpoint:
    """A checkpoint that is converted.

    Attributes:
        outlines: shapes and dtypes of its tensors, by the names that `state` has.
        read: returns tensors by these names, whole and on the CPU.
    """

    kind: str
    state: ConvertedState
    outlines: dict[str, TensorRecord]
    read: Callable[[Sequence[str]], dict[str, torch.Tensor]]


def open_source(path: str | os.PathLike[str], *, trust: bool, optimizer_class: str) -> SourceCheckpoint:
    """Return the checkpoint at a path, of whatever kind it is.

    Raises:
        CheckpointError: there is none; it is a pickle of more than tensors; or its metadata is a pickle, and `trust` is
            not set.
    """
    folder = Folder(path)
    if folder.is_local and os.path.isfile(folder.root) and not folder.name.endswith(".safetensors"):
        return _pickled([folder.root], optimizer_class)
    names = folder.names()
    if ".metadata" in names and NAME not in names:
        if not trust:
            raise CheckpointError(
                "the metadata of torch.distributed.checkpoint is a pickle: to read it is to run what it names",
                {"path": folder.path},
                "convert it with --trust, if you know who has written it",
            )
        return _distributed(folder, optimizer_class)
    pickles = [folder.at(name) for name in names if re.fullmatch(r"pytorch_model.*\.bin", name)]
    if pickles and NAME not in names and not any(name.endswith(".safetensors") for name in names):
        found = _pickled(pickles, optimizer_class)
        found.state.config = _text(folder)
        return found
    return _stored(path)


def _text(folder: Folder) -> str:
    with suppress(OSError):
        return folder.read(CONFIG).decode()
    return ""


def _stored(path: str | os.PathLike[str]) -> SourceCheckpoint:
    """Return a checkpoint of this library, or files of safetensors; what is read is verified."""
    stored = open_checkpoint(path)
    manifest = stored.manifest
    state = ConvertedState(step=manifest.step, fingerprint=dict(manifest.fingerprint), config=_text(stored.folder))
    for name in manifest.tensors:
        section, _, key = name.partition("/")
        if section.partition(".")[0] == "model":
            state.models.setdefault(section, {})[key] = StoredTensor(name)
    for name, first in manifest.aliases.items():
        section, _, key = name.partition("/")
        state.models[section][key] = StoredTensor(first)
    for section, value in manifest.values.items():
        kind = section.partition(".")[0]
        found = decode(value, manifest.tensors)
        if kind == "model":
            state.models.setdefault(section, {}).update(found)
        elif kind == "optimizer":
            state.optimizers[section] = found
        else:
            state.rest[section] = found
    if stored.is_own:
        state.left_out.append("what each rank saved for itself: random generators, dataloaders")

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        records = {name: manifest.tensors[name] for name in names}
        made = {name: torch.empty(each.shape, dtype=dtype_named(each.dtype)) for name, each in records.items()}
        targets = [target_of(name, each, made[name], SingleRankGroup()) for name, each in records.items()]
        reading = Reading.of(targets, stored)
        with OpenFiles(stored.folder) as files:
            verify(files, reading)
            fill(files, reading)
        return made

    return SourceCheckpoint("shardtensor" if stored.is_own else "hf", state, manifest.tensors, read)


def _pickled(paths: Sequence[str], optimizer_class: str) -> SourceCheckpoint:
    """Return files of ``torch.save``. Their tensors stay in the files until they are read, where the format allows."""
    tensors: dict[str, torch.Tensor] = {}
    first: dict[tuple[Any, ...], str] = {}

    def outlined(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            kind = value.data_ptr(), value.dtype, value.shape, value.stride()
            name = first.setdefault(kind, name) if value.numel() else name
            tensors[name] = value.detach()
            return StoredTensor(name)
        if isinstance(value, dict):
            return {key: outlined(item, f"{name}/{key}") for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(outlined(item, f"{name}/{i}") for i, item in enumerate(value))
        return value

    tree: dict[str, Any] = {}
    for path in paths:
        found = _unpickled(path)
        if not isinstance(found, dict):
            raise CheckpointError("the file holds no dict", {"path": path, "it holds": type(found).__name__})
        tree |= {str(key): outlined(value, str(key)) for key, value in found.items()}
    outlines = {name: TensorRecord(tuple(x.shape), dtype_name(x.dtype)) for name, x in tensors.items()}
    state = sorted_out(tree, optimizer_class)
    return SourceCheckpoint("torch", state, outlines, lambda names: {name: tensors[name] for name in names})


def _unpickled(path: str) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format of torch before 1.6, which cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(
            "the file is no file of torch.save, or holds more than tensors and plain values; nothing was run",
            {"path": path, "why": str(error).strip().splitlines()[0][:160] if str(error) else type(error).__name__},
            "save the state dicts alone: torch.save(model.state_dict(), path)",
        ) from None


def _distributed(folder: Folder, optimizer_class: str) -> SourceCheckpoint:
    """Return a folder of ``torch.distributed.checkpoint``. Its metadata, and its values other than tensors, are
    unpickled."""
    try:
        metadata = FileSystemReader(folder.root).read_metadata()
        entries = metadata.state_dict_metadata
    except Exception as error:  # unpickling raises any
        raise CheckpointError(
            'the file ".metadata" cannot be read', {"path": folder.path, "why": f"{type(error).__name__}: {error}"}
        ) from None

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **options: Any) -> Any:
            return metadata

    def load(state: dict[str, Any]) -> dict[str, Any]:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            _load_state_dict(state, Reader(folder.root), no_dist=True, planner=planner)
        except CheckpointException as error:
            raise cause_of(error, folder) from None
        return state

    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    values = load({name: None for name in entries if name not in tensors})
    flat = {name: StoredTensor(name) if name in tensors else values[name] for name in entries}
    paths = metadata.planner_data or {}
    tree = unflatten_state_dict(flat, {name: paths.get(name, (name,)) for name in flat})
    outlines = {
        name: TensorRecord(tuple(entry.size), dtype_name(entry.properties.dtype)) for name, entry in tensors.items()
    }

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return load({n: torch.empty(outlines[n].shape, dtype=tensors[n].properties.dtype) for n in names})

    return SourceCheckpoint("dcp", sorted_out(tree, optimizer_class), outlines, read)


def cause_of(error: CheckpointException, folder: Folder) -> Exception:
    """Return what went wrong on the one rank."""
    [(cause, _)] = error.failures.values()
    if isinstance(cause, CheckpointError | OSError):
        return cause
    why = f"{type(cause).__name__}: {cause}".splitlines()[0][:200]
    return CheckpointError("torch.distributed.checkpoint cannot do it", {"path": folder.path, "why": why})
