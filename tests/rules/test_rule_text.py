"""What the text of a rule says, word by word, and where the caret stands when it says nothing."""

from __future__ import annotations

import pytest

from shardtensor.errors import SpecError
from shardtensor.rules.call import parse_call
from shardtensor.rules.pattern import Term, parse_pattern

FAULTS = {
    "E601": [("{b k}", ""), ("{b k, n k}", "")],
    "E602": [
        ("b {K} -> b", ""),
        ("b k, {2} -> b", "k sum"),
        ("b {+} k -> b", "k sum"),
        ("{!} -> ()", ""),
        ("b {[k} -> b", ""),
        ("*(b, {?}) -> b", ""),
        ("b -> {B}", ""),
    ],
    "E603": [("b {k}, n k -> b n", ""), ("{...} k -> k", ""), ("b k, {n} -> b", "k sum")],
    "E604": [
        ("b k -> b", "{k}"),
        ("b k -> b", "{k sum k}"),
        ("b k n -> b", "k sum,  {n} "),
        ("b k -> b", "{k sun}"),
        ("b k n -> b", "k sum, {n  total}"),
    ],
    "E605": [
        ("... {i...} -> ... i...", ""),
        ("i... b {j...} -> b", ""),
        ("b, i... {...} -> b", "i... sum"),
        ("b {k'} -> b", ""),
        ("b {[k']} -> b", ""),
        ("b k {b} -> k", ""),
        ("b, n {n} -> b n", ""),
    ],
    "E606": [("b -> b {n}", ""), ("b -> {...} b", ""), ("b, k -> b k {nn}", ""), ("{b -> b}", "n sum")],
}
"""By the code of the error: a rule and its combine, with what the caret is under in brackets."""


@pytest.mark.parametrize(("code", "text", "combine"), [(code, *each) for code, some in FAULTS.items() for each in some])
def test_a_fault_is_shown_where_it_stands(code, text, combine):
    marked = text if "{" in text else combine
    start, stop = marked.index("{"), marked.rindex("}") - 1

    def bare(text: str) -> str:
        head, _, tail = text.partition("{")
        inside, _, rest = tail.rpartition("}")
        return head + inside + rest if tail else head

    with pytest.raises(SpecError) as caught:
        parse_pattern(bare(text), bare(combine) if marked == combine else combine, "here")
    head, shown, carets, *_ = str(caught.value).splitlines()
    assert head.startswith(f"here:1:{start + 1}: error[{code}]")
    assert shown.endswith(f"| {bare(marked)}")
    assert carets.count("^") == stop - start and carets.index("^") - carets.index("|") == start + 2


@pytest.mark.parametrize("text", ["a=1.5", "a b", "*", "-a", "a=--1", "A", "a,,B"])
def test_an_argument_that_is_none_is_shown(text):
    with pytest.raises(SpecError, match="E607") as caught:
        parse_call(text)
    assert "^" in str(caught.value)


def test_a_call_has_operands_defaults_and_one_argument_that_names_dims():
    call = parse_call("input, weight, k=, dims=None, dim=-1, flag=False, other=True, n=2, *rest")
    assert call.operands == ("input", "weight")
    assert call.names == ("input", "weight", "k", "dims", "dim", "flag", "other", "n", "rest")
    assert call.defaults == (("dims", None), ("dim", -1), ("flag", False), ("other", True), ("n", 2))
    assert call.naming == "dims" and call.spread
    assert [call.place(name) for name in call.names] == list(range(9))
    assert parse_call("input, dim").naming is None, "an operand"
    assert not parse_call("input, dim=").spread
    assert parse_call("input, normalized_shape=").naming == "normalized_shape"
    assert str(parse_call("input, *dims, k=3")) == "input, *dims, k=3"


MARKS = {
    "k": {},
    "!k": {"whole": True},
    "k?": {"optional": True},
    "k/1": {"unit": True},
    "k...": {"many": True},
    "!k...": {"many": True, "whole": True},
    "[k]": {"named": True},
    "[!k]": {"named": True, "whole": True},
    "![k]": {"named": True, "whole": True},
    "!k?": {"whole": True, "optional": True},
}


@pytest.mark.parametrize("word", MARKS)
def test_a_word_has_its_marks(word):
    pattern = parse_pattern(f"a {word}, + b -> a b", "k sum")
    assert pattern.sides[0].terms == (Term("a"), Term("k", **MARKS[word]))
    assert [side.added for side in pattern.sides] == [False, True]
    assert pattern.output.terms == (Term("a"), Term("b")) and not pattern.output.added
    assert pattern.names_dims == ("[" in word)
    assert pattern.reduces == ("[" in word)
    assert not pattern.is_elementwise and not pattern.makes_sizes and not pattern.listed


def test_an_output_has_words_of_its_own():
    for word, many, named in (("k'", False, False), ("k'...", True, False), ("[k']", False, True)):
        pattern = parse_pattern(f"a !k... -> a {word}")
        assert pattern.output.terms[1] == Term("k", new=True, many=many, named=named)
        assert pattern.makes_sizes and not pattern.reduces
    assert parse_pattern("() -> ()").sides[0].terms == ()
    assert parse_pattern(" *(... [d]) -> ... [d]").listed


def test_only_dots_are_elementwise():
    for text in ("... -> ...", "..., ... -> ...", "..., ..., ... -> ..."):
        assert parse_pattern(text).is_elementwise
    for text in ("!... -> ...", "..., i... -> ...", "!... -> ()", "... [d] -> ...", "..., k -> ..."):
        pattern = parse_pattern(text, ", ".join(f"{x} sum" for x in ("i...", "k", "d") if x in text))
        assert not pattern.is_elementwise, text


@pytest.mark.parametrize("join", ["sum", "avg", "max", "min", "prod", "@own"])
def test_a_join_is_of_all_dims_of_its_letter(join):
    pattern = parse_pattern("... k, i... k, d -> k d", f"... {join}, i... {join}")
    for letter in (".0", ".1", "i", "i0", "i12", ""):
        assert pattern.combiner_of(letter) == join
    assert pattern.combiner_of("k") is pattern.combiner_of("k0") is pattern.combiner_of("d") is None
    expected = {"sum": (), "@own": "none"}.get(join, join)
    expected = expected and ((".0", expected), ("i0", expected), ("i1", expected))
    assert pattern.bind(((2, 3), (4, 5, 3), (6,))).combine == expected
