"""`unshard`, `reshard`, `reshard_after_forward`, prefetch lists: they change what is sent and when, not results."""

from __future__ import annotations

import pytest
import torch
from fsdp.counted import counted
from fsdp.twins import Net, both_backward, ids_of, loss_of, same_gradients, same_values, twins
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError, RuleError
from shardtensor.fsdp import UnshardHandle, fully_shard
from shardtensor.mesh import Mesh

sim = pytest.mark.worlds("sim")
UNITS = 4  # three blocks and the root


def _trains(change, steps=3):
    """Some steps equal the dense ones; the gathers of each."""
    dense, model = twins(**(change if isinstance(change, dict) else {}))
    if callable(change):
        change(model)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (dense, model)]
    gathers = []
    for step in range(steps):
        with counted(model) as seen:
            both_backward(dense, model, step)
        gathers.append(seen["gather"])
        same_gradients(dense, model)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        same_values(dense, model)
    return gathers


@sim
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("value", [None, True, False, 1, 2, 4])
def test_every_reshard_after_forward(world, size, value):
    if type(value) is int and size % value:
        return
    again = value is True or (type(value) is int and value == size and size > 1)
    for gathers in world(_trains, size, change={"reshard_after_forward": value}):
        assert gathers == [UNITS + again] * 3  # two blocks of three are still there


@sim
def test_reshard_after_forward_is_checked(world):
    def refused(value):
        model = Net()
        before = list(model.parameters())
        with pytest.raises(LayoutError, match="does not divide"):
            fully_shard(model, reshard_after_forward=value)
        assert type(model) is Net
        assert all(a is b and type(a) is nn.Parameter for a, b in zip(before, model.parameters(), strict=True))

    for value in (0, 3, 5, -2):
        world(refused, 4, value=value)


def _near_only():
    """With 2 of 4, the backward's gathers are over pairs of ranks."""
    dense, model = twins(reshard_after_forward=2)
    for step in range(2):
        with counted(model) as seen:
            both_backward(dense, model, step)
        assert seen["gather"] == UNITS
        same_gradients(dense, model)
    parts = [block._fsdp_state.post_forward_mesh for block in model.blocks]
    rank = as_group().rank
    assert [list(part.group.ranks) for part in parts] == [[rank // 2 * 2, rank // 2 * 2 + 1]] * 3
    flat = model.blocks[0]._fsdp_state.param_groups[0]
    assert sum(t.numel() for t in parts[0]._kept) == flat.bucket.total // 2


@sim
def test_backward_gathers_from_near_ranks(world):
    world(_near_only, 4)


def _near_of_copies():
    mesh = as_group().on_mesh(Mesh((("rep", 2), ("dp", 4))), {})
    dense, model = twins(mesh=mesh, reshard_after_forward=2)
    both_backward(dense, model)
    same_gradients(dense, model)


@sim
def test_near_ranks_within_a_copy(world):
    world(_near_of_copies, 8)


def _unsharded():
    dense, model = twins(reshard_after_forward=True)
    both_backward(dense, model)
    wrappers = list(model.parameters())
    for _ in range(2):
        handle = model.blocks[1].unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        handle.wait()
        assert model.blocks[0].unshard() is None
        assert all(a is b for a, b in zip(wrappers, model.parameters(), strict=True))
        assert all(isinstance(p, st.ShardedTensor) for p in model.parameters())
        with counted(model) as seen:
            loss = loss_of(model(ids_of(1)[1]))
        assert seen["gather"] == UNITS - 2
        loss.backward()
        loss_of(dense(ids_of(1)[0])).backward()
        same_gradients(dense, model)
    with counted(model) as seen:  # it was for one forward
        loss_of(model(ids_of(1)[1]))
    assert seen["gather"] == UNITS
    model.blocks[0].unshard()
    model.blocks[0].reshard()
    with counted(model) as seen:
        loss_of(model(ids_of(1)[1]))
    assert seen["gather"] == UNITS


@sim
def test_unshard(world):
    world(_unsharded, 2)


def _before_first():
    dense, model = twins()
    for block in model.blocks:
        block.unshard(async_op=True)
    model.unshard()
    both_backward(dense, model)
    same_gradients(dense, model)


@sim
@pytest.mark.parametrize("size", [1, 3])
def test_unshard_before_the_first_forward(world, size):
    world(_before_first, size)


def _written(write):
    dense, model = twins()
    both_backward(dense, model)
    opts = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (dense, model)]
    for module in (model, *model.blocks):
        module.unshard()
    if write == "step":
        for opt in opts:
            opt.step()
    elif write == "copy":
        with torch.no_grad():
            for m in (dense, model):
                m.blocks[1].up.weight.mul_(2)
    elif write == "data":
        for m in (dense, model):
            m.blocks[1].up.weight.data.add_(1)
    else:
        state = {name: value + 1 for name, value in dense.state_dict().items()}
        for m in (dense, model):
            m.load_state_dict(state)
    dense.zero_grad()
    model.zero_grad()
    both_backward(dense, model, 1)
    same_gradients(dense, model)


@sim
@pytest.mark.parametrize("write", ["step", "copy", "data", "load"])
def test_a_write_after_unshard_shows(world, write):
    world(_written, 3, write=write)


class Early(Net):
    """Gathers its blocks at the start of its own forward."""

    def forward(self, ids):
        for block in self.blocks:
            if hasattr(block, "unshard"):
                block.unshard(async_op=True)
        return super().forward(ids)


def _early():
    dense, model = twins(make=Early, reshard_after_forward=True)
    for step in range(3):
        with counted(model) as seen:
            both_backward(dense, model, step)
        same_gradients(dense, model)
    return seen["gather"]


@sim
@pytest.mark.parametrize("size", [1, 2])
def test_unshard_inside_of_a_forward(world, size):
    assert world(_early, size) == [UNITS] * size


def _kept(is_sharded=False):
    dense, model = twins(reshard_after_forward=True)
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (dense, model)]
    if is_sharded:
        opts[1] = st.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2, fused=True)
    counts = []
    for step in range(2):
        for micro in range(3):
            model.set_reshard_after_backward(False)
            with counted(model) as seen:
                both_backward(dense, model, 10 * step + micro)
            counts.append(seen["gather"])
        same_gradients(dense, model)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    model.set_reshard_after_backward(True)
    for step in range(2):
        both_backward(dense, model, step)
    same_gradients(dense, model)
    return counts


@sim
@pytest.mark.parametrize("is_sharded", [False, True])
def test_kept_after_backward_until_the_step(world, is_sharded):
    for counts in world(_kept, 2, is_sharded=is_sharded):
        assert counts == [UNITS, 0, 0] * 2


def _changed():
    dense, model = twins()
    for step, value in enumerate([True, False, True]):
        model.set_reshard_after_forward(value)
        with counted(model) as seen:
            both_backward(dense, model, step)
        same_gradients(dense, model)
        assert seen["gather"] == UNITS if not value else seen["gather"] > UNITS
    with pytest.raises(LayoutError, match="True or False"):
        model.set_reshard_after_forward(2)
    model.set_reshard_after_forward(False)
    ids, mine = ids_of(5)
    loss = loss_of(model(mine))
    model.set_reshard_after_forward(True)
    other = loss_of(model(mine))  # the memory of the first is not taken away
    (loss + other).backward()
    (2 * loss_of(dense(ids))).backward()
    same_gradients(dense, model)
    both_backward(dense, model, 6)
    same_gradients(dense, model)


@sim
@pytest.mark.parametrize("size", [1, 2, 3])
def test_set_reshard_after_forward(world, size):
    world(_changed, size)


def _prefetch(model):
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[1].set_modules_to_forward_prefetch([])
    blocks[2].set_modules_to_backward_prefetch(blocks[:2])
    blocks[1].set_modules_to_backward_prefetch([blocks[0]])
    model.set_modules_to_backward_prefetch(blocks)
    model.set_reshard_after_forward(True)
    with pytest.raises(LayoutError, match="Linear"):
        model.set_modules_to_forward_prefetch([model.head])


@sim
@pytest.mark.parametrize("size", [1, 2, 3])
def test_prefetch_lists(world, size):
    for gathers in world(_trains, size, change=_prefetch):
        assert len(set(gathers)) == 1


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Embedding(7, 5), nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, ids):
        return self.head(self.a(ids) + self.b(ids))


class Projected(nn.Sequential):
    """A table, and what its rows are multiplied by: backward reads that."""

    def __init__(self):
        super().__init__(nn.Embedding(7, 5), nn.Linear(5, 5))


class ProjectedTables(Tables):
    def __init__(self):
        super().__init__()
        self.a, self.b = Projected(), Projected()


def _lookups(kind=Tables):
    torch.manual_seed(0)
    dense, model = kind().to(device()), kind().to(device())
    model.load_state_dict(dense.state_dict())
    for child in model.children():
        fully_shard(child, reshard_after_forward=True)
        child.set_unshard_in_backward(False)
    fully_shard(model)
    for step in range(3):
        with counted(model) as seen:
            both_backward(dense, model, step)
        same_gradients(dense, model)
    return seen["gather"]


@sim
def test_lookups_are_not_gathered_again(world):
    assert world(_lookups, 2) == [4] * 2  # three forward; the head again
    world(_lookups, 2, kind=ProjectedTables)  # these are, where they must be


def _stale(write):
    _, model = twins(reshard_after_forward=True)
    loss = loss_of(model(ids_of(0)[1]))
    with torch.no_grad():
        model.blocks[0].up.weight.add_(1)
    if write == "no grad":
        with torch.no_grad():
            loss_of(model(ids_of(0)[1]))
    elif write == "again":
        loss_of(model(ids_of(0)[1]))
    with pytest.raises(RuleError, match="written"):
        loss.backward()
    model.zero_grad()
    dense, _ = twins()
    with torch.no_grad():
        dense.blocks[0].up.weight.add_(1)
    both_backward(dense, model, 1)
    same_gradients(dense, model)


@sim
@pytest.mark.parametrize("write", ["", "no grad", "again"])
def test_backward_of_old_values_is_refused(world, write):
    world(_stale, 2, write=write)
