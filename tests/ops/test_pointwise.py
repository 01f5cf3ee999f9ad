"""Elementwise operations equal the dense ones, forward and backward, for all layouts of all operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import every_size
from harness.law import case, check_table

S = (5, 6)  # does not divide by 2, 3 or 4 in some dim
SMALL = (2, 3)  # leaves ranks empty
FUNCTIONS = [
    case("neg", lambda x: -x, (S,)),
    case("gelu", lambda x: F.gelu(x, approximate="tanh"), (S,), exact=False),
    case("leaky_relu", lambda x: F.leaky_relu(x, 0.5), (S,)),
    case("clamp", lambda x: x.clamp(-1, 2), (S,)),
    case("clamp_tensor", lambda x, y: torch.clamp(x, min=y), (S, (6,)), exact=False),
    case("nan_to_num", lambda x: torch.nan_to_num(x / 0.0, nan=3.0, posinf=7.0, neginf=-7.0).detach(), (S,)),
    case("square", lambda x: x.square() ** 2, (S,)),
    case("add", lambda x, y: x + y, (S, S)),
    case("add alpha", lambda x, y: torch.add(x, y, alpha=2), (S, (6,))),
    case("row", lambda x, y: x + y, (S, (6,))),
    case("column", lambda x, y: x * y, (S, (5, 1))),
    case("both ways", lambda x, y: x - y, ((5, 1), (1, 6))),
    case("more dims", lambda x, y: x * y, (S, (2, 5, 6))),
    case("scalar tensor", lambda x, y: x * y + y, (S, ())),
    case("scalar right", lambda x: x * 2 - 1, (S,)),
    case("scalar left", lambda x: 3 - 2 * x, (S,)),
    case("rdiv", lambda x: 4 / x, (S,), make=("positive",), exact=False),
    case("rpow", lambda x: 2**x, (S,), make=("positive",), exact=False),
    case("rfloordiv", lambda x: (7 // x).detach(), (S,), make=("positive",)),
    case("rmod", lambda x: 7 % x.detach(), (S,), make=("positive",)),
    case("div", lambda x, y: x / y, (S, S), make=("int", "positive"), exact=False),
    case("compare", lambda x, y: (x < y) | (x == y) & ~(x > 2), (S, (6,))),
    case("where", lambda c, x, y: torch.where(c > 0, x, y), (S, S, (6,))),
    case("masked_fill", lambda x, m: x.masked_fill(m > 0, 7.0), (S, (6,))),
    case("lerp", torch.lerp, (S, S, (5, 1))),
    case("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=2), (S, S, (6,))),
    case("addcdiv", torch.addcdiv, (S, S, (6,)), make=("int", "int", "positive"), exact=False),
    case("integers", lambda x, y: (x & y) + x // 2, (S, (6,)), make=("long", "long")),
    case("promotion", lambda x, y: x + y, (S, ()), make=("long", "int")),
    case("torch.pow", lambda x: torch.pow(2.0, x), (SMALL,), exact=False),
    case("deep", lambda x: x.unsqueeze(0) * x, (SMALL,)),
    case("1d", lambda x: (x + 1) * x, ((3,),)),
    case("size one", lambda x, y: x * y, ((1, 3), (4, 3))),
    case("no elements", lambda x: x + 1, ((0, 3),)),
]


def _in_place(change):
    def function(x, *others):
        y = x * 1
        change(y, *others)
        return y

    return function


IN_PLACE = [
    case("add_", _in_place(lambda y, o: y.add_(o, alpha=3)), (S, (6,)), gathers="into whole"),
    case("iadd", _in_place(lambda y, o: y.__iadd__(o)), (S, S), gathers="into whole"),
    case("mul_", _in_place(lambda y: y.mul_(2).sub_(1)), (S,)),
    case(
        "div_",
        _in_place(lambda y, o: y.div_(o)),
        (S, (5, 1)),
        make=("int", "positive"),
        exact=False,
        gathers="into whole",
    ),
    case("clamp_", _in_place(lambda y: y.clamp_(-1, 1)), (S,)),
    case("masked_fill_", _in_place(lambda y, m: y.masked_fill_(m > 0, 5.0)), (S, (6,)), gathers="into whole"),
    case("addcmul_", _in_place(lambda y, a, b: y.addcmul_(a, b, value=2)), (S, S, (6,)), gathers="into whole"),
    case("copy_", _in_place(lambda y, o: y.copy_(o)), (S, S), gathers="into whole"),
    case("copy_ broadcast", _in_place(lambda y, o: y.copy_(o)), (S, (6,)), gathers="into whole"),
    case("fill_", _in_place(lambda y: y.fill_(3)), (S,)),
    case("zero_", _in_place(lambda y: y.zero_()), (S,)),
    case("relu inplace", _in_place(lambda y: F.relu(y, inplace=True)), (S,)),
    case("scalar tensor", _in_place(lambda y, o: y.mul_(o)), (S, ()), gathers="into whole"),
    case(
        "out", lambda x, y: torch.mul(x.detach(), y.detach(), out=torch.zeros_like(x)), (S, (6,)), gathers="into whole"
    ),
]


def pointwise() -> None:
    check_table(FUNCTIONS)


def in_place() -> None:
    check_table(IN_PLACE)


@pytest.mark.worlds("sim")
@every_size
def test_elementwise_equals_dense(world, size):
    world(pointwise, size)


@pytest.mark.worlds("sim")
@every_size
def test_in_place_equals_dense(world, size):
    world(in_place, size)
