"""``shardtensor ckpt``: what is printed, and the exit status when there is no checkpoint, or it is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import shardtensor as st
from shardtensor.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    st.save(tmp_path / "step-3", model=model, optimizer=optimizer, step=3)
    return tmp_path / "step-3"


def run(*words: object) -> int:
    return main(["ckpt", *map(str, words)])


def damage(folder: Path) -> Path:
    [file] = folder.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return file


def test_inspect_prints_every_tensor(folder, capsys):
    assert run("inspect", folder) == 0
    out = capsys.readouterr().out
    assert out == f"{st.inspect(folder)}\n"
    for name in ("model/weight", "model/bias", "optimizer/weight/exp_avg", "step 3"):
        assert name in out


def test_inspect_prints_json(folder, capsys):
    assert run("inspect", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 3
    assert {row["name"]: row["shape"] for row in found["tensors"]}["model/weight"] == [2, 4]


def test_verify_tells_damage_by_its_status(folder, capsys):
    assert run("verify", folder) == 0
    assert "are as they were saved" in capsys.readouterr().out
    file = damage(folder)
    assert run("verify", folder) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f'shardtensor ckpt: the file "{file.name}" is damaged: the values of "model/' in err


def test_verify_says_that_others_have_no_checksums(tmp_path, capsys):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert run("verify", tmp_path) == 0
    assert "the files have no checksums; their headers fit their lengths" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["inspect", "verify"])
def test_what_is_no_checkpoint_is_status_1(tmp_path, capsys, way):
    assert run(way, tmp_path / "none") == 1
    assert "there is no folder of that name" in capsys.readouterr().err


def test_convert_prints_what_it_did(folder, tmp_path, capsys):
    assert run("convert", folder, tmp_path / "out", "--to", "hf") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{tmp_path / 'out'}: 2 tensors, 40 B: model; shardtensor to hf"
    assert out[-1] == "  left out  optimizer"
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["bias"], _bias(folder))
    assert run("convert", folder, tmp_path / "out", "--to", "hf") == 1
    assert "there is a file or folder at the target" in capsys.readouterr().err


def _bias(folder: Path) -> torch.Tensor:
    model = nn.Linear(4, 2)
    st.load(folder, model=model)
    return model.bias.detach()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pickled_metadata_needs_trust(tmp_path, capsys):
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert run("convert", tmp_path / "dcp", tmp_path / "out") == 1
    assert "convert it with --trust" in capsys.readouterr().err
    assert run("convert", tmp_path / "dcp", tmp_path / "out", "--trust") == 0
    assert [row.name for row in st.inspect(tmp_path / "out").tensors] == ["model/w"]


def test_the_class_of_an_optimizer_can_be_named(tmp_path, capsys):
    groups = [{"params": [0], "param_names": ["w"], "lr": 0.5, "own": 1}]
    state = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {0: {"m": torch.ones(3)}}, "param_groups": groups}}
    torch.save(state, tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", tmp_path / "out") == 1
    assert "name it: --optimizer AdamW" in capsys.readouterr().err
    assert run("convert", tmp_path / "a.pt", tmp_path / "out", "--optimizer", "Own") == 0
    assert [row.name for row in st.inspect(tmp_path / "out").tensors] == ["model/w", "optimizer/w/m"]


def test_help_does_not_import_torch():
    program = "import sys\nfrom shardtensor.cli.main import main\ntry: main(['ckpt', 'convert', '--help'])\n"
    program += "except SystemExit: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--trust" in done.stdout
