"""Hooks on fully sharded parameters: the objects of `parameters()`, once per backward, sharded gradients in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import MixedPrecisionPolicy, fully_shard

FLOAT32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, 2 * width), nn.LayerNorm(width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=5, depth=2):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 7, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net()


def sharded(model, reshard=None, policy=FLOAT32):
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
    return fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)


def ids(step, part=True):
    group = as_group()
    drawn = torch.randint(0, 7, (2 * group.size, 3), generator=torch.Generator().manual_seed(step))
    return drawn[2 * group.index :][:2] if part else drawn


def loss_of(model, x):
    return model(x).float().logsumexp(-1).pow(2).mean()


def hooks_step_as_well_as_the_loop(reshard, policy):
    looped, hooked = sharded(net(), reshard, policy), sharded(net(), reshard, policy)
    options = {"lr": 1e-2, "foreach": False}
    optimizer = torch.optim.AdamW(looped.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    optimizers = {p: torch.optim.AdamW([p], **options) for p in hooked.parameters()}
    schedulers = {p: torch.optim.lr_scheduler.StepLR(o, step_size=2) for p, o in optimizers.items()}
    seen = []

    def step(param):
        assert param.grad.shape == param.shape
        seen.append(param)
        optimizers[param].step()
        optimizers[param].zero_grad()
        schedulers[param].step()

    for param in hooked.parameters():
        param.register_post_accumulate_grad_hook(step)
    for it in range(5):
        seen.clear()
        losses = [loss_of(model, ids(it)) for model in (looped, hooked)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        assert torch.equal(*losses), it
        assert sorted(map(id, seen)) == sorted(map(id, hooked.parameters()))
        for (name, p), q in zip(looped.named_parameters(), hooked.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor()), (it, name)
            assert q.grad is None


@pytest.mark.parametrize("policy", [FLOAT32, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_one_optimizer_for_each_parameter_stepped_from_its_hook(world, reshard, policy):
    st.simulate(world, lambda: hooks_step_as_well_as_the_loop(reshard, policy))


def hooks_of_both_times(world):
    model, calls = net(), []
    before = model.head.weight.register_post_accumulate_grad_hook(lambda p: calls.append(("before", p)))
    early = model.head.weight.register_hook(lambda g: calls.append(("gradient", g)))
    weight = model.head.weight
    sharded(model)
    assert model.head.weight is weight
    after = weight.register_post_accumulate_grad_hook(lambda p: calls.append(("after", p)))
    for it in range(2):  # the second time onto the first
        calls.clear()
        loss_of(model, ids(it)).backward()
        assert [kind for kind, _ in calls] == ["gradient", "before", "after"]
        assert calls[0][1].shape == weight.shape
        assert calls[1][1] is weight and calls[2][1] is weight
    for handle, left in (
        (before, ["gradient", "after"]),
        (early, ["after"]),
        (after, []),
    ):
        calls.clear()
        handle.remove()
        loss_of(model, ids(2)).backward()
        assert [kind for kind, _ in calls] == left


def test_hooks_from_before_and_after_wrapping_run_in_order_until_removed():
    st.simulate(2, lambda: hooks_of_both_times(2))


def gradient_hooks_replace():
    """A gradient hook sees what is about to be added, whole over the ranks, and what it returns is added instead."""
    dense, model = net(), sharded(net())
    seen = []

    def double(grad):
        seen.append(grad)
        return grad * 2

    plain = dense.blocks[0].a.weight.register_hook(lambda grad: grad * 2)
    handle = model.blocks[0].a.weight.register_hook(double)
    for it in range(3):
        loss_of(dense, ids(it, part=False)).backward()
        loss_of(model, ids(it)).backward()
        for (name, p), q in zip(dense.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(q[1].grad.full_tensor(), p.grad, msg=lambda text, n=name: f"{n}: {text}")
        if it == 1:
            plain.remove()
            handle.remove()
    assert len(seen) == 2


@pytest.mark.parametrize("world", [1, 3])
def test_a_gradient_hook_may_replace_what_is_added(world):
    st.simulate(world, gradient_hooks_replace)


def hooks_that_raise(number):
    model, again = sharded(net()), sharded(net())
    param = list(model.parameters())[number]
    handle = param.register_post_accumulate_grad_hook(lambda p: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, ids(0)).backward()
    handle.remove()
    for m in (model, again):
        m.zero_grad()
        loss_of(m, ids(1)).backward()
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_hook_that_raises_leaves_nothing_behind(number):
    st.simulate(2, lambda: hooks_that_raise(number))


def unused_are_not_called():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = copy.deepcopy(model)

        def forward(self, x):
            return self.parts["a"](x)

    half, calls = fully_shard(Half()), []
    for name, param in half.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    half(torch.ones(2, 3)).sum().backward()
    assert sorted(calls) == ["parts.a.bias", "parts.a.weight"]
    assert half.parts["b"].weight.grad is None


def test_hooks_of_unused_parameters_are_not_called():
    st.simulate(2, unused_are_not_called)
