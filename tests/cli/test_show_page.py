"""The page of a scene: well formed, from one piece, true to the layouts, and safe whatever names are in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import attrs
import pytest

from shardtensor.cli.plan_report import figures
from shardtensor.cli.show_text import page, scene_of_plan
from shardtensor.layout.bind import bind
from shardtensor.mesh import read_mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.finding import Origin
from shardtensor.plan.flows.flow import read_flow
from shardtensor.plan.line import Hook, Line
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import ModuleFlows, Placed, Resolved
from shardtensor.spec.diagnostics import Source
from shardtensor.spec.parse import parse_spec
from shardtensor.spec.parts import Flat

EVIL = '</script><script>alert("x")</script>'
VOID = {"meta", "input", "link", "br", "hr", "wbr"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and keeps them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


def decoder(layers=3, mesh="dp=2, tp=2", name="model", store=True):
    """A small decoder: what a plan that was matched to it gives."""
    axes = Axes(read_mesh(mesh), data=("dp",))
    shapes = {f"{name}.embed.weight": ((32, 8), "[tp, -]")}
    for i in range(layers):
        shapes |= {
            f"{name}.layers.{i}.q.weight": ((8, 8), "[tp, -]"),
            f"{name}.layers.{i}.o.weight": ((8, 8), "[-, tp]"),
            f"{name}.layers.{i}.norm.weight": ((8,), "replicate"),
        }
    source = Source(f"{name}.q: [tp, -]\n", "some.shard")
    tensors = {}
    for each, (shape, text) in shapes.items():
        info, spec = TensorInfo(each, shape, ("out", "in") if len(shape) == 2 else ("embed",)), parse_spec(text)
        line = Line(each, value=spec, origin=Origin(source, (0, len(name))))
        stored = Flat(("dp",)) if store else None
        unit = each.rpartition(".")[0].rpartition(".")[0] if ".layers." in each else ""
        tensors[each] = Placed(info, spec, bind(spec, shape, axes.mesh), stored, unit if store else None, line)
    flow, line = read_flow("replicate partial(tp) -> replicate"), Line("o")
    modules = {
        f"{name}.layers.{i}.o": ModuleFlows({}, {"": (flow, line)}, ((Hook("hook"), line),)) for i in range(layers)
    }
    model = Model(tuple(placed.tensor for placed in tensors.values()))
    return Resolved(Plan(axes, world=axes.mesh.size), model, tensors, modules)


SPECS = [
    ("[tp, -]", (8, 6), "dp=2, tp=4"),
    ("[tp blocks(3), -] flat(dp)", (12, 6), "dp=2, tp=2"),
    ("replicate partial(tp)", (8, 8), "tp=2"),
    ("[dp, ep, tp]", (4, 4, 4), "dp=2, ep=2, tp=2"),
    ('enum([0:5] @ "rank:0/cuda:1", [5:9] @ "rank:1/cpu")', (9,), "tp=2"),
    ("replicate", (), "tp=2"),
    ("[tp, -]", (0, 6), "tp=2"),
    ("flat(dp)", (2, 4, 5, 8), "dp=3"),
]


def scene_of(text, shape, mesh):
    axes, info, spec = Axes(read_mesh(mesh)), TensorInfo("w", shape, dtype="float32"), parse_spec(text)
    placed = Placed(info, spec, bind(spec, shape, axes.mesh))
    return scene_of_plan(Resolved(Plan(axes, world=axes.mesh.size), Model((info,)), {"w": placed}, {}), "some.shard")


@pytest.mark.parametrize(("text", "shape", "mesh"), SPECS)
def test_a_page_is_well_formed_and_needs_nothing_else(text, shape, mesh):
    written = page(scene_of(text, shape, mesh))
    reader = Reader(written)
    assert not re.search(r"https?:|//[a-z]|@import|\bsrc=|url\((?!#)", written)
    for tag, said in reader.elements:
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert said.get("href", "#").startswith("#")


def test_a_page_says_what_the_terminal_says():
    texts = "".join(text for _, text in Reader(page(scene_of("[tp, -]", (8, 6), "dp=2, tp=4"))).texts)
    assert "a rank holds 2 × 6, 48 B; 2 copies, along dp" in texts
    assert "1 tp 1, ranks 1, 5" in texts
    assert texts.index("000000") < texts.index("111111") < texts.index("333333")


def test_layers_are_folded_and_each_layout_is_drawn_once():
    resolved = decoder(layers=3)
    written = page(scene_of_plan(resolved, "some.shard"))
    texts = "".join(text for _, text in Reader(written).texts)
    for names in ("model.embed.weight", *(f"model.layers.{{0..2}}.{name}.weight" for name in ("q", "o", "norm"))):
        assert texts.count(names) == 1


def test_more_layers_do_not_make_a_longer_page():
    short, long = (page(scene_of_plan(decoder(layers=n), "some.shard")) for n in (3, 120))
    assert len(long) < len(short) * 1.1


@pytest.mark.parametrize("where", ["name", "title", "dims"])
def test_names_are_only_text(where):
    resolved = decoder(layers=1, name=EVIL if where == "name" else "model", store=False)
    if where == "dims":
        first, placed = next(iter(resolved.tensors.items()))
        tensor = attrs.evolve(placed.tensor, dims=(EVIL, EVIL))
        tensors = {**resolved.tensors, first: attrs.evolve(placed, tensor=tensor)}
        resolved = attrs.evolve(resolved, tensors=tensors)
    written = page(scene_of_plan(resolved, EVIL if where == "title" else "some.shard"))
    reader = Reader(written)
    assert not any(tag == "script" for tag, _ in reader.elements)
    assert "alert(" in "".join(text for _, text in reader.texts)


def test_chosen_tensors_are_shown_alone():
    scene = scene_of_plan(decoder(), "some.shard", pattern="**.q")
    assert [list(shown.folded) for shown in scene.shown] == [["model.layers.{0..2}.q.weight"]]


COSTS = {
    "plan": "some.shard", "model": "config.json", "architecture": "SomeModel", "parameters": 10, "world": 4,
    "mesh": "(dp=2, tp=2)", "batch": 2, "seq": 8, "dtype": "bfloat16", "optimizer": "adamw", "master_weights": False,
    "checkpoint_activations": None, "hardware": "h100", "data_ranks": 2, "memory_bytes": 1 << 30, "fits": True,
    "memory": {"most": {"rank": 0, **dict.fromkeys((
        "parameters", "gradients", "optimizer", "master_weights", "buffers", "gathered", "activations", "total", "peak",
    ), 1)}},
}  # fmt: skip


def costs_of(**more):
    memory = COSTS["memory"]
    return COSTS | {"memory": memory | {"least": memory["most"]}} | more


def text_of(written):
    return "".join(text for _, text in Reader(written).texts)


def test_a_page_has_the_costs_of_a_step_or_says_why_it_has_none():
    row = {
        "phase": "forward", "kind": "all_reduce", "over": "tp", "group_size": 2, "calls": 3, "sent_bytes": 8,
        "received_bytes": 8, "seconds_each": 1e-3, "seconds": 3e-3, "where": "model.layers.*.o",
    }  # fmt: skip
    step = dict.fromkeys(("seconds", "compute_s", "optimizer_s", "inside_s", "beside_s", "tokens_per_s", "mfu"), 0.25)
    traced = costs_of(
        collectives=[row], activations=[{"where": "model.layers.*.mlp", "bytes": 3 << 20}], flops=1e12,
        recomputed_flops=0.0, step=step,
    )  # fmt: skip
    scene = scene_of_plan(decoder(), "some.shard")
    told = text_of(page(attrs.evolve(scene, costs=traced)))
    for words in ("SomeModel", "model.layers.*.o", "model.layers.*.mlp", "3.00 MiB", "250 ms estimated", "MFU 25.0 %"):
        assert words in told
    why = text_of(page(attrs.evolve(scene, costs=costs_of(not_counted="install torch & wait"))))
    assert "the step is not counted: install torch & wait" in why
    assert "model.embed.weight" in told and "model.embed.weight" in why


def test_plans_stand_side_by_side():
    one, other = (attrs.evolve(scene_of_plan(decoder(), name), costs=None) for name in ("one.shard", "other.shard"))
    written = page(one, other)
    reader = Reader(written)
    assert [tag for tag, _ in reader.elements].count("pre") == 2
    assert re.search(r"div \{ display: flex", written)
    assert "table" not in [tag for tag, _ in reader.elements]
    told = text_of(written)
    assert told.index("one.shard") < told.index("other.shard")
    assert "".join(text for tag, text in reader.texts if tag == "title") == "one.shard, other.shard"


def test_plans_are_compared_by_their_figures():
    step = {"seconds": 0.25, "tokens_per_s": 4000.0, "mfu": 0.5}
    counted = costs_of(step=step, collectives=[{"calls": 3, "received_bytes": 1 << 20}], activations=[])
    scenes = [attrs.evolve(scene_of_plan(decoder(), name), costs=costs_of(not_counted="")) for name in ("a", "b")]
    few = dict(zip(("model", "bytes of a rank"), ("SomeModel", "1 B"), strict=True))
    assert figures(scenes[0].costs) == few
    assert figures(counted) == few | {
        "estimated step": "250 ms", "tokens a second": "4,000", "MFU": "50.0 %", "received in a step": "3.00 MiB"
    }  # fmt: skip
    reader = Reader(page(*scenes, scene_of_plan(decoder(), "c")))
    cells = [text for tag, text in reader.texts if tag in ("th", "td")]
    assert cells == ["a", "b", "c", "model", "SomeModel", "SomeModel", "-", "bytes of a rank", "1 B", "1 B", "-"]
