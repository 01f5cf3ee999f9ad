"""Read bytes of files into tensors, by several threads: first all blocks are verified, then the values are copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch
from xxhash import xxh3_64, xxh3_64_hexdigest

from shardtensor.checkpoint.decoding import dtype_named
from shardtensor.checkpoint.exchange import region_view
from shardtensor.checkpoint.reads import (
    BUFFER_BYTES,
    Copy,
    Read,
    SummedBlock,
    blocks_to_verify,
    copies_of,
    files_of,
    reads_of,
)
from shardtensor.checkpoint.storage import THREADS, Folder, OpenFile, bytes_view
from shardtensor.checkpoint.stored import Stored
from shardtensor.checkpoint.targets import ReadTarget
from shardtensor.errors import CheckpointError


@attrs.define
class Reading:
    """The reads of one load, and the local tensors that they fill.

    Attributes:
        locals_: contiguous local tensors of the dtypes in the files.
        indirect: tensors that are not, each with the number of the local tensor that is copied into it.
    """

    targets: Sequence[ReadTarget]
    reads: list[Read]
    blocks: list[SummedBlock]
    locals_: list[torch.Tensor]
    indirect: list[tuple[torch.Tensor, int]]

    @classmethod
    def of(cls, targets: Sequence[ReadTarget], stored: Stored) -> Reading:
        """Plan the reads of this rank; reads the headers of the files that it needs.

        Raises:
            CheckpointError: a file is missing, or is not what the manifest says.
        """
        world = stored.manifest.world
        stored.open_headers({name for t in targets for name in files_of(t.record, t.layout, t.rank, world)})
        copies: list[tuple[str, Copy]] = []
        locals_: list[torch.Tensor] = []
        indirect: list[tuple[torch.Tensor, int]] = []
        for i, t in enumerate(targets):
            copies += copies_of(t.name, t.key, i, t.record, t.layout, t.rank, world, stored.headers)
            local, dtype = t.local, dtype_named(t.record.dtype)
            if not local.is_contiguous() or local.dtype != dtype:
                indirect.append((local, i))
                local = local.new_empty(local.shape, dtype=dtype) if local.numel() else local
            locals_.append(local)
        reads = reads_of(copies)
        return cls(targets, reads, blocks_to_verify(reads, stored.headers), locals_, indirect)

    @property
    def size_bytes(self) -> int:
        return sum(read.stop - read.start for read in self.reads)


_PIECE_BYTES = 256 << 10  # stays in the cache of a core between the read and the checksum


class OpenFiles:
    """The files of a folder, opened when they are first read; a context that closes them."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._readers: dict[str, OpenFile] = {}

    def __getitem__(self, name: str) -> OpenFile:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = self._folder.reader(name)
            return self._readers[name]

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        for reader in self._readers.values():
            reader.close()


def verify(files: OpenFiles, reading: Reading, progress: Callable[[int], None]) -> None:
    """Read the blocks of a load and compare their checksums; nothing is kept.

    Raises:
        CheckpointError: a block is not what was saved; the error names its file and its tensor.
    """

    def check(block: SummedBlock) -> None:
        found = _checksum(files[block.file], block.start, block.stop)
        progress(block.stop - block.start)
        if found != block.checksum:
            raise CheckpointError(
                f'the file "{block.file}" is damaged: the values of "{block.tensor}" are not those that were saved',
                {"bytes of the file": f"{block.start} to {block.stop}"},
                "load an earlier checkpoint",
            )

    _in_threads(check, reading.blocks)


def _checksum(reader: OpenFile, start: int, stop: int) -> str:
    if stop - start <= _PIECE_BYTES:
        buffer = memoryview(bytearray(stop - start))
        return xxh3_64_hexdigest(buffer[: reader.read_into(buffer, start)])
    hasher, buffer = xxh3_64(), memoryview(bytearray(_PIECE_BYTES))
    for at in range(start, stop, _PIECE_BYTES):
        piece = buffer[: min(_PIECE_BYTES, stop - at)]
        hasher.update(piece[: reader.read_into(piece, at)])
    return hasher.hexdigest()


@torch.no_grad()
def fill(files: OpenFiles, reading: Reading, progress: Callable[[int], None]) -> None:
    """Read the values of a load into the tensors."""
    locals_ = reading.locals_
    for device in {local.device for local in locals_ if local.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # the threads have streams of their own
    buffers = threading.local()

    def run(read: Read) -> None:
        local = locals_[read.copies[0].local]
        if len(read.copies) == 1 and read.copies[0].is_one_run and not local.is_cuda:
            at = read.copies[0].target.first * read.copies[0].item
            _read(files[read.file], bytes_view(local)[at : at + read.stop - read.start], read)
        else:
            if not hasattr(buffers, "memory"):
                buffers.memory = torch.empty(BUFFER_BYTES + 64, dtype=torch.uint8, pin_memory=local.is_cuda)
            _through(buffers.memory, files[read.file], read, locals_)
        progress(read.stop - read.start)

    _in_threads(run, reading.reads)
    for tensor, i in reading.indirect:
        tensor.copy_(locals_[i])
    changed = [target.local for target in reading.targets if target.local.numel()]
    torch._C._increment_version(changed)  # autograd and `fully_shard` read versions


def _through(buffer: torch.Tensor, reader: OpenFile, read: Read, locals_: Sequence[torch.Tensor]) -> None:
    """Read into a buffer, and copy from it to the local tensors."""
    if read.stop - read.start > buffer.numel():
        buffer = torch.empty(read.stop - read.start, dtype=torch.uint8)
    _read(reader, bytes_view(buffer)[: read.stop - read.start], read)
    device = locals_[read.copies[0].local].device
    if device.type != "cuda":
        for copy in read.copies:
            _copy(buffer, read, copy, locals_[copy.local])
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for copy in read.copies:
            _copy(buffer, read, copy, locals_[copy.local])
    stream.synchronize()


def _read(reader: OpenFile, view: memoryview, read: Read) -> None:
    if reader.read_into(view, read.start) != len(view):
        raise CheckpointError(f'the file "{read.file}" has become shorter while it was read')


def _copy(buffer: torch.Tensor, read: Read, copy: Copy, local: torch.Tensor) -> None:
    start, stop = copy.start - read.start, copy.stop - read.start
    values = buffer[start:stop]
    if values.storage_offset() % copy.item:  # tensors of other dtypes lie before it
        values = values.clone()
    values = values.view(local.dtype)
    found = values.as_strided(copy.sizes, copy.source.strides, values.storage_offset())
    region_view(local, copy.target, copy.sizes).copy_(found, non_blocking=True)


def _in_threads(function: Callable[[Any], None], tasks: Iterable[Any]) -> None:
    """Call a function for each task, in several threads; the first error ends it."""
    tasks = list(tasks)
    if len(tasks) <= 1:
        for task in tasks:
            function(task)
        return
    with torch.no_grad(), ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(torch.no_grad()(function), task) for task in tasks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
