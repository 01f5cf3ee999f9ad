"""What holds of every plan and model: one layout a tensor, whatever the order of lines; the boxes of ranks tile it."""

from __future__ import annotations

import time

import attrs
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as some
from plan.design_llama import model, resolved

from shardtensor.layout.box import check_tiling
from shardtensor.mesh import Mesh, read_mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.report import folded
from shardtensor.plan.line import Line, Store, Tie, Unmatched
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.spec.nodes import Replicate
from shardtensor.spec.parse import parse_spec
from shardtensor.spec.parts import Flat

MODEL = Model(
    (
        TensorInfo("embed.weight", (24, 8), ("vocab", "embed")),
        *(
            TensorInfo(f"layers.{i}.{name}.weight", shape, ("out", "in"))
            for i in range(3)
            for name, shape in (("q", (8, 8)), ("k", (4, 8)), ("up", (12, 8)), ("down", (8, 12)))
        ),
        *(TensorInfo(f"layers.{i}.norm.weight", (8,), ("embed",)) for i in range(3)),
        *(TensorInfo(f"layers.0.experts.{e}.w.weight", (4, 8), ("out", "in")) for e in range(4)),
        TensorInfo("head.weight", (24, 8), ("out", "in")),
    )
)
AXES = Axes(Mesh((("dp", 2), ("a", 2), ("b", 2))), {"tp": ("a", "b")}, ("dp",))
PATTERNS = some.sampled_from(
    ["**", "embed", "layers.*", "layers.*.{q,k}", "layers.*.q", "layers.*.{up,down}", "**.norm", "layers.<dp>.q",
     "layers.0.experts.<dp>", "layers.*.*.weight", "head.weight", "layers.{0,1}.k", "nothing", "lay.*"]
)  # fmt: skip
SPECS = some.sampled_from(
    ["replicate", "[tp, -]", "[-, tp]", "[a, ...]", "[..., b]", "[out: tp]", "[in: a unit(2)]", "[dp, tp]", "[tp]",
     "[tp balanced, -]", "[tp pad(16), -]", "[a blocks(2), -]", "[embed: a]", "[a, b]", "[tp unit(3), -]", "[-, -, a]"]
).map(parse_spec)  # fmt: skip
LINES = some.lists(
    some.builds(Line, PATTERNS, value=SPECS, is_optional=some.booleans()),
    max_size=6,
)  # fmt: skip
PLANS = some.builds(
    lambda lines, ties, unmatched: Plan(AXES, tuple(lines), ties=tuple(ties), unmatched=unmatched),
    LINES,
    some.lists(some.sampled_from([Tie("head.weight", "embed.weight"), Tie("layers.*.k.weight", "layers.*.q.weight")])),
    some.sampled_from([None, Unmatched(Replicate())]),
)


@given(PLANS)
@examples(200)
def test_every_tensor_has_one_layout_or_an_error(plan):
    found = resolve(plan, MODEL)
    assert set(found.tensors) <= set(MODEL.by_name)
    if not found.errors:
        assert list(found.tensors) == list(MODEL.by_name)
    assert bool(set(MODEL.by_name) - set(found.tensors)) <= bool(found.errors)


@given(PLANS, some.randoms(use_true_random=False))
@examples(100)
def test_order_of_lines_does_not_matter(plan, random):
    lines = list(plan.lines)
    random.shuffle(lines)
    one, other = resolve(plan, MODEL), resolve(attrs.evolve(plan, lines=tuple(lines)), MODEL)
    assert {n: p.layout for n, p in one.tensors.items()} == {n: p.layout for n, p in other.tensors.items()}
    assert sorted(f.code for f in one.errors) == sorted(f.code for f in other.errors)


@given(PLANS)
@examples(100)
def test_the_boxes_of_ranks_tile_every_tensor(plan):
    for placed in resolve(plan, MODEL).tensors.values():
        layout = placed.layout
        boxes = {box: rank for rank in range(8) for box in layout.boxes(rank)}
        check_tiling([(rank, box) for box, rank in boxes.items() if box.numel], layout.shape)


@given(PLANS)
@examples(100)
def test_folding_loses_nothing(plan):
    findings = resolve(plan, MODEL).findings
    assert {f.code for f in folded(findings)} == {f.code for f in findings}


def test_experts_are_dealt_in_order():
    line = Line("layers.0.experts.<dp>", value=parse_spec("[tp, -]"))
    found = resolve(Plan(AXES, (line, Line("**", value=Replicate(), is_optional=True))), MODEL)
    assert [f.code for f in found.errors] == ["E302"] * 4
    whole = (Line("**", value=Replicate()), Line("layers.0.experts.<dp>", value=Replicate()))
    for lines in (whole, whole[::-1]):  # one says where experts live, the other that they live everywhere
        assert {f.code for f in resolve(Plan(AXES, lines), MODEL).errors} == {"E302"}
    others = [name for name in MODEL.by_name if not name.startswith("layers.0.experts.")]
    found = resolve(Plan(AXES, (line, *(Line(name, value=Replicate()) for name in others))), MODEL)
    assert not found.errors
    specs = [str(found.tensors[f"layers.0.experts.{e}.w.weight"].spec) for e in range(4)]
    assert specs == [f"[tp, -] only(dp, {i})" for i in (0, 0, 1, 1)]
    assert not found.tensors["layers.0.experts.0.w.weight"].layout.boxes(4)


def test_a_tied_name_takes_the_layout_and_its_own_rules_are_not_used():
    lines = (Line("**", value=Replicate()), Line("head", value=parse_spec("[tp, -]")))
    found = resolve(Plan(AXES, lines, ties=(Tie("head.weight", "embed.weight"),)), MODEL)
    assert found.tensors["head.weight"].tied_to == "embed.weight"
    assert found.tensors["head.weight"].layout is found.tensors["embed.weight"].layout


def test_a_tied_name_that_files_do_not_keep_is_there():
    without = Model(tuple(t for t in MODEL.tensors if t.name != "head.weight"))
    lines = (Line("**", value=Replicate()), Line("head", "out", None, module="head"))
    found = resolve(Plan(AXES, lines, ties=(Tie("head.weight", "embed.weight"),)), without)
    assert not found.errors and list(found.tensors)[-1] == "head.weight" and "head" in found.modules


def test_alternatives_of_a_tie_go_pair_by_pair():
    tie = Tie("layers.*.{q,up}.weight", "layers.*.{down,k}.weight")
    tensors = tuple(attrs.evolve(t, shape=(8, 8)) for t in MODEL.tensors)
    found = resolve(Plan(AXES, (Line("**", value=Replicate()),), ties=(tie,)), Model(tensors))
    assert found.tensors["layers.2.q.weight"].tied_to == "layers.2.down.weight"
    assert found.tensors["layers.1.up.weight"].tied_to == "layers.1.k.weight"


def test_gather_units():
    lines, store = (Line("**", value=Replicate()),), Store("**", Flat("dp"), ("layers.*", "layers.*.q"))
    found = resolve(Plan(AXES, lines, (store,)), MODEL)
    units = {name: placed.unit for name, placed in found.tensors.items()}
    assert (units["layers.1.q.weight"], units["layers.1.k.weight"], units["head.weight"]) == (
        "layers.1.q", "layers.1", "",
    )  # fmt: skip
    tie = Tie("layers.0.k.weight", "layers.1.k.weight")
    tied = resolve(Plan(AXES, lines, (store,), (tie,)), MODEL)
    assert tied.tensors["layers.0.k.weight"].unit == tied.tensors["layers.1.k.weight"].unit == ""


def test_time_does_not_grow_with_ranks():
    def seconds(world: int) -> float:
        plan = resolved(world=world).plan
        began = time.perf_counter()
        for _ in range(3):
            resolve(plan, model())
        return time.perf_counter() - began

    seconds(8)
    assert seconds(16384) < 10 * seconds(8) + 0.1


def test_experts_of_many_ranks_are_quick():
    tensors = tuple(TensorInfo(f"l.{i}.e.{e}.w", (64, 64)) for i in range(8) for e in range(64))
    plan = Plan(Axes(read_mesh("dp=256, ep=64")), (Line("l.*.e.<ep>", value=Replicate()),))
    began = time.perf_counter()
    assert len(resolve(plan, Model(tensors)).tensors) == 512
    assert time.perf_counter() - began < 2
