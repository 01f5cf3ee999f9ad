"""One rank plans its load of a model of 405 billion parameters from 16,384 ranks in less than a second."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from shardtensor.checkpoint.manifest import FileRecord, Manifest, TensorRecord, rank_file, read_manifest
from shardtensor.checkpoint.reads import copies_of, files_of, reads_of
from shardtensor.checkpoint.tensor_file import DTYPES, ITEM_BYTES, Entry, TensorFile
from shardtensor.layout.bind import bind
from shardtensor.mesh import read_mesh
from shardtensor.spec.parse import parse_spec

HIDDEN, INNER, VOCABULARY, LAYERS, KEYS = 16384, 53248, 128256, 126, 1024
WORLD, RANK = 16384, 777
FORMATS = {name: spelled for spelled, name in DTYPES.items()}


def parameters() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and spec of each parameter of a Llama of that size."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN), "[tp, -]"
    for i in range(LAYERS):
        for name, rows in (("self_attn.q_proj", HIDDEN), ("self_attn.k_proj", KEYS), ("self_attn.v_proj", KEYS)):
            yield f"model.layers.{i}.{name}.weight", (rows, HIDDEN), "[tp, -]"
        yield f"model.layers.{i}.self_attn.o_proj.weight", (HIDDEN, HIDDEN), "[-, tp]"
        for name in ("gate_proj", "up_proj"):
            yield f"model.layers.{i}.mlp.{name}.weight", (INNER, HIDDEN), "[tp, -]"
        yield f"model.layers.{i}.mlp.down_proj.weight", (HIDDEN, INNER), "[-, tp]"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{name}.weight", (HIDDEN,), "[-]"
    yield "model.norm.weight", (HIDDEN,), "[-]"
    yield "lm_head.weight", (VOCABULARY, HIDDEN), "[tp, -]"


SPECS = {name: spec for name, _, spec in parameters()}


@pytest.fixture(scope="module")
def text() -> str:
    """The manifest: weights and two moments, each rank's parts in its own file."""
    tensors = {}
    for name, shape, spec in parameters():
        where = {"spec": f"{spec} flat(dp)", "mesh": "dp=2048, tp=8"}
        tensors[f"model/{name}"] = TensorRecord(shape, "bfloat16", **where)
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer/{name}/{key}"] = TensorRecord(shape, "float32", **where)
    files = {rank_file(rank, WORLD): FileRecord(1 << 40, "0" * 16) for rank in range(WORLD)}
    return Manifest(world=WORLD, tensors=tensors, files=files).to_text()


def header(manifest: Manifest, file: str) -> TensorFile:
    """The header that the file of a rank has."""
    rank, at, entries = int(file[11:16]), 0, {}
    for name, record in manifest.tensors.items():
        count = record.layout.numel(rank)
        if count:
            size = count * ITEM_BYTES[record.dtype]
            entries[name] = Entry(FORMATS[record.dtype], (count,), at, at + size)
            at += size
    return TensorFile(entries, {}, "")


@pytest.fixture
def no_collections() -> Iterator[None]:
    """A collection would visit the objects of all earlier tests of the process."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    ("mesh", "seconds"),
    [
        *(("dp=2048, tp=8", 1), ("dp=1024, tp=16", 1), ("dp=4096, tp=4", 1)),
        *(("dp=512, tp=8", 3), ("dp=6000, tp=1", 3)),  # a rank reads four times as much
    ],
)
def test_a_rank_plans_its_load_in_less_than_a_second(text, mesh, seconds):
    start = time.process_time()
    manifest = read_manifest(text)
    targets = []
    for name, record in manifest.tensors.items():
        spec = SPECS[name.split("/")[1]]
        targets.append((name, record, bind(parse_spec(f"{spec} flat(dp)"), record.shape, read_mesh(mesh))))
    files = {file for _, record, layout in targets for file in files_of(record, layout, RANK, WORLD)}
    paused = time.process_time()
    headers = {file: header(manifest, file) for file in files}  # which a load reads from the disk
    paused = time.process_time() - paused
    copies = [
        copy
        for i, (name, record, layout) in enumerate(targets)
        for copy in copies_of(name, name, i, record, layout, RANK, WORLD, headers)
    ]
    reads = reads_of(copies)
    took = time.process_time() - start - paused
    needed = sum(layout.numel(RANK) * ITEM_BYTES[record.dtype] for _, record, layout in targets)
    assert sum(read.stop - read.start for read in reads) >= needed
    assert sum(len(read.copies) for read in reads) == len(copies)
    assert len(files) < 32  # of 16,384
    assert took < seconds
