"""``shardtensor fmt`` writes canonical text, and says what it did in its exit status."""

from __future__ import annotations

import io

from shardtensor.cli.main import main


def test_files_are_rewritten_and_checked(tmp_path, capsys):
    path = tmp_path / "a.shard"
    path.write_text("shard 1\nfc:[tp,-]\n")
    assert main(["fmt", "--check", str(path)]) == 1
    assert capsys.readouterr().out == f"{path} would change\n"
    assert path.read_text() == "shard 1\nfc:[tp,-]\n"
    assert main(["fmt", str(path)]) == 0
    assert path.read_text() == "shard 1\nfc: [tp, -]\n"
    assert capsys.readouterr().out == f"{path} changed\n"
    assert main(["fmt", "--check", str(path)]) == 0
    assert capsys.readouterr().out == ""


def test_standard_input_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("shard 1\nfc:[tp,-]"))
    assert main(["fmt", "-"]) == 0
    assert capsys.readouterr().out == "shard 1\nfc: [tp, -]\n"


def test_faults_are_told(tmp_path, capsys):
    path = tmp_path / "a.shard"
    path.write_text("shard 1\nfc [tp,-]\n")
    assert main(["fmt", str(path), str(tmp_path / "none.shard")]) == 2
    told = capsys.readouterr().err
    assert f"{path}:2:4: error[E001]: expected `:` or `{{` after the pattern `fc`, found `[`" in told
    assert "fix: write `fc: [tp,-]`" in told
    assert "none.shard" in told
