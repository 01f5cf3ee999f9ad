"""The words of a rule, and the letters they stand for with operands of certain shapes."""

from __future__ import annotations

from importlib import import_module

import pytest

from shardtensor.ops import by_rule
from shardtensor.rules.call import parse_call
from shardtensor.rules.pattern import parse_pattern
from shardtensor.rules.table import ROWS, read_table, row_of, rows
from shardtensor.tensor.dispatch import HANDLERS, resolve

BOUND = [
    ("... -> ...", "", ((2, 3),), (), ".0 .1 -> .0 .1"),
    ("..., ... -> ...", "", ((2, 3), (3,)), (), ".0 .1, .1 -> .0 .1"),
    ("..., ... -> ...", "", ((2, 1), (2, 1, 3)), (), ".1 1, .0 1 .2 -> .0 .1 .2"),
    ("..., ... -> ...", "", ((0,), (1,)), (), ".0, 1 -> .0"),
    ("..., ... -> ...", "", ((), ()), (), "(), () -> ()"),
    ("i..., i... -> i...", "", ((2, 3), (2, 3)), (), "i0 i1, i0 i1 -> i0 i1"),
    ("i..., i... -> i...", "", ((2, 3), (2, 1)), (), None),
    ("... m? k, ... k n? -> ... m? n?", "k sum", ((4, 2, 3), (3, 5)), (), ".0 m k, k n -> .0 m n"),
    ("... m? k, ... k n? -> ... m? n?", "k sum", ((3,), (4, 3, 5)), (), "k, .0 k n -> .0 n"),
    ("... m? k, ... k n? -> ... m? n?", "k sum", ((3,), (4,)), (), None),
    ("... [!d] -> ... [d]", "", ((2, 3, 4),), (1,), ".0 !d .1 -> .0 !d .1"),
    ("... [!d] -> ... [d]", "", ((2, 3, 4),), (0, 2), "!d0 .0 !d1 -> !d0 .0 !d1"),
    ("... [!d] -> ... [d']", "", ((2, 3),), (0,), "!d .0 -> !d' .0"),
    ("... [d] -> ...", "d sum", ((2, 3),), (0,), "d .0 -> .0"),
    ("... [n], n... -> ... [n]", "", ((2, 3), (3,)), (1,), ".0 n, n -> .0 n"),
    ("... [n], n... -> ... [n]", "", ((2, 3, 4), (3, 4)), (1, 2), ".0 n0 n1, n0 n1 -> .0 n0 n1"),
    ("... [n], n... -> ... [n]", "", ((2, 3), None), (1,), ".0 n -> .0 n"),
    ("i... [!d], at -> i... [at]", "", ((2, 3), (5,)), (1,), "i !d, at -> i at"),
    ("*(i... [!d]) -> i... [d']", "", ((2, 3), (4, 3)), (0,), "!d_0 i, !d_1 i -> !d' i"),
    ("*(i...) -> i... [n']", "", ((3,), (3,), (3,)), (0,), "i, i, i -> !n' i"),
    ("n? c s..., c -> n? s...", "c sum", ((4,), (4,)), (), "c, c -> ()"),
    ("n? c s..., c -> n? s...", "c sum", ((2, 4, 3), (4,)), (), "n c s, c -> n s"),
    ("l, l/1 -> l", "", ((3,), (1,)), (), "l, 1 -> l"),
    ("l, l -> l", "", ((3,), (1,)), (), None),
    ("[d] k -> k", "d sum", ((2, 3),), (0,), "d k -> k"),
    ("[d] k ... -> k", "d sum, ... sum", ((2, 3, 4),), (1,), "k d .0 -> k"),
    ("k l -> k l", "", ((3,),), (), None),
    ("k l -> k l", "", ((3, 4, 5),), (), None),
    ("k i... l -> k l", "i... sum", ((3,),), (), None),
    ("n !h, !k -> n h'", "", ((2, 5), (3,)), (), "n !h, !k -> n !h'"),
]


@pytest.mark.parametrize(("text", "combine", "shapes", "dims", "letters"), BOUND)
def test_words_stand_for_letters(text, combine, shapes, dims, letters):
    rule = parse_pattern(text, combine).bind(shapes, dims)
    assert (None if rule is None else str(rule)) == letters


def test_a_kept_dim_is_of_size_one():
    pattern = parse_pattern("... [d] -> ...", "d sum")
    assert str(pattern.bind(((2, 3),), (0,), True)) == "d .0 -> 1 .0"
    assert str(pattern.bind(((2, 3),), (0, 1), True)) == "d0 d1 -> 1 1"


def test_a_rule_carries_what_joins_when_it_is_not_a_sum():
    assert parse_pattern("b k -> b", "k sum").bind(((2, 3),)).combine == ()
    assert parse_pattern("b k -> b", "k max").bind(((2, 3),)).combine == (("k", "max"),)
    assert parse_pattern("b k -> b", "k @own").bind(((2, 3),)).combine == (("k", "none"),)


def test_rules_are_the_same_object_for_the_same_shapes():
    assert ROWS["matmul"].rule(((2, 3), (3, 4))) is ROWS["matmul"].rule(((2, 3), (3, 4)))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.names[0])
def test_a_row_is_complete(row):
    """What it names is there: torch functions, a handler of each, the functions that combine and of layouts."""
    kinds = (row.pattern is not None, bool(row.function), bool(row.reason))
    assert sum(kinds) == 1
    if row.function:
        module, name = row.function.split(".")
        assert callable(getattr(import_module(f"shardtensor.rules.{module}"), name))
    for letter, combiner in row.pattern.combine if row.pattern else ():
        assert letter == "" or letter.isidentifier()
        assert not combiner.startswith("@") or combiner[1:] in by_rule.COMBINERS, f"no function combines as {combiner}"
    for name in row.names:
        assert ROWS[name.rpartition(".")[2]] is row, f"{name} has two rows"
        for func in resolve(name):
            func = func if callable(func) else func.__get__
            assert row.reason or func in HANDLERS, f"{name} has a row and no handler"


def test_a_table_is_read_line_by_line():
    table = read_table("# first: note\n\na b\n  c | ... -> ...\n# second\nF.d | k -> () | k sum | x, y=3\n")
    assert list(table) == ["a", "b", "c", "d"]
    assert table["c"].names == ("a", "b", "c")
    assert (table["a"].section, table["d"].section) == ("first: note", "second")
    assert str(table["d"].call) == "x, y=3"


def test_a_call_tells_operands_from_options():
    call = parse_call("input, *dims")
    assert (call.operands, call.naming, call.spread) == (("input",), "dims", True)
    call = parse_call("input, weight, dim=-1, keepdim=False")
    assert call.operands == ("input", "weight")
    assert dict(call.defaults) == {"dim": -1, "keepdim": False}
    assert row_of("f", "a, b, c -> a b c").call.operands == ("input", "other", "operand2")


def test_what_is_no_argument_is_shown():
    with pytest.raises(ValueError, match="E607") as caught:
        parse_call("input, dim=-1 or 2")
    assert "^^^" in str(caught.value)
