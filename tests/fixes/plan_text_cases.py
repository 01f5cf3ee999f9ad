"""Errors of a plan's text: the Llama plan with lines at its end or one line changed, or a text of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plan.test_reading_errors import CONFIG, LAST, TEXT

from fixes.case import Case
from fixes.corrected import Found, of_error, of_findings, text_case
from shardtensor.errors import SpecError
from shardtensor.plan.loading import load_plan
from shardtensor.plan.text.reading import read_plan
from shardtensor.plan.text.sources import PACKAGED
from shardtensor.spec.diagnostics import Source

START = TEXT.index(LAST)
STYLES = 'shard 1\ninclude "std/styles.shard"\nparam tp = 4\nmesh (tp = 4)\n'


def read(
    text: str, config: Any = CONFIG, world: int = 8, file: str = "specs/llama.shard", **params: Any
) -> list[Found]:
    """What is wrong with a plan."""
    try:
        read_plan(Source(text, file), config=config, world=world, params=params)
    except SpecError as error:
        return of_findings(error.findings) or [of_error(error)]
    return []


def lines(said: str) -> list[Found]:
    """What is wrong with the Llama plan that ends in these lines; places are counted in them."""
    return [found.moved(-START) for found in read(TEXT.replace(LAST, f"{said}\n"))]


DEEP = "\n".join(["a {"] * 70 + ["b: replicate"] + ["}"] * 70)
LINES: dict[str, dict[str, str]] = {
    "a: 3": {"write such as `[tp, -]`": "a: [tp, -]", "or `replicate`": "a: replicate"},
    "a: colwise": {"as in `colwise(ax, unit=1, blocks=1)`": "a: colwise(tp)"},
    "a: colwise()": {"as in `colwise(ax, unit=1, blocks=1)`": "a: colwise(tp)"},
    "a: colwise(tp, bloks=3)": {},
    "a: colwise(3)": {"name an axis of the mesh": "a: colwise(tp)"},
    "a: colwise(tp*kvg)": {"keep one of the two": "a: colwise(kvg)"},
    "a: colwse(tp)": {},
    "a: colwise_with(tp)\nstyle colwise_with(ax) {\nweight: [ax, -]\n}": {
        "define it further up": "style colwise_with(ax) {\nweight: [ax, -]\n}\na: colwise_with(tp)"
    },
    "a: heads(tp)": {"`heads` takes no arguments": "a: [tp unit(heads), -]"},
    "a: [tp unit(hdd)]": {},
    "a: [hd]": {"name an axis of the mesh": "a: [tp]"},
    "a: [tpp]": {},
    "a: [tp unt(3)]": {},
    "a: [tp unit]": {},
    "a: [tp balanced(3)]": {"drop the brackets": "a: [tp balanced]"},
    "a: [tp] unit(3)": {"as in `[tp unit(128), -]`": "a: [tp unit(3)]"},
    "a: unit": {"as in `[tp unit(128), -]`": "a: [tp unit(128)]"},
    "a: [tp unit(3, 4)]": {"as in `unit(128)`": "a: [tp unit(3)]"},
    "a: [tp sizes()]": {},
    "let x = gdc(3, 4)": {},
    "let x = gcd()": {"as in `gcd(tp, kv)`": "let x = gcd(tp, kv)"},
    'a: chunck(dim=0, placements=["rank:0"])': {},
    "a: chunk(dim=0, placements=tp)": {
        'as in `chunk(dim=0, placements=["rank:': 'a: chunk(dim=0, placements=["rank:0"])'
    },
    'a: chunk(dim=0, placements=["rank:0"], sizes=4)': {
        "write `(4,)`": 'a: chunk(dim=0, placements=["rank:0"], sizes=(4,))'
    },
    "a: partial(tp, op=3)": {"as in `partial(tp)`": "a: partial(tp)"},
    "a: partial(tp+1)": {"as in `partial(tp)`": "a: partial(tp)"},
    "let s = [tp, -]\na: s flat(kvr)": {"keep one of the two": "let s = [tp, -]\na: s"},
    "a: [kvr, tp]": {"keep one of the two": "a: [kvr, -]"},
    "a: [tp, tp]": {
        "keep one of the two": "a: [tp, -]",
    },
    "a: [tp*tp]": {"keep one of the two": "a: [tp]"},
    "a: [tp] flat(tp)": {"keep one of the two": "a: [tp]"},
    "a..b: replicate": {"write names with one dot between them": "a.b: replicate"},
    "a.b**: replicate": {"`**` between dots": "a.**.b: replicate"},
    "{a.b,c}: replicate": {"alternatives without dots": "{a,c}: replicate"},
    "{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}: replicate": {"write fewer": "{a,b}{a,b}{a,b}: replicate"},
    f"{'a.' * 300}w: replicate": {"write `**` for segments in between": "a.**.w: replicate"},
    "let x = hd / 3": {"`//` rounds down": "let x = hd // 3", "`/` has to be exact": "let x = hd / 4"},
    "let x = y\nlet y = 1": {"define it further up": "let y = 1\nlet x = y"},
    "let kv = 1": {"choose another name": "let kv2 = 1"},
    "let world = 1": {"choose another name": "let world2 = 1"},
    "style unit(x) {\n}": {"choose another name": "style units(x) {\nweight: [x, -]\n}"},
    "style colwise(x) {\n}": {"choose another name": "style columns(x) {\nweight: [x, -]\n}"},
    "style s(x, x) {\n}": {"choose another name": "style s(x, y) {\nweight: [x, y]\n}"},
    "style s(x=1, y) {\n}": {
        "write `y=1`": "style s(x=1, y=1) {\nb: replicate\n}",
        "move it to the front": "style s(y, x=1) {\nb: replicate\n}",
    },
    "mesh (tp)": {"keep one": ""},
    "data tp": {"keep one line": ""},
    "a {\n in: [out: tp]\n}": {
        "`replicate`, `[..., tp]`, `[-, tp, ...]`, `partial(tp)`": "a {\n in: [..., tp]\n out: replicate\n}"
    },
    "a {\n out: replicate grad [tp]\n}": {
        "`grad partial(tp)` for partial sums": "a {\n out: replicate grad partial(tp)\n}"
    },
    "a {\n out: replicate grad partial(tp, op=max)\n}": {
        "write `partial(tp)`, without `op`": "a {\n out: replicate grad partial(tp)\n}"
    },
    "a {\n in: [dp, ...]\n}": {"drop `dp`": "a {\n in: [-, ...]\n}"},
    "a {\n local heads: [tp, -]\n}": {"write such as `[tp]`": "a {\n local heads: [tp]\n}"},
    "a {\n in: tp\n}": {
        "`[tp, ...]` to cut the first dim": "a {\n in: [tp, ...]\n}",
        "`[..., tp]` to cut the last": "a {\n in: [..., tp]\n}",
    },
    "a {\n use f(x=1, x=2)\n}": {"keep one": "a {\n use f(x=1)\n}"},
    "a {\n store b: flat(dp)\n}": {"move the line out of the braces": "store b: flat(dp)"},
    "store a: [tp]": {"write such as `flat(dp)`": "store a: flat(dp)", "or `replicate`": "store a: replicate"},
    "store: replicate": {'in quotes: `"store"`': '"store": replicate'},
    "dims a.<headz> (out = 3)": {},
    "dims a (out = 3, out = 4)": {"keep one": "dims a (out = 3)"},
    'unmatched: chunk(dim=0, placements=["rank:0"])': {},
    "unmatched: replicate\nunmatched: [tp, ...]": {"keep one": "unmatched: replicate"},
    "let x = config": {"its keys: `config.hidden_size`": "let x = config.hidden_size"},
    "let x = heads.vocab_size": {},
    "let x = hidden_size": {},
    "let x = config.n_heads": {
        "use `config.num_attention_heads`": "let x = config.num_attention_heads",
        "or give a default: `config.n_heads ?? 32`": "let x = config.n_heads ?? 32",
    },
    "let x = config.zzz": {"give a default: `config.zzz ?? 1`": "let x = config.zzz ?? 1"},
    "let x = one_of(heads, llama)": {
        "`one_of(config.model_type, llama, mistral)`": "let x = one_of(config.other_1, llama, mistral)"
    },
    'include "std/style.shard"': {},
    "down_proj       replicate": {"write `down_proj: replicate`": "down_proj: replicate"},
    "fc.weight: [tp\nfc.bias: [tp]": {"close it with `]`": "fc.weight: [tp]\nfc.bias: [tp]"},
    "a: ['tp', -]": {},
    'require tp > 0 "so': {'close it with `"`': 'require tp > 0 "so"'},
    "a: [tp, -] if tp > 1": {"write `else`, and what is meant then": "a: [tp, -] if tp > 1 else replicate"},
    "a {\n b: replicate": {"close the block with `}`": "a {\n b: replicate\n}"},
    "a: colwise(tp,\n": {"close it": "a: colwise(tp)"},
    f"a: {'(' * 17}1": {"drop some": "a: [tp]"},
    DEEP: {"drop some": "a {\nc: replicate\n}"},
    "a: chunk(dim=0, placements=['rank:0'])": {},
}


def changed(old: str, new: str) -> str:
    """The Llama plan with one change."""
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


def at(text: str, **settings: Any) -> Callable[[], list[Found]]:
    return partial(read, text, **settings)


def including(last: str) -> None:
    """Read a file that includes one which ends so."""
    with TemporaryDirectory() as folder:
        Path(folder, "a.shard").write_text('shard 1\ninclude "b.shard"\n')
        Path(folder, "b.shard").write_text(f"shard 1\n{last}\n")
        read_plan(Path(folder, "a.shard"))


NUMBERS = "shard 1\nparam tp = 2\nparam ep = 4\nmesh (dp = world / (ep * tp), ep, tp)\nw: [tp, -]\n"
PRODUCT = "shard 1\nparam tp = 2\nmesh (dp = 4 / tp - 2, tp)\n"
NO_CONFIG = "shard 1\nlet x = config.other\n"
CASES: dict[str, Case] = {
    **{said[:50]: text_case(lines, said, ways) for said, ways in LINES.items()},
    "a mesh of more ranks": text_case(
        read,
        changed("(dp = world / tp,", "(dp = 2,"),
        {
            "write `dp = world / tp`": TEXT,
            "or run with --world 16": at(changed("(dp = world / tp,", "(dp = 2,"), world=16),
        },
    ),
    "factors that make another number": text_case(
        read,
        changed("kvr = tp / kvg", "kvr = 2"),
        {"write the last one as `tp` divided by the others": changed("kvr = tp / kvg", "kvr = tp / kvg")},
    ),
    "an axis of two sizes": text_case(
        read,
        "shard 1\nparam tp = 8\nmesh (dp = 2, tp = 4)\n",
        {
            "write `tp` alone": "shard 1\nparam tp = 4\nmesh (dp = 2, tp)\n",
            "or name the axis otherwise": "shard 1\nparam tp = 8\nmesh (dp = 2, tp_axis = 4)\n",
        },
    ),
    "an axis without a size": text_case(
        read,
        "shard 1\nmesh (dp = 4, tp)\n",
        {
            "write `tp = 2`": "shard 1\nmesh (dp = 4, tp = 2)\n",
            "or `param tp = 2` further up": "shard 1\nparam tp = 2\nmesh (dp = 4, tp)\n",
        },
    ),
    "an axis of no ranks": text_case(
        partial(read, world=2), PRODUCT, {"give `tp` another value, as in --set tp=N": at(PRODUCT, world=2, tp=1)}
    ),
    "a division that is not exact": text_case(
        partial(read, world=6, tp=4), TEXT, {"give `tp` another value, as in --set tp=N": at(TEXT, world=6, tp=2)}
    ),
    "a requirement": text_case(
        partial(read, world=6, tp=6), TEXT, {"give `tp` another value, as in --set tp=N": at(TEXT, world=6, tp=1)}
    ),
    "numbers that no one parameter makes fit": text_case(
        partial(read, world=1),
        NUMBERS,
        {"give `ep` or `tp` another value": at(NUMBERS, world=1, ep=1, tp=1)},
    ),
    "a parameter without a value": text_case(
        read, "shard 1\nparam new\n", {"give one: --set new=VALUE": at("shard 1\nparam new\n", new=3)}
    ),
    "a parameter from outside": text_case(partial(read, tpp=4), TEXT, {"did you mean `tp`?": at(TEXT, tp=4)}),
    "no config": text_case(
        partial(read, config={}),
        NO_CONFIG,
        {
            "`config=` in Python": at(NO_CONFIG, config={"other": 3}),
            "or give a default: `config.other ?? 1`": at(NO_CONFIG.replace("other", "other ?? 1"), config={}),
        },
    ),
    "no mesh": text_case(
        read,
        "shard 1\na: [tp, -]\n",
        {"write `mesh (tp = world)` further up": "shard 1\nmesh (tp = world)\na: [tp, -]\n"},
    ),
    "no style": text_case(
        read,
        "shard 1\nmesh (tp = 8)\na: colwise(tp)\n",
        {'write `include "std/styles.shard"` at the top': STYLES.replace("4", "8") + "a: colwise(tp)\n"},
    ),
    "data after flows": text_case(
        read,
        "shard 1\nmesh (dp = 2, tp = 4)\na {\n in: [dp, ...]\n}\ndata dp\n",
        {"drop `dp`": "shard 1\nmesh (dp = 2, tp = 4)\na {\n in: [-, ...]\n}\ndata dp\n"},
    ),
    "no first line": text_case(read, "sharrd 1\nmesh (tp = 8)\n"),
    "a plan that is too long": text_case(
        read, "shard 1\n" + "# a long comment\n" * 2**12, {"fold placements into ranges": "shard 1\n"}
    ),
    "files that include one another": Case(
        lambda: including('include "a.shard"'), {"take this line out": lambda: including("")}, mesh=""
    ),
    "no such plan": Case(
        lambda: load_plan("lama", config=CONFIG, world=8),
        {"did you mean `llama`?": lambda: load_plan("llama", config=CONFIG, world=8)},
        mesh="",
    ),
    "no plan of a name like that": Case(
        lambda: load_plan("nowhere/at/all.shard"),
        {"give the path of a file": lambda: load_plan(PACKAGED / "fsdp.shard", world=8)},
        mesh="",
    ),
    "no ranks": Case(
        lambda: load_plan(NUMBERS, world=0),
        {"give a whole number from 1 to": lambda: load_plan(NUMBERS, world=8)},
        mesh="",
    ),
}
NOT_FOLLOWED = {"plan/text/syntax.py:_check_version": "a newer version of the language is not there to be installed"}
