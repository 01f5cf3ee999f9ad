"""Pieces written straight into peers' memory: what an all-to-all gives, for any layouts; the GPUs' own at the end.

On the CPU the memories of simulated ranks are tensors that all of them see; what is copied and where is the same.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
import torch
from harness import device, every_size
from test_reshard import on_a_grid, specs, values_and_gradients

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.layout.bind import bind
from shardtensor.layout.route import route
from shardtensor.tensor import exchange, push, strided
from shardtensor.tensor.push import slots


class SeenByAll:
    """Stands for `PeerMemory`: tensors that all ranks of a simulated group see, full of what nobody sent."""

    device = torch.device("cpu")

    def __init__(self, group, tensors: list[torch.Tensor]) -> None:
        self.group, self.tensors, self.uses = group, tensors, 0

    def has_room(self, size, group, device) -> bool:
        self.group.barrier()
        if len(self.tensors[self.group.index]) < size:
            self.tensors[self.group.index] = torch.empty(size, dtype=torch.uint8)
        sizes = self.group.exchange(len(self.tensors[self.group.index]).to_bytes(8, "little"))
        assert len(set(sizes)) == 1, "all ranks ask for the same"
        return True

    def room(self, index, start, numel, dtype) -> torch.Tensor:
        bytes_ = self.tensors[index][start : start + numel * dtype.itemsize]
        assert bytes_.numel() == numel * dtype.itemsize, "within the memory"
        return bytes_.view(dtype)

    def swap(self, write, read) -> None:
        self.uses += 1
        self.tensors[self.group.index].fill_(0xAB)
        self.group.barrier()
        write()
        self.group.barrier()
        read()


@pytest.fixture
def memories(monkeypatch):
    """Give every group such memory, and use it for pieces of any size."""
    shared: dict[object, list[torch.Tensor]] = {}
    made: dict[object, SeenByAll] = {}

    def peer_memory(group):
        if group.size == 1:
            return None
        if id(group) not in made:
            tensors = shared.setdefault(group.ranks, [torch.empty(0, dtype=torch.uint8)] * group.size)
            made[id(group)] = SeenByAll(group, tensors)
        return made[id(group)]

    monkeypatch.setattr(push, "peer_memory", peer_memory)
    monkeypatch.setattr(push, "BIG", 1)
    return made


def _uses_words(monkeypatch) -> None:
    """Copy in words on the CPU, too."""

    def misplacement(t: torch.Tensor) -> int | None:
        return t.storage_offset() * t.element_size() % strided.WIDEST if t.is_contiguous() else None

    monkeypatch.setattr(push, "misplacement", misplacement)
    monkeypatch.setattr(exchange, "misplacement", misplacement)


@every_size
@pytest.mark.parametrize("shape", [(5, 6), (0, 3), (3, 2, 4)], ids=str)
def test_any_layout_to_any_other_as_by_messages(memories, size, shape):
    st.simulate(size, values_and_gradients, shape=shape)
    assert size == 1 or 0 in shape or len({memory.uses for memory in memories.values()}) == 1
    assert size == 1 or 0 in shape or next(iter(memories.values())).uses > 100


def test_any_layout_to_any_other_on_a_grid_through_the_memories_of_its_axes(memories):
    st.simulate(4, on_a_grid)
    assert {memory.group.size for memory in memories.values() if memory.uses} == {2, 4}


def in_words(dtype: torch.dtype, offset: int) -> int:
    group, moves = as_group(), []
    for shape in ((32, 64), (24, 40), (17, 48), (4, 6, 16)):
        numel = torch.Size(shape).numel()
        dense = (torch.arange(numel) % 251).to(dtype).view(shape)
        texts = [text for text in specs(len(shape), group.size) if "partial" not in text]
        for one, other in product(texts, repeat=2):
            try:
                x = st.distribute(dense, one)
                goal = st.distribute(dense, other)
            except st.LayoutError:
                continue
            steps = route(x._layout, goal._layout)
            if [step.kind for step in steps] != ["all_to_all"]:
                continue
            local = x._local
            moved = torch.empty(local.numel() + offset, dtype=dtype)[offset:].view(local.shape).copy_(local)
            for old in (moved, moved.transpose(0, -1).contiguous().transpose(0, -1)):  # and lying otherwise
                new = exchange.exchange(old, steps[0], group, group.rank)
                assert torch.equal(new, goal._local), (shape, one, other)
                moves.append(steps[0])
    return len(moves)


@pytest.mark.parametrize("way", ["memory", "messages"])
@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        (torch.bfloat16, 0),
        (torch.bfloat16, 4),
        (torch.float32, 1),
        (torch.float64, 1),
        (torch.bool, 0),
        (torch.complex128, 3),
    ],
    ids=str,
)
def test_words_never_change_what_is_copied(request, monkeypatch, way, dtype, offset):
    _uses_words(monkeypatch)
    if way == "memory":
        request.getfixturevalue("memories")
    assert min(st.simulate(2, in_words, dtype=dtype, offset=offset)) > 100


def test_rows_become_columns_in_the_widest_words():
    shape, size = (64, 64), 2
    source, target = (bind(st.parse_spec(text), shape, st.Mesh((("tp", size),))) for text in ("[tp, -]", "[-, tp]"))
    (step,) = route(source, target)
    plan = push._plan(step, 1, range(size), (64, 1), 2, 0, 0)
    assert [copies.word for copies in (plan.kept, plan.sent[0].copies, plan.come[0].copies)] == [torch.complex128] * 3
    assert plan.sent[0].copies.pieces == (strided.Strided((1, 32, 4), (0, 8, 1), 0, (0, 4, 1), 0),)
    assert push._plan(step, 1, range(size), (64, 1), 2, 8, 0).kept.word == torch.int64
    assert push._plan(step, 1, range(size), (64, 1), 2, 2, 0).kept.word is None


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_one_rank_writes_is_what_the_other_reads(size):
    mesh, shape, found = st.Mesh((("tp", size),)), (5, 7), 0
    layouts = []
    for text in specs(len(shape), size):
        with suppress(st.LayoutError):
            layouts.append(bind(st.parse_spec(text), shape, mesh))
    for source, target in product(layouts, repeat=2):
        for step in route(source, target):
            if step.kind == "all_to_all":
                room_for_what_comes(step, range(size))
                found += 1
    assert found > 50


def room_for_what_comes(step, members) -> None:
    """Givers and takers of a step plan alike: each slot is where the room says, large enough, and nobody else's."""
    room = slots(step, members, 4)
    plans = [push._plan(step, rank, members, _strides(step, rank), 4, None, None) for rank in members]
    sent = {(me, w.peer): (w.start, w.numel) for me, plan in enumerate(plans) for w in plan.sent}
    come = {(w.peer, me): (w.start, w.numel) for me, plan in enumerate(plans) for w in plan.come}
    assert sent == come
    assert room.largest == max((numel * 4 for _, numel in sent.values()), default=0)
    assert room.size == max(bounds[-1] for bounds in room.bounds)
    for (giver, taker), (start, numel) in sent.items():
        assert start == room.bounds[taker][giver]
        assert start + numel * 4 <= room.bounds[taker][giver + 1]
    for rank, plan in zip(members, plans, strict=True):
        assert sum(w.numel for w in plan.come) == step.received(rank)
    assert all(start % strided.WIDEST == 0 for bounds in room.bounds for start in bounds)


def _strides(step, rank) -> tuple[int, ...]:
    return torch.empty(step.source.local_shape(rank), device="meta").stride()


def on_gpus() -> None:
    group = as_group()
    others = set(range(group.size)) - {group.rank}
    push.BIG, big = 1, push.BIG
    try:
        with torch.inference_mode():
            st.reshard(st.distribute(torch.ones(8, 8, device=device()), "[tp balanced, -]"), "[-, tp balanced]")
        for side in (96, 96, 512):  # twice, and after growth
            dense = torch.randn(side, side + 8, device=device()).bfloat16()
            group.broadcast(dense)
            for one, other in product(("[tp balanced, -]", "[-, tp balanced]", "flat(tp)", "[tp pad(3), -]"), repeat=2):
                x, goal = st.distribute(dense, one), st.distribute(dense, other)._local
                assert torch.equal(st.reshard(x, other)._local, goal), (one, other)
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    aside = st.reshard(x, other)._local
                again = st.reshard(x, other)._local  # begins while that still runs
                torch.cuda.current_stream().wait_stream(stream)
                assert torch.equal(aside, goal)
                assert torch.equal(again, goal)
        if all(torch.cuda.can_device_access_peer(group.rank, other) for other in others):
            assert group.peer_memory._size > 0
    finally:
        push.BIG = big


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 4])
def test_on_gpus_it_gives_slices(gpu_world, size):
    gpu_world(on_gpus, size)
