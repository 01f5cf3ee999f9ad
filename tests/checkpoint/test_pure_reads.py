"""Which bytes of which files a rank reads: copies, executed on lists of integers, give its local tensor."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import attrs
import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from layout.layout_cases import elements
from programs.layouts import random_spec

from shardtensor.checkpoint import reads
from shardtensor.checkpoint.manifest import TensorRecord, describe, rank_file
from shardtensor.checkpoint.reads import Copy, Read, SummedBlock, blocks_to_verify, copies_of, files_of, reads_of
from shardtensor.checkpoint.tensor_file import BLOCK_BYTES, Entry, TensorFile
from shardtensor.errors import CheckpointError
from shardtensor.layout.bind import bind
from shardtensor.layout.box import Box
from shardtensor.layout.holders import replica_count, replica_of
from shardtensor.layout.layout import Layout, same_boxes
from shardtensor.mesh import Mesh
from shardtensor.spec.parse import parse_spec

WORLDS = (Mesh((("a", 1),)), Mesh((("a", 3),)), Mesh((("a", 2), ("b", 2))), Mesh((("a", 2), ("b", 3))))


def number(element: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The place of an element in a row-major tensor."""
    found = 0
    for i, size in zip(element, shape, strict=True):
        found = found * size + i
    return found


def local_tensor(layout: Layout, rank: int) -> list[int]:
    """By the definition: each element of each box at its place in the local tensor; -1 where none is."""
    shape = layout.local_shape(rank)
    found = [-1] * math.prod(shape)
    for box, at in zip(layout.boxes(rank), layout.local_boxes(rank), strict=True):
        inside = elements(at)
        for element, place in zip(elements(box), inside, strict=True):
            found[number(place, shape)] = number(element, layout.shape)
    return found


def stored(layout: Layout | None, shape: tuple[int, ...], copy: int, gap: int) -> tuple[TensorRecord, dict[str, Any]]:
    """A record, and each file as one list of elements (each of four bytes), of which some before the tensor."""
    files: dict[str, Any] = {}
    if layout is None:
        files["w"] = [-7] * gap + list(range(math.prod(shape)))
        return TensorRecord(shape, "int32", file="w"), files
    for rank in layout.ranks:
        held = local_tensor(layout, rank)
        if replica_of(layout, rank) == copy and held:
            files[rank_file(rank, 16)] = [-7] * gap + held
    texts = describe(layout)[1]
    record = TensorRecord(shape, "int32", **texts, copy=copy)
    assert same_boxes(record.layout, layout)
    return record, files


def strided(start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    box = Box((0,) * len(sizes), sizes)
    return [start + sum(i * stride for i, stride in zip(e, strides, strict=True)) for e in elements(box)]


def executed(found: list[Read], files: dict[str, list[int]], length: int) -> list[int]:
    """Run copies on lists of integers."""
    local = [-1] * length
    for read in found:
        for copy in read.copies:
            assert read.start <= copy.start and copy.stop <= read.stop
            source = strided(copy.start // 4, copy.sizes, copy.source.strides)
            target = strided(copy.target.first, copy.sizes, copy.target.strides)
            assert min(source) * 4 == copy.start and max(source) * 4 + 4 == copy.stop
            for i, j in zip(source, target, strict=True):
                assert local[j] == -1, "an element is written once"
                local[j] = files[read.file][i]
            if copy.is_one_run:
                assert source == list(range(source[0], source[0] + len(source)))
                assert target == list(range(target[0], target[0] + len(target)))
    return local


def drawn(rng: Random, shape: tuple[int, ...]) -> Layout:
    mesh = rng.choice(WORLDS)
    return bind(parse_spec(random_spec(rng, shape, mesh, partial=False)), shape, mesh)


@examples(1000)
@given(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.integers(0, 10**9))
def test_the_copies_of_a_rank_give_its_local_tensor(shape, seed):
    """From any layout, or a whole file, to any other; cut into parts of any size, across gaps of any size."""
    rng = Random(seed)
    source, target = rng.choice([None, drawn(rng, shape)]), drawn(rng, shape)
    if source is not None and describe(source)[0] is not source:
        return  # `describe` lists the boxes of such a layout anew
    copy = 0 if source is None else rng.randrange(replica_count(source))
    gap = rng.randint(0, 3)
    record, files = stored(source, shape, copy, gap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads, "BUFFER_BYTES", rng.choice([4, 12, 40, 10**6]))
        patch.setattr(reads, "_GAP_BYTES", rng.choice([0, 8, 10**6]))
        patch.setattr(reads, "_LONG_RUN_BYTES", rng.choice([4, 8, 10**6]))
        headers = {
            name: TensorFile({"x": Entry("I32", (), 4 * gap, 4 * len(data))}, {}, "") for name, data in files.items()
        }
        for rank in target.ranks:
            wanted = local_tensor(target, rank)
            copies: list[tuple[str, Copy]] = list(copies_of("x", "x", 0, record, target, rank, 16, headers))
            assert {name for name, _ in copies} == files_of(record, target, rank, 16)
            found = reads_of(copies)
            assert all(read.stop - read.start <= reads.BUFFER_BYTES for read in found)
            spans = [(read.file, read.start, read.stop) for read in found]
            assert spans == sorted(spans)
            assert executed(found, files, len(wanted)) == wanted


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 5))
def test_the_blocks_that_are_verified_contain_all_bytes_that_are_read(spans, before):
    """Counted in eighths of a block; the tensor begins anywhere in the file."""
    eighth, begin = BLOCK_BYTES // 8, before * 1000
    total = 20 * eighth
    sums = tuple(f"{i:016x}" for i in range(-(-total // BLOCK_BYTES)))
    entry = Entry("U8", (total,), begin, begin + total, sums)
    place = reads.Place(0, (total,), (0,))
    copies = [
        ("f", Copy("x", "x", 0, begin, 1, (size * eighth,), place._replace(offsets=(start * eighth,)), place))
        for start, size in spans
    ]
    found: set[SummedBlock] = set()
    for read in reads_of(copies):
        blocks = blocks_to_verify(read, TensorFile({"x": entry}, {}, ""))
        assert [block.start for block in blocks] == sorted({block.start for block in blocks})
        found |= set(blocks)
    assert len({block.start for block in found}) == len(found)
    for block in found:
        i = (block.start - begin) // BLOCK_BYTES
        assert block.start == begin + i * BLOCK_BYTES and block.checksum == sums[i]
        assert block.stop == min(block.start + BLOCK_BYTES, begin + total)
    needed = {
        at // BLOCK_BYTES for start, size in spans for at in range(start * eighth, (start + size) * eighth, eighth)
    }
    assert {(block.start - begin) // BLOCK_BYTES for block in found} == needed


def test_a_file_that_does_not_hold_the_tensor_is_refused():
    record, target = TensorRecord((4,), "int32", file="w"), bind(parse_spec("[a]"), (4,), WORLDS[0])
    right = Entry("I32", (4,), 0, 16)
    for entries in ({}, {"x": attrs.evolve(right, stop=12)}, {"x": attrs.evolve(right, format="F32")}):
        with pytest.raises(CheckpointError, match='tensor "x" is in it'):
            list(copies_of("x", "x", 0, record, target, 0, 1, {"w": TensorFile(entries, {}, "")}))
