"""Ranks that use different parameters: the step completes with zeros from the others, and it is told or settled."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.comm.streams import Streams
from shardtensor.errors import CallMismatchError, DisagreementError, RuleError
from shardtensor.fsdp import fully_shard
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.unused import UnusedCheck
from shardtensor.mesh import Mesh

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")


class Branches(nn.Module):
    """Runs the branches that it is told to, in that order."""

    def __init__(self, count=6, width=4):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.branches = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x, ways):
        x = self.first(x)
        for i in ways:
            x = x + torch.tanh(self.branches[i](x))
        return x


def models(find_unused, reshard, whole_units=True, mesh=None):
    torch.manual_seed(0)
    oracle = Branches().to(device())
    module = copy.deepcopy(oracle)
    options = {"find_unused": find_unused, "mesh": mesh}
    if whole_units:
        for branch in module.branches:
            fully_shard(branch, reshard_after_forward=reshard, **options)
    return fully_shard(module, **options), oracle


def batch(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).to(device())


def step(module, oracle, ways):
    """A step of both; `ways` are those of each rank."""
    group = as_group()
    module(batch(group.index), ways[group.index]).pow(2).sum().backward()
    for rank, way in enumerate(ways):
        (oracle(batch(rank), way).pow(2).sum() / group.size).backward()


def same_grads(module, oracle):
    for (name, p), q in zip(module.named_parameters(), oracle.named_parameters(), strict=True):
        got = None if p.grad is None else p.grad.full_tensor()
        want = q[1].grad
        assert (got is None) == (want is None), (name, got, want)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=name)


def update(*modules):
    for module in modules:
        for p in module.parameters():
            if p.grad is not None:
                with torch.no_grad():
                    p -= 0.1 * p.grad
                p.grad = None


PLANS = {
    "skipped from the start": [[[0, 1, 2, 3, 4, 5], [0, 2, 4]]] * 3,
    "others on each": [[[0, 1], [4, 5]]] * 3,
    "one alone": [[[0, 1, 2, 3, 4, 5], []]] * 3,
    "the first skips the most": [[[5], [0, 1, 2, 3, 4, 5]]] * 2,
    "skipped later": [[[0, 1, 2, 3, 4, 5]] * 2, [[1, 2, 3, 4], [0, 5]], [[], [0, 1, 2, 3, 4, 5]]],
    "come to later": [[[0], [0]], [[0, 1, 2, 3], [0]], [[0], [0, 3, 4, 5]], [[2], [2]]],
    "another order at first": [[[0, 1], [1, 0]]] * 2,
    "another order on all": [[[0, 1, 2]] * 2, [[2, 1, 0]] * 2],
    "none": [[[], []]] * 2,
    "by turns": [[[0, 2, 4], [1, 3, 5]], [[1, 3, 5], [0, 2, 4]]] * 2,
}
"""For each step, the branches of each rank."""


ALIKE = {
    "skipped later": PLANS["skipped later"],
    "another order on all": PLANS["another order on all"],
    "none": PLANS["none"],
    "come to later on all": [[[0]] * 2, [[0, 1]] * 2, [[4, 0]] * 2, [[0]] * 2, [[4, 0]] * 2, [[5, 1, 5]] * 2],
}
"""Those in which ranks visit, or come to, the same units in one order."""
APART = {name: plan for name, plan in PLANS.items() if name not in ALIKE}


def settled(plan, reshard, whole_units=True):
    module, oracle = models(True, reshard, whole_units)
    for ways in plan:
        step(module, oracle, ways)
        same_grads(module, oracle)
        update(module, oracle)


@sim
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("plan", ALIKE.values(), ids=ALIKE)
def test_settled_exactly(world, plan, reshard):
    world(settled, 2, plan=plan, reshard=reshard)


@sim
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_settled_in_one_unit(world, plan):
    world(settled, 2, plan=plan, reshard=True, whole_units=False)


def all_settled():
    for plan in ALIKE.values():
        settled(plan, True)
    for plan in PLANS.values():
        settled(plan, True, whole_units=False)


def test_settled_in_real_processes(world):
    world(all_settled, 2)


def four_ways(find_unused):
    module, oracle = models(find_unused, True, whole_units=False)
    step(module, oracle, [[0, 1, 5], [2], [3, 4, 5], []])
    same_grads(module, oracle)
    if find_unused:
        update(module, oracle)
        step(module, oracle, [[], [0, 1, 2, 3, 4, 5], [5], [1, 3]])
        same_grads(module, oracle)


@both
@pytest.mark.parametrize("find_unused", [True, False])
def test_four_ranks(world, find_unused):
    world(four_ways, 4, find_unused=find_unused)


def hybrid():
    group = as_group()
    mesh = group.on_mesh(Mesh((("rep", 2), ("dp", 2))), {})
    module, oracle = models(True, True, whole_units=False, mesh=mesh)
    for ways in ([[0, 1, 5], [2], [3, 4, 5], []], [[], [0, 1, 2], [5], [1]]):
        step(module, oracle, ways)
        same_grads(module, oracle)
        update(module, oracle)


@sim
def test_two_copies(world):
    world(hybrid, 4)


# -- ranks that go different ways through units


def apart(plan):
    module, oracle = models(True, True)
    for ways in plan:
        try:
            step(module, oracle, ways)
        except CallMismatchError as error:
            return str(error)
        update(module, oracle)
    raise AssertionError("nothing was raised")


@both
@pytest.mark.parametrize("name", [name for name in APART if name != "come to later"])
def test_all_ranks_raise_one_error(world, name):
    texts = world(apart, 2, plan=APART[name])
    assert texts[0] == texts[1]
    assert "\n  rank 0  " in texts[0] and "\n  rank 1  " in texts[0] and "branches." in texts[0]


def apart_later(plan, timeout_s=2.0):
    """Some ranks come to a unit that the first step did not have, the others wait for them in collectives."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    module, oracle = models(True, True, mesh=group)
    for ways in plan[:-1]:
        step(module, oracle, ways)
        same_grads(module, oracle)
        update(module, oracle)
    with pytest.raises(CallMismatchError) as caught:
        step(module, oracle, plan[-1])
    return str(caught.value)


@pytest.mark.skipif(device().type == "cuda", reason="NCCL ends the process instead")
@pytest.mark.parametrize("later", [[0, 2], [3, 4]])
def test_all_ranks_raise_one_error_later(world, later):
    texts = world(apart_later, 2, plan=[[[0, 1], [0, 1]]] * 2 + [[[0, 1], later]])
    assert texts[0] == texts[1]
    assert f"branches.{later[later[0] == 0]} (Linear), which is not next in the recorded order" in texts[0]
    assert "\n  rank 0  " in texts[0] and "\n  rank 1  " in texts[0] and "waits for the other ranks at" in texts[0]


def test_simulated_ranks_raise_one_error_later():
    with pytest.raises(DisagreementError) as caught:
        st.simulate(2, apart, PLANS["come to later"])
    assert "at branches.1\n" in str(caught.value) and "rank 1" in str(caught.value)


@both
def test_what_the_error_says(world):
    expected = """\
ranks went different ways through fully sharded modules in a forward; nothing was moved
  rank 0         branches.1 (Linear)
  rank 1         branches.2 (Linear)
  all came from  branches.0 (Linear)
  either         let every rank call the same modules in the same order, as with a loss of zero times what it does not \
need
  or             call fully_shard on a module that holds all of them instead, with find_unused=True: what a \
rank does not use counts as zero"""
    assert world(apart, 2, plan=[[[0, 1], [0, 2]]]) == [expected] * 2


# -- by default: told


def told(steps, at, whole_units=False):
    """Runs steps until one raises; it must be step `at`."""
    module, oracle = models(False, True, whole_units)
    for number, ways in enumerate(steps):
        try:
            step(module, oracle, ways)
        except RuleError as error:
            return number == at, str(error)
        if number < at - 1:
            same_grads(module, oracle)
        update(module, oracle)
    raise AssertionError("nothing was raised")


TEXT = """\
in the last backward ranks used different parameters, and fully_shard takes them to use the same
  used only  branches.1.weight on rank 0; branches.3.weight on rank 1
  either     fully_shard(..., find_unused=True): ranks exchange in each backward which parameters they used, and those \
that did not use one add zeros
  or         let every rank use every parameter, or none"""


@both
@pytest.mark.parametrize("before", [0, 2])
def test_told_in_the_next_step(world, before):
    alike, unlike = [[0, 2], [0, 2]], [[0, 1], [0, 3]]
    texts = world(told, 2, steps=[alike] * before + [unlike, alike, alike], at=before + 1)
    assert texts == [(True, TEXT)] * 2


@both
def test_a_unit_that_one_rank_skips_later_is_told_in_the_next_step(world):
    alike, unlike = [[0, 1, 2, 3]] * 2, [[0, 2, 3], [0, 1, 2]]
    texts = world(told, 2, steps=[alike, unlike, alike], at=2, whole_units=True)
    assert texts[0] == texts[1]
    assert "branches.1.weight on rank 1; branches.3.weight on rank 0" in texts[0][1]


def evaluated_apart():
    """Without gradients ranks may skip units that the first pass had."""
    module, oracle = models(False, True)
    rank = as_group().rank
    with torch.no_grad():
        for ways in ([0, 1, 2, 3], [0, 1, 2, 3][rank:], [1, 3][rank:], []):
            torch.testing.assert_close(module(batch(rank), ways), oracle(batch(rank), ways))


@both
def test_ranks_may_skip_units_in_evaluation(world):
    world(evaluated_apart, 2)


def test_what_changes_on_all_ranks_alike_is_nothing_to_tell():
    def body():
        module, oracle = models(False, True)
        for way in ([0, 1], [0], [0, 1, 2, 3, 4, 5], [], [3], [0, 1]):
            step(module, oracle, [way] * 2)
            same_grads(module, oracle)
            update(module, oracle)

    st.simulate(2, body)


def after_the_error():
    """The module can be used again."""
    module, oracle = models(False, True, whole_units=False)
    step(module, oracle, [[0], [1]])
    with pytest.raises(RuleError, match="different parameters"):
        step(module, oracle, [[0], [0]])
    oracle.zero_grad()
    module.zero_grad()
    for _ in range(2):
        step(module, oracle, [[0], [0]])
        same_grads(module, oracle)
        update(module, oracle)


@both
def test_after_the_error(world):
    world(after_the_error, 2)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x, ways):
        return sum((getattr(self, way)(x) for way in ways), x * 3)


def b27(ways):
    module = fully_shard(Two().to(device()))
    x = torch.ones(1, 2, device=device(), requires_grad=True)
    module(x, ways[as_group().index]).sum().backward()
    grads = [None if p.grad is None else p.grad.full_tensor().tolist() for p in module.parameters()]
    return grads, x.grad is not None


ONES, HALVES = [[1.0, 1.0]] * 2, [[0.5, 0.5]] * 2


@both
@pytest.mark.parametrize(
    ("ways", "grads"), [(("ab", "a"), [ONES, HALVES]), (("a", "a"), [ONES, None]), (("", ""), [None, None])]
)
def test_used_on_one_rank_only(world, ways, grads):
    assert world(b27, 2, ways=ways) == [(grads, True)] * 2


def hooked():
    """Hooks run on every rank, once, also where only another rank used the parameter."""
    module, oracle = models(True, True, whole_units=False)
    ran = []
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: ran.append((name, p.grad is not None)))
    step(module, oracle, [[0, 1], [3]])
    return sorted(ran)


@sim
def test_hooks(world):
    names = ["branches.0.weight", "branches.1.weight", "branches.3.weight", "first.bias", "first.weight"]
    assert world(hooked, 2) == [[(name, True) for name in names]] * 2


def accumulated():
    module, oracle = models(True, True, whole_units=False)
    for ways in ([[0, 1], [3]], [[1], [2, 3]]):
        step(module, oracle, ways)
    same_grads(module, oracle)


@sim
def test_accumulation(world):
    world(accumulated, 2)


def entered_apart():
    """A part called by itself in some steps."""
    module, oracle = models(False, True)
    for call in (lambda m, x: m(x, [0, 1]), lambda m, x: m.branches[4](x), lambda m, x: m(x, [0, 4])):
        x = batch(0)
        call(module, x).sum().backward()
        call(oracle, x).sum().backward()
        same_grads(module, oracle)
        update(module, oracle)


@sim
def test_parts_called_by_themselves(world):
    world(entered_apart, 2)


def two_losses():
    """Two forwards, then a backward of each."""
    module, oracle = models(False, True)
    for m in (module, oracle):
        one, other = m(batch(0), [0, 1]).sum(), m(batch(1), [1, 2]).sum()
        one.backward()
        other.backward()
    same_grads(module, oracle)


@sim
def test_two_backwards(world):
    world(two_losses, 2)


def disagreeing():
    with pytest.raises(ValueError, match="find_unused"):
        fully_shard(nn.Linear(2, 2), find_unused=as_group().rank == 0)


@sim
def test_ranks_agree_on_finding_unused(world):
    world(disagreeing, 2)


class Sides(nn.Module):
    """An inner module that all ranks use, and parameters of its own of which they use one each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.own = nn.ParameterList(nn.Parameter(torch.full((4,), i + 1.0)) for i in range(2))

    def forward(self, x: torch.Tensor, side: int) -> torch.Tensor:
        return self.inner(x) * self.own[side]


def _outer_alone_asks() -> None:
    torch.manual_seed(0)
    dense, model = Sides(), Sides()
    model.load_state_dict(dense.state_dict())
    fully_shard(model.inner)
    fully_shard(model, find_unused=True)
    for _ in range(3):
        dense.zero_grad()
        model.zero_grad()
        for side in range(2):
            (dense(torch.ones(2, 4), side).sum() / 2).backward()
        model(torch.ones(2, 4), as_group().rank).sum().backward()
        for own, whole in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), whole.grad)


def test_one_module_may_ask_for_what_is_unused():
    st.simulate(2, _outer_alone_asks)


class Late:
    """An event that has not come to pass when it is first asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def record(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 3


def _waits_for_the_device() -> int:
    check = UnusedCheck(DataMesh.of(None), [["w"]], Streams(torch.device("cpu")), False, lambda: None)
    check._event = Late()
    check.pattern = [(0, [True])]
    check.end()
    check.check(waits=False)
    assert check._event.asked == 0
    check.check(waits=True)
    return check._event.asked


def test_the_flag_of_the_last_step_is_read_when_the_device_has_written_it(monkeypatch):
    monkeypatch.setattr("shardtensor.fsdp.unused._is_capturing", lambda: False)
    assert st.simulate(2, _waits_for_the_device) == [4, 4]
