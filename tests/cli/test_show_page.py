"""The page of a scene: well formed, from one piece, true to the layouts, and safe whatever names are in it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import attrs
import pytest

from shardtensor.cli.page.markup import Markup, data, el
from shardtensor.cli.page.page import page, segments
from shardtensor.cli.scene import scene_of_plan, scene_of_spec
from shardtensor.layout.bind import bind
from shardtensor.mesh import read_mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.origin import Origin
from shardtensor.plan.flows.flow import read_flow
from shardtensor.plan.line import Hook, Line
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Passing, Placed, Resolved
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
    modules = {f"{name}.layers.{i}.o": Passing({}, {"": (flow, line)}, ((Hook("hook"), line),)) for i in range(layers)}
    model = Model(tuple(placed.tensor for placed in tensors.values()))
    return Resolved(Plan(axes, world=axes.mesh.size), model, tensors, modules)


def known(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


SPECS = [
    ("[tp, -]", (8, 6), "dp=2, tp=4", ()),
    ("[tp blocks(3), -] flat(dp)", (12, 6), "dp=2, tp=2", ("[dp, tp]",)),
    ("replicate partial(tp)", (8, 8), "tp=2", ("[tp, -]", "replicate")),
    ("[dp, ep, tp]", (4, 4, 4), "dp=2, ep=2, tp=2", ("replicate",)),
    ('enum([0:5] @ "rank:0/cuda:1", [5:9] @ "rank:1/cpu")', (9,), "*=2", ('chunk(dim=0, placements=["rank:1/cpu"])',)),
    ("replicate", (), "tp=2", ()),
    ("[tp, -]", (0, 6), "tp=2", ("[-, tp]",)),
    ("flat(dp)", (2, 4, 5, 8), "dp=3", ("replicate",)),
]


def scene_of(text, shape, mesh, to=()):
    return scene_of_spec(text, shape, read_mesh(int(mesh[2:]) if mesh.startswith("*") else mesh), to=to)


@pytest.mark.parametrize(("text", "shape", "mesh", "to"), SPECS)
def test_a_page_is_well_formed_and_needs_nothing_else(text, shape, mesh, to):
    written = page(scene_of(text, shape, mesh, to))
    reader = Reader(written)
    assert not re.search(r"https?:|//[a-z]|@import|\bsrc=|url\((?!#)", written.replace('"use strict"', ""))
    for tag, said in reader.elements:
        assert tag not in ("link", "img", "iframe", "object")
        assert said.get("href", "#").startswith("#")
    identifiers = [said["id"] for _, said in reader.elements if "id" in said]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize(("text", "shape", "mesh", "to"), SPECS)
def test_what_a_part_says_is_what_its_ranks_hold(text, shape, mesh, to):
    scene = scene_of(text, shape, mesh, to)
    layout = scene.shown[0].layout
    (figure,) = known(page(scene))
    assert len(figure["cells"]) == scene.axes.mesh.size
    for rank, number in enumerate(figure["cells"]):
        boxes = [[list(box.offsets), list(box.sizes)] for box in layout.boxes(rank)]
        if number is None:
            assert not boxes
            continue
        part = figure["parts"][number]
        assert part["boxes"] == boxes[:6]
        assert part["count"] == len(boxes)
        assert part["numel"] == f"{layout.numel(rank):,}"
        assert str(rank) in part["ranks"]


def test_devices_of_the_spec_are_told():
    (figure,) = known(page(scene_of(*SPECS[4][:3])))
    assert [part["device"] for part in figure["parts"]] == ["cuda:1", "cpu"]


def test_drawn_areas_are_to_scale():
    written = page(scene_of("[tp sizes(10, 20, 50), -]", (80, 40), "tp=3"))
    heights = [
        [float(said["height"]) for tag, said in Reader(group).elements if tag == "rect"]
        for group in re.findall(r'<g class="part.*?</g>', written)
    ]
    assert [pytest.approx(sum(each), rel=0.01) for each in heights] == [330 / 8, 330 / 4, 330 * 5 / 8]


def test_each_part_can_be_read_without_seeing_it():
    reader = Reader(page(scene_of("[tp, -]", (8, 6), "dp=2, tp=4")))
    labels = [said["aria-label"] for tag, said in reader.elements if tag == "g" and "data-p" in said]
    assert labels[1] == "tp 1; ranks 1, 5; [2:4, 0:6]; 48 B"
    assert next(said for tag, said in reader.elements if said.get("class") == "map")["tabindex"] == "0"


def test_layers_are_folded_and_each_layout_is_drawn_once():
    resolved = decoder(layers=3)
    written = page(scene_of_plan(resolved, "some.shard"))
    reader = Reader(written)
    rows = {said["data-name"]: said["data-f"] for tag, said in reader.elements if tag == "a" and "data-name" in said}
    assert rows == {
        "model.embed.weight": "0",
        "model.layers.{0..2}.q.weight": "1",
        "model.layers.{0..2}.o.weight": "2",
        "model.layers.{0..2}.norm.weight": "3",
    }
    assert sum(tag == "figure" for tag, _ in reader.elements) == 4
    assert ("span", "out replicate partial(tp) -> replicate  ·  use hook") in reader.texts


def test_more_layers_do_not_make_a_longer_page():
    short, long = (page(scene_of_plan(decoder(layers=n), "some.shard")) for n in (3, 120))
    assert len(long) < len(short) * 1.1


@pytest.mark.parametrize("where", ["name", "title", "dims", "finding", "source"])
def test_names_are_only_text(where):
    resolved = decoder(layers=1, name=EVIL if where == "name" else "model", store=False)
    if where == "dims":
        first, placed = next(iter(resolved.tensors.items()))
        tensor = attrs.evolve(placed.tensor, dims=(EVIL, EVIL))
        tensors = {**resolved.tensors, first: attrs.evolve(placed, tensor=tensor)}
        resolved = attrs.evolve(resolved, tensors=tensors)
    if where == "finding":
        resolved = attrs.evolve(resolved, findings=(Finding("E301", EVIL, why=EVIL, fix=EVIL, notes=(EVIL,)),))
    if where == "source":
        origin = Origin(Source(EVIL, EVIL), (0, len(EVIL)))
        resolved = attrs.evolve(resolved, findings=(Finding("W301", "x", origin),))
    written = page(scene_of_plan(resolved, EVIL if where == "title" else "some.shard"))
    reader = Reader(written)
    scripts = [said for tag, said in reader.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert "alert" not in "".join(text for tag, text in reader.texts if tag == "script" and "use strict" in text)


def test_a_plan_with_errors_is_drawn_with_them_first():
    resolved = attrs.evolve(decoder(), findings=(Finding("E301", "no rule matches 3 tensors"),))
    written = page(scene_of_plan(resolved, "some.shard"))
    Reader(written)
    assert written.index("no rule matches 3 tensors") < written.index("Drawn by shardtensor show")


def test_chosen_tensors_are_brought_to_other_layouts():
    scene = scene_of_plan(decoder(), "some.shard", pattern="**.q", to=["[-, tp]"])
    assert [shown.names[0] for shown in scene.shown] == ["model.layers.0.q.weight"]
    written = page(scene)
    assert 'id="reshards"' in written
    assert ("pre", "all_to_all over tp=2   64 B received by each rank") in Reader(written).texts


def test_markup_is_escaped_by_construction():
    assert el("p", "<b>", Markup("<i>"), title='"') == '<p title="&quot;">&lt;b&gt;<i></p>'
    assert "</script>" not in data("x", [EVIL])[:-9]
    assert json.loads(data("x", [EVIL])[len('<script type="application/json" id="x">') : -9]) == [EVIL]


def test_folded_names_are_parted_at_their_dots():
    assert segments("a.{0..3}.{b,c}_d.w") == ["a", "{0..3}", "{b,c}_d", "w"]
    assert segments("") == [""]
