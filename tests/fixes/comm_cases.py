"""Errors of collectives and of groups: ranks that do not meet, reductions without a meaning, groups of other ranks."""

from __future__ import annotations

import contextvars
import os
import pickle
from collections.abc import Callable
from threading import Thread
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import shardtensor as st
from fixes.case import Case, alone, mlp, placed, rank, weight
from shardtensor.comm.process_group import as_group
from shardtensor.comm.rendezvous import Rendezvous, StatusStore

NOT_FOLLOWED = {
    "comm/primitives.py:_explained": "a backend says it of ranks that died in a collective",
    "comm/rendezvous.py:Rendezvous.wait": "the process that keeps the store has died",
}


def met(*calls: Callable[[Any], Any], timeout_s: float = 10.0) -> None:
    """Ranks that are threads run a function each, given a function that makes a rendezvous; raise the first error."""
    store = dist.HashStore()
    errors: list[BaseException] = []

    def run(rank: int, call: Callable[[Any], Any]) -> None:
        statuses = StatusStore(store, rank)
        try:
            call(lambda *ranks: Rendezvous(statuses, f"of {ranks}", ranks, timeout_s).wait)
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def in_turn(*places: tuple[str, tuple[int, ...]]) -> Callable[[Any], Any]:
    return lambda meeting: [meeting(*ranks)(name, name) for name, ranks in places]


F, G = ("f", (0, 1)), ("g", (0, 1))


def made(values: torch.Tensor | st.Shard, spec: str = "[tp]") -> Any:
    if isinstance(values, st.Shard):
        return st.init_from_local_shards([values], 6)
    return st.init_from_local_tensor(values, spec, 6)


def three() -> st.Shard:
    return st.Shard(torch.ones(3), placed(0, 3)[rank()])


def reduced(op: str, values: torch.Tensor) -> torch.Tensor:
    return st.init_from_local_tensor(values, f"[-] partial(tp, op={op})", (len(values),)).full_tensor()


def simulated(act: Callable[[], Any]) -> Any:
    return st.simulate("tp=2", act)


def asked(check: str) -> None:
    with mock.patch.dict(os.environ, SHARDTENSOR_CHECK=check):
        alone(lambda: weight().full_tensor(), 2)


def written() -> bytes:
    module = st.shard_module(nn.Sequential(nn.Linear(4, 4)), {"0": st.rowwise("tp")})
    return pickle.dumps(module[0].flow)


def read(ranks: list[int]) -> Any:
    """Written by ranks 0 and 1, read in a group of some ranks."""
    text = alone(lambda: _in(dist.new_group([0, 1]), written), 2)
    return alone(lambda: _in(dist.new_group(ranks), lambda: pickle.loads(text)), 2)


def _in(group: Any, act: Callable[[], Any]) -> Any:
    with st.load_with_process_group(group):
        return act()


def on_mesh(ranks: list[int], with_mesh: bool) -> Any:
    """Written on a mesh of ranks 0 and 1, read in a group of some ranks."""

    def act() -> Any:
        mesh = dist.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
        text = pickle.dumps(st.zeros("[tp, -]", 4, 6, process_group=mesh))
        return _in(mesh if with_mesh else dist.new_group(ranks), lambda: pickle.loads(text))

    return alone(act, 3)


CASES: dict[str, Case] = {
    "ranks in different calls": Case(
        lambda: made([torch.ones(3), three()][rank()]),
        {
            "make the same calls in the same order on every rank of the group": lambda: [
                made(torch.ones(3)),
                made(three()),
            ]
        },
    ),
    "ranks with different specs": Case(
        lambda: made(torch.ones(3), ["[tp]", "[tp balanced]"][rank()]),
        {"give every rank of the group the same sharding_spec": lambda: made(torch.ones(3), "[tp]")},
    ),
    "simulated ranks in different calls": Case(
        lambda: simulated(lambda: weight().sum(rank()).full_tensor() if rank() else weight().full_tensor()),
        {
            "make the same calls in the same order on every rank of the group": lambda: simulated(
                lambda: [weight().full_tensor(), weight().sum(0)]
            )
        },
        mesh="",
    ),
    "a simulated rank that returned": Case(
        lambda: simulated(lambda: rank() and weight().full_tensor()),
        {
            "make the same calls in the same order on every rank of the group": lambda: simulated(
                lambda: weight().full_tensor()
            )
        },
        mesh="",
    ),
    "simulated ranks that send other numbers": Case(
        lambda: simulated(lambda: exchanged([rank(), 1])),
        {
            "make the same calls in the same order on every rank of the group": lambda: simulated(
                lambda: exchanged([1, 1])
            )
        },
        mesh="",
    ),
    "a thread beside a simulated rank": Case(
        lambda: in_thread(lambda: weight().full_tensor()),
        {
            "make every call that talks to other ranks inside the function that `simulate` runs, in its own thread": (
                lambda: weight().full_tensor()
            )
        },
        differs=True,
    ),
    "checked ranks in different calls": Case(
        lambda: met(in_turn(F), in_turn(G)),
        {"make the same calls in the same order on every rank of the group": lambda: met(in_turn(F, G), in_turn(F, G))},
        mesh="",
    ),
    "a checked rank that does not come": Case(
        lambda: met(in_turn(F), in_turn(), timeout_s=0.4),
        {"call it on all of ranks 0-1, or on none": lambda: [met(in_turn(F), in_turn(F)), met(in_turn(), in_turn())]},
        mesh="",
    ),
    "a check that is not there": Case(
        lambda: asked("everything"), {"SHARDTENSOR_CHECK=collectives": lambda: asked("collectives")}, mesh=""
    ),
    "a maximum of complex numbers": Case(
        lambda: reduced("max", torch.ones(4, dtype=torch.complex64)),
        {"reduce their absolute values": lambda: reduced("max", torch.ones(4, dtype=torch.complex64).abs())},
    ),
    "a maximum of uint64": Case(
        lambda: reduced("max", torch.ones(4, dtype=torch.uint64)),
        {"convert to torch.int64": lambda: reduced("max", torch.ones(4, dtype=torch.uint64).long())},
    ),
    "a stream that cannot be cut evenly": Case(
        lambda: evenly("[tp, ...]", 3),
        {
            "write `balanced` after the axis in the flow": lambda: evenly("[tp balanced, ...]", 3),
            "pad the value to a multiple of 2": lambda: evenly("[tp, ...]", 4),
        },
    ),
    "a module written by other ranks": Case(
        lambda: read([0]),
        {
            "load inside load_with_process_group(group), with the group that has these ranks": lambda: read([0, 1]),
        },
        mesh="",
    ),
    "a tensor written on a mesh of other ranks": Case(
        lambda: on_mesh([0, 2], with_mesh=False),
        {"load inside load_with_process_group(device_mesh)": lambda: on_mesh([0, 1], with_mesh=True)},
        mesh="",
    ),
}


def exchanged(counts: list[int]) -> None:
    """Send each rank so many elements, and expect one from each."""
    as_group().all_to_all(torch.ones(sum(counts)), counts, [1, 1])


def in_thread(act: Callable[[], Any]) -> None:
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            context.run(act)
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def evenly(stream: str, rows: int) -> torch.Tensor:
    """Between the second and the third layer the rows are cut over the ranks."""
    third = {**st.colwise("tp"), "in": f"{stream} -> replicate", "out": "[..., tp] -> replicate"}
    plan = {"0.0": st.colwise("tp"), "0.2": st.rowwise("tp", to=stream), "1": third}
    return st.shard_module(nn.Sequential(mlp(), nn.Linear(4, 4)), plan)(torch.ones(rows, 4))
