"""The tables of a grammar are kept between processes; with them or without, spoilt or not, a parser reads the same."""

import json
import os
import stat

import lark
import pytest
from lark.exceptions import UnexpectedCharacters

from shardtensor.plan.text import syntax
from shardtensor.spec.diagnostics import Source
from shardtensor.spec.parser_cache import parser_by
from shardtensor.spec.syntax import grammar

TEXT = """shard 1
mesh (dp=2,
  tp=4)
*.fc1.weight: [tp unit(8), -] if tp > 1 else [-, -]
"in.y" {
  in: [-] -> [tp]
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    syntax._parser.cache_clear()
    syntax._parse.cache_clear()
    yield tmp_path / "shardtensor"
    syntax._parser.cache_clear()
    syntax._parse.cache_clear()


def read(text=TEXT):
    syntax._parser.cache_clear()
    syntax._parse.cache_clear()
    try:
        return syntax.parse_plan(Source(text))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("if", "of"), TEXT + "?", "shard 1\nmesh (dp"])
def test_a_kept_parser_reads_and_refuses_as_one_made_anew(folder, text):
    anew = read(text)
    assert [path.name for path in folder.iterdir()] == ["plan.json"]
    kept = read(text)
    assert anew == kept and isinstance(anew, str) == (text != TEXT)
    if not isinstance(anew, str):
        places = [[(node.meta.start_pos, node.meta.end_pos) for node in tree.iter_subtrees()] for tree in (anew, kept)]
        assert places[0] == places[1]


def test_what_is_kept_is_read_and_not_made(folder, monkeypatch):
    read()
    monkeypatch.setattr(lark.Lark, "__init__", None)
    assert read().children[0] == "1"


def test_tables_are_json_that_only_their_owner_can_write(folder):
    read()
    key, tables = (folder / "plan.json").read_text().split("\n", 1)
    assert len(key) == 64 and set(json.loads(tables)) == {"data", "memo"}
    assert not stat.S_IMODE((folder / "plan.json").stat().st_mode) & 0o077
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o077


@pytest.mark.parametrize("end", [0, 64, 65, 1000, -2])
def test_a_file_cut_short_is_made_anew(folder, end):
    whole = read()
    path = folder / "plan.json"
    text = path.read_text()
    path.write_text(text[:end])
    assert read() == whole
    assert len(path.read_text()) > 1000 and path.read_text()[:64] == text[:64]


@pytest.mark.parametrize("spoilt", ["[]", "{}", '{"data": {}, "memo": {}}', "null", "\x00"])
def test_tables_of_another_form_are_made_anew(folder, spoilt):
    whole = read()
    path = folder / "plan.json"
    path.write_text(path.read_text()[:65] + spoilt)
    assert read() == whole


def test_another_grammar_does_not_take_what_is_kept(folder):
    old = parser_by(grammar(), ("spec",))
    new = parser_by(grammar().replace('REST:    "..."', 'REST:    "etc"'), ("spec",))
    assert str(old.parse("[...]")) == str(new.parse("[etc]")).replace("etc", "...")
    with pytest.raises(UnexpectedCharacters):
        new.parse("[...]")


@pytest.mark.skipif(os.name != "posix", reason="a folder that cannot be made")
def test_where_nothing_can_be_kept_a_parser_is_made_each_time(monkeypatch, tmp_path):
    (tmp_path / "shardtensor").write_text("a file where the folder would stand")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read().children[0] == "1"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert read().children[0] == "1"
    syntax._parser.cache_clear()
