"""Layouts that do not fit a tensor: E201 to E209, E404 and E501, of plans in text and of rules in Python."""

from __future__ import annotations

from functools import partial

from fixes.case import Case
from fixes.corrected import Found, Right, of_findings, text_case
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.diagnostics import Source

DIMS = ("out", "in")
MESH = "dp = world / 8, tp (a = 2, b = 4)"


def laid(said: str, world: int = 8, dims: tuple[str, ...] | None = DIMS, data: str = "dp") -> list[Found]:
    """What is wrong with a layout of a tensor of 24 x 36; after it may stand other lines."""
    text = f"shard 1\nmesh ({MESH})\ndata {data}\nw: {said}\n"
    model = Model((TensorInfo("w", (24, 36), dims),))
    return of_findings(check_plan(resolve(read_plan(Source(text, "<plan>"), world=world), model)))


def ruled(said: str) -> list[Found]:
    """What is wrong with such a layout as a rule in Python."""
    plan = Plan.from_rules({"w": said}, "dp=1, tp(a=2, b=4)")
    return of_findings(check_plan(resolve(plan, Model((TensorInfo("w", (24, 36), DIMS),)))))


LAYOUTS: dict[str, dict[str, Right]] = {
    "[tp, -, -]": {
        "write one entry for each dim, as in `[-, -]`": "[-, -]",
        "or `...` for the dims that stay whole": "[tp, ...]",
    },
    "[outt: tp]": {"the dims are out, in": "[out: tp]"},
    "[-, tp]": {"use the factor `a` (2), with copies along b": "[-, a]"},
    "[tp blocks(5), -]": {"give block shares whose sum divides the dim": "[tp blocks(3), -]"},
    "[tp blocks(4, 1), -]": {"give block shares whose sum divides the dim": "[tp blocks(2, 1), -]"},
    "[tp unit(9), -]": {
        "choose a unit that divides the dim": "[tp unit(3), -]",
        "or write pad(n)": "[tp pad(9), -]",
    },
    "[tp sizes(12, 12), -]": {"give one size for each piece": "[tp sizes(3, 3, 3, 3, 3, 3, 3, 3), -]"},
    "[a sizes(12, 11), -]": {"give sizes that add up": "[a sizes(13, 11), -]"},
    "[a unit(4) sizes(10, 14), -]": {"give sizes in whole units": "[a unit(4) sizes(16, 8), -]"},
    'enum([0:24, 0:35] @ "rank:0/cpu")': {
        "add a shard that starts at (0, 35)": 'enum([0:24, 0:35] @ "rank:0/cpu", [0:24, 35:36] @ "rank:1/cpu")',
        "or give the true global size": 'enum([0:24, 0:36] @ "rank:0/cpu")',
    },
    "[tp, -] partial(dp)": {"drop `partial`": "[tp, -]"},
    "[tp, -]\nstore w: flat(tp)": {"`store PATTERN: replicate`": "[tp, -]\nstore w: replicate"},
    "[a, -]\nstore w: flat(dp*a)": {"`store PATTERN: flat(dp)`": "[a, -]\nstore w: flat(dp)"},
    "[a, -] flat(b)\nstore w: flat(dp)": {"drop `flat` from the layout": "[a, -]\nstore w: flat(dp)"},
    "[a, -]\nstore w: flat(b)": {
        "write `data dp*b`": lambda: laid("[a, -]\nstore w: flat(b)", data="dp*b"),
        "or store them over axes of `data`": "[a, -]\nstore w: flat(dp)",
    },
}
RULES: dict[str, dict[str, Right]] = {
    "[xyz, -]": {"use one of dp, a, b": "[a, -]"},
    "[tp, a]": {"keep one of the two": "[tp, -]"},
    'chunk(dim=0, placements=["rank:0-8"])': {
        "name ranks of the process group": 'chunk(dim=0, placements=["rank:0-7"])'
    },
}
UNEVEN = "[dp*tp, -]"
CASES: dict[str, Case] = {
    **{said: text_case(laid, said, ways) for said, ways in LAYOUTS.items()},
    **{f"{said} in Python": text_case(ruled, said, ways) for said, ways in RULES.items()},
    "elements": text_case(
        partial(laid, world=16),
        UNEVEN,
        {
            "dp*tp has to divide 24 (1, 2, 3, 4, 6, 8, 12, 24)": partial(laid, UNEVEN),
            "or write `balanced` after it": partial(laid, "[dp*tp balanced, -]", 16),
        },
    ),
    "dims without names": text_case(
        partial(laid, dims=None),
        "[out: tp]",
        {
            "write the cut by position, such as `[tp, -]`": partial(laid, "[tp, -]", dims=None),
        },
    ),
}
