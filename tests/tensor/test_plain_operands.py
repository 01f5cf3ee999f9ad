"""A plain tensor is a copy on every rank: what to do with each rank's own ids, and the mode that finds who does not."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from harness import device
from torch.nn import functional as F

import shardtensor as st
from shardtensor.comm.process_group import as_group

SIZE = 2


@pytest.mark.parametrize("bag", [False, True])
def test_ids_of_each_rank_are_one_tensor_cut_over_the_ranks(bag: bool) -> None:
    n, k, world = 3, 4, 2
    table, every = torch.arange(40.0).view(10, 4), torch.arange(n * world * k).view(-1, k) % 10
    lookup = F.embedding_bag if bag else F.embedding

    def body(rank: int = 0) -> torch.Tensor:
        rank = as_group().rank
        weight = st.distribute(table, "[dp, -]")
        ids = st.init_from_local_tensor(every[n * rank : n * rank + n], "[dp, -]", (n * world, k))
        out = st.reshard(lookup(ids, weight), "[dp, -]" if bag else "[dp, -, -]")
        return out.local_tensor()

    for rank, mine in enumerate(st.simulate("dp=2", body)):
        assert torch.equal(mine, lookup(every[n * rank : n * rank + n], table))


def differing_operands() -> list[str]:
    os.environ["SHARDTENSOR_CHECK"] = "collectives"
    try:
        group = as_group(dist.new_group(list(range(SIZE))))
    finally:
        del os.environ["SHARDTENSOR_CHECK"]
    table = st.ones("[axis0, -]", 4, 3, process_group=group)
    same = torch.arange(3, device=device())
    assert F.embedding(same, table).shape == (3, 3)
    texts = []
    for call in (
        lambda: F.embedding(same + group.index, table),
        lambda: table * torch.full((3,), float(group.index), device=device()),
        lambda: torch.cat([table, torch.full((1, 3), float(group.index), device=device())]),
    ):
        with pytest.raises(st.DisagreementError) as caught:
            call()
        texts.append(str(caught.value))
    torch.empty(4, 3, device=device()).copy_(table)  # what is overwritten need not be equal
    return texts


def test_the_mode_names_the_operand_the_operation_and_the_line(world) -> None:
    first, second = world(differing_operands, SIZE)
    assert first == second
    for text, (name, operand) in zip(
        first, [("embedding", "operand 1"), ("mul", "operand 2"), ("cat", "operand 1[1]")], strict=True
    ):
        assert name in text.splitlines()[0] and f"{operand} of rank 0 does not match" in text.splitlines()[0]
        assert "test_plain_operands.py:" in text and "checksum" in text
