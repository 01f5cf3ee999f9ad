"""Names and shapes from the headers of checkpoint files, without reading a weight."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardtensor.errors import PlanError
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.models.safetensors_shapes import DTYPES, header, model_from_safetensors, with_dim_names


def _written(path: Path, entries: object, data: bytes = b"") -> Path:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_header_says_what_the_writer_wrote(tmp_path: Path):
    tensors = {
        "h.10.w": torch.zeros(3, 5, dtype=torch.bfloat16),
        "h.2.w": torch.zeros(0, 4),
        "step": torch.zeros((), dtype=torch.int64),
        "module.scale": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = model_from_safetensors(tmp_path)  # the folder's usual file
    assert [(t.name, t.shape, t.dtype, t.is_buffer) for t in found.tensors] == [
        ("h.2.w", (0, 4), "float32", False),
        ("h.10.w", (3, 5), "bfloat16", False),
        ("scale", (2,), "float8_e4m3fn", False),
        ("step", (), "int64", True),
    ]


@pytest.mark.parametrize("name", sorted(DTYPES.values()))
def test_every_element_type_is_read_as_it_was_written(name, tmp_path: Path):
    save_file({"w": torch.zeros(4, dtype=getattr(torch, name))}, tmp_path / "w.safetensors")
    assert model_from_safetensors(tmp_path / "w.safetensors").tensors[0].dtype == name


def test_an_index_joins_the_files_beside_it(tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    index = {"metadata": {}, "weight_map": {"b": "2.safetensors", "a": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [(t.name, t.shape) for t in model_from_safetensors(tmp_path).tensors] == [("a", (2,)), ("b", (3,))]


def test_names_of_dims_come_from_a_model_whose_names_begin_otherwise():
    named = Model((TensorInfo("a.b.w", (2, 3), ("in", "out")), TensorInfo("c.w", (2, 3), ("out", "in"))))
    bare = Model((TensorInfo("b.w", (4, 6)), TensorInfo("net.c.w", (2, 3)), TensorInfo("w", (1,)), TensorInfo("x", ())))
    assert [t.dims for t in with_dim_names(bare, named).tensors] == [("in", "out"), ("out", "in"), None, None]


def test_an_index_whose_files_are_elsewhere_says_what_can_be_done(tmp_path: Path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    with pytest.raises(PlanError) as error:
        model_from_safetensors(path)
    assert str(error.value) == (
        "2 of the 2 files that model.safetensors.index.json names are not there\n"
        f"  looked in  {tmp_path}\n"
        "  missing    1.safetensors, 2.safetensors\n"
        "  either     put them beside it: shapes stand in their headers\n"
        "  or         give --model config.json alone, if the plan has dims"
    )


FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([], "names no tensors"),
        ({"w": 1}, "does not say what `w` is"),
        ({"w": FLOATS | {"shape": [-2]}}, "does not say what `w` is"),
        ({"w": FLOATS | {"shape": [True]}}, "does not say what `w` is"),
        ({"w": FLOATS | {"dtype": "F4"}}, "element type F4"),
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
    ],
)
def test_a_header_that_is_wrong_is_named(entries, fault, tmp_path: Path):
    with pytest.raises(PlanError, match=fault):
        header(_written(tmp_path / "w.safetensors", entries, b"\0" * 8))


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 8, (10**9).to_bytes(8, "little") + b"{}"])
def test_no_more_is_read_than_the_file_holds(content, tmp_path: Path):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(PlanError, match="no safetensors file"):
        header(tmp_path / "w.safetensors")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": "../a.safetensors"}, {"a": "/etc/passwd"}])
def test_an_index_names_files_beside_it_only(weight_map, tmp_path: Path):
    (tmp_path / "i.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(PlanError, match=r"no index of safetensors files|not beside it"):
        model_from_safetensors(tmp_path / "i.json")


def test_an_index_and_its_files_agree(tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "1.safetensors")
    (tmp_path / "i.json").write_text(json.dumps({"weight_map": {"b": "1.safetensors"}}))
    with pytest.raises(PlanError, match="which it does not"):
        model_from_safetensors(tmp_path / "i.json")


@pytest.mark.parametrize("path", ["gone.safetensors", "gone.json", "."])
def test_what_is_not_there_is_told(path, tmp_path: Path):
    with pytest.raises(PlanError, match=r"cannot be read|holds no checkpoint"):
        model_from_safetensors(tmp_path / path)


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_model_or_a_plan_error(content):
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        with contextlib.suppress(PlanError):
            model_from_safetensors(file.name)
