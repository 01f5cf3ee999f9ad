"""Products of operands cut in any way, forward and backward; B14's numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from harness import every_size
from oracle import Case, check_table

CASES = [
    Case("matmul", torch.matmul, ((5, 6), (6, 3))),
    Case("small", lambda x, y: x @ y, ((2, 3), (3, 2))),
    Case("batched", torch.matmul, ((3, 2, 6), (3, 6, 5))),
    Case("broadcast", torch.matmul, ((3, 1, 2, 6), (2, 6, 5))),
    Case("batch by matrix", torch.matmul, ((3, 5, 6), (6, 2))),
    Case("vector", torch.matmul, ((5, 6), (6,))),
    Case("vector left", torch.matmul, ((6,), (6, 5))),
    Case("dot", torch.dot, ((6,), (6,))),
    Case("mm", torch.mm, ((5, 6), (6, 3))),
    Case("bmm", torch.bmm, ((3, 2, 6), (3, 6, 5))),
    Case("mv", torch.mv, ((5, 6), (6,))),
    Case("outer", torch.outer, ((5,), (3,))),
    Case("addmm", lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=3), ((3,), (5, 6), (6, 3))),
    Case("baddbmm", torch.baddbmm, ((3, 2, 5), (3, 2, 6), (3, 6, 5))),
    Case("einsum", lambda x, y: torch.einsum("bik,bkj->bij", x, y), ((3, 2, 6), (3, 6, 5))),
    Case("einsum sum", lambda x: torch.einsum("ij->j", x), ((5, 6),)),
    Case("einsum diagonal", lambda x, y: torch.einsum("ii,ij", x, y), ((4, 4), (4, 3))),
    Case("einsum dots", lambda x, y: torch.einsum("...i,ij", x, y), ((3, 5, 6), (6, 2))),
    Case("einsum three", lambda x, y, z: torch.einsum("ai,bi,ci->abc", x, y, z), ((2, 5), (3, 5), (2, 5))),
    Case("tensordot", lambda x, y: torch.tensordot(x, y, dims=([0, 2], [1, 0])), ((3, 5, 4), (4, 3, 2))),
    Case("linear", F.linear, ((4, 6), (5, 6), (5,))),
    Case("linear batch", lambda x, w: F.linear(x, w), ((2, 3, 6), (5, 6))),
]


def products() -> None:
    check_table(CASES)


@every_size
def test_products_equal_dense(world, size):
    world(products, size)
