"""Write tensors into safetensors files with checksums; and copy them to host memory first, for `async_save`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch
from xxhash import xxh3_64_hexdigest

from shardtensor.checkpoint.items import Item
from shardtensor.checkpoint.manifest import FileRecord
from shardtensor.checkpoint.storage import THREADS, Folder, bytes_view
from shardtensor.checkpoint.tensor_file import BLOCK_BYTES, make_header


@attrs.frozen(eq=False)
class FilePart:
    """A tensor to write: its name in the file, its dtype and shape there, and its values, contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: torch.Tensor


@attrs.frozen(eq=False)
class NewFile:
    """A file to write: its name, its tensors, and values for its metadata."""

    name: str
    parts: Sequence[FilePart]
    metadata: Mapping[str, str] = attrs.field(factory=dict)


def write_files(folder: Folder, files: Sequence[NewFile]) -> dict[str, FileRecord]:
    """Write files whose tensors are on the CPU, and return their sizes and the checksums of their headers.

    The checksums of the tensors are computed first, by several threads, since the header that holds them comes first.
    """
    records = {}
    for file in files:
        views = [bytes_view(part.values) for part in file.parts]
        with ThreadPoolExecutor(THREADS) as pool:
            sums = dict(zip((part.name for part in file.parts), pool.map(checksums, views), strict=True))
        header = make_header(
            [(part.name, part.dtype, part.shape) for part in file.parts], sums, {"format": "pt", **file.metadata}
        )
        folder.write(file.name, [header, *views])
        size = len(header) + sum(map(len, views))
        records[file.name] = FileRecord(size, xxh3_64_hexdigest(header))
    return records


def checksums(view: memoryview) -> list[str]:
    """Return the checksum of each block of some bytes."""
    return [xxh3_64_hexdigest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]


def own_metadata(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a rank's file: the values that only this rank has."""
    return {"rank_values": json.dumps(values)}


class HostMemory:
    """Memory of the host for copies of the tensors of a save, page-locked if they come from GPUs; kept for the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copies(self, items: Sequence[Item], *, of_all: bool) -> tuple[dict[str, Item], Callable[[], None]]:
        """Start to copy the local tensors of items; only those on GPUs unless `of_all`.

        Returns:
            the items over the copies, by name, and a function that waits for these. On a GPU the copies run in the
            current stream, so a kernel that is launched later may write the tensors.
        """
        moved = [item for item in items if of_all or item.local.is_cuda]
        needed = sum(_padded(item.local) for item in moved)
        on_cuda = any(item.local.is_cuda for item in moved)
        if self._memory.numel() < needed or (on_cuda and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # before the new memory is allocated
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=on_cuda)
        at = 0
        made: dict[str, Item] = {}
        for item in moved:
            values = item.local
            size = values.numel() * values.element_size()
            copy = self._memory[at : at + size].view(values.dtype).view(values.shape)
            copy.copy_(values, non_blocking=True)
            made[item.name] = attrs.evolve(item, local=copy)
            at += _padded(values)
        done = torch.cuda.Event() if on_cuda else None
        if done is not None:
            done.record()
        return made, (lambda: None) if done is None else done.synchronize


def _padded(tensor: torch.Tensor) -> int:
    """Return the bytes that a copy takes, so that each begins at a multiple of 64."""
    return -(-tensor.numel() * tensor.element_size() // 64) * 64
