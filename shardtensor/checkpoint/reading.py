"""Read bytes of files into tensors, by several threads, and verify their checksums before any value changes.

Tensors that are new are verified while they are read. For tensors that hold values the blocks of their bytes are read
and verified first; their values are read when every rank has found all blocks right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import attrs
import torch
from xxhash import xxh3_64

from shardtensor.checkpoint.reads import (
    BUFFER_BYTES,
    Copy,
    Place,
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
from shardtensor.checkpoint.values import dtype_named
from shardtensor.errors import CheckpointError

_PIECE_BYTES = 1 << 20  # stays in the cache of a core between the read and the checksum


@attrs.define
class Reading:
    """The reads of one load, and the local tensors that they fill.

    Attributes:
        first: reads into new tensors, each with the blocks that lie within it.
        blocks: what is to be verified beside these.
        second: reads into tensors that hold values.
        locals_: contiguous local tensors of the dtypes in the files, one for each target.
        indirect: tensors that are not, each with the number of the local tensor that is copied into it.
    """

    targets: Sequence[ReadTarget]
    first: list[tuple[Read, list[SummedBlock]]]
    blocks: list[SummedBlock]
    second: list[Read]
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
        copies: dict[bool, list[tuple[str, Copy]]] = {True: [], False: []}
        locals_: list[torch.Tensor] = []
        indirect: list[tuple[torch.Tensor, int]] = []
        for i, t in enumerate(targets):
            local, dtype = t.local, dtype_named(t.record.dtype)
            is_direct = local.is_contiguous() and local.dtype == dtype and not (local.is_conj() or local.is_neg())
            if not is_direct:
                indirect.append((local, i))
                local = local.new_empty(local.shape, dtype=dtype) if local.numel() else local
            locals_.append(local)
            found = copies_of(t.name, t.key, i, t.record, t.layout, t.rank, world, stored.headers)
            copies[t.is_new or not is_direct] += found
        first: list[tuple[Read, list[SummedBlock]]] = []
        apart: dict[tuple[str, int], SummedBlock] = {}
        second = reads_of(copies[False])
        for read in reads_of(copies[True]):
            blocks = blocks_to_verify(read, stored.headers[read.file])
            inside = [block for block in blocks if read.start <= block.start and block.stop <= read.stop]
            first.append((read, inside))
            apart.update({(read.file, block.start): block for block in blocks if block not in inside})
        for read in second:
            apart.update({(read.file, b.start): b for b in blocks_to_verify(read, stored.headers[read.file])})
        return cls(targets, first, list(apart.values()), second, locals_, indirect)


class OpenFiles:
    """The files of a folder, opened when they are first read; a context that closes them."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._readers: dict[str, OpenFile] = {}

    def __getitem__(self, name: str) -> OpenFile:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = OpenFile(self._folder, name)
            return self._readers[name]

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        for reader in self._readers.values():
            with suppress(OSError):  # all bytes have been read
                reader.close()


def verify(files: OpenFiles, reading: Reading) -> None:
    """Read values into new tensors, and verify the blocks of all.

    Raises:
        CheckpointError: a block is not what was saved; the error names its file and its tensor.
    """
    fill_one = _filler(files, reading)
    scratch = threading.local()

    def verify_one(task: tuple[Read, list[SummedBlock]] | SummedBlock) -> None:
        if not isinstance(task, SummedBlock):
            fill_one(*task)
            return
        if not hasattr(scratch, "buffer"):
            scratch.buffer = memoryview(bytearray(_PIECE_BYTES))
        _read_block(files[task.file], scratch.buffer, task, is_kept=False)

    _in_threads(verify_one, [*reading.first, *reading.blocks])


def fill(files: OpenFiles, reading: Reading) -> None:
    """Read the values of tensors that held others."""
    fill_one = _filler(files, reading)
    _in_threads(lambda read: fill_one(read, []), reading.second)
    with torch.no_grad():
        for tensor, i in reading.indirect:
            tensor.copy_(reading.locals_[i])
    changed = [target.local for target in reading.targets if target.local.numel()]
    torch._C._increment_version(changed)  # autograd and `fully_shard` read versions


def _filler(files: OpenFiles, reading: Reading) -> Callable[[Read, list[SummedBlock]], None]:
    """Return a function that runs one read, for several threads, which each have a buffer."""
    locals_ = reading.locals_
    on_cuda = {local.device for local in locals_ if local.is_cuda}
    for device in on_cuda:
        torch.cuda.current_stream(device).synchronize()  # the threads have streams of their own
    buffers = threading.local()

    def fill_one(read: Read, blocks: list[SummedBlock]) -> None:
        copy = read.copies[0]
        local = locals_[copy.local]
        size = read.stop - read.start
        if len(read.copies) == 1 and copy.is_one_run and not local.is_cuda:
            at = copy.target.first * copy.item
            _read(files[read.file], bytes_view(local)[at : at + size], read, blocks)
        else:
            if getattr(buffers, "memory", torch.empty(0)).numel() < size:
                buffers.memory = torch.empty(max(size, BUFFER_BYTES), dtype=torch.uint8, pin_memory=bool(on_cuda))
            _read(files[read.file], bytes_view(buffers.memory)[:size], read, blocks)
            _copy_out(buffers.memory, read, locals_)

    return fill_one


def _read(file: OpenFile, view: memoryview, read: Read, blocks: Sequence[SummedBlock]) -> None:
    """Read a range of bytes; verify the blocks in it, piece by piece while they are in the cache."""
    at = read.start
    for block in blocks:
        file.read_exactly(view[at - read.start : block.start - read.start], at)
        _read_block(file, view[block.start - read.start : block.stop - read.start], block, is_kept=True)
        at = block.stop
    file.read_exactly(view[at - read.start :], at)


def _read_block(file: OpenFile, view: memoryview, block: SummedBlock, *, is_kept: bool) -> None:
    """Read a block, into `view` or, if it is not kept, piece by piece into its beginning; raise if it is damaged."""
    hasher = xxh3_64()
    for at in range(block.start, block.stop, _PIECE_BYTES):
        start = at - block.start if is_kept else 0
        piece = view[start : start + min(_PIECE_BYTES, block.stop - at)]
        file.read_exactly(piece, at)
        hasher.update(piece)
    if hasher.hexdigest() != block.checksum:
        raise CheckpointError(
            f'the file "{block.file}" is damaged: the values of "{block.tensor}" are not those that were saved',
            {"bytes of the file": f"{block.start} to {block.stop}"},
            "load an earlier checkpoint",
        )


def _copy_out(buffer: torch.Tensor, read: Read, locals_: Sequence[torch.Tensor]) -> None:
    """Copy the values in a buffer to the local tensors."""
    on_cuda = {locals_[copy.local].device for copy in read.copies if locals_[copy.local].is_cuda}
    streams = [torch.cuda.Stream(device) for device in on_cuda]
    with torch.no_grad(), torch.cuda.StreamContext(streams[0] if streams else None):
        for copy in read.copies:
            values = buffer[copy.start - read.start : copy.stop - read.start]
            if values.storage_offset() % copy.item:  # tensors of other dtypes lie before it
                values = values.clone()
            local = locals_[copy.local]
            values = values.view(local.dtype)
            found = values.as_strided(copy.sizes, copy.source.strides, values.storage_offset())
            _region_view(local, copy.target, copy.sizes).copy_(found, non_blocking=True)
    for stream in streams:
        stream.synchronize()


def _region_view(local: torch.Tensor, place: Place, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the view of a region of a contiguous local tensor."""
    return local.as_strided(sizes, place.strides, local.storage_offset() + place.first)


def _in_threads(function: Callable[[Any], None], tasks: Iterable[Any]) -> None:
    """Call a function for each task, in several threads; the first error ends it."""
    tasks = list(tasks)
    if len(tasks) <= 1:
        for task in tasks:
            function(task)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(function, task) for task in tasks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
