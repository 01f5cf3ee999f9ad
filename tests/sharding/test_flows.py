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


@pytest.mark.worlds("sim", "gloo")
@every_size
@pytest.mark.parametrize("name", PLANS)
def test_a_decoder_equals_the_dense_one(world, size, name):
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
