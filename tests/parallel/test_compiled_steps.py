"""`torch.compile` over a whole step, or over code that makes a group's first tensor: the graph breaks, numbers stay."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard

SIZE = 2


def steps(way: str, optimizer: str) -> None:
    torch._dynamo.reset()
    group = as_group()
    torch.manual_seed(0)
    dense = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))).to(device())
    model = copy.deepcopy(dense)
    if way == "fully sharded":
        for block in model:
            fully_shard(block)
        fully_shard(model)
    else:
        st.shard_parameter(model[0][0], "weight", "[tp, -]")
        st.shard_parameter(model[1][2], "weight", "[-, tp]")
    made = st.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    ours = made if optimizer == "sharded" else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        model(x).pow(2).mean().backward()
        ours.step()
        ours.zero_grad()

    compiled = torch.compile(step, backend="eager")
    for number in range(3):
        x = torch.randn(2 * SIZE, 4, generator=torch.Generator().manual_seed(number)).to(device())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler function|.*record_function", UserWarning)
            warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)  # torch's own, on import
            compiled(x[2 * group.index : 2 * group.index + 2] if way == "fully sharded" else x)
        dense(x).pow(2).mean().backward()
        theirs.step()
        theirs.zero_grad()
    for param, twin in zip(model.parameters(), dense.parameters(), strict=True):
        whole = param.full_tensor() if isinstance(param, st.ShardedTensor) else param
        torch.testing.assert_close(whole.detach(), twin.detach())


@pytest.mark.parametrize("optimizer", ["sharded", "stock"])
@pytest.mark.parametrize("way", ["fully sharded", "tensor parallel"])
def test_a_compiled_step_trains_as_the_dense_one(world, way, optimizer):
    world(steps, SIZE, way=way, optimizer=optimizer)


def first_tensors() -> None:
    torch._dynamo.reset()
    group = dist.new_group(list(range(SIZE)))

    def make(x: torch.Tensor) -> torch.Tensor:
        made = st.ones("[axis0, -]", 4, 3, process_group=group)
        return (made * x).sum() + st.distribute(x, "[axis0, -]", process_group=group).sum()

    x = torch.arange(12.0, device=device()).view(4, 3)
    assert torch.compile(make, backend="eager")(x) == 2 * x.sum()


def test_a_compiled_function_may_make_the_first_tensor_of_a_group(world):
    world(first_tensors, SIZE)
