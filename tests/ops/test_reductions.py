"""Reductions over whole and cut dims, forward and backward."""

from __future__ import annotations

import torch
from harness import every_size
from oracle import Case, check_table

S = (5, 6)
SMALL = (2, 3)


def over(name, f, exact=True, shapes=(S, SMALL), make=(), keep=True, gathers=()):
    """The whole, either dim, both, and a dim that stays."""
    for shape in shapes:
        yield Case(name, lambda x: f(x), (shape,), exact, make, gathers)
        yield Case(f"{name} 0", lambda x: f(x, 0), (shape,), exact, make, gathers)
        yield Case(f"{name} -1", lambda x: f(x, dim=-1), (shape,), exact, make, gathers)
        if keep:
            yield Case(f"{name} keepdim", lambda x: f(x, dim=0, keepdim=True), (shape,), exact, make, gathers)


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
    Case("norm 3", lambda x: torch.linalg.norm(x, 3), ((5,),), exact=False),
    Case("norm 0", lambda x: torch.linalg.vector_norm(x.detach(), 0, 1), (S,)),
    Case("linalg.norm", lambda x: torch.linalg.norm(x), (S,), exact=False),
    Case("norm of zeros", lambda x: (x * 0).norm(), (S,)),
    Case("std of equals", lambda x: (x * 0).std(), (S,)),
    Case("dims", lambda x: x.sum((0, 2)), ((3, 4, 5),)),
    Case("dims keep", lambda x: x.mean((1, 2), keepdim=True), ((3, 4, 5),), exact=False),
    Case("var_mean", lambda x: torch.var_mean(x, 1), (S,), exact=False),
    Case("std_mean", lambda x: torch.std_mean(x, dim=0, correction=0), (S,), exact=False),
    Case("var biased", lambda x: x.var(False), (S,), exact=False),
    Case("axis", lambda x: torch.sum(x, axis=0, keepdims=True), (S,)),
    Case("half", lambda x: x.bfloat16().sum(0), ((64, 3),)),
    Case("dtype", lambda x: x.sum(0, dtype=torch.float64), (S,)),
    Case("integers", lambda x: x.sum(), (S,), make=("long",)),
    Case("integer max", lambda x: x.max(0), (S,), make=("long",)),
    Case("bool sum", lambda x: (x > 0).sum(0), (S,)),
    Case("ties", lambda x: (x > 0).float().amax(0) + (x * 0).amax(0), (S,), exact=False),
    Case("nan", lambda x: torch.where(x == 4, float("nan"), x.detach()).amax(), (S,)),
    Case("nan max", lambda x: torch.where(x == 4, float("nan"), x.detach()).max(0), (S,)),
    Case("nan argmax", lambda x: torch.where(x == 4, float("nan"), x.detach()).argmax(), (S,)),
    Case("infinite", lambda x: torch.where(x > 0, float("-inf"), x.detach()).max(0), (S,)),
    Case("max other", lambda x, y: torch.max(x, y), (S, (6,)), exact=False),
    Case("one dim", lambda x: x.max(0), ((4,),)),
    Case("no dims", lambda x: x.sum() + x.mean() + x.amax(), ((),)),
    Case("no rows", lambda x: x.sum(0), ((0, 3),)),
    Case("cumsum", lambda x: x.cumsum(1), (S,), gathers=(1,)),
    Case("sort", lambda x: torch.sort(x, 0), (S,), gathers=(0,), exact=False),
    Case("topk", lambda x: x.topk(2, 1), ((5, 4),), make=("unit",), gathers=(1,), exact=False),
    Case("median", lambda x: x.median(0), ((5, 4),), make=("unit",), gathers=(0,), exact=False),
    Case("full median", lambda x: x.median(), ((5, 4),), make=("unit",), gathers="all", exact=False),
]


def reductions() -> None:
    check_table(CASES)


@every_size
def test_reductions_equal_dense(world, size):
    world(reductions, size)
