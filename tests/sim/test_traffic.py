"""The counting group: bytes by formula, results of the right shapes, any number of ranks at the cost of one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.sim.traffic import Traffic

N = 4


def counted(call: Any, rank: int = 1) -> tuple[int, int, Any]:
    """Bytes sent and received in one call on a rank of four, and the result's shape."""
    traffic = st.count_bytes(N, lambda: call(as_group()), rank=rank)
    assert traffic.calls == 1
    result = traffic.result
    return (
        traffic.sent_bytes,
        traffic.received_bytes,
        tuple(result.shape) if isinstance(result, torch.Tensor) else result,
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_are_those_of_the_formulas(device):
    x = torch.ones(2, 6, device=device)  # 48 bytes
    counts = [3, 12, 0, 5]
    assert counted(lambda g: g.all_reduce(x)) == (72, 72, (2, 6))  # 2 (n - 1) / n
    assert counted(lambda g: g.all_reduce_async(x).wait()) == (72, 72, (2, 6))
    assert counted(lambda g: g.all_gather(x)) == (144, 144, (48,))
    assert counted(lambda g: g.all_gather(x, counts)) == (144, 32, (20,))
    assert counted(lambda g: g.reduce_scatter(x)) == (36, 36, (3,))
    assert counted(lambda g: g.reduce_scatter(x, [1, 2, 9, 0])) == (40, 24, (2,))
    assert counted(lambda g: g.all_to_all(x, [3, 3, 4, 2], [1, 3, 0, 2])) == (36, 12, (6,))
    assert counted(lambda g: g.broadcast(x, 1)) == (48, 0, (2, 6))
    assert counted(lambda g: g.broadcast(x, 0)) == (0, 48, (2, 6))
    assert counted(lambda g: g.exchange(b"abc")) == (9, 9, [b"abc"] * 4)
    assert counted(lambda g: g.barrier()) == (0, 0, None)


def test_all_ranks_together_send_what_all_receive():
    counts = [3, 0, 7, 1]

    def body() -> None:
        group = as_group()
        group.all_gather(torch.ones(counts[group.index]), counts)
        group.reduce_scatter(torch.ones(sum(counts)), counts)
        group.all_reduce(torch.ones(8))

    by_rank = [st.count_bytes(N, body, rank=rank) for rank in range(N)]
    assert sum(t.sent_bytes for t in by_rank) == sum(t.received_bytes for t in by_rank) > 0


def test_own_values_stay_and_the_others_bring_zeros():
    traffic = st.count_bytes(3, lambda: as_group().all_gather(torch.tensor([5.0, 6.0]), [1, 2, 1]), rank=1)
    assert traffic.result.tolist() == [0, 5, 6, 0]


def mlp(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def sharded_step(tokens: int = 64, width: int = 1024) -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False)
        )
        x = torch.empty(tokens, width, requires_grad=True)
    st.shard_parameter(model[0], "weight", "[tp, -]")
    st.shard_parameter(model[2], "weight", "[-, tp]")
    mlp(model, x)


def reductions(traffic: Traffic) -> list[tuple[str, int, int]]:
    return [(line.group, line.calls, line.sent_bytes) for line in traffic.lines if line.collective == "all_reduce"]


@pytest.mark.parametrize(("mesh", "n"), [("tp=4", 4), ("dp=64, tp=256", 256), ("dp=1024, tp=16", 16)])
def test_a_tensor_parallel_mlp_reduces_its_activations_once_each_way(mesh, n):
    volume = 64 * 1024 * 4
    traffic = st.count_bytes(mesh, sharded_step)
    assert reductions(traffic) == [(f"tp={n}" if "," in mesh else "all 4 ranks", 1, 2 * volume * (n - 1) // n)] * 2 or (
        reductions(traffic) == [(f"tp={n}", 1, 2 * volume * (n - 1) // n)] * 2
    )


def test_sixteen_thousand_ranks_cost_what_four_cost():
    sharded_step()  # torch loads what meta tensors need

    def make() -> None:
        with torch.device("meta"):
            for _ in range(100):
                st.rand("[dp, tp]", 65536, 65536)

    for body in (make, sharded_step):
        st.count_bytes("dp=64, tp=256", body)
        start = time.perf_counter()
        st.count_bytes("dp=64, tp=256", body)
        assert time.perf_counter() - start < 1.0


def test_the_table_says_what_moves_where_and_from_which_line():
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            group = as_group()
            group.axis("tp").all_gather(x)
            group.axis("dp").all_reduce(x)
            return group.axis("dp").all_reduce(x)

    traffic = st.count_bytes("dp=2, tp=3", nn.Sequential(Part()), torch.ones(512), rank=4)
    text = str(traffic)
    first = Part.forward.__code__.co_firstlineno
    assert text.splitlines() == [
        "traffic of rank 4 of (dp=2, tp=3)",
        "collective  over  calls      sent  received  from",
        f"all_gather  tp=3      1  4.00 KiB  4.00 KiB  test_traffic.py:{first + 2} in forward, at 0",
        f"all_reduce  dp=2      1  2.00 KiB  2.00 KiB  test_traffic.py:{first + 3} in forward, at 0",
        f"all_reduce  dp=2      1  2.00 KiB  2.00 KiB  test_traffic.py:{first + 4} in forward, at 0",
        "total                 3  8.00 KiB  8.00 KiB",
    ]
    assert (traffic.calls, traffic.sent_bytes) == (3, 8192)


def test_a_rank_that_is_not_there():
    with pytest.raises(st.LayoutError) as caught:
        st.count_bytes("tp=4", print, rank=4)
    assert str(caught.value) == "the mesh has no rank 4\n  mesh   (tp=4)\n  ranks  0 to 3"


def test_the_caller_is_as_before():
    state = torch.get_rng_state()
    st.count_bytes(4, lambda: (torch.rand(3), st.rand("[tp]", 8)))
    assert torch.equal(torch.get_rng_state(), state)
    assert as_group().size == 1


def test_a_world_of_gpus_is_one_along_every_axis():
    def device_types() -> list[str]:
        group = as_group()
        return [each.device_type for each in (group, group.axis("dp"), group.axis("tp"), group.axis("dp", "tp"))]

    for mesh in ("dp=1, tp=4", "dp=2, tp=4", "dp=1, tp=1"):
        assert st.count_bytes(mesh, device_types, device_type="cuda").result == ["cuda"] * 4
        assert st.count_bytes(mesh, device_types).result == ["cpu"] * 4
