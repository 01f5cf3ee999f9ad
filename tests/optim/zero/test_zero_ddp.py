"""Steps in DDP's backward equal DDP and a plain optimizer, after each iteration, from the first one on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import device
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from zero_models import ROUNDED, Factored, WithoutClosure, assert_value

import shardtensor as st

HOOKS = {"at_the_end": st.hook_with_zero_step, "interleaved": st.hook_with_zero_step_interleaved}
WAYS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static_views": {"static_graph": True, "gradient_as_bucket_view": True},
}
every_hook = pytest.mark.parametrize("hook", HOOKS)
SIZE = 2


class Net(nn.Module):
    """Large enough for several buckets of 1 KiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layers(x) * self.scale


def wrapped(way="default"):
    torch.manual_seed(0)
    net = Net().to(device())
    return DistributedDataParallel(net, bucket_cap_mb=1 / 1024, **WAYS[way])


def loss(ddp, step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return ddp(torch.randn(4, 6, generator=generator).to(device())).square().mean()


def groups(ddp):
    params = list(ddp.parameters())
    return [{"params": params[::2], "lr": 0.02}, {"params": params[1::2], "lr": 0.2}]


def overlapped(hook, way, cls=optim.AdamW, params=lambda ddp: ddp.parameters(), reduce=allreduce_hook, **options):
    """A module that steps in backward, and a twin that its optimizer steps."""
    ddp, twin = wrapped(way), wrapped(way)
    zero = st.ZeroRedundancyOptimizer(params(ddp), cls, overlap_with_ddp=True, **options)
    ddp.register_comm_hook(None, HOOKS[hook](reduce, ddp, zero))
    twin.register_comm_hook(None, reduce)
    return ddp, zero, twin, cls(params(twin), **options)


def assert_same(ddp, twin, why):
    assert_value(dict(ddp.named_parameters()), dict(twin.named_parameters()), str(why), **ROUNDED)


def iterate(ddp, zero, twin, plain, loop, steps):
    for step in steps:
        if loop == "zero_grad before forward":
            zero.zero_grad()
            loss(ddp, step).backward()
        elif loop == "zero_grad after backward":
            loss(ddp, step).backward()
            zero.zero_grad()
        elif loop == "step and zero_grad":
            loss(ddp, step).backward()
            before = [param.detach().clone() for param in ddp.parameters()]
            assert zero.step() is None
            if step:  # the first backward is stepped by the first call, the others step by themselves
                assert_value(list(ddp.parameters()), before, "step() does nothing")
            zero.zero_grad()
        plain.zero_grad()
        loss(twin, step).backward()
        plain.step()
        assert_same(ddp, twin, (loop, step))


LOOPS = ["zero_grad before forward", "zero_grad after backward", "step and zero_grad"]


def loops(hook, way):
    for loop in LOOPS:
        iterate(*overlapped(hook, way, lr=0.05), loop, range(4))


@every_hook
@pytest.mark.parametrize("way", WAYS)
def test_every_loop_steps_in_every_iteration(world, hook, way):
    world(loops, SIZE, hook=hook, way=way)


def with_classes(hook):
    iterate(*overlapped(hook, "views", optim.AdamW, groups), LOOPS[0], range(3))
    iterate(*overlapped(hook, "default", optim.SGD, groups, lr=0.1, momentum=0.9), LOOPS[0], range(3))
    iterate(*overlapped(hook, "default", optim.Adafactor, lr=0.1), LOOPS[0], range(3))
    iterate(*overlapped(hook, "default", Factored, groups), LOOPS[0], range(3))
    *made, plain = overlapped(hook, "default", WithoutClosure)
    iterate(*made, plain, LOOPS[0], range(3))
    assert made[1].param_groups[0]["calls"] == plain.param_groups[0]["calls"] == 3  # it is stepped at the end


@every_hook
def test_groups_and_custom_classes(world, hook):
    world(with_classes, 3, hook=hook)


def together(hook):
    """All parameters of this rank are stepped in one call, with both hooks."""
    ddp = wrapped()
    zero = st.ZeroRedundancyOptimizer(ddp.parameters(), Norms, overlap_with_ddp=True)
    ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, zero))
    size = len(zero.optim.param_groups[0]["params"])
    zero.zero_grad()
    loss(ddp, 0).backward()
    assert zero.optim.seen == [size]
    assert all(param.isfinite().all() for param in ddp.parameters())


class Norms(optim.SGD):
    """A class that may update parameters together: it divides by the number of those with a gradient."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        self.seen.append(len(params))
        for param in params:
            param -= 0.1 * param.grad / len(params)


@every_hook
def test_a_class_that_may_update_parameters_together_is_stepped_at_the_end(world, hook):
    world(together, SIZE, hook=hook)


def compressed(hook):
    iterate(*overlapped(hook, "default", reduce=fp16_compress_hook, lr=0.05), LOOPS[0], range(3))


@every_hook
def test_a_hook_that_compresses_gradients(world, hook):
    world(compressed, SIZE, hook=hook)


def warm_up(hook, way):
    """Without zero_grad the first two backwards do not step, three with a static graph."""
    ddp, _, twin, plain = overlapped(hook, way, optim.SGD, lr=0.1)
    skipped = 3 if "static" in way else 2
    for step in range(skipped + 2):
        for param in (*ddp.parameters(), *twin.parameters()):
            param.grad = None
        loss(ddp, step).backward()
        loss(twin, step).backward()
        if step >= skipped:
            plain.step()
        assert_same(ddp, twin, (way, step))


@every_hook
@pytest.mark.parametrize("way", ["default", "static"])
def test_backwards_before_the_first_zero_grad_do_not_step(world, hook, way):
    world(warm_up, SIZE, hook=hook, way=way)


def state_and_schedule(hook):
    """The learning rate of a scheduler holds in the next backward, and state is consolidated as always."""
    ddp, zero, twin, plain = overlapped(hook, "views", optim.Adam, groups)
    schedulers = [optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in (zero, plain)]
    for step in range(3):
        iterate(ddp, zero, twin, plain, LOOPS[0], [step])
        zero.step()  # schedulers warn if it was never called
        for scheduler in schedulers:
            scheduler.step()
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert_value(zero.state_dict(), plain.state_dict(), **ROUNDED)


@every_hook
def test_schedulers_and_state(world, hook):
    world(state_and_schedule, SIZE, hook=hook)


def refused(hook):
    ddp = DistributedDataParallel(Net().to(device()), find_unused_parameters=True)
    zero = st.ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(st.RuleError, match="unused parameters"):
        HOOKS[hook](allreduce_hook, ddp, zero)
    other = st.ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        HOOKS[hook](allreduce_hook, wrapped(), other)


@every_hook
def test_what_the_hooks_refuse(world, hook):
    world(refused, SIZE, hook=hook)
