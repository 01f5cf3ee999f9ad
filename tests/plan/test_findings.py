"""Every finding of `check`, in full: the texts are in findings.txt, under the names of the cases."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from plan.design_llama import CONFIG, model, report, with_modules

from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo

BELOW = "\n            "
DOWN = "down_proj:      rowwise(tp, to=stream)"
GATE = "{gate,up}_proj: colwise(tp)"
NORM = "    norm: along(stream)\n"
HEAD = "lm_head: vocab_head(tp, pad=64, from=stream)"
TIED_TO = "tie lm_head.weight = model."
TIE = "tie lm_head.weight = model.embed_tokens.weight if config.tie_word_embeddings ?? false"
ATTENTION = "in: stream -> replicate\n            q"
USE = "use cross_entropy()\n"
BY_HAND = """down_proj {
                weight: [tp balanced unit(1024), -]
                in: [..., tp] -> replicate
                out: [..., tp balanced unit(1024)] -> replicate
            }"""


def _tied(*groups: tuple[str, ...]) -> Model:
    modules = {path: ModuleInfo("Llama", (), {"num_key_value_groups": 4}) for path in model().paths}
    return Model(model().tensors, "the module", modules, groups, CONFIG)


def _norm_called(leaf: str) -> Model:
    name = "model.norm.weight"
    tensors = (attrs.evolve(t, name=f"model.norm.{leaf}") if t.name == name else t for t in model().tensors)
    return Model(tuple(tensors), config=CONFIG)


EXTRA = Model((*model().tensors, TensorInfo("model.extra.scale", (8, 8))), config=CONFIG)

CASES = [
    (
        "an axis that heads do not fill: E205",
        [("colwise_shared(kvg, copies=kvr, unit=hd)", "colwise(tp, unit=hd)")],
        {"world": 16, "tp": 16},
    ),
    ("a number of dims: E202", [(NORM, "    norm.weight: [tp, -]\n")], {}),
    ("two rules: E302", [("down_proj: ", "*_proj:    ")], {}),
    ("no rule: E301", [("{gate,up}", "{gate,upp}")], {}),
    ("no rule, for the part after the braces: E301", [("{gate,up}_proj", "{gate,up}_porj")], {}),
    ("no rule, for a block: E301", [("layers.*", "layer.*")], {}),
    ("no rule, for a block below stars: E301", [("layers.* {", "**.layerz.* {")], {}),
    ("no rule, for an empty alternative: E301", [("{gate,up}", "{gate,}")], {}),
    ("no rule, for other layers: E301", [("layers.* {", "layers.{0,1} {")], {}),
    ("no rule near: E301", [(NORM, "")], {}),
    ("elements: E205", [(DOWN, "down_proj.weight: [tp*dp, -]")], {"world": 24}),
    ("a name of a dim: E203", [(DOWN, "down_proj.weight: [outt: tp]")], {}),
    ("dims without names: E203", [(NORM, NORM + "    extra.scale: [out: tp]\n")], {"of": EXTRA}),
    ("blocks: E206", [(DOWN, "down_proj.weight: [tp blocks(3), -]")], {}),
    ("blocks in proportion: E206", [(DOWN, "down_proj.weight: [tp blocks(4, 1), -]")], {}),
    ("a unit: E207", [(DOWN, "down_proj.weight: [tp unit(100), -]")], {}),
    ("the count of sizes: E208", [(DOWN, "down_proj.weight: [tp sizes(2048, 2048), -]")], {}),
    ("the sum of sizes: E208", [(DOWN, "down_proj.weight: [kvr sizes(4095), -]")], {}),
    ("sizes and units: E208", [(DOWN, "down_proj.weight: [dp unit(1024) sizes(2000, 2096), -]")], {"world": 16}),
    ("boxes: E209", [(DOWN, 'down_proj.weight: enum([0:4096, 0:14335] @ "rank:0/cpu")')], {}),
    ("numbers that are not dealt evenly: E205", [("layers.*", "layers.<dp>")], {"world": 40}),
    ("an axis of factors deals nothing: E201", [("layers.*", "layers.<tp>")], {}),
    ("flat over an axis that cuts: E204", [(USE, USE + "store **.mlp.down_proj: flat(tp)\n")], {}),
    (
        "flat over devices: E204",
        [
            (DOWN, 'down_proj.weight: chunk(dim=0, placements=["rank:0-7/cpu"])'),
            (USE, USE + "store **.mlp.down_proj: flat(dp)\n"),
        ],
        {},
    ),
    ("partial: E404", [(DOWN, "down_proj.weight: [-, tp] partial(dp)")], {}),
    ("two flows: E302", [(GATE, GATE + BELOW + "gate_proj {\n                out: replicate\n            }")], {}),
    ("two stores: E302", [(USE, USE + "store **: flat(dp) by model.layers.*\nstore model.norm: replicate\n")], {}),
    ("a style before a tensor: E303", [(DOWN, "down_proj.weight: rowwise(tp)")], {}),
    ("an attribute: E303", [], {"of": with_modules({"num_key_value_group": 4})}),
    (
        "an argument: E303",
        [(ATTENTION, f"{ATTENTION[:-1]}in attention_maks: replicate{BELOW}q")],
        {"of": with_modules({"num_key_value_groups": 4})},
    ),
    (
        "an attribute that is not even: E205",
        [],
        {"of": with_modules({"num_key_value_groups": 3}), "world": 16, "tp": 16},
    ),
    ("tied in the plan, two in the module: E304", [("config.tie_word_embeddings ?? false", "true")], {"of": _tied()}),
    (
        "tied in the module alone: E304",
        [(HEAD, "lm_head: replicate")],
        {"of": _tied(("model.embed_tokens.weight", "lm_head.weight"))},
    ),
    ("tied shapes: E304", [(TIE, "tie lm_head.weight = model.norm.weight")], {}),
    (
        "ties in a circle: E304",
        [(TIE, f"{TIED_TO}embed_tokens.weight\ntie model.embed_tokens.weight = lm_head.weight")],
        {},
    ),
    ("alternatives that do not pair: E304", [(TIE, "tie model.norm.weight = model.{a,b}.weight")], {}),
    ("two rules that agree: W302", [(GATE, GATE + BELOW + "gate_proj.weight: [tp, -]")], {}),
    ("a rule for nothing: W301", [(GATE, GATE + BELOW + "gate_proj.bias: [tp]")], {}),
    (
        "a rule for nothing in a style: W301",
        [(NORM, NORM.replace("along(stream)", "colwise(tp)"))],
        {"of": _norm_called("scale")},
    ),
    ("a store for nothing: W301", [(USE, USE + "store modl.**: flat(dp) by modl.layers.*\n")], {}),
    ("an alternative for nothing: W303", [("{gate,up}", "{gate,up,down2}")], {}),
    ("an axis that idles: W304", [("mesh (dp = world / tp", "mesh (pp = 2, dp = world / tp / 2")], {"world": 16}),
    ("empty and unequal: W305", [(DOWN, BY_HAND)], {}),
    ("a loss whose head is whole: E403", [(HEAD, "lm_head: replicate")], {}),
    ("a large copy: W306", [(HEAD, "lm_head: replicate"), (USE, "")], {}),
    ("padding: N002", [("vocab_embedding(tp, pad=64", "vocab_embedding(tp, pad=500")], {}),
    ("fallen to unmatched: N003", [(NORM, ""), (USE, USE + "unmatched: replicate\n")], {}),
]
TEXTS = dict(
    part.split("\n", 1) for part in re.split(r"(?m)^## ", (Path(__file__).parent / "findings.txt").read_text())[1:]
)


@pytest.mark.parametrize(("name", "changes", "options"), CASES, ids=[case[0] for case in CASES])
def test_every_finding_in_full(name, changes, options):
    assert report(*changes, **options) == TEXTS[name].rstrip("\n")


def test_every_text_has_a_case():
    assert list(TEXTS) == [case[0] for case in CASES]


def test_the_plan_itself_has_no_finding():
    assert report() == "" == report(world=16, tp=16) == report(world=8, sp=True)
