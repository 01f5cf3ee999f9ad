"""Blocks that torch.compile made, sharded; and sharded blocks, compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp.twins import Block
from harness import device

from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard

SIZE = 2


def steps(way: str) -> None:
    torch._dynamo.reset()
    group = as_group()
    torch.manual_seed(0)
    dense = torch.nn.Sequential(*(Block(4) for _ in range(2))).to(device())
    model = copy.deepcopy(dense)
    for i, block in enumerate(model):
        if way == "in place, before":
            block.compile(backend="aot_eager", fullgraph=True)
        if way == "wrapped, before":
            model[i] = torch.compile(block, backend="aot_eager", fullgraph=True)
        fully_shard(model[i])
        if way == "in place, after":
            model[i].compile(backend="aot_eager", fullgraph=True)
    fully_shard(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, dense))
    for step in range(4):
        x = torch.randn(SIZE * 2, 4, generator=torch.Generator().manual_seed(step)).to(device())
        torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile")
        try:
            model(x[2 * group.index : 2 * group.index + 2]).pow(2).mean().backward()
        finally:
            torch.compiler.set_stance("default")
        dense(x).pow(2).mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for param, twin in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), twin.detach())


@pytest.mark.parametrize("way", ["none", "in place, before", "in place, after", "wrapped, before"])
def test_compiled_blocks_train_as_dense_ones(world, way):
    world(steps, SIZE, way=way)
