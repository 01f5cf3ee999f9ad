"""Findings of a plan that is matched to a model: the Llama plan of the design with one line changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from plan.design_llama import CONFIG, TEXT, model, with_modules
from plan.test_findings import ATTENTION, DOWN, GATE, HEAD, TIE, USE, _tied
from plan.test_findings import CASES as FINDINGS

from fixes.case import Case
from fixes.corrected import Found, Right, of_findings, text_case
from shardtensor.errors import SpecError
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.diagnostics import Source

Changes = Sequence[tuple[str, str]]


def checked(text: str, world: int = 8, of: Model | None = None, **params: Any) -> list[Found]:
    """What a check of a plan finds."""
    try:
        plan = read_plan(Source(text, "specs/llama.shard"), config=CONFIG, world=world, params=params)
    except SpecError as error:
        return of_findings(error.findings)
    return of_findings(check_plan(resolve(plan, of or model(2))))


def changed(*changes: tuple[str, str], text: str = TEXT) -> str:
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the plan"
        text = text.replace(old, new)
    return text


def at(*changes: tuple[str, str], **options: Any) -> Callable[[], list[Found]]:
    return partial(checked, changed(*changes), **options)


BLOCK = "\n            "
STORE = USE + "store "
WAYS: dict[str, dict[str, Changes | Callable[[], list[Found]]]] = {
    "an axis that heads do not fill: E205": {
        "use the factor `kvg` (8): `colwise_shared(kvg, copies=kvr, unit=hd)`": []
    },
    "two rules: E302": {"narrow one pattern": []},
    "no rule: E301": {},
    "no rule, for the part after the braces: E301": {},
    "no rule, for a block: E301": {},
    "no rule, for a block below stars: E301": {},
    "no rule, for an empty alternative: E301": {},
    "no rule near: E301": {"write a rule for it: `PATTERN: LAYOUT`": []},
    "numbers that are not dealt evenly: E205": {
        "choose dp from 1, 2": at(("layers.*", "layers.<dp>"), world=16),
    },
    "an axis of factors deals nothing: E201": {
        "write one of dp, kvg, kvr between `<` and `>`": [("layers.*", "layers.<dp>")]
    },
    "flat over devices: E204": {"write the layout in axes": [(USE, STORE + "**.mlp.down_proj: flat(dp)\n")]},
    "two stores: E302": {
        "narrow one pattern": [
            (USE, STORE + "model.layers.**: flat(dp) by model.layers.*\nstore model.norm: replicate\n")
        ],
    },
    "a style before a tensor: E303": {
        "write a layout for the tensor, such as `[tp, -]`": [
            (DOWN, "down_proj {\nweight: [-, tp]\nout: partial(tp) -> stream\n}")
        ],
        "or name the module `model.layers.0.mlp.down_proj`, without `.weight`": [],
    },
    "tied shapes: E304": {"tie tensors that are one in the model": []},
    "ties in a circle: E304": {"tie all names to the one that has a rule": []},
    "two rules that agree: W302": {
        "drop one of them": [],
        "or narrow its pattern": [(GATE, GATE.replace("{gate,up}", "up") + BLOCK + "gate_proj: colwise(tp)")],
    },
    "a rule for nothing: W301": {
        "correct the pattern": [],
        "or write `optional` before it": [(GATE, GATE + BLOCK + "optional gate_proj.bias: [tp]")],
    },
    "an alternative for nothing: W303": {"correct it, or drop it from the braces": []},
    "an axis that idles: W304": {
        "cut something over pp": [
            ("mesh (dp = world / tp", "mesh (pp = 2, dp = world / tp / 2"),
            (USE, STORE + "model.norm: flat(pp)\n"),
            ("data dp", "data dp*pp"),
        ],
        "write `data pp`": at(
            ("mesh (dp = world / tp", "mesh (pp = 2, dp = world / tp / 2"), ("data dp", "data pp"), world=16
        ),
        "or leave the axis out": [],
    },
    "a loss whose head is whole: E403": {
        "cut the head, `vocab_head(tp)`": [],
        "or drop `use cross_entropy()`": [(HEAD, "lm_head: replicate"), (USE, "")],
    },
    "a large copy: W306": {
        "cut it over an axis": [],
        "or keep it flat with `store`": at((HEAD, "lm_head: replicate"), (USE, "store lm_head: flat(dp)\n"), world=16),
    },
}
TIED = "tie lm_head.weight = model.embed_tokens.weight"
BY_NAME = {name: (changed(*changes), options) for name, changes, options in FINDINGS}


def shown(name: str) -> Case:
    """The case of an example whose finding the tests show in full."""
    text, options = BY_NAME[name]
    look = partial(checked, **options)
    ways: dict[str, Right] = {
        words: right if callable(right) else changed(*right) for words, right in WAYS[name].items()
    }
    return text_case(look, text, ways, name.rpartition(": ")[2])


def small(text: str, tensors: Sequence[str], classes: Mapping[str, str] | None = None) -> list[Found]:
    """What is found in the lines of a small plan for matrices of these names, with classes of modules."""
    infos = {path: ModuleInfo(name) for path, name in (classes or {}).items()}
    model = Model(tuple(TensorInfo(name, (8, 8), ("out", "in")) for name in tensors), "", infos)
    plan = read_plan(Source(f"shard 1\nmesh (dp = world / 2, pp = 2)\n{text}\n", "<plan>"), world=4)
    return of_findings(check_plan(resolve(plan, model)))


def called(model: Model) -> Model:
    """The model whose modules are of the classes that they are of in transformers."""
    kinds = {
        "proj": "Linear",
        "head": "Linear",
        "tokens": "Embedding",
        "norm": "LlamaRMSNorm",
        "attn": "LlamaAttention",
    }
    return attrs.evolve(
        model,
        modules={
            path: attrs.evolve(info, class_name=kinds.get(path.rpartition("_")[2].rpartition(".")[2], "LlamaModule"))
            for path, info in model.modules.items()
        },
    )


LAYERS = partial(small, tensors=("h.0.w", "h.1.w"))
LISTED = partial(LAYERS, classes={"": "Net", "h": "ModuleList", "h.0": "Block", "h.1": "Block"})
ONE = called(_tied(("model.embed_tokens.weight", "lm_head.weight")))
STORED = "**: replicate\ndata dp*pp\nstore "
CASES: dict[str, Case] = {
    **{name: shown(name) for name in WAYS},
    "two rules": text_case(
        LAYERS,
        "**: [dp, -]\nh.1: [pp, -]",
        {
            "narrow one pattern": "h.0: [dp, -]\nh.1: [pp, -]",
        },
    ),
    "ties of alternatives": text_case(
        partial(small, tensors=("g.0.w", "g.1.w", "h.0.w", "h.1.w")),
        "g.*: replicate\ntie h.*.w = g.{0,1}.w",
        {
            "write as many alternatives on the right as on the left": "g.*: replicate\ntie h.{0,1}.w = g.{0,1}.w",
            "or one name": "g.*: replicate\ntie h.*.w = g.0.w",
        },
        "E304",
    ),
    "an attribute of another name": text_case(
        partial(checked, of=called(with_modules({"num_key_value_group": 4}))),
        TEXT,
        {
            "did you mean `num_key_value_group`?": partial(
                checked,
                changed(("local num_key_value_groups", "local num_key_value_group")),
                of=called(with_modules({"num_key_value_group": 4})),
            )
        },
    ),
    "an argument that is not there": text_case(
        partial(checked, of=called(with_modules({"num_key_value_groups": 4}))),
        changed((ATTENTION, f"{ATTENTION[:-1]}in other: replicate{BLOCK}q")),
        {
            "name one of them, or write `in` alone": partial(
                checked, TEXT, of=called(with_modules({"num_key_value_groups": 4}))
            )
        },
    ),
    "tied in the plan, two in the module": text_case(
        partial(checked, of=called(_tied())),
        changed((TIE, TIED)),
        {
            "drop the line": changed((TIE, "")),
            "give it a condition (`if config.tie_word_embeddings ?? false`)": TEXT,
            "or tie them in the model": partial(checked, changed((TIE, TIED)), of=ONE),
        },
    ),
    "tied in the module alone": text_case(
        partial(checked, of=ONE),
        changed((HEAD, "lm_head: replicate"), (USE, "")),
        {f"add the line `{TIED}`": changed((HEAD, "lm_head: replicate"), (USE, ""), (TIE, TIED))},
    ),
    "tied to two": text_case(
        partial(small, tensors=("g.w", "h.w", "i.w")),
        "{g,h}: replicate\ntie i.w = g.w\ntie i.w = h.w",
        {"keep one of the lines": "{g,h}: replicate\ntie i.w = g.w"},
        "E304",
    ),
    "dealt over two axes": text_case(
        partial(small, tensors=("a.0.b.0.w", "a.0.b.1.w", "a.1.b.0.w", "a.1.b.1.w")),
        "a.<dp>.b.<pp>.w: replicate",
        {"keep one `<axis>` and write `*` for the other": "a.<dp>.b.*.w: replicate"},
    ),
    "a gather unit that is never called": text_case(
        LISTED, STORED + "**: flat(dp) by h", {"write `by h.*`": STORED + "**: flat(dp) by h.*"}
    ),
    "a gather unit stored over different axes": text_case(
        LAYERS,
        STORED + "h.0: flat(dp)\nstore h.1: flat(pp)",
        {
            "store them alike": STORED + "h.0: flat(dp)\nstore h.1: flat(dp)",
            "or name other modules after `by`": STORED + "h.0: flat(dp) by h.0\nstore h.1: flat(pp) by h.1",
        },
    ),
    "a store for nothing": text_case(
        LAYERS,
        STORED + "g.**: flat(dp)",
        {"correct the pattern": STORED + "h.**: flat(dp)", "or drop the line": STORED + "**: replicate"},
        "W301",
    ),
    "a gather unit for nothing": text_case(
        LAYERS,
        STORED + "**: flat(dp) by g.*",
        {"correct the pattern": STORED + "**: flat(dp) by h.*", "or drop it": STORED + "**: flat(dp)"},
        "W301",
    ),
    "empty pieces": text_case(
        LAYERS,
        "**: [dp*pp balanced unit(4), -]",
        {"cut over fewer ranks": "**: [pp balanced unit(4), -]", "or another dim": "**: [-, dp*pp]"},
        "W305",
    ),
    "more bytes on some ranks": text_case(
        LAYERS,
        "**: [dp sizes(7, 1), -]",
        {"cut the large tensors evenly": "**: [dp, -]", "or over other axes": "**: [pp, -]"},
        "W305",
    ),
}
