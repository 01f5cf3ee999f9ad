"""Convert checkpoints between this library, torch.distributed.checkpoint, ``torch.save`` and Hugging Face; in one
process. The new one is written file by file, so at most one file's tensors are in memory; of ``torch.save``, all are.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.futures import Future

from shardtensor.checkpoint.files import index_text
from shardtensor.checkpoint.folders import PARTIAL
from shardtensor.checkpoint.manifest import INDEX, NAME, FileRecord, Manifest, TensorRecord, folder_of
from shardtensor.checkpoint.sources import CONFIG, SourceCheckpoint, cause_of, open_source
from shardtensor.checkpoint.storage import Folder
from shardtensor.checkpoint.tensor_file import DTYPES, ITEM_BYTES
from shardtensor.checkpoint.torch_trees import to_tree
from shardtensor.checkpoint.values import (
    StoredTensor,
    dtype_named,
    encode,
    replaced,
    scalar_json,
    stored_in,
    tensor_name,
)
from shardtensor.checkpoint.writing import FilePart, NewFile, write_files
from shardtensor.errors import CheckpointError
from shardtensor.version import __version__

FILE_BYTES = 4 << 30
"""About the most bytes of a file."""

_IS_FILE = re.compile(r"(?:[\w-]+(?:\.[\w-]+)?/)?\w+", re.ASCII)

T = TypeVar("T")


@attrs.frozen
class Conversion:
    """What was converted: the kinds, the number of tensors, the names of the parts, and what was left out, in words."""

    source: str
    target: str
    tensors: int
    bytes: int
    parts: tuple[str, ...]
    left_out: tuple[str, ...]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    trust: bool = False,
    optimizer: str = "",
) -> Conversion:
    """Write a checkpoint anew as one of another kind. The models are always converted; optimizers between this library
    and torch.distributed.checkpoint, and from files of ``torch.save`` whose states have names of parameters.

    Args:
        source: a checkpoint of this library, a folder of torch.distributed.checkpoint, a file of ``torch.save``, or a
            folder or file of safetensors.
        target: where nothing is yet. It is complete, or absent.
        to: ``"shardtensor"``, ``"dcp"``, ``"hf"`` (safetensors, the models alone), or ``"torch"`` (one file of
            ``torch.save``, the models alone).
        trust: read the metadata of torch.distributed.checkpoint, which is a pickle: to read it is to run what it names.
        optimizer: the name of the optimizer's class, if its options do not tell it.

    Raises:
        CheckpointError: the source cannot be read, or cannot be of that kind.
    """
    writers = {"shardtensor": _write_own, "dcp": _write_dcp, "hf": _write_hf, "torch": _write_torch}
    if to not in writers:
        raise CheckpointError(f'there is no kind of checkpoint "{to}"', fix=f"write one of {', '.join(writers)}")
    goal = Folder(target)
    if goal.has():
        raise CheckpointError(
            "there is a file or folder at the target", {"path": goal.path}, "choose another name, or remove it"
        )
    if to in ("dcp", "torch") and not goal.is_local:
        raise CheckpointError(
            f"a checkpoint of kind {to} is written to a disk", {"path": goal.path}, "name a local path"
        )
    found = open_source(source, trust=trust, optimizer_class=optimizer)
    state = found.state
    if to in ("hf", "torch"):
        state.left_out += [*state.optimizers, *state.rest]
        state.optimizers, state.rest = {}, {}
    _with_numbers(found)
    made = goal.beside(PARTIAL.format(goal.name)) if goal.is_local else goal
    try:
        made.remove()
        writers[to](found, made)
    except BaseException as error:
        with suppress(OSError):
            made.remove()
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            "a file cannot be written",
            {"path": goal.path, "why": error.strerror or error},
            "choose a folder that this process may write, on a disk with space",
        ) from None
    if goal.is_local:
        made.sync()
        made.rename(goal.name)
    names = {leaf.name for leaf in stored_in([state.models, state.optimizers, state.rest])}
    sizes = [math.prod(x.shape) * ITEM_BYTES.get(x.dtype, 0) for name, x in found.outlines.items() if name in names]
    parts = (*state.models, *state.optimizers, *state.rest)
    return Conversion(found.kind, to, len(names), sum(sizes), parts, tuple(state.left_out))


def _with_numbers(source: SourceCheckpoint) -> None:
    """Read all tensors without dims that are not of a model: ``step`` and the like."""
    state = source.state
    names = {leaf.name for leaf in stored_in([state.optimizers, state.rest]) if not source.outlines[leaf.name].shape}
    numbers = source.read(sorted(names)) if names else {}

    def number(leaf: StoredTensor) -> Any:
        return leaf.final(numbers[leaf.name]) if leaf.name in numbers else leaf

    state.optimizers, state.rest = replaced(state.optimizers, number), replaced(state.rest, number)


def _write_torch(source: SourceCheckpoint, folder: Folder) -> None:
    """Write one file: the state dict of the model; of several models a dict of them."""
    models = source.state.models
    tensors = source.read(sorted({leaf.name for leaf in stored_in(models)}))
    states = {name.partition(".")[2]: replaced(each, lambda leaf: tensors[leaf.name]) for name, each in models.items()}
    with open(folder.root, "wb") as file:
        torch.save(states.get("", states), file)
        file.flush()
        os.fsync(file.fileno())


def _write_dcp(source: SourceCheckpoint, folder: Folder) -> None:
    outlines = source.outlines
    standing: dict[int, str] = {}
    made: dict[str, torch.Tensor] = {}

    def stand_in(leaf: StoredTensor) -> torch.Tensor:
        if leaf.name not in made:
            dtype = dtype_named(outlines[leaf.name].dtype)
            made[leaf.name] = torch.empty(outlines[leaf.name].shape, dtype=dtype, device="meta")
            standing[id(made[leaf.name])] = leaf.name
        return made[leaf.name]

    tree = replaced(to_tree(source.state), stand_in)
    planner = _ReadingPlanner(standing, lambda name: source.read([name])[name].contiguous())
    try:
        _save_state_dict(tree, _FilesWriter(folder.root), no_dist=True, planner=planner)
    except CheckpointException as error:
        raise cause_of(error, folder) from None


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with tensors on the meta device, and reads each when it is written."""

    def __init__(self, standing: Mapping[int, str], read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._standing, self._read = standing, read

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return self._read(self._standing[id(found)]) if id(found) in self._standing else found


class _FilesWriter(FileSystemWriter):
    """Writes several files, one after the other: torch's keeps the tensors of a file in memory until it is written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        results: list[Any] = []
        for i, items in enumerate(_in_batches(plan.items, lambda item: item.tensor_storage_size() or 0)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{i}_")
            results += super().write_data(dataclasses.replace(plan, items=items, storage_data=prefix), planner).wait()
        done: Future[Any] = Future()
        done.set_result(results)
        return done


@attrs.define
class _Placed:
    """A tensor to write: its name in the source, the file, and its name there."""

    name: str
    file: str
    key: str


def _write_hf(source: SourceCheckpoint, folder: Folder) -> None:
    """Write the models as Hugging Face does: files of safetensors, an index if there are several, ``config.json``."""
    placed = _placed_models(source, folder)
    for new, each in placed.items():
        if (dtype := source.outlines[each.name].dtype) not in DTYPES.values():
            raise CheckpointError(
                "files of safetensors hold no tensor of this dtype",
                {"tensor": new, "dtype": dtype},
                "convert it with --to torch, or --to dcp",
            )
    _write_files(source, folder, placed.values())


def _write_own(source: SourceCheckpoint, folder: Folder) -> None:
    """Write a checkpoint of this library whose tensors are whole, as one rank saves it."""
    state = source.state
    placed = _placed_models(source, folder)
    values: dict[str, Any] = {}
    for section, value in {**state.optimizers, **_own_sections(source)}.items():
        found: dict[str, str] = {}
        values[section] = encode(value, section, partial(_as_json, found))
        placed |= _placed(source, found, f"{section}/state")
    aliases: dict[str, str] = {}
    for section, model in state.models.items():
        rest = {name: value for name, value in model.items() if not isinstance(value, StoredTensor)}
        if rest:
            values[section] = encode(rest, section, partial(_as_json, {}))
        first = {each.name: name for name, each in placed.items()}
        own = {f"{section}/{name}": value for name, value in model.items() if isinstance(value, StoredTensor)}
        aliases |= {name: first[value.name] for name, value in own.items() if name not in placed}
    files = _write_files(source, folder, placed.values())
    records = {}
    for name, each in placed.items():
        outline = source.outlines[each.name]
        records[name] = TensorRecord(outline.shape, outline.dtype, file=each.file)
    manifest = Manifest(
        library=__version__,
        step=state.step,
        saved_at=round(time.time(), 3),
        files=dict(sorted(files.items())),
        tensors=records,
        aliases=aliases,
        values=values,
        fingerprint=state.fingerprint,
    )
    folder.write(NAME, [manifest.to_text().encode()])


def _own_sections(source: SourceCheckpoint) -> dict[str, Any]:
    """Return the values that are no models and optimizers by section; of other libraries, most become ``extra``."""
    state = source.state
    if source.kind == "shardtensor":
        return state.rest
    rest = dict(state.rest)
    made = {key: rest.pop(key) for key in list(rest) if key.partition(".")[0] == "scheduler"}
    extra = rest.pop("extra", {})
    if rest or extra:
        made["extra"] = {**extra, **rest} if isinstance(extra, dict) else {"extra": extra, **rest}
    for key, value in list(made.get("extra", {}).items()):
        try:
            encode(value, key, partial(_as_json, {}))
        except CheckpointError as error:
            state.left_out.append(error.fault)
            del made["extra"][key]
    return made


def _as_json(found: dict[str, str], value: Any, path: str) -> Any:
    """Return the JSON of a tensor; enter one that is stored into `found`, by its new name."""
    if isinstance(value, StoredTensor):
        name = tensor_name(path, found)
        found[name] = value.name
        tagged = {"$tensor": name}
        return {"$numpy": tagged} if value.is_array else tagged
    if value.dim():
        raise CheckpointError(f'"{path}" is an array of numpy in a pickle, which is not converted')
    return scalar_json(value.dtype, value.item())


def _placed_models(source: SourceCheckpoint, folder: Folder) -> dict[str, _Placed]:
    """Return where the tensors of the models go, each once, by their names; writes ``config.json`` and the indexes."""
    placed: dict[str, _Placed] = {}
    if source.state.config:
        folder.write(CONFIG, [source.state.config.encode()])
    for section, model in source.state.models.items():
        first: dict[str, str] = {}
        for name, leaf in model.items():
            if isinstance(leaf, StoredTensor):
                first.setdefault(leaf.name, f"{section}/{name}")
        found = {new: name for name, new in first.items()}
        inner = folder_of(section)
        own = _placed(source, found, f"{inner}model")
        files = {each.key: each.file.removeprefix(inner) for each in own.values()}
        if len(set(files.values())) > 1:
            text = index_text(files, sum(_bytes_of(source, name) for name in found.values()))
            folder.write(f"{inner}{INDEX}", [text.encode()])
        placed |= own
    return placed


def _placed(source: SourceCheckpoint, names: Mapping[str, str], file: str) -> dict[str, _Placed]:
    """Return the files, called ``<file>.safetensors`` or with numbers, of tensors by their new names."""
    if names and not _IS_FILE.fullmatch(file):
        raise CheckpointError("a part of the checkpoint has a name that no folder can have", {"name": file[:200]})
    files = _in_batches(names, lambda new: _bytes_of(source, names[new]))
    number = f"-of-{len(files):05d}" if len(files) > 1 else ""
    return {
        new: _Placed(names[new], f"{file}{f'-{i:05d}{number}' if number else ''}.safetensors", new.partition("/")[2])
        for i, each in enumerate(files, 1)
        for new in each
    }


def _in_batches(items: Iterable[T], size_of: Callable[[T], int]) -> list[list[T]]:
    """Return the items in lists, one for each file of about `FILE_BYTES`."""
    batches: list[list[T]] = []
    total = 0
    for item in items:
        size = size_of(item)
        if not batches or total + size > FILE_BYTES:
            batches.append([])
            total = 0
        batches[-1].append(item)
        total += size
    return batches


def _bytes_of(source: SourceCheckpoint, name: str) -> int:
    outline = source.outlines[name]
    if outline.dtype not in ITEM_BYTES:
        raise CheckpointError(
            f'tensor "{name}" has dtype {outline.dtype}: no file of safetensors holds it',
            fix="convert it with --to torch",
        )
    return math.prod(outline.shape) * ITEM_BYTES[outline.dtype]


def _write_files(source: SourceCheckpoint, folder: Folder, placed: Iterable[_Placed]) -> dict[str, FileRecord]:
    by_file: dict[str, list[_Placed]] = {}
    for each in placed:
        by_file.setdefault(each.file, []).append(each)
    written: dict[str, FileRecord] = {}
    for file, tensors in by_file.items():
        values = source.read([each.name for each in tensors])
        outlines = [source.outlines[each.name] for each in tensors]
        parts = [
            FilePart(each.key, outline.dtype, outline.shape, values[each.name].contiguous())
            for each, outline in zip(tensors, outlines, strict=True)
        ]
        written |= write_files(folder, [NewFile(file, parts)])
    return written
