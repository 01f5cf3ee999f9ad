"""specs/valid and specs/invalid: each file is what it says it is, and what is found in it stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import corpus
import pytest

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.text.formatting import format_plan
from shardtensor.plan.text.syntax import _parser, parse_plan
from shardtensor.spec.diagnostics import Source
from shardtensor.spec.reader import WORDS

PARTS = sorted((corpus.SPECS / "valid/parts").glob("*.shard"))


@pytest.fixture(autouse=True)
def _at_the_specs(monkeypatch):
    monkeypatch.chdir(corpus.SPECS)


def _name(path: Any) -> str:
    return path.relative_to(corpus.SPECS).with_suffix("").as_posix()


@pytest.mark.parametrize("path", corpus.VALID, ids=_name)
def test_valid_files_have_notes_at_most(path):
    resolved, found = corpus.checked(path)
    assert found == corpus.text_beside(path)
    assert resolved is not None and "error[" not in found and "warning[" not in found
    assert resolved.tensors, "a file without tensors shows nothing"


@pytest.mark.parametrize("path", corpus.INVALID, ids=_name)
def test_faults_are_told_as_the_text_beside_says(path):
    _, found = corpus.checked(path)
    assert found == corpus.text_beside(path) != ""
    if path.parent.name == "meaning":
        severity = Finding(path.name[:4], "").severity
        assert f"{severity}[{path.name[:4]}]: " in found.splitlines()[0], "the first finding is the one that it shows"
    else:
        assert "error[E00" in found.splitlines()[0]
    assert "/home" not in found and str(corpus.SPECS) not in found


@pytest.mark.parametrize("path", [*corpus.VALID, *PARTS], ids=_name)
def test_valid_files_are_canonical(path):
    text = path.read_text()
    assert (format_plan(Source(text)) == text) is (path.stem != "lines"), "shardtensor fmt would change it"


def test_no_text_stands_without_its_plan():
    for path in corpus.SPECS.glob("*valid/**/*.txt"):
        assert path.with_suffix(".shard").exists(), path


def test_each_file_says_what_it_shows():
    for path in (*corpus.VALID, *corpus.INVALID, *PARTS):
        lines = path.read_text().splitlines()
        first = next(line for line in lines if line.startswith("#"))
        assert len(first) > 15 and first.endswith("."), path


def test_valid_files_use_every_rule_of_the_grammar_and_every_word():
    used, words = set(), set()
    for path in (*corpus.VALID, *PARTS):
        for node in _nodes(parse_plan(Source(path.read_text()))):
            used.add(str(node.data))
            words |= {str(child) for child in node.children if str(child) in WORDS}
    rules = {rule.alias or str(rule.origin.name) for rule in _parser().rules if rule.options.expand1 is False}
    public = {str(rule) for rule in rules if not str(rule).startswith("_")} - {"spec", "value"}
    assert public - used == set()
    assert set(WORDS) - words == {"only"}, "which is printed, and never needs to be written"


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for child in tree.children:
        if hasattr(child, "children"):
            yield from _nodes(child)
