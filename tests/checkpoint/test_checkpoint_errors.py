"""What cannot be saved or loaded is a CheckpointError of one text on every rank, and nothing has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn, optim
from trained import COLUMNS, Net, adamw, assert_same, save_columns, step, values
from xxhash import xxh3_128_hexdigest

import shardtensor as st
from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")


def message(act: Callable[[], Any]) -> str:
    with pytest.raises(st.CheckpointError) as caught:
        act()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)
    return str(caught.value)


def one_text(texts: list[str]) -> str:
    assert texts == [texts[0]] * len(texts)
    return texts[0]


# -- loads -------------------------------------------------------------------------------------------------------------


def loads_nothing(path: str) -> str:
    """Values, options, generators and every object stay as they were, and the run goes on."""
    model = st.shard_module(Net(3), COLUMNS)
    optimizer = adamw(model)
    step(model, optimizer, 5)
    before, generator = values(model, optimizer), torch.get_rng_state()
    scheduler, extra = optim.lr_scheduler.StepLR(optimizer, 2), {"mine": 1}
    times = scheduler.state_dict()
    text = message(lambda: st.load(path, model=model, optimizer=optimizer, extra=extra))
    assert_same(values(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert scheduler.state_dict() == times and extra == {"mine": 1}
    step(model, optimizer, 6)
    return text


@pytest.fixture
def saved(tmp_path: Path, world: Any) -> Path:
    world(save_columns, 2, path=str(tmp_path / "c"))
    return tmp_path / "c"


def resigned(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest as a program would that computes the checksum, too."""
    file = folder / "checkpoint.json"
    table = json.loads(file.read_text())
    del table["checksum"]
    change(table)
    body = json.dumps(table)[:-1]
    file.write_text(f'{body},\n "checksum": "{xxh3_128_hexdigest(body.encode())}"\n}}\n')


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def first_model_file(folder: Path) -> Path:
    return sorted(folder.glob("model*.safetensors"))[0]


def cut(file: Path, count: int = 1) -> None:
    file.write_bytes(file.read_bytes()[:-count])


def swapped(folder: Path) -> None:
    """The file of an earlier save of the same model."""
    model = first_model_file(folder)
    other = model.with_name(model.name.replace("00001", "00002"))
    a, b = model.read_bytes(), other.read_bytes()
    model.write_bytes(b)
    other.write_bytes(a)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda c: shutil.rmtree(c), "there is no folder of that name"),
    "an empty folder": (lambda c: [shutil.rmtree(c), c.mkdir()], "no checkpoint"),
    "a file": (lambda c: [shutil.rmtree(c), c.write_text("x")], "no checkpoint"),
    "no manifest": (lambda c: (c / "checkpoint.json").unlink(), ""),
    "half a manifest": (lambda c: cut(c / "checkpoint.json", 2), "cannot be read"),
    "an edited manifest": (lambda c: flip(c / "checkpoint.json", 200), "checkpoint.json"),
    "a manifest of bytes": (lambda c: (c / "checkpoint.json").write_bytes(b"\xff\xfe"), "not text"),
    "another manifest": (lambda c: (c / "checkpoint.json").write_text("[]"), "not the manifest"),
    "nested too deep": (lambda c: (c / "checkpoint.json").write_text("[" * 10**5), "cannot be read"),
    "another version": (lambda c: resigned(c, lambda t: t.update(version=2)), "another version"),
    "an unknown field": (lambda c: resigned(c, lambda t: t.update(more=2)), "cannot be read"),
    "a step of text": (lambda c: resigned(c, lambda t: t.update(step="7")), "cannot be read"),
    "a file outside": (
        lambda c: resigned(c, lambda t: t["files"].update({"../x": {"bytes": 1, "checksum": "0"}})),
        "no legal name",
    ),
    "a file less": (lambda c: first_model_file(c).unlink(), "is missing"),
    "a rank's file less": (lambda c: (c / "state" / "rank-00001-of-00002.safetensors").unlink(), "is missing"),
    "a shorter file": (lambda c: cut(first_model_file(c)), "not as long"),
    "another header": (lambda c: flip(first_model_file(c), 20), "header"),
    "a value that changed": (lambda c: flip(first_model_file(c), -1), "damaged: the values of"),
    "a moment that changed": (lambda c: flip(c / "state" / "rank-00000-of-00002.safetensors", -1), "damaged"),
    "files that were swapped": (swapped, ""),
    "checkpoints in it": (
        lambda c: [os.rename(c, c.with_name("step-1")), c.mkdir(), os.rename(c.with_name("step-1"), c / "step-1")],
        "holds checkpoints, and is none itself",
    ),
    "pickles": (lambda c: [shutil.rmtree(c), c.mkdir(), torch.save({}, c / "model.bin")], "pickled weights"),
    "one of torch": (lambda c: [shutil.rmtree(c), c.mkdir(), (c / ".metadata").write_text("")], "torch.distributed"),
    "another model": (lambda c: st.save(c, model=nn.Linear(2, 2)), "does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
@sim
def test_damage_is_found_before_anything_is_loaded(world, saved, name):
    damage, words = DAMAGE[name]
    damage(saved)
    text = one_text(world(loads_nothing, 3, path=str(saved)))
    assert words in text, text


def test_damage_is_found_by_processes(world, saved):
    flip(first_model_file(saved), -1)
    assert "damaged: the values of" in one_text(world(loads_nothing, 3, path=str(saved)))


def tensors_alone(path: str, act: str) -> str:
    model = nn.Linear(4, 2)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    want = model.weight.detach().clone()
    given: dict[str, Any] = {
        "optimizer": {"model": model, "optimizer": optimizer},
        "scheduler": {"model": model, "scheduler": optim.lr_scheduler.StepLR(optimizer, 2)},
        "dataloader": {"model": model, "dataloader": torch.Generator()},
        "key": {"model": {"net": model}},
    }[act]
    text = message(lambda: st.load(path, **given))
    assert torch.equal(model.weight, want)
    return text


@sim
@pytest.mark.parametrize("act", ["optimizer", "scheduler", "dataloader", "key"])
@pytest.mark.parametrize("ours", [True, False])
def test_what_a_checkpoint_does_not_hold(world, tmp_path, act, ours):
    if ours:
        st.save(tmp_path / "c", model=nn.Linear(4, 2))
    else:
        (tmp_path / "c").mkdir()
        save_file(nn.Linear(4, 2).state_dict(), tmp_path / "c" / "model.safetensors")
    text = one_text(world(tensors_alone, 2, path=str(tmp_path / "c"), act=act))
    assert {"key": "model.net"}.get(act, act) in text


def other_state(path: str, kind: str) -> str:
    saved, here = nn.Linear(4, 2), nn.Linear(4, 2, bias=kind != "parameters")
    made = optim.AdamW(saved.parameters(), lr=0.1)
    saved(torch.ones(4)).sum().backward()
    made.step()
    st.save(path, model=saved, optimizer=made)
    its = optim.AdamW(nn.Linear(3, 3).parameters() if kind == "of others" else here.parameters(), lr=0.5)
    want = here.weight.detach().clone()
    text = message(lambda: st.load(path, model=here, optimizer=its))
    assert torch.equal(here.weight, want) and its.param_groups[0]["lr"] == 0.5 and not its.state
    return text


@sim
@pytest.mark.parametrize(("kind", "words"), [("parameters", "bias"), ("of others", "not in the model")])
def test_state_of_other_parameters(world, tmp_path, kind, words):
    assert words in one_text(world(other_state, 2, path=str(tmp_path / "c"), kind=kind))


def partial_target(path: str, act: str) -> str:
    x = st.init_from_local_tensor(torch.ones(4), "[-] partial(tp)", 4)
    whole = torch.arange(4.0)
    st.save(path, model={"x": whole, "y": whole})
    y = torch.zeros(4)
    text = message(lambda: st.save(path, model={"x": x}) if act == "save" else st.load(path, model={"y": y, "x": x}))
    assert not y.any() and x._local.tolist() == [1] * 4
    st.load(path, model={"x": y, "y": torch.zeros(4)})
    assert torch.equal(y, whole)
    return text


@both
@pytest.mark.parametrize("act", ["save", "load"])
def test_partial_sums(world, tmp_path, act):
    assert '"model/x" is a partial sum' in one_text(world(partial_target, 2, path=str(tmp_path / "c"), act=act))


# -- saves -------------------------------------------------------------------------------------------------------------


class Custom:
    pass


def itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "layout": (lambda: {"layout": "x"}, 'layout of files is called "x"'),
    "keep_last": (lambda: {"keep_last": 0}, "keep_last=0"),
    "negative step": (lambda: {"step": -1}, "step=-1"),
    "step of text": (lambda: {"step": "3"}, "step='3'"),
    "an object": (lambda: {"extra": {"a": [Custom()]}}, '"extra/a/0" cannot be saved'),
    "a function": (lambda: {"extra": {"f": len}}, '"extra/f" cannot be saved'),
    "a list in itself": (lambda: {"extra": itself()}, "contains itself"),
    "texts of numpy": (lambda: {"extra": __import__("numpy").array(["a"])}, "numpy"),
    "on the meta device": (lambda: {"extra": torch.empty(2, device="meta")}, "meta device"),
    "model on the meta device": (lambda: {"model": nn.Linear(2, 2, device="meta")}, "meta"),
    "sparse": (lambda: {"model": {"x": torch.eye(3).to_sparse()}}, "sparse"),
    "quantized": (lambda: {"model": {"x": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}}, "quantized"),
    "a key with a slash": (lambda: {"model": {"a/b": nn.Linear(2, 2)}}, "'a/b'"),
    "a key of a number": (lambda: {"model": {1: nn.Linear(2, 2)}}, "key"),
    "an optimizer alone": (lambda: {"optimizer": optim.SGD([torch.ones(1)], lr=1.0)}, "no names without their model"),
    "a scheduler that is none": (lambda: {"scheduler": 3}, "state_dict"),
    "optimizer of another model": (
        lambda: {"model": nn.Linear(2, 2), "optimizer": optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)},
        "does not have",
    ),
}


def saves_nothing(folder: str, name: str, rank: int | None) -> str:
    """On all ranks, or on one, the others of which pass what can be saved."""
    st.save(f"{folder}/c", extra="before")
    bad = rank is None or as_group().rank == rank
    given = BAD[name][0]() if bad else {}
    text = message(lambda: st.save(f"{folder}/c", **given))
    assert st.load(f"{folder}/c") == "before"
    assert os.listdir(folder) == ["c"]
    return text


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("name", list(BAD))
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@sim
def test_what_cannot_be_saved(world, tmp_path, name, rank):
    text = one_text(world(saves_nothing, 2, folder=str(tmp_path), name=name, rank=rank))
    is_of_one = rank is not None and "optimizer" in name  # the ranks first compare which optimizers they save
    assert ("optimizers of rank 0" if is_of_one else BAD[name][1]) in text, text
    assert ("rank 1" in text) == (rank == 1), text


def test_what_cannot_be_saved_in_processes(world, tmp_path):
    assert "rank 1" in one_text(world(saves_nothing, 2, folder=str(tmp_path), name="an object", rank=1))


DIFFER: dict[str, Callable[[int, str], dict[str, Any]]] = {
    "path": lambda rank, folder: {"path": f"{folder}/{rank}"},
    "step": lambda rank, folder: {"step": rank},
    "layout": lambda rank, folder: {"layout": ("whole", "as is")[rank]},
    "keep_last": lambda rank, folder: {"keep_last": rank + 1},
    "extra": lambda rank, folder: {"extra": {"a": {f"key {rank}": 1}}},
    "shape": lambda rank, folder: {"model": {"x": torch.ones(rank + 1)}},
    "dtype": lambda rank, folder: {"model": {"x": torch.ones(2, dtype=(torch.int64, torch.int32)[rank])}},
    "no model": lambda rank, folder: {"model": nn.Linear(2, 2)} if rank else {},
    "rng": lambda rank, folder: {"rng": bool(rank)},
    "tensor": lambda rank, folder: {"extra": {"a": torch.ones(3) if rank else 1}},
    "lr": lambda rank, folder: {"model": (m := nn.Linear(2, 2)), "optimizer": optim.SGD(m.parameters(), lr=rank + 1.0)},
}
WORDS = {"shape": 'tensor "model/x"', "dtype": "int32", "no model": "model/weight", "rng": "values of each rank"} | {
    "lr": "values of optimizer", "tensor": "extra/a"
}  # fmt: skip


def saves_that_differ(folder: str, name: str) -> str:
    st.save(f"{folder}/c", extra="before")
    given = {"path": f"{folder}/c", **DIFFER[name](as_group().rank, folder)}
    text = message(lambda: st.save(given.pop("path"), **given))
    assert st.load(f"{folder}/c") == "before"
    assert os.listdir(folder) == ["c"]
    return text


@both
@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_do_not_agree(world, tmp_path, name):
    text = one_text(world(saves_that_differ, 2, folder=str(tmp_path), name=name))
    assert WORDS.get(name, name) in text and "rank 0" in text and "rank 1" in text, text


def loads_that_differ(folder: str, name: str) -> str:
    for number in range(2):
        st.save(f"{folder}/{number}", model={"x": torch.ones(2), "y": torch.ones(2)})
    rank, path = as_group().rank, f"{folder}/0"
    x, y = torch.zeros(2), torch.zeros(2)
    options: dict[str, Any] = {"strict": {"strict": bool(rank)}, "cast": {"cast": bool(rank)}}.get(name, {})
    model = {"x": x} if name == "names" and rank else {"x": x, "y": y}
    options |= {"strict": False} if name == "names" else {}
    text = message(lambda: st.load(f"{folder}/{rank}" if name == "path" else path, model=model, **options))
    assert not x.any() and not y.any()
    return text


@both
@pytest.mark.parametrize("name", ["path", "strict", "cast", "names"])
def test_loads_that_do_not_agree(world, tmp_path, name):
    text = one_text(world(loads_that_differ, 2, folder=str(tmp_path), name=name))
    assert "rank 0" in text and "rank 1" in text, text


def cannot_be_written(path: str, words: str) -> str:
    model = nn.Linear(2, 2)
    want = model.weight.detach().clone()
    text = message(lambda: st.save(path, model=model))
    assert words in text, text
    assert torch.equal(model.weight, want)
    return text


@both
def test_a_folder_that_cannot_be_made(world, tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "c", tmp_path / "file" / "a" / "c"):
        one_text(world(cannot_be_written, 2, path=str(path), words="cannot be made"))
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


@both
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_checkpoint_is_not_replaced(world, tmp_path, kind):
    (tmp_path / "c").mkdir() if kind == "folder" else (tmp_path / "c").write_text("mine")
    if kind == "folder":
        (tmp_path / "c" / "notes.txt").write_text("mine")
    one_text(world(cannot_be_written, 2, path=str(tmp_path / "c"), words="which is no checkpoint"))
    assert os.listdir(tmp_path) == ["c"]
    assert (tmp_path / "c" / "notes.txt" if kind == "folder" else tmp_path / "c").read_text() == "mine"


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "c").mkdir()
    st.save(tmp_path / "c", extra=1)
    assert st.load(tmp_path / "c") == 1


@pytest.mark.parametrize("key", ["état", "state", "a_B-1"])
def test_a_key_of_a_model_that_can_be_saved_can_be_loaded(tmp_path, key):
    """Keys become folders: other letters are refused at once, and none is that of the ranks' own files."""
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    try:
        st.save(tmp_path / "c", model={key: model})
    except st.CheckpointError:
        return
    st.load(tmp_path / "c", model={key: fresh}, rng=True)
    assert torch.equal(fresh.weight, model.weight)
