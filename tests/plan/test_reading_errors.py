"""The faults of a plan's text, in full: each is the Llama plan with one line changed, or a setting."""

from __future__ import annotations

import pytest

from shardtensor.errors import SpecError
from shardtensor.plan.loading import read_config
from shardtensor.plan.text.reading import read_plan
from shardtensor.plan.text.sources import PACKAGED
from shardtensor.spec.diagnostics import Source

TEXT = (PACKAGED / "llama.shard").read_text()
END = TEXT.count("\n")
LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
}
CONFIG = {**LLAMA, **{f"other_{i}": "text" for i in range(27 - len(LLAMA))}}
DOWN = "down_proj:      rowwise(tp, to=stream)"
GATE = "{gate,up}_proj: colwise(tp)\n"
LAST = "use cross_entropy()\n"


def refused(old: str = "", new: str = "", world: int = 8, **params: object) -> SpecError:
    """What the plan with one change is refused with."""
    assert old in TEXT
    source = Source(TEXT.replace(old, new, 1) if old else TEXT, "specs/llama.shard")
    with pytest.raises(SpecError) as caught:
        read_plan(source, config=CONFIG, world=world, params=params, config_source="models/llama3-8b/config.json")
    return caught.value


# change, settings, message
GOLDENS = {
    "E001": (
        (DOWN, "down_proj       rowwise(tp, to=stream)"),
        {},
        """
specs/llama.shard:31:29: error[E001]: expected `:` or `{` after the pattern `down_proj`, found `rowwise`
   31 |             down_proj       rowwise(tp, to=stream)
      |                             ^^^^^^^
  why: a rule is `PATTERN: LAYOUT` or `PATTERN { ... }`
  fix: write `down_proj: rowwise(tp, to=stream)`
""",
    ),
    "E201": (
        (DOWN, "down_proj.weight: [-, tpp]"),
        {},
        """
specs/llama.shard:31:35: error[E201]: no mesh axis is called `tpp`
   31 |             down_proj.weight: [-, tpp]
      |                                   ^^^
  why: the mesh of this plan has the axes dp, tp, and tp is made of kvg, kvr
  fix: did you mean `tp`?
""",
    ),
    "E102": (
        (GATE, "{gate,up}_proj: columnwise(tp)\n"),
        {},
        """
specs/llama.shard:30:29: error[E102]: no style is called `columnwise`
   30 |             {gate,up}_proj: columnwise(tp)
      |                             ^^^^^^^^^^
  why: styles in scope: along, colwise, colwise_shared, rowwise, vocab_embedding, vocab_head
  fix: did you mean `colwise`?
""",
    ),
    "E104": (
        ("config.num_attention_heads", "config.n_heads"),
        {},
        """
specs/llama.shard:7:13: error[E104]: config.json has no key `n_heads`
    7 | let heads = config.n_heads
      |             ^^^^^^^^^^^^^^
  why: models/llama3-8b/config.json has 27 keys; the nearest is `num_attention_heads` (32)
  fix: use `config.num_attention_heads`, or give a default: `config.n_heads ?? 32`
""",
    ),
    "E105": (
        ("(dp = world / tp, ", "(dp = 2, "),
        {},
        """
specs/llama.shard:11:6: error[E105]: the mesh has 16 ranks (dp=2 x tp=8), but --world is 8
   11 | mesh (dp = 2, tp (kvg = gcd(tp, kv), kvr = tp / kvg))  # tp=16, kv=8: kvg=8, kvr=2
      |      ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  why: every rank of the world has one place in the mesh
  fix: write `dp = world / tp`, or run with --world 16
""",
    ),
    "E106": (
        (),
        {"world": 6, "tp": "6"},
        """
specs/llama.shard:13:9: error[E106]: requirement not met: every rank needs whole query heads
   13 | require heads % tp == 0 "every rank needs whole query heads"
      |         ^^^^^^^^^^^^^^^
  why: heads=32, tp=6
  fix: give `tp` another value, as in --set tp=N; without --set, `shardtensor plan --search` lists those that fit
  note: from --set tp=6 on the command line

specs/llama.shard:14:9: error[E106]: requirement not met: kv heads must divide tp, or tp must divide kv heads
   14 | require kv % tp == 0 or tp % kv == 0 "kv heads must divide tp, or tp must divide kv heads"
      |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  why: kv=8, tp=6
  fix: give `tp` another value, as in --set tp=N; without --set, `shardtensor plan --search` lists those that fit
  note: from --set tp=6 on the command line
""",
    ),
    "E204": (
        (DOWN, "down_proj.weight: [tp, tp]"),
        {},
        """
specs/llama.shard:31:36: error[E204]: axis `tp` splits dim 0 and dim 1 of one tensor
   31 |             down_proj.weight: [tp, tp]
      |                                    ^^
  why: each rank has a single tp coordinate
  fix: keep one of the two
""",
    ),
    "E107 in a mesh": (
        (),
        {"world": 6, "tp": 4},
        """
specs/llama.shard:11:12: error[E107]: `world / tp` is not a whole number
   11 | mesh (dp = world / tp, tp (kvg = gcd(tp, kv), kvr = tp / kvg))  # tp=16, kv=8: kvg=8, kvr=2
      |            ^^^^^^^^^^
  why: it is 6 / 4
  fix: give `tp` another value, as in --set tp=N; without --set, `shardtensor plan --search` lists those that fit
""",
    ),
    "E101 from outside": (
        (),
        {"tpp": 4},
        """
error[E101]: no parameter is called `tpp`
  why: the parameters are sp, tp
  fix: did you mean `tp`?
  note: from tpp=4, given by the caller
""",
    ),
    "E003": (
        (LAST, 'include "zzz"\n'),
        {},
        """
specs/llama.shard:END:9: error[E003]: `zzz` is not there
{END:5} | include "zzz"
      |         ^^^^^
  why: looked in specs and the plans of the package
""",
    ),
    "E001 in a value from outside": (
        (),
        {"tp": "4 +"},
        """
--set tp:1:4: error[E001]: expected a value, found the end of the line
    1 | 4 +
      |    ^
""",
    ),
    "E107 of a parameter": (
        (),
        {"sp": "4"},
        """
specs/llama.shard:6:7: error[E107]: the parameter `sp` is true or false by default, and it is given a number
    6 | param sp = false  # sequence parallel between the products
      |       ^^
  note: from --set sp=4 on the command line
""",
    ),
    "a fault of what a style is given": (
        (GATE, "{gate,up}_proj: colwise(tp, unit=0)\n"),
        {},
        """
specs/llama.shard:30:29: error[E102]: unit needs to be at least 1, found 0
   30 |             {gate,up}_proj: colwise(tp, unit=0)
      |                             ^^^^^^^^^^^^^^^^^^^
  note: in `weight: [out: ax blocks(blocks) unit(unit)]`, std/styles.shard:5
""",
    ),
    "E204 through factors": (
        (DOWN, "down_proj.weight: [kvr, tp]"),
        {},
        """
specs/llama.shard:31:37: error[E204]: axis `tp` and axis `kvr` split one tensor, and they share kvr
   31 |             down_proj.weight: [kvr, tp]
      |                                     ^^
  why: the mesh has dp, tp, and tp is made of kvg, kvr
  fix: keep one of the two
""",
    ),
    "E204 of data": (
        (DOWN, "down_proj { \n in: [dp, ...]\n}"),
        {},
        """
specs/llama.shard:32:6: error[E204]: `dp` is a data axis, and a flow names it
   32 |  in: [dp, ...]
      |      ^^^^^^^^^
  why: a flow says what ranks of one data coordinate see; along data axes samples differ
  fix: drop `dp`
""",
    ),
    "a keyword as a pattern": (
        (LAST, "store: replicate\n"),
        {},
        """
specs/llama.shard:END:6: error[E001]: expected text in quotes or a pattern, found `:`
{END:5} | store: replicate
      |      ^
  why: `store` begins a statement
  fix: a pattern that is a keyword stands in quotes: `"store"`
""",
    ),
    "an open bracket": (
        (LAST, "fc.weight: [tp\nfc.bias: [tp]\n"),
        {},
        """
specs/llama.shard:END:12: error[E001]: this `[` is never closed
{END:5} | fc.weight: [tp
      |            ^
  fix: close it with `]`
""",
    ),
    "E002": (
        ("shard 1\n", "shard 2\n"),
        {},
        """
specs/llama.shard:1:1: error[E002]: this plan is written in version 2 of the language
    1 | shard 2
      | ^^^^^^^
  why: version 1 is read
  fix: install a newer shardtensor
""",
    ),
}


@pytest.mark.parametrize(("change", "settings", "message"), GOLDENS.values(), ids=GOLDENS)
def test_message(change, settings, message):
    told = str(refused(*change, **settings)).replace(str(PACKAGED), "PACKAGED")
    assert told == message.strip("\n").replace("{END:5}", f"{END:5}").replace("END", str(END))


# lines at the end of the plan, code, fault
FAULTS = [
    ("a: 3", "E107", "`3` is a number, and a rule says a layout or a style"),
    ("a: tp", "E107", "`tp` is an axis, and a rule says a layout or a style"),
    ("a: colwise", "E102", "the style `colwise` needs its arguments"),
    ("a: colwise(tp, bloks=3)", "E102", "`colwise` has no argument `bloks`"),
    ("a: colwise()", "E102", "`colwise` needs `ax`"),
    ("a: colwise(3)", "E107", "`ax` is a number, and an axis of the mesh is needed here"),
    ("a: colwise(tp*kvg)", "E204", "`tp*kvg` names an axis twice"),
    ("a: [tp unit(hdd)]", "E103", "nothing is called `hdd`"),
    ("a: [hd]", "E107", "`hd` is a number, and an axis of the mesh is needed here"),
    ("a: [tp unt(3)]", "E102", "no modifier is called `unt`"),
    ("a: gdc(3, 4)", "E102", "no function is called `gdc`"),
    ("a: chunck(dim=0, placements=[\"rank:0\"])", "E102", "no spec is called `chunck`"),
    ("a: chunk(dim=0, placements=[\"rank:0-99999999999\"])", "E501", "the range has more than 1048576 placements"),
    ("a: chunk(dim=0, placements=[\"rank:0-8\"])", "E501", "rank 8 is named, and the world has 8 ranks"),
    ("a: [tp] if heads else replicate", "E107", "`heads` is a number, and true or false is needed here"),
    ("let s = [tp, -]\na: s flat(kvr)", "E204", "axis `kvr` splits one tensor twice"),
    ("a: (1, 2)", "E107", "numbers in round brackets cannot stand here"),
    ("a.<e>: replicate", "E201", "no mesh axis is called `e`"),
    ("a..b: replicate", "E001", "a segment of this pattern is empty, or has a part of `**` or `{a,b}`"),
    ("a.b**: replicate", "E001", "a segment of this pattern is empty, or has a part of `**` or `{a,b}`"),
    ("{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}: replicate", "E001",
     "a pattern has at most 6 of `*` and braces in a segment, and of `**`"),
    ("let x = 9223372036854775807 + 1", "E107", "`9223372036854775807 + 1` is too large"),
    ("let x = 99999999999999999999", "E001", "the number is too large"),
    ("let x = 1 / 0", "E107", "`1 / 0` divides by 0"),
    ("let x = hd / 3", "E107", "`hd / 3` is not a whole number"),
    ("let x = y\nlet y = 1", "E103", "`y` is used above its definition"),
    ("let kv = 1", "E103", "`kv` is defined twice"),
    ("let world = 1", "E103", "`world` is a word of the language"),
    ("style unit(x) {\n}", "E103", "`unit` is a word of the language"),
    ("style s(x=1, y) {\n}", "E102", "`y` needs a default, for a parameter before it has one"),
    ("style s(x) {\n a: s(x)\n}\nb: s(tp)", "E102", "no style is called `s`"),
    ("param new", "E101", "the parameter `new` has no value"),
    ("mesh (tp)", "E105", "a plan has one mesh, and this is another"),
    ("data tp", "E105", "the axes of the data are said twice"),
    ("a {\n in: [out: tp]\n}", "E107", "`[out: tp]` is no layout of a value"),
    ("a {\n out: replicate grad [tp]\n}", "E107", "a gradient is cut as its value is"),
    ("a {\n local heads: [tp, -]\n}", "E202", "`[tp, -]` is no layout of one dim"),
    ("a {\n use f(x=1, x=2)\n}", "E102", "`x` is given twice"),
    ("store a: [tp]", "E107", "`[tp]` cannot be stored"),
    ("dims a.<L> (out = 3)", "E103", "nothing is called `L`"),
    ("dims a (out = -3)", "E107", "a dim has -3 elements"),
    ("unmatched: replicate\nunmatched: [tp, ...]", "E302", "`unmatched` is said twice"),
    ("require 3 \"three\"", "E107", "`3` is a number, and true or false is needed here"),
    ("let x = config", "E103", "`config` is not a value"),
    ("let x = config.other_1", "E107", "`config.other_1` is of type str"),
    ("let x = heads.y", "E103", "`heads` has no key `y`"),
    ("let x = true + 1", "E107", "`true` is true or false, and a number is needed here"),
    ("let x = 1 == true", "E107", "`1` is a number and `true` is true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "code", "fault"), FAULTS, ids=[lines[:40] for lines, *_ in FAULTS])
def test_fault(lines, code, fault):
    error = refused(LAST, f"{lines}\n")
    (finding,) = [finding for finding in error.findings if finding.severity == "error"]
    assert (finding.code, finding.fault) == (code, fault)
    assert finding.origin.line >= END
    assert (error.code, error.file, error.line, error.col) == (
        code, "specs/llama.shard", finding.origin.line, finding.origin.col,
    )  # fmt: skip


def test_all_faults_are_found_at_once_and_what_follows_from_one_is_not_told():
    text = TEXT.replace("config.num_attention_heads", "config.n_heads").replace(DOWN, "down_proj: rowise(tp)")
    with pytest.raises(SpecError) as caught:
        read_plan(Source(text + "a: [tpp]\n"), config=CONFIG, world=8)
    assert [(finding.code, finding.origin.line) for finding in caught.value.findings if finding.code[0] == "E"] == [
        ("E104", 7), ("E102", 31), ("E201", END + 1),
    ]  # fmt: skip


def test_without_a_config_what_to_give_is_said_and_not_only_a_default(tmp_path):
    """Whoever forgot the option is told of it, however many keys are missing."""
    for text in (TEXT, "shard 1\nmesh (tp = config.a.b)\n"):
        with pytest.raises(SpecError) as caught:
            read_plan(Source(text), world=8)
        missing = [finding for finding in caught.value.findings if finding.code == "E104"]
        assert missing
        for finding in missing:
            key = finding.origin.text.split(".")[1]
            assert finding.fault == f"no config was given, and the plan takes `{key}` from it"
            assert "--model config.json" in finding.fix and "config=" in finding.fix
    assert read_plan(Source("shard 1\nmesh (tp = config.a.b ?? 2)\n"), world=2).axes.size("tp") == 2, "defaults hold"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpecError, match="holds no keys"):
        read_config(tmp_path)


def test_a_file_that_cannot_be_read_is_the_only_fault(tmp_path):
    (tmp_path / "broken.shard").write_text("shard 1\nlet a = \n")
    (tmp_path / "main.shard").write_text('shard 1\ninclude "broken.shard"\nlet b = a\nc: colwise(d)\n')
    with pytest.raises(SpecError) as caught:
        read_plan(tmp_path / "main.shard", world=1)
    assert [(finding.code, finding.origin.source.file) for finding in caught.value.findings] == [
        ("E001", (tmp_path / "broken.shard").as_posix())
    ]


def test_includes_in_a_circle(tmp_path):
    (tmp_path / "a.shard").write_text('shard 1\ninclude "b.shard"\n')
    (tmp_path / "b.shard").write_text('shard 1\ninclude "a.shard"\n')
    with pytest.raises(SpecError) as caught:
        read_plan(tmp_path / "a.shard", world=1)
    error = caught.value
    assert error.code == "E003"
    assert error.findings[0].fault == "these files include one another in a circle"
    assert error.findings[0].why.replace(f"{tmp_path.as_posix()}/", "") == "a.shard -> b.shard -> a.shard"
