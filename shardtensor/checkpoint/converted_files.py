"""The files of a checkpoint that is converted to safetensors: the models alone, or all that `load` reads.

Files are written one after the other; the tensors of one are read when its turn comes.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import attrs
import torch

from shardtensor.checkpoint.encoding import StoredTensor, scalar_json, torch_json
from shardtensor.checkpoint.files import index_text
from shardtensor.checkpoint.manifest import INDEX, NAME, FileRecord, Manifest, TensorRecord, folder_of
from shardtensor.checkpoint.sources import CONFIG, SourceCheckpoint
from shardtensor.checkpoint.storage import Folder
from shardtensor.checkpoint.tensor_file import DTYPES, ITEM_BYTES
from shardtensor.checkpoint.values import encode, tensor_name
from shardtensor.checkpoint.writing import FilePart, NewFile, write_files
from shardtensor.errors import CheckpointError
from shardtensor.version import __version__

FILE_BYTES = 4 << 30
"""About the most bytes of a file."""

_IS_FILE = re.compile(r"(?:[\w-]+(?:\.[\w-]+)?/)?\w+", re.ASCII)

T = TypeVar("T")


@attrs.define
class _Placed:
    """A tensor to write: its name in the source, the file, and its name there."""

    name: str
    file: str
    key: str


def write_hf(source: SourceCheckpoint, folder: Folder) -> None:
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


def write_own(source: SourceCheckpoint, folder: Folder) -> None:
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
    """Return the JSON of a value that is no plain one; enter a tensor into `found`, by its new name."""
    if isinstance(value, StoredTensor):
        name = tensor_name(path, found)
        found[name] = value.name
        tagged = {"$tensor": name}
        return {"$numpy": tagged} if value.is_array else tagged
    if isinstance(value, torch.Tensor):
        return scalar_json(value.dtype, value.item())
    return torch_json(value, path)


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
    files = in_batches(names, lambda new: _bytes_of(source, names[new]))
    number = f"-of-{len(files):05d}" if len(files) > 1 else ""
    return {
        new: _Placed(names[new], f"{file}{f'-{i:05d}{number}' if number else ''}.safetensors", new.partition("/")[2])
        for i, each in enumerate(files, 1)
        for new in each
    }


def in_batches(items: Iterable[T], size_of: Callable[[T], int]) -> list[list[T]]:
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
        parts = [
            FilePart(
                each.key,
                source.outlines[each.name].dtype,
                source.outlines[each.name].shape,
                values[each.name].contiguous(),
            )
            for each in tensors
        ]
        written |= write_files(folder, [NewFile(file, parts)])
    return written
