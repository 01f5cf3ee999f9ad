"""Patterns of names: what they stand for, and that no pattern takes long."""

from __future__ import annotations

import re
import time

import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as some

from shardtensor.plan.findings.brief import brief_names
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.match.patterns import matches, pattern, starred


def is_below(text: str, name: str) -> bool:
    """Whether a name is below a module that the pattern matches."""
    above = name.rpartition(".")[0]
    return bool(above) and pattern(text).captures(above, is_below=True) is not None


NAMES = [
    "model.embed.weight",
    *(f"model.layers.{i}.attn.{p}_proj.weight" for i in range(12) for p in "qkv"),
    *(f"model.layers.{i}.moe.experts.{e}.w1.weight" for i in range(2) for e in range(4)),
    "model.norm.weight",
    "head.in.weight",
]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("**", ""),
        ("**", "a.b"),
        ("**.bias", "bias"),
        ("a.**.b", "a.b"),
        ("a.**.b", "a.x.y.b"),
        ("l.*.{q,k}_proj", "l.11.k_proj"),
        ("*_layernorm", "post_attention_layernorm"),
        ("e.<ep>.w1", "e.17.w1"),
        ("l.<32>", "l.31"),
        ("wi_{0,1}", "wi_1"),
        ("h.ln_{,1,2}", "h.ln_"),
        ('a."in".b', "a.in.b"),
        ("{in}.weight", "in.weight"),
        ("x-y/z", "x-y/z"),
    ],
)
def test_a_pattern_stands_for_a_name(text, name):
    assert matches(text, name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("*", "a.b"),
        ("", "a"),
        ("a", ""),
        ("a.*", "a"),
        ("**.bias", "xbias"),
        ("e.<ep>", "e.x"),
        ("l.<32>", "l.32"),
        ("l.{1,2}", "l.12"),
        ("a.b", "aXb"),
    ],
)
def test_a_pattern_does_not_stand_for_another_name(text, name):
    assert not matches(text, name)


def test_what_lies_below():
    assert is_below("model.layers.*", "model.layers.3.attn.q_proj.weight")
    assert not is_below("model.layers.*.attn.q_proj.weight", "model.layers.3.attn.q_proj.weight")
    assert not is_below("mlp", "mlp2.weight")


def test_wildcards_say_what_they_stand_for():
    read = pattern("**.experts.<ep>.{w1,w2}.*")
    assert read.captures("model.layers.1.moe.experts.3.w1.weight") == ("model.layers.1.moe", "3", "w1", "weight")
    assert pattern("*<ep>").captures("expert12") == ("expert", "12")


PARTS = some.sampled_from(
    ["*", "**", "{q,k}", "{q,k}_proj", "<ep>", "layers", "model", "attn", "*_proj", "weight", "1"]
)


@given(some.lists(PARTS, min_size=1, max_size=5).map(".".join))
def test_the_tree_finds_what_the_pattern_stands_for(text):
    paths = ["", *dict.fromkeys(".".join(n.split(".")[:i]) for n in NAMES for i in range(1, n.count(".") + 1))]
    tree = NameTree(NAMES, paths)
    assert sorted(tree.modules(text)) == sorted(path for path in paths if matches(text, path))
    below_root = matches(text, "")
    assert tree.tensors(text) == tuple(n for n in NAMES if below_root or matches(text, n) or is_below(text, n))


@given(some.lists(PARTS, min_size=1, max_size=6).map(".".join), some.sampled_from(NAMES))
def test_a_pattern_means_what_the_regular_expression_means(text, name):
    segments = []
    for segment in text.split("."):
        if segment == "**":
            segments.append(r"(?:[^.]+\.)*")
            continue
        one = re.escape(segment).replace(r"\*", "[^.]*").replace("<ep>", "[0-9]+")
        segments.append(re.sub(r"\\\{(.*?)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", one) + r"\.")
    assert matches(text, name) == bool(re.fullmatch("".join(segments), f"{name}."))


@given(some.text(some.sampled_from('ab.*{},<>"1'), max_size=60), some.text(some.sampled_from("ab.1"), max_size=60))
@examples(300)
def test_any_text_is_a_pattern(text, name):
    assert matches(text, name) in (True, False)


@pytest.mark.parametrize(
    "text",
    ["{a,aa}" * 60 + "b", "*a" * 60 + "b", ".".join(["**", "a"] * 60) + ".b", "<e>" * 60 + "b", "**." * 200 + "b"],
)
def test_no_pattern_takes_long(text):
    began = time.perf_counter()
    for name in ("a" * 200, ".".join("a" * 100), "1" * 200):
        matches(text, name)
        is_below(text, name)
    assert time.perf_counter() - began < 1


@given(some.lists(some.sampled_from(NAMES), min_size=1, unique=True))
def test_names_in_brief_are_all_there(names):
    brief = brief_names(names)
    assert sorted(name for members in brief.values() for name in members) == sorted(names)
    assert len(brief) <= len({starred(name) for name in names})
