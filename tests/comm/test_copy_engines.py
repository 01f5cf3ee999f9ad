"""Gathers by copy engines are used where every rank can, and only there; else memory and group are the plain ones."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardtensor.comm import copy_engines
from shardtensor.comm.backend_support import BackendSupport
from shardtensor.comm.copy_engines import Buffer, GatherBuffer, gather_buffer
from shardtensor.comm.group import SingleRankGroup
from shardtensor.comm.torch_group import TorchGroup

CUDA = torch.device("cuda", 1)


class Pretended(TorchGroup):
    """A group of four GPUs that is never called, but for its exchange of answers."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1, 2, 3), config: str = "cuda:nccl") -> None:
        self.support, self.ranks, self.size, self.process_group = (
            BackendSupport.of_backends(config, None),
            ranks,
            4,
            None,
        )
        self.others: list[bytes] | None = None
        self.asked: list[bytes] = []

    def exchange(self, blob: bytes) -> list[bytes]:
        self.asked.append(blob)
        return [blob] * 4 if self.others is None else [blob, *self.others]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host of four GPUs that see each other, with an NCCL that gathers by copy engines."""
    options = lambda: SimpleNamespace(config=SimpleNamespace(cta_policy=0))  # noqa: E731
    monkeypatch.delenv("SHARDTENSOR_COPY_ENGINES", raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: device.index != other)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    return monkeypatch


def can(group: Pretended) -> bool:
    return copy_engines._all_can(group, CUDA)


def test_they_are_used_where_nothing_is_in_the_way(gpus):
    assert can(Pretended()) is True
    gpus.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 1))
    gpus.setenv("SHARDTENSOR_COPY_ENGINES", "1")
    assert can(Pretended()) is True


@pytest.mark.parametrize(
    "missing", ["switched off", "an older NCCL", "no policy", "order", "a far GPU", "another backend"]
)
def test_each_condition_counts(gpus, missing):
    group = Pretended((0, 2, 1, 3) if missing == "order" else (0, 1, 2, 3))
    if missing == "switched off":
        gpus.setenv("SHARDTENSOR_COPY_ENGINES", "0")
    elif missing == "an older NCCL":
        gpus.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 9))
    elif missing == "no policy":
        gpus.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda: SimpleNamespace(config=object())))
    elif missing == "a far GPU":
        gpus.setattr(torch.cuda, "can_device_access_peer", lambda device, other: device.index != other != 3)
    elif missing == "another backend":
        group = Pretended(config="cpu:gloo")
    assert can(group) is False
    assert len(group.asked) == 1, "the others ask, too"


def test_all_ranks_have_to_be_able_on_one_host(gpus):
    group = Pretended()
    (mine,) = can(group) and group.asked
    assert len(mine) == 64 and socket.gethostname()[-40:].encode() in mine
    cannot = Pretended()
    gpus.setenv("SHARDTENSOR_COPY_ENGINES", "0")
    can(cannot)
    gpus.delenv("SHARDTENSOR_COPY_ENGINES")
    gpus.setattr(socket, "gethostname", lambda: "elsewhere")
    far = Pretended()
    can(far)
    gpus.undo()
    assert len({mine, cannot.asked[0], far.asked[0]}) == 3
    for other in (cannot.asked[0], far.asked[0]):
        assert other != mine


def test_the_answer_of_one_other_rank_is_enough_against_it(gpus):
    for others in ([b"x" * 64] * 3, None):
        group = Pretended()
        group.others = others
        assert can(group) is (others is None)


def test_elsewhere_memory_and_group_are_the_plain_ones(gpus):
    groups: list[Any] = [SingleRankGroup(), Pretended(config="cpu:gloo")]
    for group in groups:
        for device, size in ((torch.device("cpu"), 12), (torch.device("meta"), 0)):
            plain = gather_buffer(group, size, device)
            assert plain.group is group
            assert (plain.memory.numel(), plain.memory.dtype, plain.memory.device) == (size, torch.uint8, device)
            assert plain.end() is None
    assert not groups[1].asked, "nothing is asked of a CPU"


def test_a_group_has_one_communicator_and_each_lease_its_memory(gpus):
    made, pools = [], []

    class Backend:
        mem_allocator = "an allocator"
        registered: list[Any] = []

        def register_mem_pool(self, pool: Any, symm: bool) -> None:
            assert symm
            self.registered.append(pool)

        def deregister_mem_pool(self, pool: Any) -> None:
            self.registered.remove(pool)

    class Pool:
        def __init__(self, allocator: Any) -> None:
            assert allocator == "an allocator"
            pools.append(self)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    def gatherer(group: TorchGroup, device: torch.device) -> Any:
        made.append(group)
        return SimpleNamespace(process_group=SimpleNamespace(_get_backend=lambda device: backend))

    backend = Backend()
    empty = torch.empty
    gpus.setattr(copy_engines, "_gatherer", gatherer)
    gpus.setattr(torch.cuda, "MemPool", Pool)
    gpus.setattr(torch.cuda, "use_mem_pool", lambda pool: pool)
    gpus.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype, device="meta"))
    group = Pretended()
    checked = SimpleNamespace(_group=group)
    leases = [gather_buffer(group, 12, CUDA), gather_buffer(checked, 20, CUDA), gather_buffer(group, 8, CUDA)]
    assert made == [group] and backend.registered == pools and len(pools) == 3
    assert leases[0].group is leases[1].group is leases[2].group is not group
    assert [each.memory.numel() for each in leases] == [12, 20, 8]
    leases[1].end()
    assert backend.registered == [pools[0], pools[2]]
    for none in (gather_buffer(group, 0, CUDA), gather_buffer(checked, 0, CUDA)):
        assert none.group in (group, checked) and len(pools) == 3
    other = Pretended()
    assert gather_buffer(other, 8, CUDA).group is not leases[0].group and made == [group, other]


def test_the_communicator_asks_for_copy_engines_and_is_connected(gpus):
    seen = []
    gpus.setattr(copy_engines.primitives, "timeout_of", lambda group: 7.0)
    gpus.setattr(copy_engines.primitives, "new_group", lambda *args: seen.append(args) or "made")
    gpus.setattr(copy_engines.primitives, "all_reduce", lambda group, t, op: seen.append((group, t.numel(), op)))
    gpus.setattr(copy_engines, "TorchGroup", lambda made: f"group of {made}")
    assert copy_engines._gatherer(Pretended((1, 2, 4, 7)), torch.device("cpu")) == "group of made"
    (ranks, timeout, options), connected = seen
    assert (ranks, timeout, options.config.cta_policy) == ((1, 2, 4, 7), 7.0, 2)
    assert connected == ("made", 1, "sum")


def test_a_buffer_is_idle_unless_more_tensors_are_in_its_memory_than_when_its_users_were_counted():
    memory = torch.empty(8, dtype=torch.uint8)
    buffer = Buffer(GatherBuffer(SingleRankGroup(), memory))
    views = [memory[:4]]
    buffer.count_users()
    assert buffer.is_idle is True
    saved = memory[4:]
    assert buffer.is_idle is False
    del saved
    assert buffer.is_idle is True
    views.clear()
    assert buffer.is_idle is True
