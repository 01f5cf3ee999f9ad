"""Gradients of several backwards add up to the dense ones, with every way to put off their communication."""

from __future__ import annotations

import pytest
import torch
from fsdp.counted import counted
from fsdp.twins import both_backward, ids_of, loss_of, same_gradients, same_values, twins
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError
from shardtensor.fsdp import MixedPrecisionPolicy, fully_shard
from shardtensor.mesh import Mesh

sim = pytest.mark.worlds("sim")
sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])


def _accumulate(syncs):
    """Backwards with `syncs` telling which are reduced; the last is."""
    dense, model = twins()
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (dense, model)]
    counts = []
    for step in range(2):
        for micro, flag in enumerate(syncs):
            model.set_requires_gradient_sync(flag)
            model.set_is_last_backward(micro == len(syncs) - 1)
            with counted(model) as seen:
                both_backward(dense, model, 10 * step + micro)
            counts.append(seen["reduce"])
            if not any(syncs[: micro + 1]):
                assert all(p.grad is None for p in model.parameters())
        same_gradients(dense, model)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        same_values(dense, model)
    return counts


@sim
@sizes
@pytest.mark.parametrize("syncs", [(True, True), (False, False, True), (True, False, True)])
def test_accumulation(world, size, syncs):
    if size == 1 and syncs[0]:
        return
    for counts in world(_accumulate, size, syncs=syncs):
        assert counts == [4 * sync for sync in syncs] * 2  # three blocks and the root


@pytest.mark.worlds("gloo")
def test_accumulation_in_processes(world):
    world(_accumulate, 2, syncs=(True, False, True))
    world(_hybrid, 4, steps=[(False, False), (True, False), (True, True)])


def _by_unit():
    dense, model = twins()
    model.set_requires_gradient_sync(False, recurse=False)  # the root's own, not the blocks'
    model.blocks[1].set_requires_gradient_sync(False)
    both_backward(dense, model, 0)
    waits = [name for name, p in model.named_parameters() if p.grad is None]
    assert {name.split(".")[0] for name in waits} == {"embed", "head", "blocks"}
    assert {name.split(".")[1] for name in waits if name.startswith("blocks")} == {"1"}
    model.set_requires_gradient_sync(True)
    both_backward(dense, model, 1)
    same_gradients(dense, model)


@sim
@pytest.mark.parametrize("size", [1, 3])
def test_units_sync_by_themselves(world, size):
    world(_by_unit, size)


def _used_before():
    """A parameter that only the backward without sync used is reduced by the next with sync."""
    torch.manual_seed(0)
    dense = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)])
    model = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)])

    class Two(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x, picks):
            return sum(self.layers[i](x).sum() for i in picks)

    model.load_state_dict(dense.state_dict())
    dense, model = Two(dense).to(device()), Two(model).to(device())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    group = as_group()
    x = torch.arange(3.0 * group.size, device=device()).view(group.size, 3)
    for flag, picks in ((False, [0, 1]), (True, [0]), (False, [1]), (True, [0])):
        model.set_requires_gradient_sync(flag)
        model(x[group.index : group.index + 1], picks).backward()
        (dense(x, picks) / group.size).backward()
        if flag:
            same_gradients(dense, model)


@sim
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_waits_is_not_forgotten(world, size):
    world(_used_before, size)


def _hybrid(steps):
    mesh = as_group().on_mesh(Mesh((("rep", 2), ("dp", 2))), {})
    dense, model = twins(mesh=mesh)
    counts = []
    for step in range(2):
        for micro, (syncs, reduces) in enumerate(steps):
            model.set_requires_gradient_sync(syncs)
            model.set_requires_all_reduce(reduces)
            with counted(model) as seen:
                both_backward(dense, model, 10 * step + micro)
            counts.append((seen["reduce"], seen["sum over copies"]))
        same_gradients(dense, model)
        dense.zero_grad()
        model.zero_grad()
    return counts


@sim
@pytest.mark.parametrize(
    "steps",
    [
        [(True, True)],
        [(True, False), (True, False), (True, True)],
        [(False, False), (True, False), (True, True)],
        [(True, True), (True, False), (True, True)],
    ],
    ids=str,
)
def test_copies_are_summed_last(world, steps):
    for counts in world(_hybrid, 4, steps=steps):
        assert counts == [(4 * syncs, 4 * (syncs and reduces)) for syncs, reduces in steps] * 2


def _held_wide():
    """In bfloat16 256 + 1 + 1 is 256; kept in float32 it is 258."""
    model = nn.Linear(1, 1, bias=False, device=device())
    with torch.no_grad():
        model.weight.fill_(1.0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    for value in (256.0, 1.0, 1.0):
        model.set_requires_gradient_sync(False)
        model(torch.full((1, 1), value, device=device())).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.zeros(1, 1, device=device())).sum().backward()
    return model.weight.grad.full_tensor().item()


@sim
def test_waiting_gradients_are_wide(world):
    assert world(_held_wide, 2) == [258.0] * 2


def _factor(factor):
    dense, model = twins()
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
    model.set_reduce_scatter_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(True)
    both_backward(dense, model)
    same_gradients(dense, model, factor=as_group().size / factor)
    with pytest.raises(LayoutError, match="divided by 0"):
        model.set_gradient_divide_factor(0)


@sim
@pytest.mark.parametrize("size", [1, 3])
def test_divide_factor(world, size):
    world(_factor, size, factor=0.5)


def _hooked(copies):
    size = as_group().size
    mesh = as_group().on_mesh(Mesh((("rep", 2), ("dp", size // 2))), {}) if copies else None
    dense, model = twins(mesh=mesh)
    seen = []

    def double(grad):
        seen.append((grad.dtype, grad.dim()))
        grad.mul_(2)

    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(double)
    both_backward(dense, model)
    both_backward(dense, model, 1)
    same_gradients(dense, model, factor=2)
    assert seen == [(torch.float64, 1)] * 8
    if copies:
        with pytest.raises(LayoutError, match="stream"):
            model.set_all_reduce_hook(double, stream=object())


@sim
@pytest.mark.parametrize(("size", "copies"), [(1, False), (3, False), (4, True)])
def test_all_reduce_hook(world, size, copies):
    world(_hooked, size, copies=copies)


def _no_copies():
    """Without copies of the shards there is nothing that set_requires_all_reduce puts off, as in torch."""
    dense, model = twins()
    model.set_requires_all_reduce(False)
    both_backward(dense, model)
    same_gradients(dense, model)
    assert torch.isfinite(loss_of(model(ids_of(0)[1])))


@sim
def test_all_reduce_without_copies(world):
    world(_no_copies, 2)
    assert st.simulate(1, _no_copies) == [None]
