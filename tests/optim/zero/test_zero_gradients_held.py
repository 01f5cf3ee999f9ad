"""What a rank holds of gradients and states, and whose values parameters have at first."""

from __future__ import annotations

import pytest
import torch
from harness import device, every_size
from torch import optim
from torch.multiprocessing.reductions import StorageWeakRef
from zero_models import (
    AVERAGED,
    PARTITIONS,
    assert_averaged,
    assert_equal,
    backward,
    batch,
    loss_of,
    part_of,
    reducing,
    train_both,
    twins,
)

import shardtensor as st
from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")
every_mode = pytest.mark.parametrize("mode", PARTITIONS)


DIVISIBLE = {"a": (16, 8), "b": (64,), "c": (4, 4, 4), "d": (128,)}


def held(mode):
    """What a rank holds of gradients and states, in elements; full gradients are freed when backward ends."""
    model = {name: torch.nn.Parameter(torch.ones(shape, device=device())) for name, shape in DIVISIBLE.items()}
    full = []
    for param in model.values():
        param.register_post_accumulate_grad_hook(lambda p: full.append(StorageWeakRef(p.grad.untyped_storage())))
    ours = reducing(model, optim.AdamW, mode)
    for _ in range(2):
        loss_of({name: param.view(-1)[:24] for name, param in model.items()}, part_of(batch(0))).backward()
        assert len(full) == len(model)
        grads = [param.grad for param in model.values()]
        assert all(isinstance(grad, st.ShardedTensor) for grad in grads)
        if as_group().size > 1:
            assert all(storage.expired() for storage in full), "a full gradient is alive"
        full.clear()
        parts = [grad._local for grad in grads]
        stored = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() // 4 for part in parts}
        average = [StorageWeakRef(part.untyped_storage()) for part in parts]
        ours.step()
        assert all(leaf.grad is None for group in ours.optim.param_groups for leaf in group["params"])
        assert all(isinstance(param.grad, st.ShardedTensor) for param in model.values())
        ours.zero_grad()
        assert all(param.grad is None for param in model.values())
        elements = sum(part.numel() for part in parts)
        del grads, parts
        assert all(storage.expired() for storage in average), "a part of a gradient is alive after zero_grad"
    states = [ours.state[param]["exp_avg"] for param in model.values() if param in ours.state]
    states = [state._local if isinstance(state, st.ShardedTensor) else state for state in states]
    return elements, sum(stored.values()), sum(state.numel() for state in states)


@sim
@every_size
@every_mode
def test_gradients_and_states_are_held_once_in_all(world, size, mode):
    found = world(held, size, mode=mode)
    total = sum(torch.Size(shape).numel() for shape in DIVISIBLE.values())
    assert sum(elements for elements, _, _ in found) == sum(states for _, _, states in found) == total
    if mode != "of_owners" and size in (1, 2, 4):
        assert sum(stored for _, stored, _ in found) <= total * 9 / 8
        assert max(elements for elements, _, _ in found) <= total / size * 9 / 8


# -- initial values


def unequal(mode, is_later):
    """Parameters differ between ranks; all have the first rank's values after construction."""
    model, oracle = twins()
    with torch.no_grad():
        for param in model.values():
            param.add_(float(as_group().rank))
    names = list(model)
    first = names[:4] if is_later else names
    ours = reducing([model[name] for name in first], optim.SGD, mode, lr=0.1)
    if is_later:
        assert_equal({name: model[name] for name in first}, {name: oracle[name] for name in first})
        ours.add_param_group({"params": [model[name] for name in names[4:]]})
    assert_equal(model, oracle)
    train_both(model, ours, oracle, optim.SGD(oracle.values(), lr=0.1), range(2))


@both
@every_mode
@pytest.mark.parametrize("is_later", [False, True], ids=["at_once", "later"])
def test_parameters_get_the_values_of_the_first_rank(world, mode, is_later):
    world(unequal, 3, mode=mode, is_later=is_later)


def another_group(mode):
    """The first rank of a process group whose ranks are in another order than in the world."""
    model, oracle = twins()
    backward(model, oracle)
    for param in (*model.values(), *oracle.values()):
        param.grad = None
    ours = reducing(model, optim.SGD, mode, process_group=as_group().subgroup([1, 2]), lr=0.1)
    x = batch(0, 4)
    rank = as_group().rank
    loss_of(model, x.chunk(2)[rank - 1]).backward()
    loss_of(oracle, x).backward()
    assert_averaged(model, oracle)
    ours.step()
    optim.SGD(oracle.values(), lr=0.1).step()
    assert_equal(model, oracle, **AVERAGED)


def in_group(mode):
    if as_group().rank in (1, 2):
        another_group(mode)


@sim
@every_mode
def test_the_ranks_of_a_group(world, mode):
    world(in_group, 4, mode=mode)
