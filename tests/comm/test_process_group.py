"""as_group: every way torch users say which ranks take part."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size
from torch.distributed.device_mesh import init_device_mesh

from shardtensor.comm import process_group
from shardtensor.comm.group import Group, NonMemberGroup, SingleRankGroup
from shardtensor.comm.process_group import _release_destroyed, as_group, load_with_process_group
from shardtensor.comm.torch_group import TorchGroup


def facts(group: Group) -> tuple[int, int, list[int], int]:
    return group.size, group.rank, list(group.ranks), group.index


def total(group: Group) -> float:
    """The sum of the global ranks of the members, by communication."""
    return group.all_reduce(torch.tensor([float(group.rank)], device=device())).item()


def test_without_processes_a_world_of_one():
    group = as_group()
    assert isinstance(group, Group)
    assert facts(group) == (1, 0, [0], 0)
    assert group.process_group is None
    assert group.exchange(b"x") == [b"x"]
    assert group.subgroup([0]) is group


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="this is a str"):
        as_group("tp")


def check_default() -> None:
    group = as_group()
    assert facts(group) == (dist.get_world_size(), dist.get_rank(), list(range(dist.get_world_size())), dist.get_rank())
    assert isinstance(group.ranks, range)
    assert as_group(dist.group.WORLD) is group is as_group(group) is as_group()
    assert group.process_group is dist.group.WORLD
    assert isinstance(group, SingleRankGroup if group.size == 1 else TorchGroup)


@every_size
def test_none_means_the_default_group(world, size):
    world(check_default, size)


def check_subgroups() -> None:
    rank = dist.get_rank()
    odd = as_group(dist.new_group([1, 3]))
    if rank in (1, 3):
        assert facts(odd) == (2, rank, [1, 3], [1, 3].index(rank))
        assert total(odd) == 4
        # Places in the group are group ranks; `ranks` are global.
        assert odd.broadcast(torch.tensor([rank], device=device()), 1).item() == 3
    else:
        assert isinstance(odd, NonMemberGroup)
        assert odd.index == -1
        with pytest.raises(RuntimeError, match=f"rank {rank} is not a member"):
            odd.all_reduce(torch.ones(1))

    # Members only need to call it; everyone may.
    last = as_group().subgroup([3, 2, 0])
    if rank == 1:
        assert facts(last) == (3, 1, [0, 2, 3], -1)
        with pytest.raises(RuntimeError, match=r"rank 1 is not a member of the group of ranks \[0, 2, 3\]"):
            last.barrier()
    else:
        assert facts(last) == (3, rank, [0, 2, 3], [0, 2, 3].index(rank))
        assert total(last) == 5
        assert as_group().subgroup((0, 2, 3)) is last
    assert facts(as_group().subgroup([rank])) == (1, rank, [rank], 0)
    assert as_group().subgroup([0, 1, 2, 3]) is as_group()


def test_subgroups(world):
    world(check_subgroups, timeout_s=5.0)


def check_meshes() -> None:
    rank = dist.get_rank()
    row, column = divmod(rank, 2)
    grid = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    group = as_group(grid)
    assert as_group(grid) is group
    assert str(group.mesh) == "(dp=2, tp=2)"
    assert facts(group) == (4, rank, [0, 1, 2, 3], rank)
    assert list(group.axis("tp").ranks) == [2 * row, 2 * row + 1]
    assert list(group.axis("dp").ranks) == [column, column + 2]
    assert (total(group), total(group.axis("tp")), total(group.axis("dp"))) == (6, 4 * row + 1, 2 * column + 2)
    assert list(group.axis("dp", "tp").ranks) == [0, 1, 2, 3]
    assert as_group().mesh is None
    assert as_group(grid["tp"]).mesh is None
    assert list(as_group(grid["tp"]).ranks) == [2 * row, 2 * row + 1]

    cube = as_group(init_device_mesh(device().type, (2, 1, 2)))
    assert cube.mesh.names == ("dim_0", "dim_1", "dim_2")
    assert facts(cube.axis("dim_1")) == (1, rank, [rank], 0)
    assert list(cube.axis("dim_1", "dim_2").ranks) == [2 * row, 2 * row + 1]
    assert total(cube.axis("dim_1", "dim_2")) == 4 * row + 1


def test_device_meshes(world):
    world(check_meshes)


def check_load_with_process_group() -> None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return
    with load_with_process_group(pair):
        assert list(as_group().ranks) == [0, 1]
        with pytest.raises(RuntimeError, match="already active"), load_with_process_group(pair):
            pass
    assert as_group().size == dist.get_world_size()
    from torch.distributed._shard.api import load_with_process_group as upstream

    with upstream(pair):
        assert list(as_group().ranks) == [0, 1]


def test_load_with_process_group(world):
    world(check_load_with_process_group, 3)


def check_destroyed() -> None:
    dist.destroy_process_group()
    assert as_group().size == 1


def test_after_destroy_a_world_of_one(world):
    world(check_destroyed, 2)
    world(check_default, 2)


def check_fake() -> None:
    """A world of 16,384 that sends nothing: the second look at a group costs the same as in a world of 8."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    seconds = {}
    for size in (8, 16384):
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=size)
        group = as_group()
        assert (group.size, group.index, group.ranks) == (size, 3, range(size))
        gc.disable()
        seconds[size] = min(_time_of_as_group() for _ in range(5))
        gc.enable()
        grid = as_group(init_device_mesh("cpu", (size // 8, 8), mesh_dim_names=("dp", "tp")))
        assert grid.axis("tp").ranks == range(8)
        assert torch.equal(group.all_reduce(torch.ones(2)), torch.ones(2))
        dist.destroy_process_group()
    assert seconds[16384] < 3 * seconds[8] + 100e-6


def _time_of_as_group() -> float:
    start = time.perf_counter()
    for _ in range(100):
        as_group()
    return time.perf_counter() - start


def test_a_huge_world_costs_what_a_small_one_costs(world):
    world(check_fake, 1)


def test_nothing_refers_to_a_destroyed_process_group_when_the_interpreter_ends():
    """Groups of tensors live on; gloo would end the process with an abort if it were freed later."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = as_group()
    assert group.process_group is dist.group.WORLD
    _release_destroyed()
    assert group.process_group is dist.group.WORLD
    dist.destroy_process_group()
    assert as_group() is not group
    kept = group.process_group
    assert kept is not None
    process_group._groups[kept] = group
    _release_destroyed()
    assert group.process_group is None
