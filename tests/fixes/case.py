"""A case: an error, and each way out that it names; and the modules and tensors that many cases start from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard
from shardtensor.mesh import Mesh

Act = Callable[[], Any]
ROW = re.compile(r"^ +(?:fix|either|or)\b:? +(.*)$", re.MULTILINE)


@attrs.frozen
class Case:
    """What goes wrong, and each way out: words of the message, and what they say to do.

    Attributes:
        mesh: the simulated ranks that run it; without a mesh it runs in this process alone, and may start its own.
        differs: whether the message of each rank has facts of that rank alone.
        on: the ranks that get an error, where not all of them do.
    """

    wrong: Act
    ways: dict[str, Act]
    mesh: str | int = "tp=2"
    differs: bool = False
    on: tuple[int, ...] | None = None


def go_wrong(case: Case) -> list[str]:
    """The message on every rank."""
    texts = st.simulate(case.mesh, _message, case) if case.mesh else [_message(case)]
    return [text for rank, text in enumerate(texts) if case.on is None or rank in case.on]


def go_on(case: Case) -> None:
    """Take each way out, each in a world of its own."""
    for act in case.ways.values():
        if case.mesh:
            st.simulate(case.mesh, act)
        else:
            act()


def _message(case: Case) -> str:
    try:
        case.wrong()
    except st.ShardTensorError as error:
        return str(error)
    assert case.on is not None and as_group().rank not in case.on, "nothing was wrong"
    return ""


def weight(spec: str = "[tp, -]", rows: int = 4, columns: int = 6) -> st.ShardedTensor:
    return st.distribute(torch.arange(float(rows * columns)).view(rows, columns), spec)


def linear(spec: str | None = "[tp, -]") -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 4))
    if spec:
        st.shard_parameter(module, "0.weight", spec)
    return module


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def units(**options: Any) -> Any:
    model = mlp()
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def alone(act: Act, size: int = 1) -> Any:
    """Run as the only rank of a process group; or as rank 0 of several, of which the others only seem to be there."""
    backend = "gloo" if size == 1 else "cpu:fake"  # of the CPU alone, where there is a GPU, too
    dist.init_process_group(backend, store=dist.HashStore() if size == 1 else FakeStore(), rank=0, world_size=size)
    try:
        return act()
    finally:
        dist.destroy_process_group()


def rank() -> int:
    return as_group().rank


def on_cpu(*ranks: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def grid(*axes: tuple[str, int]) -> Any:
    return as_group().on_mesh(Mesh(axes), {})


def strictly(act: Act) -> Any:
    with st.strict():
        return act()


def step(model: nn.Module, width: int = 4) -> None:
    model(torch.ones(2, width)).sum().backward()


def blocked() -> st.ShardedTensor:
    """Two stretches on each rank, with a hole between them."""
    return st.distribute(torch.arange(8.0), "[tp blocks(2)]")


def partials() -> st.ShardedTensor:
    return st.init_from_local_tensor(torch.ones(4, 6), "[-, -] partial(tp)", (4, 6))


def placed(first: int, second: int) -> list[st.ShardMetadata]:
    """Three elements from `first` on rank 0, three from `second` on rank 1."""
    return [st.ShardMetadata([start], [3], f"rank:{rank}/cpu") for rank, start in enumerate((first, second))]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    return model
