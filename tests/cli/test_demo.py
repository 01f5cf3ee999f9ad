"""The demo trains as the dense model does, shows who holds what, and fails when the two differ."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from harness import FULL
from rich.console import Console

import shardtensor
from shardtensor.cli.demo import Corpus, DemoError, Outcome, _judge, read_text, worst_difference
from shardtensor.cli.main import main


def _demo(folder, *options):
    """The demo where numpy is not installed: a module in `folder` takes its place and cannot be imported."""
    (folder / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy')")
    command = [sys.executable, "-m", "shardtensor.cli.main", "demo", *options]
    paths = [str(folder), str(Path(shardtensor.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "COLUMNS": "160", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


@pytest.mark.parametrize("world", [1, 2, 3] if FULL else [2])
def test_the_demo_agrees_with_the_dense_run(world, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, that is the question. " * 200)
    done = _demo(tmp_path, "--world", str(world), "--steps", "4", "--text", str(text), "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no warning, of numpy or of gathers
    assert "The sharded run and the dense run agree" in done.stdout
    assert "{embed,head}.weight" in done.stdout
    assert world == 1 or f"rank {world - 1}" in done.stdout
    assert "Next\n  shardtensor plan" in done.stdout
    for command in re.findall(r"shardtensor ((?:plan|show) .*?)   ", done.stdout):
        assert main(command.split()) == 0


def _outcome(sharded, dense):
    return Outcome(sharded, dense, (1.0, 1.0))


@pytest.mark.parametrize("bad", [2.001, float("nan")])
def test_a_difference_is_said_and_is_an_error(bad, capsys):
    console = Console(width=120)
    assert _judge(_outcome([2.0, bad], [2.0, 2.0]), console, 1.0, 2) == 1
    assert "differ" in capsys.readouterr().out
    assert _judge(_outcome([2.0, 2.00001], [2.0, 2.0]), console, 1.0, 2) == 0
    out = capsys.readouterr().out
    assert "agree" in out
    assert "A sharded step is slower here" not in out  # both took one second


def test_why_sharded_steps_are_slower_is_said_where_they_are(capsys):
    slow = attrs.evolve(_outcome([2.0], [2.0]), step_s=(3.0, 1.0))
    assert _judge(slow, Console(width=120), 1.0, 2) == 0
    assert "A sharded step is slower here: the 2 ranks share this machine" in capsys.readouterr().out


def test_the_worst_step_is_found():
    assert worst_difference([1.0, 2.2, 3.0], [1.0, 2.0, 3.0]) == (2, pytest.approx(0.1))


def test_a_missing_text_is_said_before_anything_starts(capsys, tmp_path):
    assert main(["demo", "--text", str(tmp_path / "none.txt")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DemoError, match="at least 1000"):
        read_text(tmp_path / "short.txt")


@pytest.mark.parametrize("options", [["--world", "0"], ["--steps", "x"], ["--device", "tpu"]])
def test_wrong_options_exit_with_2(options):
    with pytest.raises(SystemExit) as caught:
        main(["demo", *options])
    assert caught.value.code == 2


def test_the_corpus_numbers_the_bytes_that_occur():
    corpus = Corpus(b"abac" * 300)
    assert corpus.vocabulary == 3
    tokens, targets = corpus.batch(0, batch=2, length=8)
    assert tokens.shape == targets.shape == (2, 8)
    assert tokens[:, 1:].equal(targets[:, :-1])
