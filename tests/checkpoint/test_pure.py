"""What checkpoints compute: headers, manifests, values as JSON, and which bytes go where; most of it without torch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import OrderedDict
from random import Random
from typing import Any

import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from layout.layout_cases import MESH, axis_specs, device_specs, elements

from shardtensor.checkpoint.manifest import FileRecord, Manifest, TensorRecord, describe, rank_file, read_manifest
from shardtensor.checkpoint.tensor_file import ITEM_BYTES, TensorFile, make_header, read_header
from shardtensor.checkpoint.values import decode, encode
from shardtensor.errors import CheckpointError
from shardtensor.layout.bind import bind
from shardtensor.layout.box import Box
from shardtensor.layout.holders import holders
from shardtensor.layout.layout import Layout, same_boxes
from shardtensor.spec.parse import parse_spec

PURE = ("manifest", "reads", "tensor_file")


def test_these_modules_run_where_torch_cannot_be_imported():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib\n"
        f"for name in {PURE!r}: importlib.import_module('shardtensor.checkpoint.' + name)\n"
        "from shardtensor.checkpoint.manifest import Manifest, read_manifest\n"
        "print(read_manifest(Manifest(step=3).to_text()).step)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


# -- headers -----------------------------------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
outlines = st.dictionaries(names, st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), max_size=5)


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


def header_of(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, bytes]:
    """The header, and data of zeros."""
    sums = {name: ["0" * 16] * (size_of(*each) > 0) for name, each in tensors.items()}
    header = make_header([(name, *each) for name, each in tensors.items()], sums, metadata)
    return header, bytes(sum(size_of(*each) for each in tensors.values()))


def opened(data: bytes) -> TensorFile:
    return read_header(lambda start, stop: data[start:stop], len(data), "x.safetensors")


@examples(200)
@given(outlines, st.dictionaries(names.filter(lambda name: name != "shardtensor"), st.text(max_size=5), max_size=2))
def test_a_header_is_read_as_it_was_written(tensors, metadata):
    header, data = header_of(tensors, metadata)
    assert len(header) % 64 == 8 % 64
    found = opened(header + data)
    assert list(found.entries) == list(tensors)
    assert metadata.items() <= found.metadata.items()
    at = len(header)
    for name, (dtype, shape) in tensors.items():
        entry, size = found.entries[name], size_of(dtype, shape)
        assert (entry.start, entry.stop) == (at, at + size)
        assert entry.sums == ("0" * 16,) * entry.blocks
        at += size


TEXTS = [b"NaN", b"1e999", b"[[[[", b"-1", b"true", b"null", b'"', b"9" * 30]


@examples(2000)
@given(outlines, st.data())
def test_a_header_that_was_changed_in_any_way_is_read_or_refused(tensors, data):
    """Never another error, and what is read lies in the file."""
    header, body = header_of(tensors, {"format": "pt"})
    raw = bytearray(header + body)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["bit", "byte", "cut", "more", "text"]))
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        if kind == "bit" and raw:
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "byte" and raw:
            raw[at] = data.draw(st.sampled_from(list(b'0123456789-."{}[],:eE \\\x00\xff')))
        elif kind == "cut":
            del raw[at:]
        elif kind == "more":
            raw += data.draw(st.binary(min_size=1, max_size=9))
        elif kind == "text":
            raw[at:at] = data.draw(
                st.sampled_from([b"NaN", b"1e999", b"[[[[", b"-1", b"true", b"null", b'"', b"9" * 30])
            )
    try:
        found = opened(bytes(raw))
    except CheckpointError:
        return
    for entry in found.entries.values():
        assert 0 <= entry.start <= entry.stop <= len(raw)


def test_no_number_of_a_header_makes_it_slow_or_large():
    """A length that nobody wrote, and a list nested without end."""
    for data in (b"\xff" * 8, (10**15).to_bytes(8, "little") + b"{}", (10**5).to_bytes(8, "little") + b"[" * 10**5):
        with pytest.raises(CheckpointError, match="damaged"):
            opened(data)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": 1},
        {"dtype": "F32", "shape": [2]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 8]},
        [],
        None,
    ],
)
def test_an_entry_that_does_not_fit_its_file(entry):
    text = json.dumps({"x": entry}).encode()
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        opened(len(text).to_bytes(8, "little") + text + bytes(8))


# -- values ------------------------------------------------------------------------------------------------------------

keys: Any = st.one_of(
    st.text(max_size=4), st.integers(), st.floats(allow_nan=False), st.none(), st.tuples(st.integers())
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.text("$tensordict", max_size=6), inner, max_size=2),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.sets(keys, max_size=3),
    ),
    max_leaves=12,
)


@examples(1000)
@given(values)
def test_values_are_read_as_they_were_written(value):
    text = json.dumps(encode(value, "x", lambda value, path: None), allow_nan=False)
    assert_same(decode(json.loads(text), {}), value)


def assert_same(found: Any, want: Any) -> None:
    """Equal bits and equal types; the kinds of dicts are one."""
    if isinstance(want, dict):
        assert isinstance(found, dict) and list(map(repr, found)) == list(map(repr, want))
        for x, y in zip(found.values(), want.values(), strict=True):
            assert_same(x, y)
    elif isinstance(want, list | tuple):
        assert type(found) is type(want) and len(found) == len(want)
        for x, y in zip(found, want, strict=True):
            assert_same(x, y)
    elif isinstance(want, set):
        assert found == want
    else:
        assert type(found) is type(want) and repr(found) == repr(want)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["a", "$tuple", "$dict", "$float", "$bytes", "$complex", "$set", "$counter", "$deque", "$x"]
            ),
            inner,
            max_size=2,
        ),
    ),
    max_leaves=8,
)


@examples(1000)
@given(json_values)
def test_json_that_nobody_wrote_is_read_or_refused(value):
    try:
        decode(value, {})
    except CheckpointError:
        return


# -- the manifest ------------------------------------------------------------------------------------------------------


def manifest_of(layout: Layout) -> Manifest:
    texts = describe(layout)[1]
    files = {rank_file(rank, MESH.size): FileRecord(1 << 20, "0" * 16) for rank in range(MESH.size)}
    return Manifest(
        **{"library": "1", "step": 3, "saved_at": 1.5, "world": MESH.size, "files": files},
        tensors={"model/x": TensorRecord(layout.shape, "bfloat16", **texts)},
        aliases={"model/y": "model/x"},
        values={"extra": {"a": [1, {"$tuple": []}]}},
    )


@examples(500)
@given(st.one_of(device_specs(), axis_specs()))
def test_a_layout_in_a_manifest_gives_back_its_boxes(case):
    spec, shape = case
    layout = bind(spec, shape, MESH)
    manifest = manifest_of(layout)
    found = read_manifest(manifest.to_text())
    assert found == manifest
    back, wrote = found.tensors["model/x"].layout, describe(layout)[0]
    assert same_boxes(back, wrote)
    if wrote is layout:
        assert [back.boxes(rank) for rank in layout.ranks] == [layout.boxes(rank) for rank in layout.ranks]
        return
    for element in elements(Box((0,) * len(shape), shape)):  # the first copy of each element, where it was
        point = Box(element, (1,) * len(shape))
        assert holders(back, point) == holders(layout, point)


@examples(500)
@given(st.integers(0, 10**9), st.data())
def test_a_manifest_that_was_changed_in_any_way_is_refused(seed, data):
    text = manifest_of(bind(parse_spec("[dp, tp]"), (4, 6), MESH)).to_text()
    at, rng = data.draw(st.integers(0, len(text) - 2)), Random(seed)
    changed = rng.choice(
        [
            text[:at],
            text[:at] + chr(ord(text[at]) ^ (1 << rng.randrange(7))) + text[at + 1 :],
            text[:at] + rng.choice(["0", "NaN", "[", '"', "\n"]) + text[at:],
            text[:at] + text[at + rng.randint(1, 9) :],
        ]
    )
    if changed.rstrip("\n") != text.rstrip("\n"):
        with pytest.raises(CheckpointError):
            read_manifest(changed)
