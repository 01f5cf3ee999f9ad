"""Modules of torch over sharded parameters and inputs: attention, bags of embeddings, batch norm, a small network."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from harness import device, every_size
from harness.law import whole

import shardtensor as st


def chunk(dim: int) -> st.ChunkShardingSpec:
    return st.ChunkShardingSpec(dim, [f"rank:{rank}/{device(rank)}" for rank in range(dist.get_world_size())])


def equal_to_dense(
    module: nn.Module, dims: dict[str, int], *inputs: torch.Tensor, cut: int | None = None, gathers: bool = False
) -> None:
    """Shard parameters along `dims`, perhaps the first input, too; values, gradients and buffers are the dense ones."""
    module = copy.deepcopy(module).to(device())
    sharded = copy.deepcopy(module)
    for name, dim in dims.items():
        owner, _, attribute = name.rpartition(".")
        st.shard_parameter(sharded.get_submodule(owner), attribute, chunk(dim))
    given = [x.to(device()) for x in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if gathers else "error", st.GatherWarning)
        first = given[0] if cut is None else st.distribute(given[0], chunk(cut))
        found, want = sharded(first, *given[1:]), module(*given)
        found, want = (y[0] if isinstance(y, tuple) else y for y in (found, want))
        torch.testing.assert_close(whole(found), want)
        (found * found).sum().backward()
        (want * want).sum().backward()
    for (name, x), y in zip(sharded.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(whole(x.grad), y.grad, msg=lambda text, name=name: f"{name}: {text}")
    for (name, x), y in zip(sharded.named_buffers(), module.buffers(), strict=True):
        torch.testing.assert_close(whole(x), y, msg=lambda text, name=name: f"{name}: {text}")


def attention() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8)
    for dims in ({"in_proj_weight": 1, "out_proj.weight": 1}, {"in_proj_weight": 1}, {"out_proj.weight": 0}):
        equal_to_dense(nn.MultiheadAttention(8, 4, batch_first=True), dims, x, x, x)


@every_size
def test_multi_head_attention_equals_dense(world, size):
    world(attention, size)


def bags() -> None:
    torch.manual_seed(2)
    two = torch.randint(7, (4, 3))
    one, offsets = torch.randint(7, (9,)), torch.tensor([0, 2, 2, 6])
    for mode in ("sum", "mean", "max"):
        for dim in (0, 1):
            for options, *inputs in (
                *(({"padding_idx": padding}, *given) for padding in (None, 3) for given in ((two,), (one, offsets))),
                ({"max_norm": 1.0}, two),
                ({"include_last_offset": True}, one, torch.tensor([0, 4, 9])),
            ):
                bag = nn.EmbeddingBag(7, 5, mode=mode, **options)
                equal_to_dense(bag, {"weight": dim}, *inputs, gathers=mode == "max")


@every_size
def test_bags_of_embeddings_equal_dense(world, size):
    world(bags, size)


def batch_statistics() -> None:
    torch.manual_seed(3)
    for train in (True, False):
        for module, x in (
            (nn.BatchNorm1d(4), torch.randn(7, 4)),
            (nn.BatchNorm2d(4, momentum=None), torch.randn(5, 4, 2, 3)),
            (nn.InstanceNorm1d(4, affine=True), torch.randn(5, 4, 3)),
            (nn.GroupNorm(2, 4), torch.randn(5, 4, 3)),
        ):
            for cut in (0, 1):
                equal_to_dense(module.train(train), {}, x, cut=cut)
            if module.weight is not None:
                equal_to_dense(module.train(train), {"weight": 0, "bias": 0}, x)


@every_size
def test_batch_statistics_equal_dense(world, size):
    world(batch_statistics, size)


def network() -> None:
    torch.manual_seed(4)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.PReLU(8), nn.MaxPool2d(2), nn.Conv2d(8, 4, 2, groups=2),
        nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip
    x = torch.randn(6, 3, 6, 6)
    equal_to_dense(net, {}, x, cut=0)
    equal_to_dense(net, {"0.weight": 0, "8.weight": 1}, x)


@every_size
def test_a_small_network_equals_dense(world, size):
    world(network, size)
