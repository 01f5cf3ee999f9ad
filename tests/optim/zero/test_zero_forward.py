"""New values that are sent while the next forward runs: each submodule waits for those that it reads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from zero_models import AVERAGED, MANY, part_of

import shardtensor as st


class Reads(nn.Module):
    """Calls one layer, and reads the weight of another that is below a module with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.second = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.first(x).relu() * self.scale, self.second.weight, self.second.bias)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.GELU(), Reads()), nn.LayerNorm(3))


def made(module, **options):
    options = {"overlap_gradients": True, "bucket_mib": MANY / 10, "lr": 0.1, "momentum": 0.9, **options}
    return st.ZeroRedundancyOptimizer(module.named_parameters(), optim.SGD, module=module, **options)


def step(module, optimizer, x):
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()


def buckets(optimizer):
    return optimizer._division.buckets


def pending(optimizer):
    return sum(bucket.pending is not None for bucket in buckets(optimizer))


def trains(partition):
    module, dense = model(), model()
    optimizer, oracle = made(module, partition=partition), optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(number))
        step(module, optimizer, part_of(x))
        step(dense, oracle, x)
        assert pending(optimizer) == len(buckets(optimizer)) > (partition == "ranges")
    optimizer.wait()
    assert pending(optimizer) == 0
    for param, want in zip(module.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param, want, **AVERAGED)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("partition", ["owners", "ranges"])
def test_steps_are_those_of_the_dense_program(world, partition):
    world(trains, 3, partition=partition)


def waits_for_what_it_reads():
    module = model()
    optimizer = made(module)
    step(module, optimizer, torch.randn(4, 4))
    done = lambda: {name for name, param in module.named_parameters() if not is_pending(optimizer, param)}  # noqa: E731
    assert done() == set()
    seen = []
    module[1][0].register_forward_pre_hook(lambda *_: seen.append(done()))
    module[1][1].register_forward_pre_hook(lambda *_: seen.append(done()))
    with torch.no_grad():
        module(torch.randn(4, 4))
    own = {name for name, _ in module.named_parameters()}
    assert {"0.weight", "0.bias"} <= seen[0] < own, "the first layer waited for its own parameters"
    assert {name for name in own if name.startswith("1.1.")} <= seen[1], "and for those below, which it may read itself"
    assert done() == own


def is_pending(optimizer, param):
    return any(bucket.pending is not None and any(p is param for p in bucket.params) for bucket in buckets(optimizer))


@pytest.mark.worlds("sim")
def test_a_module_waits_for_its_parameters_and_those_below(world):
    world(waits_for_what_it_reads, 2)


class Outside(nn.Module):
    """Reads the weight of a layer that it does not call, and has no parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.layer.weight


def too_early():
    module = Outside()
    optimizer = made(module)
    step(module, optimizer, torch.randn(2, 4))
    with pytest.raises(st.RuleError, match="before they had the values"):
        step(module, optimizer, torch.randn(2, 4))
    optimizer.zero_grad()
    optimizer.wait()
    before = module.layer.weight.detach().clone()
    step(module, optimizer, torch.randn(2, 4))
    optimizer.wait()
    assert not torch.equal(module.layer.weight, before)


def reduced_elsewhere(wrong):
    """Gradients are averaged by `data_parallel`; values are sent while the next forward runs."""
    torch.manual_seed(3)
    module = Outside() if wrong else model()
    dense = copy.deepcopy(module)
    optimizer = made(st.data_parallel(module), overlap_gradients=False, partition="ranges")
    oracle = optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(number))
        if wrong and number == 1:
            with pytest.raises(st.RuleError, match="before they had the values"):
                step(module, optimizer, part_of(x))
            return
        step(module, optimizer, part_of(x))
        step(dense, oracle, x)
        assert pending(optimizer) == len(buckets(optimizer))
    optimizer.wait()
    for param, want in zip(module.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param, want, **AVERAGED)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("wrong", [False, True])
def test_ranges_with_gradients_that_are_reduced_elsewhere(world, wrong):
    world(reduced_elsewhere, 3, wrong=wrong)


@pytest.mark.worlds("sim")
def test_a_use_that_did_not_wait_is_an_error(world):
    world(too_early, 2)


def others():
    module = model()
    optimizer = made(module)
    lone = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [("lone", lone)], "lr": 0.5})
    optimizer.zero_grad()
    (module(torch.randn(4, 4)).square().mean() + lone.sum()).backward()
    optimizer.step()
    assert not is_pending(optimizer, lone), "no module has it: it is waited for at once"
    assert torch.allclose(lone, torch.full((3,), 0.5))
    assert pending(optimizer) > 0
    saved = module.state_dict()
    assert pending(optimizer) == 0, "a state dict has the values of the last step"
    step(module, optimizer, torch.randn(4, 4))
    twin, other = copy.deepcopy((module, optimizer))
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), twin.parameters(), strict=True))
    step(twin, other, torch.ones(4, 4))
    assert pending(other) > 0
    twin.state_dict()
    assert pending(other) == 0 and len(saved) == len(twin.state_dict())


@pytest.mark.worlds("sim")
def test_state_dicts_copies_and_parameters_of_no_module(world):
    world(others, 2)


def reads_without_gradients():
    module = Outside()
    optimizer = made(module)
    step(module, optimizer, torch.randn(2, 4))
    with torch.no_grad():
        module(torch.randn(2, 4))
    assert pending(optimizer) == 0, "one forward is the most that reads old values"


@pytest.mark.worlds("sim")
def test_a_forward_without_gradients_waits_at_its_end(world):
    world(reads_without_gradients, 2)


class Branches(nn.Module):
    """Calls one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


def one_branch():
    torch.manual_seed(0)
    module = Branches()
    dense = copy.deepcopy(module)
    optimizer, oracle = made(module), optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    for which in (0, 1, 1, 0):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(which))
        for each, own, own_x in ((module, optimizer, part_of(x)), (dense, oracle, x)):
            own.zero_grad()
            each(own_x, which).square().mean().backward()
            own.step()
    optimizer.wait()
    for param, want in zip(module.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param, want, **AVERAGED)


@pytest.mark.worlds("sim")
def test_a_forward_may_leave_out_layers(world):
    world(one_branch, 2)


def loads_and_leaves():
    module = model()
    optimizer = made(module)
    saved = {name: torch.full_like(x, 7.0) for name, x in module.state_dict().items()}
    step(module, optimizer, torch.randn(4, 4))
    module.load_state_dict(saved)
    assert all(torch.equal(x, torch.full_like(x, 7.0)) for x in module.parameters())
    step(module, optimizer, torch.randn(4, 4))
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(2)))]})
    assert pending(optimizer) == 0
    optimizer.zero_grad()
    module(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    left = [bucket for bucket in buckets(optimizer) if bucket.pending is not None]
    del optimizer
    module(torch.randn(4, 4))
    assert left and all(bucket.pending is None for bucket in left), "the module waits without the optimizer, too"
    hooks = {len(submodule._forward_pre_hooks) for submodule in module.modules()}
    assert hooks <= {0, 1}, "hooks for earlier groups are removed"


@pytest.mark.worlds("sim")
def test_loads_later_groups_and_a_dropped_optimizer(world):
    world(loads_and_leaves, 2)


def test_a_wrapped_module_is_refused(monkeypatch):
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match="unwrapped"):
        st.ZeroRedundancyOptimizer(
            [nn.Parameter(torch.ones(2))], optim.SGD, overlap_gradients=True, module=wrapped, lr=0.1
        )


def test_a_module_needs_reduced_gradients():
    with pytest.raises(ValueError, match="overlap_gradients"):
        st.ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], optim.SGD, module=nn.Linear(2, 2), lr=0.1)
