"""Errors of the text of a spec, and of the values that specs are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spec.test_spec_errors import MESSAGES, text_of

from fixes.case import Case
from fixes.corrected import in_spec, text_case
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.nodes import Replicate, Spec
from shardtensor.spec.parse import as_spec, parse_spec
from shardtensor.spec.placement import MAX_PLACEMENTS, Placements, parse_placement

RANGE = 'chunk(dim=0, placements=["rank:0-1"]'
LONG = "chunk(dim=0, placements=[" + ", ".join(f'"rank:{rank}"' for rank in range(20_000)) + "])"
WAYS: dict[str, dict[str, str]] = {
    "[tp, -": {"close it with `]`": "[tp, -]"},
    "flat(dp": {"close it with `)`": "flat(dp)"},
    "(tp, -)": {"as in `[tp, -]`": "[tp, -]"},
    "[tp, ]": {"as in `[tp, -]`": "[tp, -]"},
    'chunk(dim=0, placements=["rank:0])': {'close it with `"`': 'chunk(dim=0, placements=["rank:0"])'},
    "[tp dp]": {"a product is `tp*dp`": "[tp*dp]"},
    "tp": {"`[..., tp]` to cut a dim": "[..., tp]"},
    "[tp, -] unit(128)": {"as in `[tp unit(128), -]`": "[tp unit(128), -]"},
    "[tp flat(dp)]": {"as in `[tp, -] flat(dp)`": "[tp] flat(dp)"},
    '[tp] chunk(dim=0, placements=["rank:0"])': {
        'as in `chunk(dim=0, placements=["rank:0-3/cuda:0-3"])`': 'chunk(dim=0, placements=["rank:0"])'
    },
    "[tp balanced(3), -]": {"drop the brackets": "[tp balanced, -]"},
    "[tp unit(hd)]": {"as in `unit(128)`": "[tp unit(128)]"},
    "[tp unit(2) unit(3)]": {"keep one": "[tp unit(2)]"},
    "[tp, -] only(ep, 1) only(ep, 1)": {"keep one": "[tp, -] only(ep, 1)"},
    "[tp, -] flat(dp) flat(cp)": {"keep one": "[tp, -] flat(dp)"},
    "[tp balanced sizes(2, 1)]": {"drop one": "[tp sizes(2, 1)]"},
    "[tp, tp]": {"keep one of the two": "[tp, -]", "make the mesh of two axes": "[tp, dp]"},
    "[tp, -] flat(dp) partial(tp)": {
        "keep one of the two": "[tp, -] flat(dp)", "make the mesh of two axes": "[tp, -] flat(dp) partial(cp)",
    },
    "[out: tp, -]": {"write [out: tp]": "[out: tp]", "every dim in order": "[tp, -]"},
    "[out: tp, out: dp]": {"keep one": "[out: tp]"},
    "[tp, ..., ...]": {"keep one": "[tp, ...]"},
    "flat(dp, 2, (4, 2), 3)": {"as in `flat(dp)`": "flat(dp)"},
    "partial(tp, op=mean)": {
        "one of sum, avg, max, min": "partial(tp, op=avg)", "`partial(a*b)`": "partial(tp*mean)",
    },
    "flat(dp, ep)": {"as in `flat(dp)`": "flat(dp)", "`flat(a*b)`": "flat(dp*ep)"},
    "flat(dp, rwo)": {"did you mean `row`?": "flat(dp, row)", "`flat(a*b)`": "flat(dp*rwo)"},
    'chunk(dim=0, placements=["rank:0"]) partial(tp)': {"axes too, as in `[tp, -] flat(dp)`": "[tp, -] partial(dp)"},
    f"{RANGE}, dim=1)": {"keep one": f"{RANGE})"},
    "chunk(dim=0, placements=tp)": {'as in `chunk(dim=0, placements=["rank:0-3/cuda:0-3"])`': f"{RANGE})"},
    r'chunk(dim=0, placements=["a\qb"])': {r"write `\\` for a backslash": r'chunk(dim=0, placements=["a\\qb"])'},
    'chunk(dim=0, placements=["rank:0", "rnak:1/cpu"])': {
        "did you mean rank:<n>?": 'chunk(dim=0, placements=["rank:0", "rank:1/cpu"])'
    },
    'chunk(dim=0, placements=["rank:0/cuba:0"])': {"did you mean cuda?": 'chunk(dim=0, placements=["rank:0/cuda:0"])'},
    'chunk(dim=0, placements=["rank:0-3/cuda:0-2"])': {
        "give both ranges one length": 'chunk(dim=0, placements=["rank:0-2/cuda:0-2"])'
    },
    'chunk(dim=0, placements=["rank:3-0"])': {"the smaller number first": 'chunk(dim=0, placements=["rank:0-3"])'},
    'chunk(dim=0, placements=["rank:0-99999999999"])': {"name fewer ranks": f"{RANGE})"},
    f"{RANGE}, sizes=(1, 2, 3))": {"one size for each placement": f"{RANGE}, sizes=(1, 2))"},
    'grid(splits=(2, 2), placements=["rank:0-2"])': {
        "one placement for each piece": 'grid(splits=(2, 2), placements=["rank:0-3"])'
    },
    'enum([0:5] @ "rank:0", [4:9] @ "rank:1")': {
        "give each element to one shard": 'enum([0:5] @ "rank:0", [5:9] @ "rank:1")'
    },
    " ": {"write `replicate`": "replicate", "dims as in `[tp, -]`": "[tp, -]"},
    "[tp, 'dp]": {"drop it": "[tp, dp]"},
    "chunk(0, ['rank:0'])": {},
    "[tp" + " (" * 17: {"drop some": "[tp]"},
    LONG: {"fold placements into ranges": 'chunk(dim=0, placements=["rank:0-19999"])'},
}  # fmt: skip
"""Words of the way out, and the text that they make; nothing where it says what to write instead."""

# what goes wrong, words of the way out, what they say to do
VALUES: list[tuple[Callable[[], Any], str, Callable[[], Any]]] = [
    (lambda: Spec("tp*dp"), "a tuple in Python: ('tp', 'dp')", lambda: Spec(("tp", "dp"))),
    (lambda: Spec("-"), "a whole dim is None in Python", lambda: Spec(None)),
    (lambda: Spec("[tp]"), "parse_spec reads text", lambda: parse_spec("[tp]")),
    (lambda: Spec(out=None), "leave it out: it is whole", lambda: Spec()),
    (lambda: Replicate().partial("tp", op="prod"), "write one of sum, avg", lambda: Replicate().partial("tp", "avg")),
    (lambda: ChunkShardingSpec("out", ["rank:0"]), 'Spec(out="tp") cuts a dim by name', lambda: Spec(out="tp")),
    (lambda: ChunkShardingSpec("the rows", ["rank:0"]), "give its number", lambda: ChunkShardingSpec(0, ["rank:0"])),
    (
        lambda: ChunkShardingSpec(0, ["rank:0"], sizes=(1, 2)),
        "give one size for each placement",
        lambda: ChunkShardingSpec(0, ["rank:0"], sizes=(3,)),
    ),
    (
        lambda: EnumerableShardingSpec([3]),
        "make it with ShardMetadata(...)",
        lambda: EnumerableShardingSpec([ShardMetadata([0], [3])]),
    ),
    (lambda: parse_placement("rank:0-3/cpu"), "write it in a list of placements", lambda: Placements(["rank:0-3/cpu"])),
    (lambda: parse_placement("rank:0/"), 'as in "rank:0/cpu"', lambda: parse_placement("rank:0/cpu")),
    (lambda: parse_placement("cpu:"), "did you mean cpu:<n>?", lambda: parse_placement("cpu:0")),
    (lambda: parse_spec(LONG), "or raise max_length", lambda: parse_spec(LONG, max_length=len(LONG))),
    (
        lambda: Placements(["rank:0-1048575", "rank:1048576"]),
        "name fewer ranks",
        lambda: len(Placements([f"rank:0-{MAX_PLACEMENTS - 1}"])),
    ),
    (lambda: as_spec(3), 'write text such as "[tp, -]"', lambda: as_spec("[tp, -]")),
    (lambda: GridShardingSpec((2, 2), ["rank:0-2"]), "for each piece", lambda: GridShardingSpec((3,), ["rank:0-2"])),
]  # fmt: skip

TEXTS = {text_of(message.strip("\n")): {} for message in MESSAGES if "  fix: " in message} | WAYS
CASES: dict[str, Case] = {
    **{text[:60]: text_case(in_spec, text, ways) for text, ways in TEXTS.items()},
    **{words: Case(wrong, {words: right}, mesh="") for wrong, words, right in VALUES},
}
