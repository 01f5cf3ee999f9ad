"""Saves that a thread completes, and what is left of older checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from trained import COLUMNS, Net, adamw, assert_same, map_whole, step, values, whole

import shardtensor as st
from shardtensor.checkpoint import saving
from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")


# -- async_save --------------------------------------------------------------------------------------------------------


def steps_on(path: str, layout: str) -> None:
    """The values are those at the time of the call, whatever is done to the tensors before the save is complete."""
    model = st.shard_module(Net(), COLUMNS)
    optimizer = adamw(model)
    extra = {"x": torch.arange(3.0), "n": [1]}
    step(model, optimizer, 0)
    want = values(model, optimizer)
    made = st.async_save(path, model=model, optimizer=optimizer, extra=extra, layout=layout)
    for number in range(1, 4):
        step(model, optimizer, number)
    extra["x"] += 7
    extra["n"].append(2)
    made.wait()
    assert made.done()
    made.wait()
    fresh = st.shard_module(Net(4), COLUMNS)
    its = adamw(fresh)
    found = st.load(path, model=fresh, optimizer=its)
    assert_same(values(fresh, its), want)
    assert found["x"].tolist() == [0, 1, 2] and found["n"] == [1]


SHARED = "ranks of a simulated world copy into the same host memory, one over the other"


@sim
@pytest.mark.parametrize("layout", ["whole", "as is"])
def test_the_values_of_the_call_are_saved_by_simulated_ranks(world, tmp_path, layout):
    world(steps_on, 3, path=str(tmp_path / "c"), layout=layout)


@pytest.mark.parametrize("layout", ["whole", "as is"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_values_of_the_call_are_saved(world, tmp_path, size, layout):
    world(steps_on, size, path=str(tmp_path / "c"), layout=layout)


def several(folder: str) -> None:
    """Each call, and a load, waits for the save before; the memory of one is used by the next."""
    model = st.shard_module(Net(), COLUMNS)
    wants = []
    for number in range(4):
        for param in model.parameters():
            param.data = param.data + 1
        wants.append(map_whole(model))
        st.async_save(f"{folder}/step-{number}", model=model, step=number)
        if number:
            assert os.path.exists(f"{folder}/step-{number - 1}/checkpoint.json")
    for number, want in reversed(list(enumerate(wants))):
        fresh = st.shard_module(Net(9), {"first": "[tp balanced, ...]"})
        st.load(f"{folder}/step-{number}", model=fresh)
        assert_same(map_whole(fresh), want)


@pytest.mark.worlds("gloo")
def test_one_save_is_on_its_way_at_a_time(world, tmp_path):
    world(several, 2, folder=str(tmp_path))


def failing(folder: str, then: str) -> str:
    """The disk is full while the thread of rank 1 writes: each rank gets the error once."""
    Path(folder).mkdir(exist_ok=True)
    model = st.shard_module(Net(), COLUMNS)
    st.save(f"{folder}/c", model=model)
    want = map_whole(model)
    with torch.no_grad():
        for param in model.parameters():
            param.data = param.data + 1
    before, write = saving.write_files, saving.write_files
    if as_group().rank == 1:

        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        write = full
    saving.write_files = write
    try:
        made = st.async_save(f"{folder}/c", model=model)
        calls = {
            "wait": made.wait,
            "save": lambda: st.save(f"{folder}/d", extra=1),
            "load": lambda: st.load(f"{folder}/c", model=model),
        }
        with pytest.raises(st.CheckpointError, match="No space left") as caught:
            calls[then]()
    finally:
        saving.write_files = before
    made.wait()
    fresh = Net(5)
    st.load(f"{folder}/c", model=fresh)
    assert_same(map_whole(fresh), want)
    assert sorted(os.listdir(folder)) == ["c"]
    return str(caught.value)


@pytest.mark.parametrize("then", ["wait", "save", "load"])
def test_the_error_of_a_save_arrives_on_every_rank(world, tmp_path, then):
    texts = world(failing, 2, folder=str(tmp_path / "all"), then=then)
    assert texts == [texts[0]] * 2 and "rank 1" in texts[0] and "free space" in texts[0]


def refused(path: str) -> None:
    """What cannot be saved is said at once."""
    with pytest.raises(st.CheckpointError, match="cannot be saved"):
        st.async_save(path, extra={"x": object()})
    assert not os.path.exists(path)


@both
def test_what_cannot_be_saved_is_refused_by_the_call(world, tmp_path):
    world(refused, 2, path=str(tmp_path / "c"))


# -- older checkpoints -------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def keeping(folder: str, asynchronous: bool) -> None:
    save = st.async_save if asynchronous else st.save
    for number in (5, 40, 300, 7, 41):
        made = save(f"{folder}/step-{number}", extra=number, step=number, keep_last=2)
        if made is not None:
            made.wait()


@both
@pytest.mark.parametrize("asynchronous", [False, True])
def test_keep_last_removes_those_with_smaller_steps(world, tmp_path, asynchronous):
    others = [tmp_path / "best-1", tmp_path / "step-9x", tmp_path / "run-2-step-3"]
    for other in others:
        st.save(other, extra="other", step=1)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    world(keeping, 2, folder=str(tmp_path), asynchronous=asynchronous)
    assert names(tmp_path) == sorted([*(each.name for each in others), "step-1", "step-300", "step-41"])
    assert st.latest(tmp_path) == str(tmp_path / "step-300")


def test_the_one_that_is_saved_stays_though_others_have_larger_steps(tmp_path):
    for number in (10, 11, 3):
        st.save(tmp_path / f"s{number}", extra=number, step=number, keep_last=1)
    assert "s3" in names(tmp_path) and st.load(tmp_path / "s3") == 3


def test_latest_goes_by_step_and_then_by_time(tmp_path):
    assert st.latest(tmp_path) is None and st.latest(tmp_path / "absent") is None
    for name in ("b", "a"):
        st.save(tmp_path / name, extra=name)
    assert st.latest(tmp_path) == str(tmp_path / "a")
    st.save(tmp_path / "c", extra=1, step=0)
    assert st.latest(tmp_path) == str(tmp_path / "c")
    for number in (100, 90):
        st.save(tmp_path / f"step-{number}", extra=1, step=number)
    assert st.latest(tmp_path) == str(tmp_path / "step-100")
    manifest = tmp_path / "step-100" / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"step": 100', '"step": 101'))
    assert st.latest(str(tmp_path)) == str(tmp_path / "step-90")


def over(path: str) -> None:
    """Another model, other files: nothing of the old ones is left."""
    model = st.shard_module(Net(), COLUMNS)
    st.save(path, model=model, optimizer=adamw(model), extra={"old": torch.ones(3)})
    small = nn.Linear(2, 2)
    st.save(path, model=small, rng=False)
    st.load(path, model=nn.Linear(2, 2))
    with pytest.raises(st.CheckpointError):
        st.load(path, model=model)


@sim
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_save_replaces_the_checkpoint_that_was_there(world, tmp_path, size):
    world(over, size, path=str(tmp_path / "c"))
    assert names(tmp_path) == ["c"]
    listed = json.loads((tmp_path / "c" / "checkpoint.json").read_text())["files"]
    there = [str(path.relative_to(tmp_path / "c")) for path in (tmp_path / "c").rglob("*.safetensors")]
    assert sorted(there) == sorted(listed)


@pytest.mark.parametrize("stage", [".c.old", ".c.partial"])
def test_after_a_crash_the_checkpoint_is_the_earlier_one(tmp_path, stage):
    """Between the two renames, the earlier one has another name; before them, a half one lies beside it."""
    st.save(tmp_path / "c", extra=1, step=4)
    if stage == ".c.old":
        os.rename(tmp_path / "c", tmp_path / stage)
    else:
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "model.safetensors").write_text("half")
    assert st.load(tmp_path / "c") == 1
    assert st.load(st.latest(tmp_path)) == 1
    st.save(tmp_path / "c", extra=2)
    assert st.load(tmp_path / "c") == 2
    assert names(tmp_path) == ["c"]


def relative() -> None:
    st.save("here/step-1", extra=1, step=1)
    assert st.load("here/step-1") == 1
    assert st.load(st.latest("here")) == 1


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative()
    st.save(Path("here") / "step-2", extra=2, step=2, keep_last=1)
    assert names(tmp_path / "here") == ["step-2"]


def test_a_url_that_fsspec_knows():
    x = nn.Linear(3, 2)
    optimizer = optim.AdamW(x.parameters())
    whole(x(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    for number in (1, 2, 3):
        st.save(f"memory://run/step-{number}", model=x, optimizer=optimizer, extra=number, step=number, keep_last=2)
    with pytest.raises(st.CheckpointError, match="there is a checkpoint of that name"):
        st.save("memory://run/step-3", model=x, optimizer=optimizer, extra=4, step=3)
    fresh = nn.Linear(3, 2)
    its = optim.AdamW(fresh.parameters())
    assert st.load("memory://run/step-3", model=fresh, optimizer=its) == 3
    assert torch.equal(fresh.weight, x.weight)
    assert st.load("memory://run/step-2") == 2
    with pytest.raises(st.CheckpointError):
        st.load("memory://run/step-1")


def test_latest_of_a_url():
    st.save("memory://runs/step-1", extra=1, step=1)
    found = st.latest("memory://runs")
    assert found is not None and st.load(found) == 1


def test_what_a_crash_left_of_an_older_checkpoint_is_removed(tmp_path):
    """The crash came between the two renames of a save over step 1: its folder has the name that it had meanwhile."""
    st.save(tmp_path / "s1", extra=1, step=1)
    os.rename(tmp_path / "s1", tmp_path / ".s1.old")
    st.save(tmp_path / "s2", extra=2, step=2, keep_last=1)
    assert names(tmp_path) == ["s2"]
    st.save(tmp_path / "s1", extra=3, step=3, keep_last=1)
    assert names(tmp_path) == ["s1"] and st.load(tmp_path / "s1") == 3
