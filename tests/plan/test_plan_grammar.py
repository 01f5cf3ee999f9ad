"""The grammar: no conflict, one place for the rules of one tensor, carets that fit."""

from __future__ import annotations

import logging
import re
from importlib.resources import files

import pytest
from lark import Lark, Token

from shardtensor.plan.text.sources import PACKAGED
from shardtensor.plan.text.syntax import KEYWORDS, parse_plan
from shardtensor.spec.diagnostics import Source
from shardtensor.spec.parse import grammar
from shardtensor.spec.reader import span

PLANS = files("shardtensor.plan.text").joinpath("grammar.lark").read_text(encoding="utf-8")


@pytest.mark.parametrize(("text", "start"), [(grammar(), "spec"), (grammar() + PLANS, ["plan", "value"])])
def test_there_is_no_conflict(text, start, caplog):
    with caplog.at_level(logging.DEBUG, logger="lark"):
        Lark(text, start=start, parser="lalr", debug=True)
    assert "conflict" not in caplog.text.lower()


def test_no_rule_stands_twice():
    rules = [re.findall(r"^[?]?(_?[a-z]\w*)\s*:", text, re.M) for text in (grammar(), PLANS)]
    assert not set(rules[0]) & set(rules[1])
    assert re.findall(r"^%override (\w+)", PLANS, re.M) == ["_value", "minus", "word", "SPACE"]


def test_keywords_are_those_of_the_grammar():
    tree = parse_plan(Source("shard 1\n" + "".join(f'"{word}": replicate\n' for word in KEYWORDS)))
    assert len(tree.children) == 1 + len(KEYWORDS)
    for word in KEYWORDS:
        with pytest.raises(ValueError, match="E001"):
            parse_plan(Source(f"shard 1\n{word}: replicate : \n"))


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.shard")), ids=lambda path: path.stem)
def test_every_token_stands_where_it_says(path):
    source = Source(path.read_text())
    for token in parse_plan(source).scan_values(lambda value: isinstance(value, Token)):
        start, end = span(token)
        assert source.text[start:end] == str(token)
