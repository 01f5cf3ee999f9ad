"""Products written in other ways than `tests/rules` calls them, of operands cut in any way."""

from __future__ import annotations

import pytest
import torch
from harness import every_size
from harness.law import case, check_table

CASES = [
    case("small", lambda x, y: x @ y, ((2, 3), (3, 2))),
    case("batched", torch.matmul, ((3, 2, 6), (3, 6, 5))),
    case("broadcast", torch.matmul, ((3, 1, 2, 6), (2, 6, 5))),
    case("vector left", torch.matmul, ((6,), (6, 5))),
    case("einsum sum", lambda x: torch.einsum("ij->j", x), ((5, 6),)),
    case("einsum diagonal", lambda x, y: torch.einsum("ii,ij", x, y), ((4, 4), (4, 3))),
    case("einsum dots", lambda x, y: torch.einsum("...i,ij", x, y), ((3, 5, 6), (6, 2))),
    case("einsum three", lambda x, y, z: torch.einsum("ai,bi,ci->abc", x, y, z), ((2, 5), (3, 5), (2, 5))),
]


def products() -> None:
    check_table(CASES)


@pytest.mark.worlds("sim")
@every_size
def test_products_equal_dense(world, size):
    world(products, size)
