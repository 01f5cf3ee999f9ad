"""Ranks with fewer inputs in torch's Join, and process groups of some of the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import device
from torch import optim
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from zero_models import MODES, ROUNDED, SHAPES, assert_equal, assert_value, set_grads, twins, zero

import shardtensor as st
from shardtensor.comm.process_group import as_group


def joined_alone(mode):
    """Each rank has one input more than the one before; gradients are those that were set last."""
    model, oracle = twins()
    ours, plain = zero(model, optim.Adam, mode, lr=0.1), optim.Adam(oracle.values(), lr=0.1)
    set_grads(0, model, oracle)
    rank, size = dist.get_rank(), dist.get_world_size()
    with Join([ours]):
        for _ in range(rank + 1):
            ours.step()
    for _ in range(size):
        plain.step()
    assert_equal(model, oracle, mode, **(ROUNDED if mode == "ranges" else {}))


@pytest.mark.parametrize("mode", MODES)
def test_uneven_inputs(world, mode):
    world(joined_alone, 3, mode=mode)


class Reducer(Joinable):
    """Sums the gradient of a parameter over the ranks; one without inputs left adds zero and gets the sum, too."""

    def __init__(self, params):
        super().__init__()
        self.params = params

    def reduce(self):
        Join.notify_join_context(self)
        for param in self.params:
            dist.all_reduce(param.grad)

    def shadow(self):
        for param in self.params:
            param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)

    def join_hook(self, **kwargs):
        hook = JoinHook()
        hook.main_hook = self.shadow
        return hook

    @property
    def join_device(self):
        return device()

    @property
    def join_process_group(self):
        return dist.group.WORLD


def joined_with_another(mode):
    """The last step is of the rank that has inputs left, and all ranks make it."""
    model, oracle = twins(["matrix", "bias", "last"])
    ours, plain = zero(model, optim.SGD, mode, lr=0.1, momentum=0.9), optim.SGD(oracle.values(), lr=0.1, momentum=0.9)
    reducer = Reducer(list(model.values()))
    rank, size = dist.get_rank(), dist.get_world_size()
    with Join([reducer, ours]):
        for _ in range(rank + 1):
            for i, param in enumerate(model.values()):
                param.grad = torch.full_like(param, float(i + 1))
            reducer.reduce()
            ours.step()
    for step in range(size):
        for i, param in enumerate(oracle.values()):
            param.grad = torch.full_like(param, float((i + 1) * (size - step)))
        plain.step()
    assert_equal(model, oracle, mode, **(ROUNDED if mode == "ranges" else {}))


@pytest.mark.parametrize("mode", MODES)
def test_uneven_inputs_with_another_joinable(world, mode):
    world(joined_with_another, 3, mode=mode)


def in_a_part(mode):
    """Ranks 0 and 2 step a model, ranks 1 and 3 another: consolidation is by ranks of the group."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[rank % 2]
    model, oracle = twins([name for name in SHAPES if name != "empty"])
    options = {"lr": 0.1 * (1 + rank % 2)}
    ours, plain = zero(model, optim.AdamW, mode, process_group=own, **options), optim.AdamW(oracle.values(), **options)
    for step in range(3):
        set_grads(10 * (rank % 2) + step, model, oracle)
        ours.step()
        plain.step()
    close = ROUNDED if mode == "ranges" else {}
    assert_equal(model, oracle, mode, **close)
    ours.consolidate_state_dict(to=1)
    if dist.get_rank(own) == 1:
        assert_value(ours.state_dict(), plain.state_dict(), mode, **close)
    else:
        with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\)"):
            ours.state_dict()
    ours.load_state_dict(plain.state_dict())
    set_grads(7, model, oracle)
    ours.step()
    plain.step()
    assert_equal(model, oracle, mode, **close)
    assert ours.join_process_group is own


@pytest.mark.parametrize("mode", ["owners", "ranges"])
def test_a_process_group_of_some_ranks(world, mode):
    world(in_a_part, 4, mode=mode)


def in_simulated_part(mode):
    rank = as_group().rank
    own = as_group().subgroup([0, 2] if rank % 2 == 0 else [1, 3])
    model, oracle = twins()
    ours, plain = zero(model, optim.Adam, mode, process_group=own, lr=0.1), optim.Adam(oracle.values(), lr=0.1)
    for step in range(2):
        set_grads(step, model, oracle)
        ours.step()
        plain.step()
    assert_equal(model, oracle, mode, **(ROUNDED if mode == "ranges" else {}))
    held = sum(local_of(ours.state[param]["exp_avg"]).numel() for param in model.values() if param in ours.state)
    return own.index, held


def local_of(value):
    return value._local if isinstance(value, st.ShardedTensor) else value


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("mode", MODES)
def test_the_ranks_of_a_group_hold_state_once(world, mode):
    found = world(in_simulated_part, 4, mode=mode)
    total = sum(param.numel() for param in twins()[0].values())
    assert found[0][1] + found[2][1] == found[1][1] + found[3][1] == total
