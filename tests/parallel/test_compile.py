"""A module with flows compiles into one graph, and computes what it computes uncompiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder import Decoder, rules
from harness import device
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardtensor as st


class Checkpointed(nn.Module):
    """A decoder whose layers are computed again in backward."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.decoder.embed(ids)
        for layer in self.decoder.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.decoder.head(self.decoder.norm(x))


def made(stream: str, checkpoints: bool) -> nn.Module:
    torch.manual_seed(0)
    module = st.shard_module(Decoder(layers=1).to(device()), rules(stream))
    return Checkpointed(module) if checkpoints else module


def run(module: nn.Module, forward: Any, ids: torch.Tensor, autocasts: bool) -> list[torch.Tensor]:
    with torch.autocast(device().type, torch.bfloat16, enabled=autocasts):
        logits = forward(ids)
    logits.float().square().sum().backward()
    grads = [p.grad._local if isinstance(p.grad, st.ShardedTensor) else p.grad for p in module.parameters()]
    found = [logits.detach(), *(grad.clone() for grad in grads)]
    for param in module.parameters():
        param.grad = None
    return found


def compiles(stream: str, checkpoints: bool, autocasts: bool) -> None:
    module = made(stream, checkpoints)
    torch._dynamo.reset()
    forward = torch.compile(module, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        ids = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(seed)).to(device())
        with torch._dynamo.config.patch(error_on_recompile=bool(seed)):
            found = run(module, forward, ids, autocasts)
        bound = {"rtol": 0.05, "atol": 0.05} if autocasts else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found, run(module, module, ids, autocasts), **bound)
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(0.5)  # new values are seen, and compile nothing anew


@pytest.mark.parametrize(
    ("stream", "checkpoints", "autocasts"),
    [("replicate", False, False), ("[-, tp, ...]", True, False), ("[-, tp, ...]", False, True)],
    ids=["", "checkpoint", "autocast"],
)
def test_one_graph_and_the_same_numbers(world, stream, checkpoints, autocasts):
    world(compiles, 2, stream=stream, checkpoints=checkpoints, autocasts=autocasts)
