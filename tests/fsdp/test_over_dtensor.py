"""`parallelize_module` of torch, then `fully_shard`: DTensors are cut further over the data ranks, as FSDP2 does."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from harness import device
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardtensor as st
from shardtensor.errors import LayoutError
from shardtensor.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.met = set()

    def forward(self, x):
        self.met.add((type(self.up.weight), isinstance(self.up.weight, nn.Parameter)))
        return self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, vocabulary=16, checkpoints=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary, bias=False)
        self.layers, self.checkpoints = nn.ModuleList(Block() for _ in range(2)), checkpoints

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


def grid():
    """Two data ranks, two of tp."""
    return dist.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))


def tensor_parallel(net, mesh):
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh["tp"], plan)


def train(vocabulary=16, checkpoints=False, meta=False, again=False, **options):
    mesh = grid()
    torch.manual_seed(0)
    oracle = Net(vocabulary).to(device())
    if meta:
        with torch.device("meta"):
            net = Net(vocabulary, checkpoints)
    else:
        net = Net(vocabulary, checkpoints).to(device())
        net.load_state_dict(oracle.state_dict())
    tensor_parallel(net, mesh)
    shard = functools.partial(fully_shard, mesh=mesh["dp"], reshard_after_forward=again, **options)
    for layer in net.layers:
        shard(layer)
    shard(net)
    if meta:
        net.to_empty(device=device())
        net.load_state_dict(oracle.state_dict())
    ways = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (oracle, net)]
    for step in range(3):
        ids = torch.randint(0, vocabulary, (4, 6), generator=torch.Generator().manual_seed(step)).to(device())
        oracle(ids).square().mean().backward()
        net(ids.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
        for (name, p), q in zip(net.named_parameters(), oracle.parameters(), strict=True):
            assert isinstance(p, st.ShardedTensor) and isinstance(p, nn.Parameter)
            message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
            grad = p.grad.full_tensor().to(device())
            torch.testing.assert_close(grad, q.grad, rtol=1e-4, atol=1e-6, msg=message)
        for way in ways:
            way.step()
            way.zero_grad()
    full = st.full_state_dict(net)
    for name, value in oracle.state_dict().items():
        torch.testing.assert_close(full[name].to(device()), value, rtol=1e-4, atol=1e-5)
    assert net.layers[0].met == {(DTensor, True)}  # what torch's hooks expect
    return {name: str(p.sharding_spec()) for name, p in net.layers[0].named_parameters()}


def test_the_dense_steps(world):
    specs = world(train, 4)[0]
    cut = {name: spec.partition(" flat")[0] for name, spec in specs.items() if spec.startswith("[")}
    assert cut == {"up.weight": "[tp, -]", "up.bias": "[tp]", "down.weight": "[-, tp]"}


def rows(param):
    return "flat(dp, unit=row)"


@pytest.mark.parametrize(
    "options",
    [
        {"vocabulary": 15},
        {"checkpoints": True, "again": True},
        {"meta": True},
        {"shard_placement_fn": rows},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["uneven", "checkpoints", "meta", "rows", "offload"],
)
def test_the_dense_steps_in_other_ways(world, options):
    world(train, 4, **options)


def copies():
    """The sum over tp of the gradients of a norm's copies is made in the dtype of reductions."""
    mesh = grid()
    net = nn.Sequential(nn.LayerNorm(4, eps=0.0)).to(device())
    parallelize_module(net, mesh["tp"], {"0": SequenceParallel(use_local_output=True)})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net, mesh=mesh["dp"], mp_policy=policy)
    x = torch.tensor([-1.0, 1.0, 1.0, -1.0], device=device()).expand(1, 1, 4)
    (net(x) * (256.0, 1.0)[mesh.get_local_rank("tp")]).sum().backward()
    return [p.grad.full_tensor().tolist() for p in net.parameters()]


def test_copies_are_summed_in_the_dtype_of_reductions(world):
    assert world(copies, 4) == [[[-257.0, 257.0, 257.0, -257.0], [257.0] * 4]] * 4


def refused():
    mesh = grid()
    net = tensor_parallel(Net().to(device()), mesh)
    with pytest.raises(LayoutError, match="no mesh joins with the data ranks") as first:
        fully_shard(net)
    assert all(isinstance(p, DTensor) for p in net.parameters())
    fully_shard(net, mesh=mesh["dp"])
    on_both = nn.Linear(4, 4, bias=False).to(device())
    weight = distribute_tensor(on_both.weight.detach(), mesh, [Replicate(), Shard(0)])
    on_both.weight = nn.Parameter(weight)
    with pytest.raises(LayoutError, match="which has the data axis dp") as second:
        fully_shard(on_both, mesh=mesh["dp"])
    twin = nn.Linear(4, 4, bias=False).to(device())
    fully_shard(parallelize_module(twin, mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])
    return str(first.value), str(second.value)


def test_what_does_not_fit_names_the_way(world):
    for first, second in world(refused, 4):
        assert 'fully_shard(module, mesh=mesh["dp"])' in first
        assert 'parallelize_module(module, mesh["tp"], plan)' in second
