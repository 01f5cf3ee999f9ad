"""What a checkpoint holds is what was saved; every damaged byte is found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardtensor as st
from shardtensor.checkpoint.inspecting import verify_files

PLAN = {"0": "[tp balanced, ...]", "2.weight": "[-, tp balanced]"}


def saved(folder: str, layout: str = "whole") -> dict[str, tuple[Any, ...]]:
    """Save a model and its optimizer; the shapes and dtypes of all tensors by name."""
    torch.manual_seed(0)
    model = st.shard_module(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 7)), PLAN)
    model.register_buffer("count", torch.tensor(3))
    optimizer = torch.optim.AdamW(model.parameters())
    out = model(torch.ones(2, 6))
    (out.full_tensor() if isinstance(out, st.ShardedTensor) else out).sum().backward()
    optimizer.step()
    st.save(folder, model=model, optimizer=optimizer, extra={"epoch": 1}, step=7, layout=layout)
    tensors = {f"model/{name}": x for name, x in model.state_dict().items()}
    for name, state in st.optim_state_dict(model, optimizer)["state"].items():
        tensors |= {f"optimizer/{name}/{key}": x for key, x in state.items() if x.dim()}
    return {name: (tuple(x.shape), str(x.dtype).removeprefix("torch."), x.nbytes) for name, x in tensors.items()}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = str(tmp_path / "step-7")
    st.simulate(3, saved, path)
    return path


@pytest.mark.parametrize("layout", ["whole", "as is"])
@pytest.mark.parametrize("size", [1, 3])
def test_all_tensors_that_were_saved_are_listed(tmp_path, size, layout):
    path = str(tmp_path / "step-7")
    want = st.simulate(size, saved, path, layout)[0]
    found = st.inspect(path)
    assert {x.name: (x.shape, x.dtype, x.bytes) for x in found.tensors} == want
    assert (found.kind, found.step, found.world) == ("shardtensor", 7, size)
    assert sorted(found.values) == ["extra", "optimizer"]
    assert found.bytes == sum(size for *_, size in want.values())
    there = {str(file.relative_to(path)) for file in Path(path).rglob("*.safetensors")}
    assert {file for x in found.tensors for file in x.files} == there
    by_name = {x.name: x for x in found.tensors}
    cut = "tp balanced" if size > 1 else "tp"
    assert by_name["model/2.weight"].layout == ("whole" if layout == "whole" else f"[-, {cut}] on tp={size}")
    assert len(by_name["optimizer/0.weight/exp_avg"].files) == size


def test_tied_tensors_are_listed_by_both_names(tmp_path):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    st.save(tmp_path / "m", model=model)
    [row] = st.inspect(tmp_path / "m").tensors
    assert (row.name, row.tied) == ("model/0.weight", ("model/1.weight",))
    assert "model/1.weight" in str(st.inspect(tmp_path / "m"))


def test_the_table_and_the_json_have_every_tensor(folder):
    found = st.inspect(folder)
    text, table = str(found), json.loads(json.dumps(found.as_dict()))
    assert "step 7" in text and "by 3 ranks" in text
    for row in found.tensors:
        [line] = [line for line in text.splitlines() if line.startswith(f"{row.name} ")]
        assert row.layout in line and row.dtype in line and row.files[0] in line
    assert [row["name"] for row in table["tensors"]] == [row.name for row in found.tensors]
    assert table["bytes"] == found.bytes


@pytest.mark.parametrize("name", ["", "model.safetensors"], ids=["folder", "file"])
def test_files_of_other_libraries_are_listed(tmp_path, name):
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    found = st.inspect(tmp_path / name)
    assert (found.kind, found.world, found.step) == ("safetensors", 1, None)
    assert {x.name: (x.shape, x.dtype, x.files) for x in found.tensors} == {
        "model/a": ((2, 3), "float32", ("model.safetensors",)),
        "model/b": ((4,), "bfloat16", ("model.safetensors",)),
    }
    assert verify_files(tmp_path / name) == 0


def test_no_tensor_is_read(folder, monkeypatch):
    """A file without values is inspected as a whole one."""
    for file in Path(folder).rglob("*.safetensors"):
        file.write_bytes(b"")
    assert len(st.inspect(folder).tensors) == 13


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(st.CheckpointError, match="there is no folder of that name"):
        st.inspect(tmp_path / "none")
    with pytest.raises(st.CheckpointError, match="is no checkpoint, or was not saved completely"):
        verify_files(tmp_path)


def test_a_whole_checkpoint_is_verified(folder):
    found = st.inspect(folder)
    assert verify_files(folder) >= found.bytes


def test_every_damaged_byte_is_found(folder):
    """Of any file: in the header, in a tensor of the model, of the optimizer, or of a rank's own state."""
    for file in (Path(folder, "checkpoint.json"), *Path(folder).rglob("*.safetensors")):
        data = file.read_bytes()
        for at in (0, 9, len(data) // 3, len(data) // 2, len(data) - 10):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(st.CheckpointError) as caught:
                verify_files(folder)
            assert file.name in str(caught.value)
            file.write_bytes(data)
    verify_files(folder)


def test_damage_names_the_tensor(folder):
    row = max((x for x in st.inspect(folder).tensors if x.name.startswith("model/")), key=lambda x: (x.files, x.name))
    path = Path(folder, row.files[0])
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(st.CheckpointError, match=rf'"{row.files[0]}" is damaged: the values of "{row.name}"'):
        verify_files(folder)


@pytest.mark.parametrize("way", ["missing", "short", "another"])
def test_a_file_that_is_not_the_one_is_found(folder, way):
    first, second = sorted(Path(folder, "state").iterdir())[:2]
    if way == "missing":
        os.remove(second)
    elif way == "short":
        second.write_bytes(second.read_bytes()[:-8])
    else:
        second.write_bytes(first.read_bytes())
    with pytest.raises(st.CheckpointError, match=second.name):
        verify_files(folder)
