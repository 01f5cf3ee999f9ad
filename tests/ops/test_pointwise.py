"""Elementwise operations equal the dense ones, forward and backward, for all layouts of all operands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import every_size
from oracle import Case, check_table

S = (5, 6)  # does not divide by 2, 3 or 4 in some dim
SMALL = (2, 3)  # leaves ranks empty
FUNCTIONS = [
    Case("neg", lambda x: -x, (S,)),
    Case("exp", torch.exp, (SMALL,), exact=False),
    Case("abs", abs, (S,)),
    Case("relu", F.relu, (S,)),
    Case("gelu", lambda x: F.gelu(x, approximate="tanh"), (S,), exact=False),
    Case("silu", F.silu, (S,), exact=False),
    Case("leaky_relu", lambda x: F.leaky_relu(x, 0.5), (S,)),
    Case("clamp", lambda x: x.clamp(-1, 2), (S,)),
    Case("clamp_tensor", lambda x, y: torch.clamp(x, min=y), (S, (6,)), exact=False),
    Case("nan_to_num", lambda x: torch.nan_to_num(x / 0.0, nan=3.0, posinf=7.0, neginf=-7.0).detach(), (S,)),
    Case("square", lambda x: x.square() ** 2, (S,)),
    Case("add", lambda x, y: x + y, (S, S)),
    Case("add alpha", lambda x, y: torch.add(x, y, alpha=2), (S, (6,))),
    Case("row", lambda x, y: x + y, (S, (6,))),
    Case("column", lambda x, y: x * y, (S, (5, 1))),
    Case("both ways", lambda x, y: x - y, ((5, 1), (1, 6))),
    Case("more dims", lambda x, y: x * y, (S, (2, 5, 6))),
    Case("scalar tensor", lambda x, y: x * y + y, (S, ())),
    Case("scalar right", lambda x: x * 2 - 1, (S,)),
    Case("scalar left", lambda x: 3 - 2 * x, (S,)),
    Case("rdiv", lambda x: 4 / x, (S,), make=("positive",), exact=False),
    Case("rpow", lambda x: 2**x, (S,), make=("positive",), exact=False),
    Case("rfloordiv", lambda x: (7 // x).detach(), (S,), make=("positive",)),
    Case("rmod", lambda x: 7 % x.detach(), (S,), make=("positive",)),
    Case("div", lambda x, y: x / y, (S, S), make=("int", "positive"), exact=False),
    Case("maximum", torch.maximum, (S, (6,))),
    Case("compare", lambda x, y: (x < y) | (x == y) & ~(x > 2), (S, (6,))),
    Case("where", lambda c, x, y: torch.where(c > 0, x, y), (S, S, (6,))),
    Case("masked_fill", lambda x, m: x.masked_fill(m > 0, 7.0), (S, (6,))),
    Case("lerp", torch.lerp, (S, S, (5, 1))),
    Case("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=2), (S, S, (6,))),
    Case("addcdiv", torch.addcdiv, (S, S, (6,)), make=("int", "int", "positive"), exact=False),
    Case("integers", lambda x, y: (x & y) + x // 2, (S, (6,)), make=("long", "long")),
    Case("promotion", lambda x, y: x + y, (S, ()), make=("long", "int")),
    Case("torch.pow", lambda x: torch.pow(2.0, x), (SMALL,), exact=False),
    Case("deep", lambda x: x.unsqueeze(0) * x, (SMALL,)),
    Case("1d", lambda x: (x + 1) * x, ((3,),)),
    Case("size one", lambda x, y: x * y, ((1, 3), (4, 3))),
    Case("no elements", lambda x: x + 1, ((0, 3),)),
]


def _in_place(change):
    def function(x, *others):
        y = x * 1
        change(y, *others)
        return y

    return function


IN_PLACE = [
    Case("add_", _in_place(lambda y, o: y.add_(o, alpha=3)), (S, (6,)), gathers="into whole"),
    Case("iadd", _in_place(lambda y, o: y.__iadd__(o)), (S, S), gathers="into whole"),
    Case("mul_", _in_place(lambda y: y.mul_(2).sub_(1)), (S,)),
    Case(
        "div_",
        _in_place(lambda y, o: y.div_(o)),
        (S, (5, 1)),
        make=("int", "positive"),
        exact=False,
        gathers="into whole",
    ),
    Case("clamp_", _in_place(lambda y: y.clamp_(-1, 1)), (S,)),
    Case("masked_fill_", _in_place(lambda y, m: y.masked_fill_(m > 0, 5.0)), (S, (6,)), gathers="into whole"),
    Case("addcmul_", _in_place(lambda y, a, b: y.addcmul_(a, b, value=2)), (S, S, (6,)), gathers="into whole"),
    Case("copy_", _in_place(lambda y, o: y.copy_(o)), (S, S), gathers="into whole"),
    Case("copy_ broadcast", _in_place(lambda y, o: y.copy_(o)), (S, (6,)), gathers="into whole"),
    Case("fill_", _in_place(lambda y: y.fill_(3)), (S,)),
    Case("zero_", _in_place(lambda y: y.zero_()), (S,)),
    Case("relu inplace", _in_place(lambda y: F.relu(y, inplace=True)), (S,)),
    Case("scalar tensor", _in_place(lambda y, o: y.mul_(o)), (S, ()), gathers="into whole"),
    Case(
        "out", lambda x, y: torch.mul(x.detach(), y.detach(), out=torch.zeros_like(x)), (S, (6,)), gathers="into whole"
    ),
]


def pointwise() -> None:
    check_table(FUNCTIONS)


def in_place() -> None:
    check_table(IN_PLACE)


@every_size
def test_elementwise_equals_dense(world, size):
    world(pointwise, size)


@every_size
def test_in_place_equals_dense(world, size):
    world(in_place, size)
