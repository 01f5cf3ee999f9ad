"""A steady step: what it adds to the operations of the plain module does not grow with its parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardtensor as st
from shardtensor.fsdp import fully_shard


class Seen(TorchDispatchMode):
    """Counts the operations of a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(model: nn.Module) -> Counter[str]:
    """Of a forward, after two steps."""
    x = torch.ones(2, 8)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    with Seen() as seen:
        model(x)
    return seen.count


def added(linears: int) -> Counter[str]:
    """What three units of so many layers do more than the plain modules."""

    def blocks() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(linears))) for _ in range(3)))

    plain, model = blocks(), blocks()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    more, less = operations(model), operations(plain)
    assert not less - more
    return more - less


def test_a_forward_does_nothing_for_each_parameter():
    [few, _], [many, _] = (st.simulate(2, added, linears) for linears in (1, 6))
    assert few == many
    assert few
