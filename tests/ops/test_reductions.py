"""Reductions over whole and cut dims, forward and backward: where ranks hold nothing, and in ways of one operation."""

from __future__ import annotations

import pytest
import torch
from harness import every_size
from harness.law import case, check_table

S = (5, 6)
SMALL = (2, 3)


def over(name, f, exact=True, shapes=(SMALL,), make=(), keep=True, gathers=()):
    """The whole, either dim, both, and a dim that stays."""
    for shape in shapes:
        yield case(name, lambda x: f(x), (shape,), exact, make, gathers)
        yield case(f"{name} 0", lambda x: f(x, 0), (shape,), exact, make, gathers)
        yield case(f"{name} -1", lambda x: f(x, dim=-1), (shape,), exact, make, gathers)
        if keep:
            yield case(f"{name} keepdim", lambda x: f(x, dim=0, keepdim=True), (shape,), exact, make, gathers)


CASES = [
    *over("sum", torch.sum),
    *over("mean", torch.mean, exact=False),
    *over("amax", lambda x, dim=(), keepdim=False: x.amax(dim, keepdim), exact=False),
    *over("amin", lambda x, dim=(), keepdim=False: x.amin(dim, keepdim), exact=False),
    *over("max", lambda x, *a, **k: torch.max(x, *a, **k), exact=False),
    *over("min", lambda x, *a, **k: x.min(*a, **k), exact=False),
    *over("argmax", torch.argmax),
    *over("argmin", lambda x, *a, **k: x.argmin(*a, **k)),
    *over("var", torch.var, exact=False, shapes=(S,)),
    *over("std", lambda x, *a, **k: x.std(*a, **k), exact=False, shapes=(S,)),
    *over("prod", torch.prod, exact=False),
    *over("logsumexp", lambda x, dim=(0, 1), keepdim=False: torch.logsumexp(x, dim, keepdim), exact=False),
    *over("count_nonzero", torch.count_nonzero, keep=False),
    *over("any", lambda x, *a, **k: (x > 3).any(*a, **k)),
    *over("all", lambda x, *a, **k: (x > -3).all(*a, **k)),
    *over(
        "vector_norm 2", lambda x, dim=None, keepdim=False: torch.linalg.vector_norm(x, 2, dim, keepdim), exact=False
    ),
    *over("norm 1", lambda x, dim=None, keepdim=False: x.norm(1, dim, keepdim), exact=False),
    *over("norm inf", lambda x, dim=None, keepdim=False: x.norm(float("inf"), dim, keepdim), exact=False),
    *over("norm fro", lambda x, dim=None, keepdim=False: torch.norm(x, "fro", dim, keepdim), exact=False),
    case("norm 3", lambda x: torch.linalg.norm(x, 3), ((5,),), exact=False),
    case("norm 0", lambda x: torch.linalg.vector_norm(x.detach(), 0, 1), (S,)),
    case("linalg.norm", lambda x: torch.linalg.norm(x), (S,), exact=False),
    case("norm of zeros", lambda x: (x * 0).norm(), (S,)),
    case("std of equals", lambda x: (x * 0).std(), (S,)),
    case("dims", lambda x: x.sum((0, 2)), ((3, 4, 5),)),
    case("dims keep", lambda x: x.mean((1, 2), keepdim=True), ((3, 4, 5),), exact=False),
    case("var_mean", lambda x: torch.var_mean(x, 1), (S,), exact=False),
    case("std_mean", lambda x: torch.std_mean(x, dim=0, correction=0), (S,), exact=False),
    case("var biased", lambda x: x.var(False), (S,), exact=False),
    case("axis", lambda x: torch.sum(x, axis=0, keepdims=True), (S,)),
    case("dtype", lambda x: x.sum(0, dtype=torch.float64), (S,)),
    case("integers", lambda x: x.sum(), (S,), make=("long",)),
    case("integer max", lambda x: x.max(0), (S,), make=("long",)),
    case("bool sum", lambda x: (x > 0).sum(0), (S,)),
    case("ties", lambda x: (x > 0).float().amax(0) + (x * 0).amax(0), (S,), exact=False),
    case("nan", lambda x: torch.where(x == 4, float("nan"), x.detach()).amax(), (S,)),
    case("nan max", lambda x: torch.where(x == 4, float("nan"), x.detach()).max(0), (S,)),
    case("nan argmax", lambda x: torch.where(x == 4, float("nan"), x.detach()).argmax(), (S,)),
    case("infinite", lambda x: torch.where(x > 0, float("-inf"), x.detach()).max(0), (S,)),
    case("max other", lambda x, y: torch.max(x, y), (S, (6,)), exact=False),
    case("one dim", lambda x: x.max(0), ((4,),)),
    case("no dims", lambda x: x.sum() + x.mean() + x.amax(), ((),), gathers=True),
    case("no rows", lambda x: x.sum(0), ((0, 3),)),
    case("cumsum", lambda x: x.cumsum(1), (S,), gathers=(1,)),
    case("sort", lambda x: torch.sort(x, 0), (S,), gathers=(0,), exact=False),
    case("topk", lambda x: x.topk(2, 1), ((5, 4),), make=("unit",), gathers=(1,), exact=False),
    case("median", lambda x: x.median(0), ((5, 4),), make=("unit",), gathers=(0,), exact=False),
    case("full median", lambda x: x.median(), ((5, 4),), make=("unit",), gathers=True, exact=False),
]


def reductions() -> None:
    check_table(CASES)


@pytest.mark.worlds("sim")
@every_size
def test_reductions_equal_dense(world, size):
    world(reductions, size)
