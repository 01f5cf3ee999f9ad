"""What a checkpoint holds, and whether its files are those that were saved; in one process, without its program."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime
from typing import Any

import attrs

from shardtensor.checkpoint.manifest import Manifest, TensorRecord, rank_file
from shardtensor.checkpoint.reading import OpenFiles, Reading, verify
from shardtensor.checkpoint.reads import SummedBlock, key_in, summed_block
from shardtensor.checkpoint.stored import Stored, open_checkpoint
from shardtensor.checkpoint.tensor_file import ITEM_BYTES
from shardtensor.layout.box import whole
from shardtensor.layout.explain import bytes_text
from shardtensor.layout.holders import holders


@attrs.frozen
class InspectedTensor:
    """A tensor of a checkpoint.

    Attributes:
        layout: ``whole``, or the spec and the mesh under which ranks wrote their parts.
        files: those that hold it.
        tied: its other names in the model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    layout: str
    files: tuple[str, ...]
    tied: tuple[str, ...] = ()


@attrs.frozen
class Inspected:
    """What a checkpoint holds; ``str()`` is a table, ``as_dict()`` is for JSON.

    Attributes:
        kind: ``shardtensor``, or ``safetensors`` for files of another library, which have no checksums.
        world: the number of ranks that wrote it.
        saved_at: in seconds since 1970; 0 if it is not known.
        library: the version of this library that saved it.
        values: what is saved besides tensors: ``optimizer``, ``scheduler``, ``extra``, ...
    """

    path: str
    kind: str
    step: int | None
    world: int
    saved_at: float
    library: str
    values: tuple[str, ...]
    tensors: tuple[InspectedTensor, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    def as_dict(self) -> dict[str, Any]:
        """Return dicts, lists, numbers and text."""
        return {**attrs.asdict(self), "bytes": self.bytes}

    def __str__(self) -> str:
        head = [self.path, f"{self.kind} {self.library}".rstrip()]
        head += [f"step {self.step}"] if self.step is not None else []
        head += [f"saved {datetime.fromtimestamp(self.saved_at, UTC):%Y-%m-%d %H:%M:%S} UTC"] if self.saved_at else []
        head += [f"by {self.world} rank{'s' * (self.world > 1)}"] if self.kind == "shardtensor" else []
        rows = [("tensor", "shape", "dtype", "size", "layout", "files")]
        for row in self.tensors:
            shape = " x ".join(map(str, row.shape)) or "scalar"
            rows.append((row.name, shape, row.dtype, bytes_text(row.bytes), row.layout, _files_text(row.files)))
            rows += [(name, "", "", "", f"is {row.name}", "") for name in row.tied]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        count = len(self.tensors)
        lines = [", ".join(head), ""]
        lines += ["  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += ["", f"{count} tensor{'s' * (count != 1)}, {bytes_text(self.bytes)}"]
        return "\n".join([*lines, f"beside tensors: {', '.join(self.values)}"] if self.values else lines)


def inspect(path: str | os.PathLike[str]) -> Inspected:
    """Return what a checkpoint holds, from its manifest, or the headers of its files; no tensor is read.

    Args:
        path: a folder that `save` has written, or a folder or file of safetensors.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.

    Example:
        >>> import tempfile, torch, shardtensor as st
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> st.save(folder, model=torch.nn.Linear(4, 2), step=1)
        >>> [(x.name, x.shape, x.bytes, x.layout) for x in st.inspect(folder).tensors]
        [('model/bias', (2,), 8, 'whole'), ('model/weight', (2, 4), 32, 'whole')]
    """
    stored = open_checkpoint(path)
    manifest = stored.manifest
    tied: dict[str, list[str]] = {}
    for name, first in manifest.aliases.items():
        tied.setdefault(first, []).append(name)
    return Inspected(
        path=os.fspath(path),
        kind="shardtensor" if stored.is_own else "safetensors",
        step=manifest.step,
        world=manifest.world,
        saved_at=manifest.saved_at,
        library=manifest.library,
        values=tuple(manifest.values),
        tensors=tuple(
            InspectedTensor(
                name=name,
                shape=record.shape,
                dtype=record.dtype,
                bytes=math.prod(record.shape) * ITEM_BYTES[record.dtype],
                layout=_layout_text(record),
                files=_files_of(record, manifest),
                tied=tuple(tied.get(name, ())),
            )
            for name, record in manifest.tensors.items()
        ),
    )


def verify_files(path: str | os.PathLike[str]) -> int:
    """Read every file of a checkpoint and compare all checksums, by several threads; nothing is kept.

    Returns:
        the number of bytes that were verified; less than in the files if another library wrote them, as there are no
        checksums then.

    Raises:
        CheckpointError: a file is missing, has another length, or the checksum of a block differs. The error names
            the file and the tensor.
    """
    stored = open_checkpoint(path)
    stored.open_headers(stored.manifest.files)
    blocks = _all_blocks(stored)
    with OpenFiles(stored.folder) as files:
        verify(files, Reading([], [], blocks, [], [], []))
    return sum(block.stop - block.start for block in blocks)


def _all_blocks(stored: Stored) -> list[SummedBlock]:
    """Return every block that has a checksum, in the order of the files."""
    names = {(record.file, key_in(record, name)): name for name, record in stored.manifest.tensors.items()}
    return [
        summed_block(file, entry, i, names.get((file, key), key))
        for file, header in stored.headers.items()
        for key, entry in header.entries.items()
        for i in range(len(entry.sums or ()))
    ]


def _files_of(record: TensorRecord, manifest: Manifest) -> tuple[str, ...]:
    if record.file:
        return (record.file,)
    ranks = holders(record.layout, whole(record.shape), record.copy)
    return tuple(rank_file(rank, manifest.world) for rank in sorted(ranks))


def _layout_text(record: TensorRecord) -> str:
    if record.file:
        return "whole"
    where = [f"on {record.mesh}"] if record.mesh else []
    return " ".join([record.spec, *where, *([f"ranks {record.ranks}"] if record.ranks else [])])


def _files_text(files: tuple[str, ...]) -> str:
    return files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else "") if files else "none"
