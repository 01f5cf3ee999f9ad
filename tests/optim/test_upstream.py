"""The flow of PyTorch's own test of its ShardedOptimizer, with the names it uses."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.distributed as dist
from harness import device

from shardtensor import (
    ChunkShardingSpec,
    ShardedOptimizer,
    ShardedTensor,
    named_params_with_sharded_tensor,
    sharded_tensor,
)


class Model(torch.nn.Module):
    """Two parameters, one of them perhaps sharded; works on this rank's shard directly."""

    def __init__(self, spec=None):
        super().__init__()
        torch.manual_seed(0)
        self.param = torch.nn.Parameter(torch.rand(5, 10))
        if spec is None:
            self.sharded_param = torch.nn.Parameter(torch.rand(5, 10))
        else:
            rows = 5 * dist.get_world_size()
            self.sharded_param = torch.nn.Parameter(sharded_tensor.rand(spec, rows, 10, requires_grad=True))

    def forward(self, x):
        second = self.sharded_param
        if isinstance(second, ShardedTensor):
            second = second.local_shards()[0].tensor
        return self.param + second + x


def flow():
    kind, world = device().type, dist.get_world_size()
    spec = ChunkShardingSpec(
        dim=0,
        placements=[f"rank:{rank}/{kind}:{rank}" if kind == "cuda" else f"rank:{rank}/cpu" for rank in range(world)],
    )
    local_model, sharded_model = Model().to(device()), Model(spec).to(device())
    sharded_model.sharded_param.local_shards()[0].tensor = local_model.sharded_param.detach().clone().requires_grad_()
    local_optim = torch.optim.SGD(local_model.parameters(), lr=0.1)
    sharded_optim = ShardedOptimizer(dict(sharded_model.named_parameters()), torch.optim.SGD, lr=0.1)
    local_optim.zero_grad()
    sharded_optim.zero_grad()
    before_update = deepcopy(sharded_optim.named_params)
    x = torch.rand(5, 10, device=device(), requires_grad=True)
    local_model(x).sum().backward()
    sharded_model(x).sum().backward()
    local_optim.step()
    sharded_optim.step()
    assert list(before_update) == ["param", "sharded_param"]
    for name, old in before_update.items():
        new = sharded_optim.named_params[name]
        if isinstance(old, ShardedTensor):
            assert not torch.equal(old.local_shards()[0].tensor, new.local_shards()[0].tensor)
            assert torch.equal(new.local_shards()[0].tensor, local_model.sharded_param)
        else:
            assert not torch.equal(old, new)
            assert torch.equal(new, local_model.param)


def test_sharded_optim(world):
    world(flow, 4)


def attributes():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    module[0].extra = module.extra = sharded_tensor.zeros("[tp]", 4)
    module[1].more = sharded_tensor.zeros("[tp]", 4)
    names = [name for name, _ in named_params_with_sharded_tensor(module)]
    assert names == ["0.weight", "0.bias", "extra", "1.more"]
    assert [name for name, _ in named_params_with_sharded_tensor(module, prefix="m", recurse=False)] == ["m.extra"]
    assert [name for name, _ in named_params_with_sharded_tensor(module[1], prefix="m")] == ["m.weight", "m.more"]


def test_named_params_with_sharded_tensor(world):
    world(attributes, 2)
