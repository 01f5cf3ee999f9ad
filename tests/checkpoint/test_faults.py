"""Checkpoints and faults: whenever a rank dies, a disk is full or a file is damaged, the last checkpoint is whole, half
ones are not there, errors name what is damaged, and nobody waits for ever. ``benchmarks/faults.py`` runs many more."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from broken_disk import Disk
from crash_points import SAVES, calls_of, crash, crashes_in
from damaged_loads import Victim
from damages import MANIFEST, flips, of_files, of_hands, with_checksum
from failing_saves import failing_load, failing_save, full_disk
from harness import FULL
from harness.quick import sampled
from killed_ranks import MODES, Point, Ranks
from small_run import Run

import shardtensor as st
from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a disk: nothing waits for the platters."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("mode", SAVES)
def test_a_crash_at_any_call_or_byte_leaves_a_whole_checkpoint(memory_path, mode):
    run, parent = Run.new(), memory_path / "runs"
    faults = list(crashes_in(calls_of(parent, mode, run), step=500 if FULL else 5000))
    broken = {fault: crash(parent, mode, fault, run) for fault in sampled(faults, 25)}
    assert not any(broken.values()), {fault: text for fault, text in broken.items() if text}


@pytest.mark.parametrize("mode", SAVES)
def test_a_loss_of_power_leaves_a_whole_checkpoint(memory_path, mode):
    """Bytes of files and names in folders that nobody waited for are gone."""
    run, parent = Run.new(), memory_path / "runs"
    faults = list(crashes_in(calls_of(parent, mode, run), step=500 if FULL else 100_000))
    broken = {fault: crash(parent, mode, fault, run, seed) for seed, fault in enumerate(sampled(faults, 25))}
    assert not any(broken.values()), {fault: text for fault, text in broken.items() if text}


def test_a_save_that_has_returned_outlives_a_loss_of_power(memory_path):
    """Also if its parent folders are new, and if it replaces another one."""
    run, path = Run.new(), memory_path / "new" / "runs" / "only"
    for step in (1, 2):
        with Disk(remembers=True) as disk:
            run.save(path, step)
        for seed in range(4):
            disk.lose_power(seed)
        assert run.load(path) == step
        assert st.latest(path.parent) == str(path)


@sim
def test_some_of_the_ranks_save_and_load(world, tmp_path):
    """Their numbers are larger than the number of their files."""
    assert world(_save_and_load_in_a_subgroup, 4, folder=str(tmp_path)) == [None, 0.5, None, 0.5]


def _save_and_load_in_a_subgroup(folder: str) -> float | None:
    group = as_group().subgroup((1, 3))
    if group.index < 0:
        return None
    model = torch.nn.Linear(4, 4)
    st.shard_parameter(model, "weight", "[tp, -]", process_group=group)
    model.weight.local_tensor().detach().fill_(0.5)
    st.save(f"{folder}/a", model=model, process_group=group, layout="as is")
    model.weight.local_tensor().detach().fill_(1.0)
    st.load(f"{folder}/a", model=model, process_group=group)
    return float(model.weight.local_tensor().detach().unique())


def test_killed_ranks_leave_a_whole_checkpoint_and_the_others_raise(tmp_path):
    ranks = Ranks(str(tmp_path))
    for seed in range(len(MODES) * (10 if FULL else 1)):
        point = Point.drawn(seed, stops=FULL)
        assert ranks.point(point).broken == {}, point


@pytest.mark.parametrize("victim", [0, 1])
def test_a_call_that_fails_on_one_rank_is_an_error_of_all(world, memory_path, victim):
    every = 1 if FULL else 7
    count, broken = world(failing_save, 2, folder=str(memory_path), victim=victim, asynchronous=False, every=every)[0]
    assert (broken, count > 1) == ([], True)


def test_a_call_that_fails_in_an_async_save_is_an_error_of_all(world, memory_path):
    codes = (errno.EIO, errno.ENOSPC)
    every = 1 if FULL else 9
    arguments = {"folder": str(memory_path), "victim": 0, "asynchronous": True, "codes": codes, "every": every}
    assert world(failing_save, 2, **arguments)[0][1] == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_limit_of_the_sizes_of_files_is_an_error_of_all(world, memory_path, victim):
    limits = [0, 1, 500, 3000, 10_000]
    assert world(full_disk, 2, folder=str(memory_path), victim=victim, limits=limits)[0] == []


def test_a_read_that_fails_on_one_rank_is_an_error_of_all(world, memory_path):
    count, broken = world(failing_load, 2, folder=str(memory_path), victim=1, every=1 if FULL else 3)[0]
    assert (broken, count > 1) == ([], True)


def test_damaged_files_are_named(memory_path):
    victim = Victim(memory_path, Run.new())
    bits = flips(victim.whole, 500 if FULL else 40)
    damages = [*of_files(victim.whole, victim.other), *of_hands(victim.whole), *bits]
    broken = [text for text in map(victim.broken_law, damages) if text]
    assert broken == []


def test_another_version_is_told_from_damage(tmp_path):
    run, path = Run.new(), tmp_path / "a" / MANIFEST
    run.save(tmp_path / "a", 1)
    text = path.read_text().replace('"version": 1', '"version": 2')
    for each, words in ((with_checksum(text), "another version"), (text, "is damaged"), (text[:40], "cannot be read")):
        path.write_text(each)
        with pytest.raises(st.CheckpointError, match=words):
            st.load(tmp_path / "a", **run.parts)


@sim
@pytest.mark.parametrize("layout", ["whole", "as is"])
def test_damaged_files_of_several_ranks_are_named(world, memory_path, layout):
    world(_save_by_ranks, 3, folder=str(memory_path), layout=layout)
    victim = Victim.__new__(Victim)
    victim.whole, victim.other, victim.folder = (memory_path / name for name in ("whole", "other", "step-1"))
    victim.run = Run.new()
    victim.repair()
    read = [damage for damage in flips(victim.whole, 20) if not damage.tensor.startswith("rng")]  # not read here
    damages = [*of_files(victim.whole, victim.other), *read]
    broken = [text for text in map(victim.broken_law, sampled(damages, 60)) if text]
    assert broken == []


def _save_by_ranks(folder: str, layout: str) -> None:
    run = Run.new()
    run.save(f"{folder}/whole", 1, layout=layout)
    run.save(f"{folder}/other", 2, layout=layout)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", ".hidden"])
def test_an_index_names_no_file_outside_of_its_folder(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(st.CheckpointError, match="missing"):
        st.load(tmp_path / "model", model=Run.new().model)


@pytest.mark.parametrize(
    "text", ['{"weight_map": {"a": 3}}', '{"weight_map": {"a": null}}', '{"weight_map": {"a": ["b"]}}', "[]", "{", "3"]
)
def test_a_damaged_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(st.CheckpointError, match=r"model\.safetensors\.index\.json"):
        st.load(tmp_path, model=Run.new().model)


@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors", "state/rank-00000-of-00001.safetensors"])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_is_no_file_is_not_read(tmp_path, name, kind):
    """A device would give bytes without end, and a pipe would wait for ever."""
    run, file = Run.new(), tmp_path / "a" / name
    run.save(tmp_path / "a", 1)
    file.unlink()
    file.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(file)
    with pytest.raises(st.CheckpointError, match="no regular file"):
        st.load(tmp_path / "a", **run.parts)
    assert (st.latest(tmp_path) is None) == (name == "checkpoint.json")
