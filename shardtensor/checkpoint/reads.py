"""Which bytes of which files a rank reads for its part of a tensor, and where they go. Integers only.

A file holds whole tensors, or ranks' parts of them; a rank needs the elements of its boxes. The overlaps of boxes are
*copies* between two arrays, cut so that none reads more than a buffer. Copies of neighbouring bytes become one *read*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from shardtensor.checkpoint.manifest import TensorRecord, rank_file
from shardtensor.checkpoint.tensor_file import BLOCK_BYTES, DTYPES, ITEM_BYTES, Entry, TensorFile
from shardtensor.errors import CheckpointError
from shardtensor.layout.box import Box, whole
from shardtensor.layout.holders import holders
from shardtensor.layout.layout import Layout

BUFFER_BYTES = 4 * BLOCK_BYTES
"""The most bytes that one read brings into memory."""
_GAP_BYTES = 64 << 10  # bytes between two copies that are read rather than skipped
_LONG_RUN_BYTES = 256 << 10  # runs of elements of this size are read one by one, and the bytes between them are not

Shape = tuple[int, ...]


class Place(NamedTuple):
    """Where a region lies in a flat local tensor: at `offsets` in a row-major array of `shape` that begins at element
    `start`."""

    start: int
    shape: Shape
    offsets: Shape

    @property
    def strides(self) -> Shape:
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.append(strides[-1] * size)
        return tuple(reversed(strides[: len(self.shape)]))

    @property
    def first(self) -> int:
        """The number of the region's first element in the local tensor."""
        return self.start + sum(a * b for a, b in zip(self.offsets, self.strides, strict=True))

    def length(self, sizes: Shape) -> int:
        """Return how many elements there are from the first to the last one of a region of these sizes."""
        return 1 + sum((size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True))

    def run(self, sizes: Shape) -> int:
        """Return how many elements of a region of these sizes lie end to end from its first one on."""
        run = 1
        for size, whole_size in zip(reversed(sizes), reversed(self.shape), strict=True):
            run *= size
            if size != whole_size:
                break
        return run

    def moved(self, dim: int, by: int) -> Place:
        return self._replace(offsets=(*self.offsets[:dim], self.offsets[dim] + by, *self.offsets[dim + 1 :]))


class Overlap(NamedTuple):
    """Elements that a rank needs and a file holds: the rank whose file it is (None: the file of a whole tensor), and
    how many elements of the tensor are in that file."""

    holder: int | None
    held: int
    sizes: Shape
    source: Place
    target: Place


class Copy(NamedTuple):
    """Elements of a tensor in a file that go to a local tensor of the same dtype.

    Attributes:
        tensor: its name; `key` is the one that it has in the file.
        local: the number of the local tensor.
        begin: the byte of the file at which the tensor begins; `item` is the bytes of an element.
    """

    tensor: str
    key: str
    local: int
    begin: int
    item: int
    sizes: Shape
    source: Place
    target: Place

    @property
    def start(self) -> int:
        return self.begin + self.source.first * self.item

    @property
    def stop(self) -> int:
        return self.start + self.source.length(self.sizes) * self.item

    @property
    def is_one_run(self) -> bool:
        """Whether the elements lie end to end in the file and in the local tensor."""
        numel = math.prod(self.sizes)
        return self.source.run(self.sizes) == numel == self.target.run(self.sizes)


class Read(NamedTuple):
    """A range of bytes of a file, and the copies out of it."""

    file: str
    start: int
    stop: int
    copies: tuple[Copy, ...]


class SummedBlock(NamedTuple):
    """A range of bytes of a file, its checksum, and the name of its tensor."""

    file: str
    start: int
    stop: int
    checksum: str
    tensor: str


def files_of(record: TensorRecord, target: Layout, rank: int, world: int) -> set[str]:
    """Return the names of the files that `rank` of the layout `target` reads for a tensor; `world` ranks wrote it."""
    return {_file(record, overlap.holder, world) for overlap in overlaps(_source(record), record.copy, target, rank)}


def copies_of(
    name: str,
    key: str,
    local: int,
    record: TensorRecord,
    target: Layout,
    rank: int,
    world: int,
    files: Mapping[str, TensorFile],
) -> Iterator[tuple[str, Copy]]:
    """Yield a file and a copy for each part of a tensor that `rank` of the layout `target` needs.

    Raises:
        CheckpointError: a file does not hold what it should.
    """
    item = ITEM_BYTES[record.dtype]
    for holder, held, sizes, source, place in overlaps(_source(record), record.copy, target, rank):
        file = _file(record, holder, world)
        entry = files[file].entries.get(key)
        is_right = entry is not None and entry.stop - entry.start == held * item
        if entry is None or not is_right or DTYPES[entry.format] not in (record.dtype, "uint8"):
            which = "another" if entry else "no"
            raise CheckpointError(
                f'the file "{file}" is not that of this checkpoint: {which} tensor "{name}" is in it',
                fix="load an earlier checkpoint",
            )
        for copy in _cut(Copy(name, key, local, entry.start, item, sizes, source, place)):
            yield file, copy


def key_in(record: TensorRecord, name: str) -> str:
    """Return the name under which a file lists a tensor: a file of whole tensors lists a model's own names."""
    return name.partition("/")[2] if record.file else name


def reads_of(copies: Iterable[tuple[str, Copy]]) -> list[Read]:
    """Return reads for copies of files: those of neighbouring bytes together, in the order of the files."""
    reads: list[Read] = []
    batch: list[Copy] = []
    file, start, stop = "", 0, 0
    for other, copy in sorted(copies, key=lambda each: (each[0], each[1].start)):
        is_near = other == file and copy.start <= stop + _GAP_BYTES and max(stop, copy.stop) - start <= BUFFER_BYTES
        if not is_near:
            if batch:
                reads.append(Read(file, start, stop, tuple(batch)))
            batch, file, start, stop = [], other, copy.start, copy.stop
        batch.append(copy)
        stop = max(stop, copy.stop)
    return [*reads, Read(file, start, stop, tuple(batch))] if batch else reads


def blocks_to_verify(read: Read, file: TensorFile) -> list[SummedBlock]:
    """Return the blocks, with checksums, that contain the bytes of a read, in their order."""
    found: dict[int, SummedBlock] = {}
    for copy in read.copies:
        entry = file.entries[copy.key]
        if entry.sums is None:
            continue
        first, last = (copy.start - entry.start) // BLOCK_BYTES, (copy.stop - 1 - entry.start) // BLOCK_BYTES
        for i in range(first, last + 1):
            block = summed_block(read.file, entry, i, copy.tensor)
            found[block.start] = block
    return [found[start] for start in sorted(found)]


def summed_block(file: str, entry: Entry, index: int, tensor: str) -> SummedBlock:
    """Return a block of a tensor that has checksums in a file."""
    assert entry.sums is not None, "files of other libraries have no checksums"
    start = entry.start + index * BLOCK_BYTES
    return SummedBlock(file, start, min(start + BLOCK_BYTES, entry.stop), entry.sums[index], tensor)


def _source(record: TensorRecord) -> Layout | Shape:
    return record.shape if record.file else record.layout


def _file(record: TensorRecord, holder: int | None, world: int) -> str:
    return record.file if holder is None else rank_file(holder, world)


@lru_cache(maxsize=4096)
def overlaps(source: Layout | Shape, copy: int, target: Layout, rank: int) -> tuple[Overlap, ...]:
    """Return what `rank` needs under `target` of a tensor that `source` describes: a layout, or the shape of a whole.

    Tensors of equal layouts have equal overlaps, so a model of many equal layers costs little more than one layer.
    """
    found = []
    for box, goal in zip(target.boxes(rank), box_places(target, rank), strict=True):
        if not box.numel:
            continue
        parts: list[tuple[int | None, int, Box, Place]]
        if isinstance(source, Layout):
            parts = [
                (holder, source.numel(holder), *pair)
                for holder in holders(source, box, copy)
                for pair in zip(source.boxes(holder), box_places(source, holder), strict=True)
            ]
        else:
            parts = [(None, math.prod(source), whole(source), Place(0, source, (0,) * len(source)))]
        for holder, held, other, place in parts:
            both = box.overlap(other)
            if both is not None:
                found.append(Overlap(holder, held, both.sizes, _within(both, other, place), _within(both, box, goal)))
    return tuple(found)


@lru_cache(maxsize=4096)
def box_places(layout: Layout, rank: int) -> tuple[Place, ...]:
    """Return where each box of a rank lies in its local tensor."""
    boxes, local = layout.boxes(rank), layout.local_boxes(rank)
    if layout.packed:  # each box row-major, one after the other
        return tuple(
            Place(at.offsets[0], box.sizes, (0,) * len(box.sizes)) for box, at in zip(boxes, local, strict=True)
        )
    shape = layout.local_shape(rank)
    return tuple(Place(0, shape, at.offsets) for at in local)


def _within(part: Box, box: Box, place: Place) -> Place:
    """Return the place of `part` of `box`, which lies at `place`."""
    offsets = (a - b + c for a, b, c in zip(part.offsets, box.offsets, place.offsets, strict=True))
    return place._replace(offsets=tuple(offsets))


def _cut(copy: Copy) -> Iterator[Copy]:
    """Yield the copy in parts that read at most a buffer; long runs of elements one by one."""
    if copy.is_one_run:
        yield from _cut_run(copy)
        return
    run = copy.source.run(copy.sizes)
    is_sparse = run < math.prod(copy.sizes) and run * copy.item >= _LONG_RUN_BYTES
    if copy.stop - copy.start <= BUFFER_BYTES and not is_sparse:
        yield copy
        return
    dim = next(d for d, length in enumerate(copy.sizes) if length > 1)
    length = copy.sizes[dim]
    stride = copy.source.strides[dim] * copy.item
    step = 1 if is_sparse else max(1, min(length, BUFFER_BYTES // stride))
    for at in range(0, length, step):
        sizes = (*copy.sizes[:dim], min(step, length - at), *copy.sizes[dim + 1 :])
        part = copy._replace(sizes=sizes, source=copy.source.moved(dim, at), target=copy.target.moved(dim, at))
        yield from _cut(part)


def _cut_run(copy: Copy) -> Iterator[Copy]:
    """Yield a run of elements in parts that begin at every `BUFFER_BYTES` of the tensor, so that blocks stay whole."""
    first, target = copy.source.first, copy.target.first
    stop = first + math.prod(copy.sizes)
    most = BUFFER_BYTES // copy.item
    for start in (first, *range(first - first % most + most, stop, most)):
        end = min(start - start % most + most, stop)
        flat = (end - start,)
        yield copy._replace(
            sizes=flat, source=Place(start, flat, (0,)), target=Place(target + start - first, flat, (0,))
        )
