"""specs/README.md: its examples are read and checked, its tables are the language's, its grammar is the one in use."""

from __future__ import annotations

import re
from pathlib import Path

import corpus
import pytest

import shardtensor
from shardtensor import parse_spec
from shardtensor.plan.text.sources import MAX_FILES
from shardtensor.plan.text.syntax import KEYWORDS, MAX_BRACKETS, MAX_DEPTH, MAX_LENGTH
from shardtensor.spec.reader import WORDS

SPECS = corpus.SPECS
PAGE = (SPECS / "README.md").read_text()
PACKAGE = Path(shardtensor.__file__).parent
BLOCKS = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CODES = {path.name[:4] for path in corpus.INVALID if path.parent.name == "meaning"} | {"E001", "E002", "E003", "E405"}
CODES = sorted(CODES, key=lambda code: ("EWN".index(code[0]), code))


@pytest.fixture(autouse=True)
def _at_the_specs(monkeypatch):
    monkeypatch.chdir(SPECS)


def test_examples_that_name_a_file_are_that_file():
    named = [(name.strip(), text) for language, name, text in BLOCKS if language == "shard" and name]
    assert len(named) > 20
    for name, text in named:
        lines = (SPECS / name).read_text().splitlines()[1:]
        while lines[0].startswith("#"):
            lines.pop(0)
        assert text.strip("\n") == "\n".join(lines).strip("\n"), name


def test_other_examples_are_clean(tmp_path):
    others = [text for language, name, text in BLOCKS if language == "shard" and not name]
    assert len(others) == 2
    for text in others:
        assert text.startswith("shard 1\n# check: ")
        assert corpus.checked(text)[1] == ""


def test_what_check_prints_is_what_it_prints():
    shown = {text for language, _, text in BLOCKS if language == "text"}
    assert shown <= {path.read_text() for path in SPECS.glob("invalid/*/*.txt")} and shown


def test_layouts_in_tables_are_layouts():
    rows = re.findall(r"^\| `((?:\[|chunk|grid|enum|replicate)[^`]*)` \| [^|]*\|$", PAGE, re.MULTILINE)
    assert len(rows) > 15
    for text in rows:
        assert parse_spec(text)


def test_all_words_are_in_the_table():
    table = _section("Words")
    for word in WORDS:
        assert f"`{word}`" in table, word
    listed = re.search(r"Words that begin a line: `([^`]*)`", table)
    assert listed is not None and sorted(listed[1].split()) == sorted(["shard", *KEYWORDS])
    limits = table[table.index("Limits") :].replace("\n", " ")
    assert f"{MAX_LENGTH:,} characters a file, {MAX_FILES} files" in limits
    assert f"brackets {MAX_BRACKETS} deep, blocks and values {MAX_DEPTH} deep" in limits


def test_all_findings_are_in_the_table_and_every_link_is_there():
    assert re.findall(r"^\| ([EWN]\d\d\d) \|", _section("Findings"), re.MULTILINE) == CODES
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (SPECS / target).exists(), target
    headings = {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in re.findall(r"^#+ (.*)$", PAGE, re.M)}
    for target in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert target in headings, target


def test_plans_of_the_package_are_in_the_table():
    names = "".join(re.findall(r"^\| (`[^|]*)\|", _section("Plans that come"), re.MULTILINE))
    there = {path.stem for path in SPECS.glob("*.shard") if not path.stem.endswith(".dims")}
    assert set(re.findall(r"`(\w+)`", names)) == there


def test_styles_of_the_package_are_in_the_table():
    defined = re.findall(r"^style (\w+\([^)]*\))", (SPECS / "std" / "styles.shard").read_text(), re.MULTILINE)
    assert re.findall(r"^\| `(\w+\([^`]*\))` \|", _section("Styles"), re.MULTILINE) == defined


def test_the_grammar_is_the_one_in_use():
    shown = [text for language, _, text in BLOCKS if language == "lark"]
    assert shown == [(PACKAGE / folder / "grammar.lark").read_text() for folder in ("spec", "plan/text")]


def _section(name: str) -> str:
    found = re.search(rf"^## {name}.*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[0]
