"""Mutated manifests and headers: a load raises a CheckpointError, soon and in little memory, or all is as it was saved.

SHARDTENSOR_TEST_FULL=1 reads ten thousand, the quick run fewer; `mutated` says what they are.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damages import MANIFEST, record_again, with_checksum
from harness import FULL
from mutated import MOST_S, Mutants, checkpoints
from small_run import Run

import shardtensor as st
from shardtensor.checkpoint.manifest import read_manifest
from shardtensor.checkpoint.tensor_file import read_header, size_in_file
from shardtensor.checkpoint.values import decode
from shardtensor.sim.simulate import simulate

COUNT = 10_000 if FULL else 1500
EVERY = 20  # of which one is watched by tracemalloc, which makes it slow


@pytest.mark.parametrize("part", range(2))
@pytest.mark.filterwarnings("ignore")  # a forged state is odd
def test_mutated_checkpoints_are_refused_or_loaded(tmp_path, part):
    mutants = Mutants(tmp_path, checkpoints(tmp_path, simulate), Run.new())
    outcomes, broken = Counter[str](), []
    for seed in range(part * COUNT // 2, (part + 1) * COUNT // 2):
        verdict = mutants.verdict(seed, memory=seed % EVERY == 0)
        outcomes[verdict.outcome] += 1
        if verdict.law:
            broken.append(f"seed {seed}: {verdict.law}")
    assert broken == []
    assert outcomes["refused"] > outcomes["loaded"] > 0  # the mutations are neither all harmless nor all found early


def forged(change: Callable[[dict[str, Any]], Any]) -> str:
    """Return the text of a manifest of two ranks with something changed, and a right checksum."""
    files = {f"state/rank-0000{rank}-of-00002.safetensors": {"bytes": 10_000, "checksum": ""} for rank in range(2)}
    tensor = {"shape": [8, 4], "dtype": "float32", "spec": "[tp, -]", "mesh": "tp=2"}
    table: dict[str, Any] = {"format": "shardtensor checkpoint", "version": 1, "world": 2, "files": files}
    table["tensors"] = {"model/a": tensor}
    change(table)
    return with_checksum(json.dumps(table))


FORGED = {
    "ranks without end": {"ranks": "0-99999999999"},
    "ranks far away": {"ranks": "99999999998-99999999999"},
    "ranks backwards": {"ranks": "3-1"},
    "ranks that are words": {"ranks": "first"},
    "ranks below zero": {"ranks": "-1,0"},
    "a rank twice": {"ranks": "0,0"},
    "a mesh without end": {"mesh": "tp=999999999999"},
    "a mesh that is none": {"mesh": "tp="},
    "no mesh": {"mesh": ""},
    "thousands of lengths": {"shape": [1 << 62] * 100_000},
    "lengths whose product is huge": {"shape": [1 << 62, 1 << 62]},
    "more elements than bytes in the files": {"shape": [8, 4000]},
    "a length below zero": {"shape": [-8, 4]},
    "a length that is a float": {"shape": [8.0, 4]},
    "a length that is true": {"shape": [True, 4]},
    "a dtype that is none": {"dtype": "load"},
    "a copy below zero": {"copy": -1},
    "a file that is not listed": {"file": "../../x", "spec": "", "mesh": ""},
    "a file as well as a layout": {"file": "state/rank-00000-of-00002.safetensors"},
    "neither a file nor a layout": {"spec": "", "mesh": ""},
    "another key": {"pickle": "x"},
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_tensor_is_refused_at_once(name):
    began = time.process_time()
    with pytest.raises(st.CheckpointError, match=r"checkpoint\.json"):
        read_manifest(forged(lambda table: table["tensors"]["model/a"].update(FORGED[name])))
    assert time.process_time() - began < MOST_S


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b/c", "a/../b", ".x", "state/../../x", "a//b", "a\\b", ""])
def test_a_manifest_names_no_file_outside_of_its_folder(name):
    record = {"bytes": 10, "checksum": ""}
    with pytest.raises(st.CheckpointError, match="legal name"):
        read_manifest(forged(lambda table: table["files"].update({name: record})))


@pytest.mark.parametrize("key", ["step", "world", "saved_at", "files", "tensors", "aliases", "values", "fingerprint"])
@pytest.mark.parametrize("value", [-1, True, "x", [[]], {"a": {"b": None}}, None, 1e308], ids=repr)
def test_wrong_types_in_a_manifest_are_refused_or_harmless(key, value):
    text = forged(lambda table: table.update({key: value}))
    if (key, value) in [("step", None), ("saved_at", 1e308), ("values", {"a": {"b": None}})]:
        read_manifest(text)
        return
    with pytest.raises(st.CheckpointError, match=r"checkpoint\.json"):
        read_manifest(text)


def test_what_forged_files_claim_is_not_allocated(tmp_path):
    """An entry of 64 GiB in a file of some bytes is refused; its checksums are right."""
    run = Run.new()
    run.save(tmp_path / "a", 1)
    file = tmp_path / "a" / "model.safetensors"
    size = 1 << 36
    header = json.dumps({"tied": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    record_again(tmp_path / "a", "model.safetensors")
    with pytest.raises(st.CheckpointError, match=r"model\.safetensors|checkpoint\.json"):
        st.load(tmp_path / "a", **run.parts)


@pytest.mark.parametrize("depth", [50, 900, 5000, 100_000])
def test_nested_values_end_in_an_error(tmp_path, depth):
    Run.new().save(tmp_path / "a", 1)
    path: Path = tmp_path / "a" / MANIFEST
    bomb = '{"$tuple": [' * depth + "]}" * depth
    path.write_text(with_checksum(path.read_text().replace('"extra": {"step"', f'"extra": {bomb}, "other": {{"step"')))
    if depth == 50:
        assert isinstance(st.load(tmp_path / "a", model=Run.new().model), tuple)
        return
    with pytest.raises(st.CheckpointError):
        st.load(tmp_path / "a", model=Run.new().model)
    st.latest(tmp_path)


@pytest.mark.parametrize("tag", ["$dtype", "$scalar"])
@pytest.mark.parametrize("name", ["load", "_dynamo", "nn", "Tensor", "__builtins__", "onnx", "Float", 3, None, ["a"]])
def test_a_dtype_is_looked_up_in_a_table(tag, name):
    """Not among all names of torch, of which some import modules."""
    with pytest.raises(st.CheckpointError, match="dtype"):
        decode({tag: name if tag == "$dtype" else [name, 1.0]}, {})


@pytest.mark.parametrize(
    "value",
    [
        {"$numpy": 3}, {"$numpy": {"$scalar": ["bfloat16", 1.0]}}, {"$scalar": ["int8", 10**30]}, {"$device": 10**30},
        {"$device": "no such"}, {"$device": [1]}, {"$bytes": 3}, {"$bytes": "é"}, {"$float": []}, {"$float": "1"},
        {"$complex": [1]}, {"$complex": "ab"}, {"$counter": 3}, {"$dict": [[[], 1]]}, {"$dict": [[1]]}, {"$set": [[1]]},
        {"$tuple": None}, {"$tensor": []}, {"$tensor": "unknown"}, {"$eval": "1 + 1"}, {"$scalar": "float32"},
        {"$scalar": ["float32", [[1], [1, 2]]]},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_nothing_encodes_to_are_refused(value):
    with pytest.raises(st.CheckpointError):
        decode(value, {})


def test_bytes_of_a_shape_are_counted_without_large_numbers():
    assert size_in_file((), "float32") == 4
    assert size_in_file((1 << 62, 1 << 62, 0), "float64") == 0
    assert size_in_file((1 << 60,), "float64") is None
    assert (
        size_in_file((2.0, 3), "float32") is size_in_file(("2",), "float32") is size_in_file((-1, 0), "float32") is None
    )


@pytest.mark.parametrize(
    "text",
    [
        "[]", "3", "null", '"a"', "{", "", '{"a": 3}', '{"a": {}}', '{"a": [], "a": []}', '{"__metadata__": []}',
        '{"__metadata__": {"shardtensor": "["}}', '{"__metadata__": {"shardtensor": "[]"}}',
        '{"__metadata__": {"shardtensor": 3}}', '{"__metadata__": {"a": 3}}', "[" * 50_000, '{"a":' * 50_000,
        '{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0], "more": 1}}',
        '{"a": {"dtype": "U8", "shape": 3, "data_offsets": [0, 0]}}',
        '{"a": {"dtype": [], "shape": [0], "data_offsets": [0, 0]}}',
        '{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0]}}',
        '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        '{"a": {"dtype": "U8", "shape": [0], "data_offsets": [1, 1]}}',
        '{"a": {"dtype": "U8", "shape": [1e400], "data_offsets": [0, 0]}}',
        f'{{"a": {{"dtype": "U8", "shape": {[1 << 62] * 9999}, "data_offsets": [0, 0]}}}}',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_forged_headers_are_refused_at_once(text):
    data = len(text).to_bytes(8, "little") + text.encode()
    began = time.process_time()
    with pytest.raises(st.CheckpointError, match="the file"):
        read_header(lambda start, stop: data[start:stop], len(data), "x.safetensors")
    assert time.process_time() - began < MOST_S
