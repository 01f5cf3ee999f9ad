"""Gradients of a plan: how they lie in cases that were tried by hand, and what is told where they would go wrong."""

from __future__ import annotations

import pytest

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.gradients import check_flows, flows_of
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model, TensorInfo

EMBED, HEAD, KV, HIDDEN = 16, 4, 2, 32


def model(text: str) -> Model:
    """Tensors, one a line: a name and the sizes of its dims, ``q.weight out=16 in=16``."""
    tensors = []
    for row in text.strip().splitlines():
        name, *dims = row.split()
        names, sizes = zip(*(dim.split("=") for dim in dims), strict=True)
        tensors.append(TensorInfo(name, tuple(map(int, sizes)), names))
    return Model(tuple(tensors))


ATTENTION = model("""
embed.weight vocab=32 embed=16
norm.weight embed=16
norm.bias embed=16
attn.q.weight out=16 in=16
attn.q.bias out=16
attn.k.weight out=8 in=16
attn.k.bias out=8
attn.q_norm.weight embed=4
attn.k_norm.weight embed=4
attn.o.weight out=16 in=16
attn.o.bias out=16
last.weight embed=16
last.bias embed=16
head.weight out=32 in=16
""")

PLAN = """shard 1
include "std/styles.shard"
param tp = 4
param sp = false
mesh (dp = world / tp, tp (kvg = 2, kvr = tp / 2))
data dp
let stream = [-, tp, ...] if sp else replicate
embed: vocab_embedding(tp, to=stream)
norm: along(stream)
attn {
    in: stream -> replicate
    q: colwise(tp, unit=4)
    k: colwise_shared(kvg, copies=kvr, unit=4)
    q_norm {
        weight: replicate
        in: [-, -, tp, ...]
        out: [-, -, tp, ...]
    }
    k_norm {
        weight: replicate
        in: [-, -, kvg, ...]
        out: [-, -, kvg, ...] grad partial(kvr)
    }
    o: rowwise(tp, unit=4, to=stream)
}
last {
    **: replicate
    in: stream
    out: stream -> replicate
}
head: vocab_head(tp)
use cross_entropy()
"""
TP = ("kvg", "kvr")


def sums(text: str, tensors: Model, world: int, **params) -> dict[str, tuple[str, ...]]:
    resolved = resolve(load_plan(text, world=world, **params), tensors)
    assert not resolved.errors and not check_flows(resolved), (*resolved.errors, *check_flows(resolved))
    flows, found = flows_of(resolved), {}
    for name, placed in resolved.tensors.items():
        path, _, last = name.rpartition(".")
        work = flows.works.get(path)
        axes = {*flows.modules.data, *(work.sums.get(last, ()) if work is not None else ())}
        names = resolved.plan.axes.mesh.names
        cut = {names[axis] for axis in placed.layout.sharding_axes}
        found[name] = tuple(sorted(axes - cut))
    return found


@pytest.mark.parametrize("sp", [False, True])
def test_parameters_of_grouped_attention_are_summed_as_the_design_says(sp):
    found = sums(PLAN, ATTENTION, 8, sp=sp)
    stream = TP if sp else ()
    data = ("dp",)
    assert found == {
        name: tuple(sorted((*data, *axes)))
        for name, axes in {
            "embed.weight": (),
            "norm.weight": stream, "norm.bias": stream,  # a copy, or a sum over all of the stream
            "attn.q.weight": (), "attn.q.bias": (),
            "attn.k.weight": ("kvr",), "attn.k.bias": ("kvr",),  # each copy feeds other query heads
            "attn.q_norm.weight": TP,  # rule 2
            "attn.k_norm.weight": TP,  # kvg by rule 2, kvr by rule 3
            "attn.o.weight": (),
            "attn.o.bias": stream,  # added to what leaves
            "last.weight": stream, "last.bias": stream,  # gathered after it: the bias as it is before the arrow
            "head.weight": (),
        }.items()
    }  # fmt: skip


@pytest.mark.parametrize("sp", [False, True])
def test_all_that_meets_at_the_in_of_grouped_attention_are_partials_along_tp(sp):
    flows = flows_of(resolve(load_plan(PLAN, world=4, sp=sp), ATTENTION))
    assert set(flows.sums.partials["attn"]) == set(TP)
    assert [layer.path for layer in flows.sums.served["attn"]] == ["attn.q", "attn.k"]
    assert set(flows.works["head"].partials) == set(TP), "the head sums at its own `in`"


def test_an_axis_of_size_1_sums_nothing():
    assert sums(PLAN, ATTENTION, 2, tp=2)["attn.k.weight"] == ()


EXPERTS = model("""
block.norm.weight embed=8
block.gate.weight out=4 in=8
block.experts.up e=4 out=16 in=8
block.experts.down e=4 out=8 in=16
""")
EXPERTS_PLAN = """shard 1
mesh (ep = 2, tp = 2)
data ep
block {
    {norm,gate}: replicate
    experts {
        up: [ep, tp, -]
        down: [ep, -, tp]
        in: replicate grad partial(tp)
        in top_k_weights: replicate grad partial(tp)
        use dispatch(ep, top_k=2)
        out: partial(tp) -> replicate
    }
}
"""


def test_experts_are_summed_over_no_axis_and_their_router_over_the_data():
    found = sums(EXPERTS_PLAN, EXPERTS, 4)
    assert found == {
        "block.norm.weight": ("ep",), "block.gate.weight": ("ep",), "block.experts.up": (), "block.experts.down": (),
    }  # fmt: skip


def test_copies_of_shards_are_data_too():
    text = "shard 1\nmesh (rep = 2, dp = world / 2)\ndata rep*dp\n**: replicate\nstore **: flat(dp)\n"
    assert set(sums(text, ATTENTION, 4).values()) == {("dp", "rep")}


# -- what is told -----------------------------------------------------------------------------------------------------

MLP = model("""
mlp.fc1.weight out=32 in=16
mlp.fc1.bias out=32
mlp.fc2.weight out=16 in=32
mlp.fc2.bias out=16
""")
FC0 = "fc0: colwise(tp)"
FC1 = "fc1 {\n weight: [tp, -]\n bias: [tp]\n out: [..., tp]\n}"
FC2 = "fc2 {\n weight: [-, tp]\n bias: replicate\n in: [..., tp]\n out: partial(tp) -> replicate\n}"


def told(body: str, tensors: Model, head: str = "mesh (tp = world)", world: int = 4) -> list[str]:
    text = f'shard 1\ninclude "std/styles.shard"\n{head}\n{body}\n'
    resolved = resolve(load_plan(text, world=world), tensors)
    assert not resolved.errors, resolved.errors[0]
    return [str(finding) for finding in check_flows(resolved)]


def mlp(fc1: str = FC1, fc2: str = FC2, more: str = "") -> str:
    return f"mlp {{\n{more}\n{fc1}\n{fc2}\n}}"


def test_a_right_plan_is_told_nothing():
    assert told(mlp(), MLP) == [] == told(mlp(more="in: replicate"), MLP)


GOLDENS = {
    "a sum that is not said": (
        mlp(fc2=FC2.replace("partial(tp) -> replicate", "replicate")),
        """<plan>:15:7: error[E402]: `out: replicate` contradicts the layout of the weight
   15 |  out: replicate
      |       ^^^^^^^^^
  why: the weight (out=16, in=32) is `[-, tp]`, so what it makes is a partial sum along tp until it is summed
  fix: write `out: partial(tp) -> replicate`""",
    ),
    "a sum that is dropped": (
        mlp(fc2=FC2.replace("partial(tp) -> replicate", "partial(tp)")),
        """<plan>:15:7: error[E404]: this value leaves as partial sums along tp, and nobody sums them
   15 |  out: partial(tp)
      |       ^^^^^^^^^^^
  why: `partial(tp)` has no arrow that sums: what meets it takes one rank's partial sum for the value
  fix: write `partial(tp) -> replicate` (one all_reduce), or say who sums: `in: partial(tp) -> replicate` there""",
    ),
    "a sum that is made twice": (
        mlp(more="out: partial(tp) -> replicate"),
        """<plan>:5:6: error[E403]: nothing in `mlp` leaves partial sums along tp
    5 | out: partial(tp) -> replicate
      |      ^^^^^^^^^^^^^^^^^^^^^^^^
  why: `mlp.fc2` sums them already; summed again they are as many times too large as there are ranks along tp
  fix: drop this `out`, or the arrow inside""",
    ),
    "an in around and again inside": (
        mlp(
            "in: replicate\nfc1 {\n weight: [tp, -]\n bias: [tp]\n in: replicate\n out: [..., tp]\n}\nfc0: colwise(tp)"
        ),
        """<plan>:10:6: error[E401]: this gradient is summed along tp here and again around
   10 |  in: replicate
      |      ^^^^^^^^^
  why: the `in` of mlp sums what comes back along tp; mlp.fc1 sums its part before: it would be counted 4 times
  fix: drop `in` here, or the `in` of mlp""",
    ),
    "a bias that is cut beside a sum": (
        mlp(fc2=FC2.replace("bias: replicate", "bias: [tp]")),
        """<plan>:13:8: error[E402]: the bias is cut over other axes than the weight's `out`
   13 |  bias: [tp]
      |        ^^^^
  why: the weight is `[-, tp]`, the bias `[tp]`: each rank would add a part to the whole sum
  fix: keep the bias whole (`replicate`): it is added once, to what leaves""",
    ),
    "parts that nobody takes": (
        mlp(fc2="fc2: replicate"),
        """<plan>:9:7: error[E403]: this value leaves cut along tp, and no module takes it so
    9 |  out: [..., tp]
      |       ^^^^^^^^^
  why: what meets it next would take one rank's part for the whole
  fix: say who takes it: `in: [..., tp]` there, or such an `out` on the module around; or gather it: \
`out: [..., tp] -> replicate`; for logits: `use cross_entropy()`""",
    ),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_what_is_wrong_is_told_at_its_line(name):
    body, text = GOLDENS[name]
    more = "\nmlp.fc0.weight out=32 in=16" if "fc0" in body else ""
    rows = "\n".join(
        f"{t.name} {' '.join(f'{d}={n}' for d, n in zip(t.dims, t.shape, strict=True))}" for t in MLP.tensors
    )
    assert text in told(body, model(rows + more))


def test_the_example_of_the_design_is_told_word_for_word():
    text = PLAN.replace("k: colwise_shared(kvg, copies=kvr, unit=4)", "k: colwise(kvg, unit=4)")
    resolved = resolve(load_plan(text, world=4), ATTENTION)
    assert str(check_flows(resolved)[0]) == (
        """<plan>:13:8: error[E401]: the gradient of this output along kvr is not known
   13 |     k: colwise(kvg, unit=4)
      |        ^^^^^^^^^^^^^^^^^^^^
  why: the output is cut by kvg and copied along its sibling kvr inside tp: the copies may feed different query heads, \
and then their gradients differ
  fix: `colwise_shared(kvg, copies=kvr, unit=4)` sums over the copies; if every copy gets the same gradient, write the \
flow with `grad replicate`, and move the `in` of attn down to the layers in it
  note: the flow is `out: [..., ax blocks(blocks) unit(unit)]`, std/styles.shard:7"""
    )


def test_grad_replicate_is_the_second_way_out():
    k = "k {\n weight: [kvg unit(4), -]\n bias: [kvg unit(4)]\n out: [..., kvg unit(4)] grad replicate\n }"
    text = PLAN.replace("k: colwise_shared(kvg, copies=kvr, unit=4)", k)
    found = check_flows(resolve(load_plan(text, world=4), ATTENTION))
    assert [finding.fault for finding in found] == ["copies meet partial sums at the `in` of attn"], "the rest is told"


Q_NORM = PLAN[PLAN.index("q_norm {") : PLAN.index("k_norm {")]
WITHOUT_LAST = PLAN[: PLAN.index("last {")] + "last: replicate\n" + PLAN[PLAN.index("head:") :]
COPIES = {
    "a norm on heads beside products that are cut": (
        PLAN.replace(Q_NORM, "q_norm: replicate\n"),
        {},
        "attn.q_norm.weight",
        "tp",
    ),
    "a norm in a stream": (PLAN.replace("norm: along(stream)", "norm: replicate"), {"sp": True}, "norm.weight", "tp"),
    "the last norm of a stream": (WITHOUT_LAST, {"sp": True}, "last.weight", "tp"),
}


@pytest.mark.parametrize("name", COPIES)
def test_copied_parameters_beside_cut_values_are_asked_about(name):
    text, params, tensor, axes = COPIES[name]
    found, *_ = (f for f in check_flows(resolve(load_plan(text, world=4, **params), ATTENTION)) if f.code == "E401")
    assert (found.code, found.fault) == ("E401", f"the gradient of `{tensor}` along {axes} is not known")
    assert found.origin is not None and found.origin.text == tensor.split(".")[-2]


def test_without_a_stream_norms_are_not_asked_about():
    text = PLAN.replace("norm: along(stream)", "norm: replicate")
    assert check_flows(resolve(load_plan(text, world=4), ATTENTION)) == ()


BLOCK = model("""
up.weight out=32 in=16
down.weight out=16 in=32
""")


def test_a_block_alone_may_leave_values_as_they_come():
    text = """shard 1
include "std/styles.shard"
mesh (tp = 4)
in: STREAM -> replicate
up: colwise(tp)
down: rowwise(tp, to=[-, tp, ...])
"""
    assert sums(text.replace("STREAM", "[-, tp, ...]"), BLOCK, 4) == {"up.weight": (), "down.weight": ()}
    resolved = resolve(load_plan(text.replace("STREAM", "replicate"), world=4), BLOCK)
    assert {(found.code, found.tensor) for found in check_flows(resolved)} == {("E403", "down")}


def test_what_has_no_line_is_told_by_its_name():
    found = Finding("E403", "this value leaves cut along tp, and no module takes it so", tensor="up")
    assert str(found) == "error[E403]: up: this value leaves cut along tp, and no module takes it so"
