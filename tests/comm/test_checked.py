"""Agreement mode: ranks that do not make one call raise one error, before anything moves and before the timeout."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size
from torch import nn

import shardtensor as st
from shardtensor import comm
from shardtensor.comm import collectives
from shardtensor.comm.checked import CheckedGroup, are_collectives_checked
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group, forget_destroyed
from shardtensor.comm.redistribute import all_gather, reduce_scatter
from shardtensor.comm.torch_group import TorchGroup
from shardtensor.layout.route import DimStep

PATIENT_S, SHORT_S = 30.0, 2.0  # timeouts: where nobody waits for one to be over, and where somebody does


@contextmanager
def checks(asked: str = "collectives"):
    os.environ["SHARDTENSOR_CHECK"] = asked
    try:
        yield
    finally:
        del os.environ["SHARDTENSOR_CHECK"]


def checked_group(ranks: list[int] | None = None, timeout_s: float = PATIENT_S) -> Any:
    with checks():
        return as_group(dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)))


METHODS = sorted(name for name in vars(CheckedGroup) if name in vars(Group) and name[0] != "_")


@pytest.mark.parametrize("name", METHODS)
def test_a_checked_group_is_called_as_any_group(name):
    ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (CheckedGroup, Group))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def rest() -> None:
    """Wait for all ranks, on the world's own group, which is not checked."""
    as_group().barrier()


def told(call: Any, within_s: float = PATIENT_S / 2) -> tuple[str, str]:
    """The type and the text of what a call raises, with line numbers taken out; and that it came before the timeout."""
    start = time.monotonic()
    with pytest.raises(st.ShardTensorError) as caught:
        call()
    assert time.monotonic() - start < within_s
    assert isinstance(caught.value, RuntimeError)
    return type(caught.value).__name__, re.sub(r"\.py:\d+ in", ".py:N in", str(caught.value))


def the_one(results: list[Any]) -> Any:
    assert all(result == results[0] for result in results), results
    return results[0]


# -- ranks in different calls -----------------------------------------------------------------------------------------


def gather_or_sum() -> tuple[str, str]:
    pair = checked_group()
    x = st.distribute(torch.ones(4, 3, device=device()), "[tp, -]", process_group=pair)
    return told(lambda: x.full_tensor() if pair.rank == 0 else x.sum())


def test_another_operation(world):
    name, text = the_one(world(gather_or_sum, 2))
    assert name == "CallMismatchError"
    assert text == (
        "the ranks are in different calls; nothing was moved\n"
        "  rank 0  full_tensor: all_gather 6 float32\n"
        "          test_checked.py:N in <lambda>\n"
        "  rank 1  sum: all_reduce sum of 1 float32\n"
        "          test_checked.py:N in <lambda>\n"
        "  in      collective 1 of ranks 0-1\n"
        "  fix     make the same calls in the same order on every rank of the group, each from one line of the program"
    )


def test_the_error_in_the_readme_is_this_one(world):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (shown,) = re.findall(r"```text\n(the ranks are in .*?)\n```", readme, re.DOTALL)
    _, text = the_one(world(gather_or_sum, 2))
    assert re.sub(r"train.py:\d+ in step", "test_checked.py:N in <lambda>", shown) == text


def swap_the_order() -> list[tuple[str, str]]:
    group = checked_group()
    t = torch.ones(2, device=device())
    calls = [lambda: group.broadcast(t, 1), lambda: group.all_gather(t)]
    group.barrier()
    return [told(call) for call in (calls if group.rank != 2 else reversed(calls))]


def test_another_order(world):
    errors = the_one(world(swap_the_order, 4))
    assert [name for name, _ in errors] == ["CallMismatchError"] * 2
    assert errors[0][1].splitlines()[1:6] == [
        "  ranks 0-1, 3  broadcast 2 float32 from rank 1",
        "                test_checked.py:N in <lambda>",
        "  rank 2        all_gather 2 float32",
        "                test_checked.py:N in <lambda>",
        "  in            collective 2 of ranks 0-3",
    ]
    assert "rank 2        broadcast 2 float32" in errors[1][1] and "in            collective 3" in errors[1][1]


def bring_other_counts(kind: str) -> tuple[str, str]:
    group = checked_group()
    t = torch.ones(1 + group.rank, device=device())
    calls = {
        "numel": lambda: group.all_reduce(t),
        "dtype": lambda: group.all_reduce(torch.ones(1, dtype=(torch.float32, torch.int64)[group.rank])),
        "operation": lambda: group.all_reduce(t[:1], ("sum", "max")[group.rank]),
        "counts": lambda: group.all_gather(t[:1], ((1, 1), (2, 1))[group.rank]),
        "source": lambda: group.broadcast(t[:1], group.rank),
        "pairs": lambda: group.all_to_all(torch.ones(3), (1, 2), ((1, 1), (3, 2))[group.rank]),
        "async": lambda: group.all_reduce_async(t),
        "async broadcast": lambda: group.broadcast_async(t, 1),
        "into": lambda: group.all_gather_into(torch.empty(2 * t.numel()), t),
        "sum into": lambda: group.reduce_scatter_into(torch.empty(t.numel()), t.repeat(2)),
        "sum": lambda: group.reduce_scatter(t.repeat(2)),
        "bytes": lambda: group.exchange(b"x" * t.numel()),
        "async scatter": lambda: group.reduce_scatter_async(t, ((1, 0), (2, 0))[group.rank]),
    }
    return told(calls[kind])


COUNTS = {
    "numel": ("all_reduce sum of 1 float32", "all_reduce sum of 2 float32"),
    "dtype": ("all_reduce sum of 1 float32", "all_reduce sum of 1 int64"),
    "operation": ("all_reduce sum of 1 float32", "all_reduce max of 1 float32"),
    "counts": ("all_gather 1+1 float32", "all_gather 2+1 float32"),
    "source": ("broadcast 1 float32 from rank 0", "broadcast 1 float32 from rank 1"),
    "pairs": ("all_to_all float32; sends 1+2, receives 1+1", "all_to_all float32; sends 1+2, receives 3+2"),
    "async": ("all_reduce_async sum of 1 float32", "all_reduce_async sum of 2 float32"),
    "async broadcast": ("broadcast_async 1 float32 from rank 1", "broadcast_async 2 float32 from rank 1"),
    "into": ("all_gather_into 1 float32", "all_gather_into 2 float32"),
    "sum into": ("reduce_scatter_into 2 float32", "reduce_scatter_into 4 float32"),
    "sum": ("reduce_scatter 2 float32", "reduce_scatter 4 float32"),
    "bytes": ("exchange 1 bytes", "exchange 2 bytes"),
    "async scatter": ("reduce_scatter_async 1+0 float32", "reduce_scatter_async 2+0 float32"),
}


def bring_all_other_counts() -> list[tuple[str, str]]:
    return [bring_other_counts(kind) for kind in COUNTS]


def test_other_numbers(world):
    for kind, (name, text) in zip(COUNTS, the_one(world(bring_all_other_counts, 2)), strict=True):
        assert name == "CallMismatchError"
        what = ["the ranks are in different calls", "the numbers of elements sent and received differ"][kind == "pairs"]
        lines = [f"{what}; nothing was moved"]
        for rank, call in enumerate(COUNTS[kind]):
            call, *own = call.split("; ")
            own = ["          " + each for each in own]
            lines += [f"  rank {rank}  {call}", "          test_checked.py:N in <lambda>", *own]
        assert text.splitlines()[:-2] == lines, kind


def gather_from_two_lines() -> list[str]:
    group = checked_group()
    x = st.distribute(torch.ones(4, 3, device=device()), "[tp, -]", process_group=group)
    try:
        if group.rank:
            x.full_tensor()
        else:
            (2 * x).full_tensor()
    except st.CallMismatchError as error:
        caught = error
    return re.findall(r"test_checked.py:(\d+) in gather_from_two_lines", str(caught))


def test_the_same_operation_of_another_line(world):
    lines = the_one(world(gather_from_two_lines, 2))
    assert len(set(lines)) == 2


def backward_of_two_things() -> tuple[str, str]:
    group = checked_group()
    x = torch.ones(3, device=device(), requires_grad=True)
    split, alike = collectives.sum_gradient(x, group), all_gather(x, DimStep("all_gather"), group)
    halves = DimStep("reduce_scatter")
    return told(lambda: (split if group.rank == 0 else reduce_scatter(alike, halves, group)).sum().backward())


def test_backward(world):
    name, text = the_one(world(backward_of_two_things, 2))
    assert name == "CallMismatchError"
    assert "rank 0  backward of SumGradient: all_reduce sum of 3 float32" in text
    assert "rank 1  reduce_scatter 6 float32" in text


def run_layers_in_another_order() -> tuple[str, str]:
    group = checked_group()
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False, device=device()) for name in ("first", "second")})
    for name in model:
        st.shard_parameter(model[name], "weight", "[-, tp]", process_group=group)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> None:
            for name in (("first", "second"), ("second", "first"))[group.rank]:
                self.layers[name](x)

    return told(lambda: Net()(torch.ones(2, 4, device=device())))


def test_the_same_line_in_another_layer(world):
    _, text = the_one(world(run_layers_in_another_order, 2))
    assert text.splitlines()[1:5] == [
        "  rank 0  linear: plain operand 1",
        "          test_checked.py:N in forward, at layers.first",
        "  rank 1  linear: plain operand 1",
        "          test_checked.py:N in forward, at layers.second",
    ]


# -- ranks that do not come -------------------------------------------------------------------------------------------


def call_alone(method: str) -> tuple[str, str] | str:
    group = checked_group(None, SHORT_S)
    x = st.distribute(torch.ones(4, 3, device=device()), "[tp, -]", process_group=group)
    group.barrier()
    calls = {
        "full_tensor": x.full_tensor,
        "gather": lambda: x.gather(0, torch.empty(4, 3, device=device())),
        "sum": x.sum,
        "repr of the whole": lambda: x.tolist(),
    }
    if group.rank == 0:
        result = told(calls[method], SHORT_S)
        rest()
        return result
    rest()
    return told(lambda: group.all_reduce(torch.ones(1)))  # late, and the first that rank 0 has waited for


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("full_tensor", "full_tensor: all_gather 3 float32"),
        ("gather", "gather: exchange 33 bytes"),  # to agree on the call
        ("sum", "sum: all_reduce sum of 1 float32"),
        ("repr of the whole", "tolist: all_gather 3 float32"),
    ],
)
def test_one_rank_calls_alone(world, method, call):
    name, text = the_one(world(call_alone, 4, method=method))
    operation = call.split(":")[0]
    assert name == "AbsentRankError"
    lines = text.splitlines()
    assert lines[0] == f"{operation}: ranks 1-3 did not join within 2 s; nothing was moved"
    assert lines[1].split(None, 1) == ["call", call]
    assert lines[3:] == [
        "  by         rank 0",
        "  ranks 1-3  nothing since barrier",
        "             test_checked.py:N in call_alone",
        "             collective 1 of ranks 0-3",
        "  in         collective 2 of ranks 0-3",
        "  fix        call it on all of ranks 0-3, or on none",
    ]


def wait_in_a_subgroup() -> tuple[str, str] | None:
    whole, part = checked_group(None, SHORT_S), checked_group([1, 2], 2 * SHORT_S)  # rank 0 asks while rank 1 waits
    t = torch.ones(1, device=device())
    result = None
    if dist.get_rank() == 0:
        result = told(lambda: whole.all_reduce(t), SHORT_S)
    elif dist.get_rank() == 1:
        result = told(lambda: part.all_reduce(t), 2 * SHORT_S)
    rest()
    return result


def test_where_absent_ranks_are(world):
    first, second, third = world(wait_in_a_subgroup, 3)
    assert third is None
    assert first == (
        "AbsentRankError",
        "all_reduce: ranks 1-2 did not join within 2 s; nothing was moved\n"
        "  call    all_reduce sum of 1 float32\n"
        "          test_checked.py:N in <lambda>\n"
        "  by      rank 0\n"
        "  rank 1  waiting in all_reduce sum of 1 float32\n"
        "          test_checked.py:N in <lambda>\n"
        "          collective 1 of ranks 1-2\n"
        "  rank 2  in no collective yet\n"
        "  in      collective 1 of ranks 0-2\n"
        "  fix     call it on all of ranks 0-2, or on none",
    )
    assert second[1].startswith("all_reduce: rank 2 did not join within 4 s; nothing was moved\n")


def make_a_part_alone() -> tuple[str, str] | None:
    group = checked_group(None, SHORT_S)
    result = told(lambda: group.subgroup([0, 1]), SHORT_S) if group.rank == 0 else None
    rest()
    return result


def test_a_group_that_one_rank_makes_alone(world):
    name, text = world(make_a_part_alone, 3)[0]
    assert name == "AbsentRankError"
    assert text.startswith("subgroup: rank 1 did not join within 2 s; nothing was moved\n")
    assert "rank 1  nothing since" not in text and "rank 1  in no collective yet" in text


def go_on_after_an_error() -> list[float]:
    group = checked_group(None, SHORT_S)
    t = torch.ones(1, device=device())
    if group.rank == 0:
        told(lambda: group.all_reduce(t), SHORT_S)
        rest()
    else:
        rest()
        told(lambda: group.barrier())
    return [group.all_reduce(torch.full((1,), 2.0, device=device())).item() for _ in range(3)]


def test_the_group_serves_on_once_all_have_the_error(world):
    assert world(go_on_after_an_error, 2) == [[4.0] * 3] * 2


# -- programs whose ranks agree ---------------------------------------------------------------------------------------


def train(checked: bool) -> list[list[float]]:
    group = checked_group() if checked else as_group()
    assert type(group) is (TorchGroup if not checked and group.size > 1 else type(group))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5)).to(device())
    st.shard_parameter(model, "0.weight", "[tp balanced, -]", process_group=group)
    st.shard_parameter(model, "2.weight", "[-, tp balanced]", process_group=group)
    optimizer = st.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 6), 1.0 + step, device=device())).square().mean().backward()
        st.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    whole = [p.full_tensor() if isinstance(p, st.ShardedTensor) else p for p in model.parameters()]
    return [p.detach().flatten().tolist() for p in whole]


@every_size
def test_training_gives_what_it_gives_without(world, size):
    assert world(train, size, checked=True) == world(train, size, checked=False)


def call_everything() -> list[Any]:
    results = []
    plain = as_group(dist.new_group())
    for group in (plain, checked_group()):
        counts = [1 + i for i in range(group.size)]
        t = torch.arange(float(group.rank + 1), device=device())
        ones = torch.full((group.size,), 1.0 + group.rank, device=device())
        results.append(
            [
                group.all_reduce(ones.clone(), "max").tolist(),
                group.all_reduce_async(ones.clone()).wait().tolist(),
                group.all_gather(t, counts).tolist(),
                group.all_gather(ones).tolist(),
                group.reduce_scatter(ones).tolist(),
                group.all_to_all(ones, [1] * group.size, [1] * group.size).tolist(),
                group.broadcast(ones.clone(), group.size - 1).tolist(),
                group.broadcast_async(ones.clone(), group.size - 1).wait().tolist(),
                group.exchange(b"%d" % group.rank),
                group.exchange_objects({"rank": group.rank}),
                group.barrier(),
                [g.all_reduce(ones.clone()).tolist() for g in [group.subgroup([0, 1])] if g.index >= 0],
                (group.size, group.rank, list(group.ranks), group.index, group.device_type, group.mesh),
            ]
        )
    assert type(plain) is TorchGroup
    return results


def test_every_method_gives_what_the_plain_group_gives(world):
    for plain, checked in world(call_everything, 3):
        assert plain == checked


def test_every_method_of_a_group_is_checked():
    questions = {"size", "rank", "ranks", "index", "device_type", "process_group", "mesh"}
    by_make_subgroup = {"subgroup", "axis", "on_mesh"}
    methods = {name for name in vars(Group) if not name.startswith("_")} - questions - by_make_subgroup
    assert methods | {"_make_subgroup"} <= set(vars(CheckedGroup))


def mesh_axes() -> list[Any]:
    with checks():
        mesh = dist.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
        forget_destroyed()
        group = as_group(mesh)
        found = [type(g).__name__ for g in (group.axis("dp"), group.axis("tp"), group.axis("dp", "tp"))]
        x = st.distribute(torch.arange(24.0, device=device()).view(4, 6), "[dp, tp]", process_group=mesh)
        return [type(as_group(dist.new_group())).__name__, *found[:2], x.full_tensor().tolist(), x.sum(0).tolist()]


def test_axes_of_a_mesh(world):
    whole = torch.arange(24.0).view(4, 6)
    expected = [*["CheckedGroup"] * 3, whole.tolist(), whole.sum(0).tolist()]
    assert world(mesh_axes, 4) == [expected] * 4


def count_keys() -> tuple[int, int]:
    group = checked_group()
    store = group._rendezvous.statuses.store
    t = torch.ones(1, device=device())
    counts = []
    for _ in range(2):
        for _ in range(20):
            group.all_reduce(t)
            group.all_to_all(torch.ones(2), [1, 1], [1, 1])
        rest()
        counts.append(store.num_keys())
        rest()
    return counts


def test_the_store_does_not_grow(world):
    for before, after in world(count_keys, 2):
        assert before == after


# -- on and off -------------------------------------------------------------------------------------------------------


def kinds() -> list[str]:
    off = as_group(dist.new_group())
    with checks():
        on = as_group(dist.new_group())
        known = as_group(off.process_group)
    assert known is off
    return [type(group).__name__ for group in (off, on)]


def test_a_group_is_plain_unless_asked(world):
    assert world(kinds, 2) == [["TorchGroup", "CheckedGroup"]] * 2


def test_an_unknown_check(monkeypatch):
    monkeypatch.setenv("SHARDTENSOR_CHECK", "colectives")
    with pytest.raises(st.SpecError) as caught:
        are_collectives_checked()
    assert str(caught.value) == (
        "SHARDTENSOR_CHECK knows no check called `colectives`\n  fix  SHARDTENSOR_CHECK=collectives"
    )


def test_asking_by_a_call(monkeypatch):
    monkeypatch.setattr(comm.checked, "_is_requested", False)
    assert not are_collectives_checked()
    st.check_collectives()
    assert are_collectives_checked()


def wait_in_vain() -> str | None:
    group = as_group(dist.new_group(timeout=timedelta(seconds=1)))
    x = st.distribute(torch.ones(4, 3), "[tp, -]", process_group=group)
    if group.rank:
        rest()
        return None
    with pytest.raises(st.AbsentRankError) as caught:
        x.full_tensor()
    rest()
    return re.sub(r"\.py:\d+ in", ".py:N in", str(caught.value))


@pytest.mark.skipif(os.environ.get("SHARDTENSOR_TEST_DEVICE") == "cuda", reason="NCCL ends the process instead")
def test_without_the_mode_a_timeout_of_gloo_names_the_call(world):
    text = world(wait_in_vain, 2)[0]
    assert re.sub(r"backend  .*", "backend  ...", text) == (
        "full_tensor: other ranks of the group did not join, or were lost\n"
        "  call     all_gather of 6 float32\n"
        "           test_checked.py:N in wait_in_vain\n"
        "  ranks    0-1\n"
        "  backend  ...\n"
        "  fix      call it on every rank of the group; SHARDTENSOR_CHECK=collectives tells which ranks are where"
    )
    assert "Timed out waiting" in text


PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import shardtensor as st

out, into = os.pipe()
rank = 0 if os.fork() else 1
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(into, b"%05d" % store.port)
else:
    store = dist.TCPStore("127.0.0.1", int(os.read(out, 5)), is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=4))
x = st.distribute(torch.ones(4, 3), "[tp, -]")
x.full_tensor()
if rank == 1:
    sys.stdout.flush()
    os._exit(0) if sys.argv[1] == "dies" else sys.exit(0)
start = time.monotonic()
try:
    x.sum()
except RuntimeError as error:
    print(type(error).__name__, error)
    assert time.monotonic() - start < {"dies": 4, "ends": 3}[sys.argv[1]]
os._exit(0)
"""


def test_a_rank_that_is_no_more():
    ways = {
        "ends": ("and some of them have ended", "ended"),
        "dies": ("within 4 s", "nothing since full_tensor: all_gather 6 float32"),
    }
    environment = {**os.environ, "SHARDTENSOR_CHECK": "collectives", "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    programs = {how: subprocess.Popen([sys.executable, "-c", PROGRAM, how], **pipes) for how in ways}
    for how, (when, what) in ways.items():
        out, err = programs[how].communicate(timeout=60)
        lines = out.splitlines()
        assert lines[0] == f"AbsentRankError sum: rank 1 did not join {when}; nothing was moved", err
        assert lines[4] == f"  rank 1  {what}"


@pytest.mark.gpu
def test_one_rank_calls_alone_on_nccl(gpu_world):
    name, text = the_one(gpu_world(call_alone, 2, method="full_tensor"))
    assert name == "AbsentRankError"
    assert text.startswith("full_tensor: rank 1 did not join within 2 s; nothing was moved\n")
