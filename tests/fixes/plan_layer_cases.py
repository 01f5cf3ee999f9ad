"""Findings about the flows of single layers and containers, in a plan of few lines; and flows of rules in Python."""

from __future__ import annotations

from functools import partial

from plan.test_gradients import FC1, FC2, model

from fixes.case import Case
from fixes.corrected import Found, of_findings, text_case
from shardtensor.plan.flows.flow import partial_axes, read_flow
from shardtensor.plan.flows.gradients import check_flows
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.diagnostics import Source

NET = model("""
embed.weight vocab=32 embed=16
norm.weight embed=16
mlp.fc1.weight out=32 in=16
mlp.fc1.bias out=32
mlp.fc2.weight out=16 in=32
mlp.fc2.bias out=16
head.weight out=32 in=16
""")


HEAD = 'shard 1\ninclude "std/styles.shard"\nmesh (pp = 2, tp (a = 2, b = world / 4))\n'


def found_in(said: str, tensors: Model = NET) -> list[Found]:
    """What is found in the lines of a plan."""
    text = f"{HEAD}{said}\nunmatched: replicate\n"
    resolved = resolve(read_plan(Source(text, "<plan>"), world=8), tensors)
    return [each.moved(-len(HEAD)) for each in of_findings(resolved.errors or check_flows(resolved))]


def of(path: str, *entries: str) -> str:
    return "\n".join([f"{path} {{", *entries, "}"])


def mlp(fc1: str = FC1, fc2: str = FC2, *more: str) -> str:
    return of("mlp", *more, fc1, fc2)


def norm(*entries: str, weight: str = "replicate") -> str:
    return of("norm", f"weight: {weight}", *entries)


def column(**said: str) -> str:
    said = {"weight": "[tp, -]", "bias": "[tp]", "out": "[..., tp]"} | {
        key.rstrip("_"): text for key, text in said.items()
    }
    return of("fc1", *(f"{key}: {text}" for key, text in said.items()))


def row(**said: str) -> str:
    said = {
        "weight": "[-, tp]", "bias": "replicate", "in": "[..., tp]", "out": "partial(tp) -> replicate",
    } | {key.rstrip("_"): text for key, text in said.items()}  # fmt: skip
    return of("fc2", *(f"{key}: {text}" for key, text in said.items()))


FUSED = {"weight": "[tp blocks(2), -]", "bias": "[tp blocks(2)]"}
COPIES = of("fc2", "**: replicate", "in: replicate", "out: replicate")
PASSED = norm("in: replicate", "out: replicate")
PLACES = 'chunk(dim=0, placements=["rank:0-3"])'
# what is wrong, and words of the way out with the text that they make
SLIPS: dict[str, tuple[str, dict[str, str]]] = {
    "a layer that names devices": (
        mlp(column(weight=PLACES, bias="replicate", out="replicate"), "fc2: replicate"),
        {"write the layout in axes, such as `[tp, -]`": mlp(column(out="[..., tp] -> replicate"), "fc2: replicate")},
    ),
    "slices that nobody takes": (
        mlp(fc2=COPIES),
        {
            "say who takes it: `in: [..., tp]` there": mlp(),
            "or gather it: `out: [..., tp] -> replicate`": mlp(column(out="[..., tp] -> replicate"), COPIES),
        },
    ),
    "another stream than came": (
        mlp(column(in_="replicate", out="[-, pp, ..., tp]")), {"cut both sides alike": mlp(column(in_="replicate"))},
    ),
    "another stream than came, whole": (
        mlp(column(weight="replicate", bias="replicate", in_="replicate", out="[-, pp, ...]"), "fc2: replicate"), {},
    ),
    "a bias that is cut otherwise": (
        mlp(column(bias="[a]")),
        {"cut the bias as the weight's `out` is cut": mlp(), "or leave it whole": mlp(column(bias="replicate"))},
    ),
    "a whole bias of features that are dealt out": (
        mlp(fc2=row(out="partial(tp) -> [..., tp]")), {"leave the sum whole (`-> replicate`)": mlp()},
    ),
    "a vocabulary in blocks": (
        of("embed", "weight: [tp blocks(2), -]", "out: partial(tp) -> replicate"),
        {"cut the vocabulary without `blocks`": of("embed", "weight: [tp, -]", "out: partial(tp) -> replicate")},
    ),
    "a norm that is cut": (norm("in: replicate", "out: replicate", weight="[tp]"), {}),
    "partial sums that reach a norm": (
        of("embed", "weight: [tp, -]", "out: partial(tp)") + "\n" + norm("in: partial(tp)", "out: partial(tp)"),
        {
            "sum them before: `out: partial(tp) -> replicate` where they are made": of(
                "embed", "weight: [tp, -]", "out: partial(tp) -> replicate"
            ) + "\n" + PASSED
        },
    ),
    "a norm of parts": (
        norm("in: replicate -> [..., tp]", "out: [..., tp] -> replicate"),
        {"cut the stream along another dim": norm("in: replicate -> [-, tp, ...]", "out: [-, tp, ...] -> replicate")},
    ),
    "a norm that gives other than it takes": (norm("in: replicate", "out: [-, tp, ...]"), {}),
    "a layer with two inputs": (
        mlp(column(**{"in x": "replicate"})), {"write `in` alone": mlp(column(in_="replicate"))},
    ),
    "blocks that are joined on the way": (
        mlp(column(**FUSED, out="[..., tp blocks(2)] -> replicate"), "fc2: replicate"),
        {
            "let the value pass as it is: `out: [..., tp blocks(2)]`": mlp(
                column(**FUSED, out="[..., tp blocks(2)]"), row(in_="[..., tp blocks(2)]")
            )
        },
    ),
    "a gradient that is no partial sum": (
        mlp(column(out="[..., tp] grad partial(tp)")), {"leave tp out of `grad`": mlp()},
    ),
    "a value whose gradient is no partial sum": (
        of("mlp", "in: replicate -> [-, pp, ...] grad partial(pp)", "out: [-, pp, ...] -> replicate"),
        {"leave pp out of `grad`": of("mlp", "in: replicate -> [-, pp, ...]", "out: [-, pp, ...] -> replicate")},
    ),
    "a copy that becomes partial sums": (
        mlp(FC1, FC2, "in: replicate -> partial(tp)"),
        {"leave out `partial` after the arrow": mlp(FC1, FC2, "in: replicate")},
    ),
    "blocks that are cut on the way": (
        of("mlp", "in: replicate -> [..., tp blocks(2)]", "out: [..., tp] -> replicate"),
        {
            "let the value pass as it is": of("mlp", "in: replicate", "out: replicate"),
            "or cut it evenly": of("mlp", "in: replicate -> [..., tp]", "out: [..., tp] -> replicate"),
            "or `balanced`": of("mlp", "in: replicate -> [..., tp balanced]", "out: [..., tp balanced] -> replicate"),
        },
    ),
    "partial sums along a part of an axis": (
        of("mlp", "in: [-, tp, ...] -> replicate grad partial(a)", "out: replicate -> [-, tp, ...]"),
        {
            "say the others, too: `grad partial(...)`": of(
                "mlp", "in: [-, tp, ...] -> replicate grad partial(tp)", "out: replicate -> [-, tp, ...]"
            )
        },
    ),
}  # fmt: skip
BLOCK = model("""
blk.norm.weight embed=16
blk.fc0.weight out=32 in=16
blk.fc1.weight out=32 in=16
blk.fc2.weight out=16 in=32
""")


def block(fc0: tuple[str, ...], *more: str, norm: tuple[str, ...] = ()) -> str:
    """A norm and a layer beside two products; `more` stands in the block, or is of the product that comes first."""
    first = [entry.removeprefix("fc1 ") for entry in more if entry.startswith("fc1 ")]
    around = [entry for entry in more if not entry.startswith("fc1 ")]
    fc1 = of("fc1", "weight: [tp, -]", "out: [..., tp]", *first)
    return of("blk", *around, of("norm", "weight: replicate", *norm), of("fc0", *fc0), fc1, "fc2: rowwise(tp)")


SHARDED, OTHER = ("weight: [tp, -]",), ("weight: [pp, -]", "out: [..., pp] -> replicate")
SAME = ("weight: [a, -]", "out: [..., a] -> replicate grad replicate")
PLAIN, WHOLE = ("in: replicate", "out: replicate"), ("weight: replicate", "in: replicate", "out: replicate")
PARTIALS = ("in: replicate", "out: replicate grad partial(tp)")
IN = "in: replicate"
BLOCKS: dict[str, tuple[str, dict[str, str]]] = {
    "a sharded layer among partial sums": (
        block(SHARDED, IN),
        {"move `in` down to those that are cut alike": block(SHARDED, f"fc1 {IN}")},
    ),
    "partial sums along another axis": (
        block(OTHER, IN),
        {"move `in` down to those that are cut alike": block((*OTHER, IN), f"fc1 {IN}")},
    ),
    "the same gradient among partial sums": (
        block(SAME, IN), {"move `in` down to those that are cut alike": block((*SAME, IN), f"fc1 {IN}")},
    ),
    "a norm among partial sums": (
        block(WHOLE, IN, norm=PLAIN),
        {
            "write `grad partial(tp)` after its `out`": block(WHOLE, IN, norm=PARTIALS),
            "or put `in` after it, on the module that holds the products": block(WHOLE, f"fc1 {IN}", norm=PLAIN),
        },
    ),
}  # fmt: skip
CASES: dict[str, Case] = {
    **{name: text_case(found_in, text, ways) for name, (text, ways) in SLIPS.items()},
    **{name: text_case(partial(found_in, tensors=BLOCK), text, ways) for name, (text, ways) in BLOCKS.items()},
    "a module of a class that is not known": text_case(
        partial(found_in, tensors=model("own.table rows=8 columns=8")),
        of("own", "table: [tp, -]", IN, "out: partial(tp)") + "\n" + of("last", "in: partial(tp) -> replicate"),
    ),
    "two arrows": Case(
        lambda: read_flow("replicate -> replicate -> [..., tp]"),
        {"write `LAYOUT -> LAYOUT`": lambda: read_flow("replicate -> [..., tp]")},
        mesh="",
    ),
    "a gradient that is cut otherwise": Case(
        lambda: read_flow("[..., tp] grad [tp, ...]"),
        {
            "write `grad [..., tp]`, `grad partial(tp)` for partial sums, or `grad replicate` for copies": lambda: [
                read_flow(f"[..., tp] grad {said}") for said in ("[..., tp]", "partial(tp)", "replicate")
            ]
        },
        mesh="",
    ),
    "a flow of names": Case(
        lambda: read_flow("[out: tp]"),
        {
            "write such as `replicate`, `[..., tp]`, `[-, tp, ...]`, `partial(tp)`": lambda: [
                read_flow(said) for said in ("replicate", "[..., tp]", "[-, tp, ...]", "partial(tp)")
            ]
        },
        mesh="",
    ),
    "a flow of averages": Case(
        lambda: partial_axes(read_flow("partial(tp, op=avg) -> replicate").before),
        {"write `partial(tp)`, without `op`": lambda: partial_axes(read_flow("partial(tp) -> replicate").before)},
        mesh="",
    ),
}
