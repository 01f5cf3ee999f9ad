"""What expressions, names, parameters, includes and styles mean."""

from __future__ import annotations

import math

import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from shardtensor import Plan, load_plan
from shardtensor.errors import SpecError
from shardtensor.plan.flows.flow import read_flow
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.nodes import Replicate, Spec

NAMES = {"a": 7, "b": 12, "c": 1}
HEAD = "shard 1\n" + "".join(f"let {name} = {value}\n" for name, value in NAMES.items())


def value(text: str, **params: object):
    """The value of an expression, seen through a parameter that has it by default."""
    return read_plan(f"{HEAD}param x = {text}\n", config={"k": 5, "n": None, "d": {"e": 6}}, params=params).params["x"]


numbers = st.integers(0, 99).map(str) | st.sampled_from([*NAMES])
expressions = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(" ".join)
        | inner.map("({})".format)
        | inner.map("-{}".format)
        | st.tuples(inner, inner).map(lambda pair: f"max({pair[0]}, {pair[1]})")
        | st.tuples(inner, inner, inner).map(lambda three: f"({three[0]} if {three[1]} < {three[2]} else b)")
    ),
    max_leaves=12,
)
conditions = st.recursive(
    st.tuples(expressions, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), expressions).map(" ".join),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join)
        | inner.map("not ({})".format)
        | inner.map("({})".format)
    ),
    max_leaves=4,
)


@examples(200)
@given(expressions | conditions)
def test_operators_mean_what_they_mean_in_python(text):
    try:
        expected = eval(text, {"max": max}, dict(NAMES))
    except ZeroDivisionError:
        with pytest.raises(SpecError, match="divides by 0"):
            value(text)
        return
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b / 4", 3),
        ("gcd(b, 8, 6)", math.gcd(12, 8, 6)),
        ("config.k", 5),
        ("config.d.e", 6),
        ("config.missing ?? 3", 3),
        ("config.n ?? config.d.zz ?? 4", 4),
        ("config.missing / 2 ?? 9", 9),
        ("config.k ?? 3", 5),
        ("world", 1),
        ("true and not false", True),
        ("replicate", Replicate()),
        ("[-, -] if a == 7 else replicate", Spec(None, None)),
        ("row", "row"),
    ],
)
def test_values(text, expected):
    assert value(text) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [(4, 4), ("4", 4), ("world * 3", 3), ("a", 7), (True, None), ("true", None)],
)
def test_parameters_are_given_from_outside_as_values_or_as_text(given, expected):
    if expected is None:
        with pytest.raises(SpecError, match="E107"):
            value("1", x=given)
    else:
        assert value("1", x=given) == expected


def files(tmp_path, **texts: str):
    for name, text in texts.items():
        (tmp_path / f"{name}.shard").write_text(f"shard 1\n{text}")
    return tmp_path / "main.shard"


def test_a_plan_may_set_what_it_includes_by_a_parameter_of_that_name(tmp_path):
    path = files(
        tmp_path, inner="param x = 1\nlet two = x + 1\n", main='param x = 4\ninclude "inner.shard"\nparam y = two\n'
    )
    assert load_plan(path).params == {"x": 4, "y": 5}
    assert load_plan(path, x=6).params == {"x": 6, "y": 7}


def test_a_file_that_is_included_on_two_ways_is_read_once(tmp_path):
    path = files(
        tmp_path,
        base="let a = 1\n",
        other='include "base.shard"\n',
        main='include "other.shard"\ninclude "base.shard"\n',
    )
    assert len(load_plan(path).sources) == 3


def test_rules_of_an_included_file_come_where_it_is_included(tmp_path):
    path = files(tmp_path, inner="a: replicate\nunmatched: [-, ...]\n", main='include "inner.shard"\nb: [-]\n')
    plan = load_plan(path)
    assert [line.pattern for line in plan.lines] == ["a", "b"]
    assert plan.unmatched.depth == 1


def test_factors_make_an_axis():
    text = "shard 1\nmesh (dp = world / tp, tp (kvg = 4, kvr = 2))\na: [tp, -]\nb: [kvr*dp, -]\nparam n = tp * kvg\n"
    with pytest.raises(SpecError, match="used above"):
        read_plan(text, world=16)
    plan = read_plan(text.replace("mesh", "param tp = 8\nmesh"), world=16)
    assert plan.axes.mesh.axes == (("dp", 2), ("kvg", 4), ("kvr", 2))
    assert plan.axes.made_of == {"tp": ("kvg", "kvr")}
    assert str(plan.axes.spelled(plan.lines[0].value)) == "[kvg*kvr, -]"
    assert plan.params["n"] == 32


def test_factors_have_to_make_the_size_that_the_axis_has():
    with pytest.raises(SpecError, match="the factors of `tp` make 6 \\(a=2 x b=3\\), and tp=8") as caught:
        read_plan("shard 1\nparam tp = 8\nmesh (tp (a = 2, b = 3))\n", world=8)
    assert len(caught.value.findings) == 1


@pytest.mark.parametrize(
    ("mesh", "fault"),
    [
        ("param tp = 8\nmesh (tp = 4, dp = 2)", "the axis `tp` has 4 ranks, and tp=8"),
        ("mesh (tp = 1, tp = 8)", "`tp` is defined twice"),
        ("mesh (tp = 0)", "the axis `tp` has 0 ranks"),
        ("mesh (tp)", "the axis `tp` has no size"),
        ("param tp = true\nmesh (tp)", "`tp` is true or false, and the size of an axis is needed here"),
        ("mesh (tp = 3)", "the mesh has 3 ranks \\(tp=3\\), but --world is 8"),
    ],
)
def test_meshes_that_are_none(mesh, fault):
    with pytest.raises(SpecError, match=fault):
        read_plan(f"shard 1\n{mesh}\na: [tp]\n", world=8)


def test_a_style_calls_styles_above_it_and_a_caret_points_at_the_plan():
    text = """shard 1
mesh (tp = world)
style inner(ax, n=2) {
    weight: [ax unit(n), -]
}
style outer(ax, n) {
    up:   inner(ax, n=n * 2)
    down: inner(ax)
    in x: replicate -> [-, ax] grad replicate
}
mlp: outer(tp, 8)
"""
    plan = read_plan(text, world=4)
    assert [(line.pattern, str(line.value), line.module) for line in plan.lines] == [
        ("mlp.up.weight", "[tp unit(16), -]", "mlp.up"),
        ("mlp.down.weight", "[tp unit(2), -]", "mlp.down"),
        ("mlp", "replicate -> [-, tp] grad replicate", "mlp"),
    ]
    origin = plan.lines[0].origin
    assert (origin.line, origin.text) == (11, "outer(tp, 8)")
    assert (origin.through.text, origin.through.through.text) == ("inner(ax, n=n * 2)", "weight: [ax unit(n), -]")
    assert plan.lines[0].pattern_origin.text == "mlp"


def test_a_choice_that_falls_through_is_a_note():
    text = """shard 1
mesh (tp = world)
let n = 6
let fits = n % tp == 0
a: [tp] if fits else replicate
b: [tp] if 2 > 1 else replicate
"""
    plan = read_plan(text, world=4)
    (note,) = plan.findings
    assert (note.code, note.severity, note.fault) == ("N001", "note", "the `else` side was taken: `replicate`")
    assert note.why == "fits=false, n=6, tp=4"
    assert read_plan(text, world=3).findings == ()


def test_statements():
    text = """shard 1
param ep = 2
mesh (dp = world / ep, ep)
data dp
let L = 3
store **: flat(dp, unit=4) by layers.*, head
store norm: replicate
tie head = embed if L == 3
tie x = y if L == 4
dims layers.<L>.w (out = L * 2, in = 5)
dims other (out = 2) if L == 4
unmatched: replicate
optional experts.<ep> {
    w: [-, -]
    out 01: partial(ep) -> replicate
    local heads: [ep]
    use dispatch(ep, dp*ep, top_k=L, to=replicate, on=max)
}
"""
    plan = read_plan(text, world=4)
    first, second = plan.stores
    assert (first.pattern, str(first.flat), first.by) == (
        "**",
        "flat(dp, unit=4)",
        ("layers.*", "head"),
    )
    assert (second.pattern, second.flat) == ("norm", None)
    assert [(tie.pattern, tie.to) for tie in plan.ties] == [("head", "embed")]
    assert [(dims.pattern, dims.names, dims.sizes) for dims in plan.dims] == [("layers.<3>.w", ("out", "in"), (6, 5))]
    assert plan.unmatched.spec == Replicate()
    assert plan.axes.data == ("dp",)
    assert [(line.kind, line.name, line.is_optional) for line in plan.lines] == [
        ("tensor", "", True),
        ("out", "1", True),
        ("local", "heads", True),
        ("use", "", True),
    ]
    hook = plan.lines[-1].value
    assert (hook.name, hook.args, hook.kwargs) == (
        "dispatch",
        ("ep", ("dp", "ep")),
        {"top_k": 3, "to": Replicate(), "on": "max"},
    )


@pytest.mark.parametrize(
    "text", ["replicate", "partial(tp) -> [-, tp, ...]", "[tp] grad partial(dp)", "[-] grad replicate"]
)
def test_a_flow_reads_back(text):
    flow = read_flow(text)
    assert read_flow(str(flow)) == flow
    assert flow.declares_grad == ("grad" in text)


def test_load_plan_takes_what_configs_come_as(tmp_path):
    class Config:
        def to_dict(self):
            return {"n": 8}

    (tmp_path / "config.json").write_text('{"n": 8}')
    text = "shard 1\nparam n = config.n\n"
    for config in ({"n": 8}, Config(), tmp_path, tmp_path / "config.json", str(tmp_path / "config.json")):
        plan = load_plan(text, config)
        assert isinstance(plan, Plan)
        assert plan.params == {"n": 8}
    with pytest.raises(SpecError, match="no such plan"):
        load_plan("no_such_family")
    with pytest.raises(SpecError, match="is not there"):
        load_plan(text, tmp_path / "none.json")


def test_a_statement_may_break_in_brackets_and_end_with_the_file():
    plan = read_plan("# first\n\nshard 1  # one\nmesh (\n  tp = world,  # all\n)\n\n\na: [tp,\n    -]  # end", world=2)
    assert str(plan.lines[0].value) == "[tp, -]"
