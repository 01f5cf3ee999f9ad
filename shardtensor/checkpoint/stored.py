"""An existing checkpoint: its tensors, its files and their headers. No values are read here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
from xxhash import xxh3_64_hexdigest

from shardtensor.checkpoint.folders import manifest_text, settled
from shardtensor.checkpoint.manifest import INDEX, NAME, FileRecord, Manifest, TensorRecord, read_manifest
from shardtensor.checkpoint.storage import THREADS, Folder
from shardtensor.checkpoint.tensor_file import DTYPES, TensorFile, read_header
from shardtensor.errors import CheckpointError


@attrs.define(eq=False)
class Stored:
    """A checkpoint that can be read.

    Attributes:
        manifest: of a folder of safetensors files without one, what their headers say.
        digest: equal for equal checkpoints.
        headers: those of the files that were opened.
        is_own: whether this library wrote it; else there are no checksums.
    """

    folder: Folder
    manifest: Manifest
    digest: str
    is_own: bool
    headers: dict[str, TensorFile] = attrs.field(factory=dict)

    def open_headers(self, names: Iterable[str]) -> None:
        """Read the headers of files, several at a time, and compare them with the manifest.

        Raises:
            CheckpointError: a file is missing, or is not the one that was saved.
        """
        new = [name for name in sorted(set(names)) if name not in self.headers]
        with ThreadPoolExecutor(THREADS) as pool:
            self.headers.update(zip(new, pool.map(self._header, new), strict=True))

    def _header(self, name: str) -> TensorFile:
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f'"{NAME}" is damaged: it does not list the file "{name}"')
        header = _read_header(self.folder, name, record if self.is_own else None)
        if self.is_own and header.checksum != record.checksum:
            raise CheckpointError(
                f'the header of the file "{name}" is not the one that was saved', fix="load an earlier checkpoint"
            )
        return header


def _read_header(folder: Folder, name: str, record: FileRecord | None) -> TensorFile:
    try:
        size = folder.size(name)
        if record is not None and size != record.bytes:
            raise CheckpointError(
                f'the file "{name}" is not as long as when it was saved',
                {"bytes": size, "saved": record.bytes},
                "load an earlier checkpoint",
            )
        return read_header(lambda start, stop: folder.read(name, start, stop), size, name)
    except FileNotFoundError:
        raise CheckpointError(
            f'the file "{name}" of the checkpoint is missing', {"folder": folder.path}, "load an earlier checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(f'the file "{name}" cannot be read', {"why": error.strerror or error}) from None


def open_checkpoint(path: str | os.PathLike[str]) -> Stored:
    """Return the checkpoint at a path: a folder of `save`, a folder of safetensors files, or one such file.

    Raises:
        CheckpointError: there is none.
    """
    folder = settled(Folder(path))
    try:
        text = manifest_text(folder)
        return Stored(folder, read_manifest(text), xxh3_64_hexdigest(text.encode()), is_own=True)
    except (FileNotFoundError, NotADirectoryError):
        return _safetensors(folder)
    except OSError as error:
        raise CheckpointError("the checkpoint cannot be read", {"path": folder.path, "why": error}) from None


def _safetensors(folder: Folder) -> Stored:
    """Return the tensors of a folder of safetensors files that another library wrote, or of one file."""
    names = [name for name in folder.names() if name.endswith(".safetensors")]
    if folder.name.endswith(".safetensors") and names in ([], [folder.name]):
        folder, names = folder.parent, [folder.name]
    elif folder.has(INDEX):
        names = _indexed(folder, names)
    elif "model.safetensors" in names:
        names = ["model.safetensors"]
    if not names or not folder.has(names[0]):
        raise _none_there(folder)
    headers = {name: _read_header(folder, name, None) for name in names}
    tensors: dict[str, TensorRecord] = {}
    for name, header in headers.items():
        for key, entry in header.entries.items():
            if f"model/{key}" in tensors:
                raise CheckpointError(f'two files of the folder hold a tensor "{key}"', {"folder": folder.path})
            tensors[f"model/{key}"] = TensorRecord(entry.shape, DTYPES[entry.format], file=name)
    files = {name: FileRecord(0, header.checksum) for name, header in headers.items()}
    digest = xxh3_64_hexdigest(repr(sorted(files.items())).encode())
    return Stored(folder, Manifest(files=files, tensors=tensors), digest, is_own=False, headers=headers)


def _indexed(folder: Folder, there: list[str]) -> list[str]:
    """Return the files that the index of a Hugging Face folder names."""
    try:
        names = sorted(set(json.loads(folder.read(INDEX))["weight_map"].values()))
        missing = [str(name) for name in names if name not in there]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
        raise CheckpointError(f'"{INDEX}" is damaged', {"folder": folder.path}) from None
    if missing:
        raise CheckpointError(
            f'the file "{missing[0][:200]}", which "{INDEX}" names, is missing', {"folder": folder.path}
        )
    return names


def _none_there(folder: Folder) -> CheckpointError:
    names = folder.names()
    facts: dict[str, Any] = {"path": folder.path}
    if not folder.has():
        return CheckpointError("there is no folder of that name", facts, "name the folder that save() was given")
    if ".metadata" in names:
        return CheckpointError(
            "this is a checkpoint of torch.distributed.checkpoint, whose metadata is a pickle; nothing here unpickles",
            facts,
            ["run `shardtensor ckpt convert`", "torch.distributed.checkpoint.load takes sharded tensors as they are"],
        )
    pickles = [name for name in names if re.fullmatch(r".*\.(bin|pt|pth|ckpt)", name)]
    if pickles:
        facts["found"] = ", ".join(pickles[:4])
        return CheckpointError(
            "the folder has pickled weights and no safetensors files",
            facts,
            "run `shardtensor ckpt convert` on the file",
        )
    inner = [name for name in names if folder.within(name).has(NAME)]
    if inner:
        facts["in it"] = ", ".join(inner[-4:])
        return CheckpointError("the folder holds checkpoints, and is none itself", facts, "load(latest(folder), ...)")
    facts["in it"] = ", ".join(names[:4]) or "nothing"
    return CheckpointError("the folder is no checkpoint, or was not saved completely", facts, "load an earlier one")
