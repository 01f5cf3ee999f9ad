"""Plans with flows: layers on plain local values give the dense outputs and gradients, whatever the layouts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoder import HEAD, Decoder, rules
from harness import device, every_size
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def grid(**axes: int) -> Any:
    """The ranks of this world as a grid."""
    return as_group().on_mesh(Mesh(tuple(axes.items())), {})


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(5)
    module = Decoder(**options).to(device(), torch.float64)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.rand_like(param) * 0.1)
    return module


def trained(module: nn.Module, tokens: int) -> dict[str, torch.Tensor]:
    """Logits, gradients and parameters of two steps."""
    optimizer = st.ShardedOptimizer(module, torch.optim.AdamW, lr=0.01)
    ids = torch.arange(2 * tokens, device=device()).view(2, tokens) % 16
    found = {}
    for step in range(2):
        optimizer.zero_grad()
        logits = module(ids)
        F.cross_entropy(logits.flatten(0, 1), (ids + 1).flatten() % 16).backward()
        found[f"{step} logits"] = logits.detach()
        found |= {f"{step} gradient of {name}": whole(p.grad) for name, p in module.named_parameters()}
        optimizer.step()
    return found | {name: whole(p).detach() for name, p in module.named_parameters()}


def equals_dense(plan: Any, process_group: Any = None, tokens: int = 4, **options: Any) -> None:
    dense = decoder(**options)
    module = copy.deepcopy(dense)
    names = [name for name, _ in module.named_parameters()]
    with st.strict():
        st.shard_module(module, plan, process_group=process_group)
        assert [name for name, _ in module.named_parameters()] == names
        found = trained(module, tokens)
    torch.testing.assert_close(found, trained(dense, tokens))


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor parallel": (rules(balanced=True), {}),
    "without biases": (rules(balanced=True), {"bias": False}),
    "uneven": (rules(balanced=True), {"heads": 3, "kv_heads": 3, "hidden": 7}),
    "sequence parallel": (rules("[-, tp, ...]", balanced=True), {"tokens": 12}),
    "sequence parallel, uneven": (
        rules("[-, tp balanced, ...]", balanced=True),
        {"tokens": 3, "heads": 5, "kv_heads": 5},
    ),
    "batch along tp": (rules("[tp balanced, ...]", balanced=True), {"hidden": 3}),
}


@pytest.mark.worlds("sim")
@every_size
@pytest.mark.parametrize("name", PLANS)
def test_a_decoder_equals_the_dense_one(world, size, name):
    plan, options = PLANS[name]
    world(equals_dense, size, plan=plan, **options)


@pytest.mark.parametrize(("name", "size"), [("tensor parallel", 4), ("sequence parallel, uneven", 3), ("uneven", 2)])
def test_a_decoder_on_real_ranks(world, name, size):
    plan, options = PLANS[name]
    world(equals_dense, size, plan=plan, **options)


def grouped(stream: str) -> None:
    plan = rules(stream, axes=("kvg", "kvr"), kv=st.colwise_shared("kvg", "kvr", unit=HEAD))
    equals_dense(plan, grid(kvg=2, kvr=2), kv_heads=2)


@pytest.mark.parametrize("stream", ["replicate", "[-, kvg*kvr, ...]"])
def test_fewer_key_heads_than_ranks(world, stream):
    world(grouped, 4, stream=stream)


def test_flows_on_a_grid_with_a_data_axis(world):
    world(on_a_data_grid, 4)


def on_a_data_grid() -> None:
    """Each coordinate of dp holds the whole batch here, so that nothing is to be summed over dp."""
    equals_dense(rules("[-, tp, ...]"), grid(dp=2, tp=2))


class Exact(nn.Module):
    """Small integers all the way, so that float32 sums are the same in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(7, 6), nn.Linear(6, 11), nn.Linear(11, 6)
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(torch.randint(-2, 3, param.shape, generator=torch.Generator().manual_seed(i)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.embed(ids))))


def integers(stream: str) -> None:
    rules = {
        "embed": {"weight": "[vocab: tp balanced]", "out": f"partial(tp) -> {stream}"},
        "up": {**st.colwise(balanced=True), "in": "replicate" if stream == "replicate" else f"{stream} -> replicate"},
        "down": {**st.rowwise(to=stream, balanced=True)},
        "out": "replicate" if stream == "replicate" else f"{stream} -> replicate",
    }
    dense = Exact().to(device())
    module = st.shard_module(copy.deepcopy(dense), rules)
    ids = torch.arange(10, device=device()).view(2, 5) % 7
    found, wanted = module(ids), dense(ids)
    assert found.dtype == torch.float32 and torch.equal(found, wanted)
    for y in (found, wanted):
        (y * (torch.arange(y.numel(), device=device()).view(y.shape) % 3 - 1)).sum().backward()
    for (name, p), q in zip(module.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(whole(p.grad), q.grad), name


@pytest.mark.worlds("sim")
@every_size
@pytest.mark.parametrize("stream", ["replicate", "[-, tp balanced, ...]"])
def test_sums_that_are_exact_are_equal_in_float32(world, size, stream):
    world(integers, size, stream=stream)


def in_bfloat16(stream: str) -> None:
    """Each result is within 2 % (in norm) of float64, as the dense bfloat16 run is within 1 %."""
    exact = decoder()
    results = []
    for module in (
        exact,
        copy.deepcopy(exact).bfloat16(),
        st.shard_module(copy.deepcopy(exact).bfloat16(), rules(stream)),
    ):
        ids = torch.arange(16, device=device()).view(2, 8)
        logits = module(ids)
        logits.float().square().mean().backward()
        results.append([x.double() for x in (logits.detach(), *(whole(p.grad) for p in module.parameters()))])
    for x, dense, sharded in zip(*results, strict=True):
        assert (dense - x).norm() <= 0.01 * x.norm() + 1e-3
        assert (sharded - x).norm() <= 0.02 * x.norm() + 1e-3


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stream", ["replicate", "[-, tp, ...]"])
def test_bfloat16_stays_near_the_exact_result(world, size, stream):
    world(in_bfloat16, size, stream=stream)
