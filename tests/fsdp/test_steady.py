"""A steady step: what it adds to the operations of the plain module does not grow with its parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from fsdp.counted import counted
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

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


class Blocks(nn.Module):
    """Blocks that are gathered again in backward, each in a checkpoint or not (None)."""

    def __init__(self, is_reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(160, 160) for _ in range(4))
        self.is_reentrant = is_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.is_reentrant is None else checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


def sent_by(is_reentrant: bool | None, is_around: bool = False) -> tuple[int, int]:
    """All-gathers and comparisons of the third step; what is recomputed is so to its end."""
    model = Blocks(None if is_around else is_reentrant)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    x = torch.ones(2, 160, requires_grad=True)

    def step() -> None:
        y = checkpoint(model, x, use_reentrant=is_reentrant) if is_around else model(x)
        y.sum().backward()

    with set_checkpoint_early_stop(False):
        for _ in range(2):
            step()
        whole = model._fsdp_state.data_mesh.whole
        compared, exchange = [], whole.exchange
        whole.exchange = lambda blob: compared.append(blob) or exchange(blob)
        with counted(model) as counts:
            step()
    return counts["gather"], len(compared)


@pytest.mark.parametrize("is_reentrant", [None, False, True])
def test_a_steady_step_gathers_what_it_needs_and_compares_nothing(is_reentrant):
    assert st.simulate(2, sent_by, is_reentrant) == [(6, 0), (6, 0)]


def test_a_reentrant_checkpoint_of_the_whole_model_gathers_for_one_forward_more_and_compares_nothing():
    assert st.simulate(2, sent_by, True, True) == [(10, 0), (10, 0)]


def kept_bytes(width: int) -> int:
    """Of the buffers that gradients are packed in, after a backward."""
    model = fully_shard(nn.Linear(width, width, bias=False))
    model(torch.ones(2, width)).sum().backward()
    return sum(x.untyped_storage().nbytes() for x in fully_shard.state(model).runtime.reducer._memory.values())


def test_small_buffers_of_reductions_stay_and_large_ones_are_freed_for_the_next_loss():
    assert min(st.simulate(2, kept_bytes, 64)) > 0
    assert st.simulate(2, kept_bytes, 2100) == [0, 0]


def shown_by_rnn() -> None:
    rnn = fully_shard(nn.LSTM(4, 4))
    rnn(torch.ones(3, 2, 4))[0].sum().backward()
    for _ in range(2):
        assert all(
            a is rnn._parameters[name] for a, name in zip(rnn._flat_weights, rnn._flat_weights_names, strict=True)
        )
        with torch.no_grad():
            rnn(torch.ones(3, 2, 4))


def test_a_recurrent_layer_lists_the_parameters_that_its_module_shows():
    st.simulate(2, shown_by_rnn)


def reduced_on_the_way() -> list[int]:
    """How many units were reduced when the backward came to each unit's output, from the first unit to the last."""
    model = Blocks(None)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    seen: list[int] = []
    with counted(model) as counts:
        x = torch.ones(2, 160)
        for block in model.blocks:
            x = block(x)
            x.register_hook(lambda grad: seen.insert(0, counts["reduce"]))
        x.sum().backward()
    return seen


def test_gradients_are_reduced_while_backward_runs():
    for seen in st.simulate(2, reduced_on_the_way):
        assert seen == [3, 2, 1, 0]
