"""What a plan with flows can get wrong is told when it is sharded, on every rank; the module is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoder import Decoder, rules
from torch import nn
from torch.func import functional_call

import shardtensor as st
from shardtensor.parallel.layers import ParallelLayer

PlanError, LayoutError = st.PlanError, st.LayoutError


class Branches(nn.Module):
    """A column-parallel product beside a plain one, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(self.up(x) * scale)


class OfOnesOwn(nn.Linear):
    """A class that is not known."""


def told(module: nn.Module, plan: dict[str, Any], kind: type[Exception]) -> str:
    before = copy.deepcopy(module.state_dict())
    classes = [type(m) for m in module.modules()]
    with pytest.raises(kind) as caught:
        st.shard_module(module, plan)
    assert [type(m) for m in module.modules()] == classes, "the module is as it was"
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    assert not any(isinstance(param, st.ShardedTensor) for param in module.parameters())
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    return "\n".join(line for line in str(caught.value).splitlines() if "raised this" not in line)


FAULTS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a head cut in half": (
        lambda: Decoder(heads=3, kv_heads=3),
        rules(),
        LayoutError,
        """error[E205]: layers.0.attn.q.weight: 3 units of 4 cannot be split evenly over tp=2
  why: layers.0.attn.q.weight is (out=12, in=12); 12 = 3 units of 4 and 3 % 2 = 1
  fix: tp has to divide 3 (1, 3); or write `balanced` after it for pieces that differ by one unit
  note: the rule is `layers.*.attn.q.weight: [out: tp unit(4)]`
  note: found for 14 names: layers.{0..1}.attn.q.{weight,bias}, layers.{0..1}.attn.k.{weight,bias} \
and 2 patterns more""",
    ),
    "a layer that takes what it cannot": (
        Branches,
        {"up": st.colwise(), "down": {**st.rowwise(), "in": "replicate"}},
        PlanError,
        """error[E402]: down: `in: replicate` contradicts the layout of the weight
  why: the weight (out=4, in=8) is `[in: tp]`, so its input is wanted cut over tp on its last dim
  fix: write `in: [..., tp]`""",
    ),
    "a sum that is not said": (
        Branches,
        {"up": st.colwise(), "down": {**st.rowwise(), "out": "replicate"}},
        PlanError,
        """error[E402]: down: `out: replicate` contradicts the layout of the weight
  why: the weight (out=4, in=8) is `[in: tp]`, so what it makes is a partial sum along tp until it is summed
  fix: write `out: partial(tp) -> replicate`""",
    ),
    "a bias cut where the weight is not": (
        Branches,
        {"up": {**st.colwise(), "optional bias": "replicate"}, "down": {**st.rowwise(), "bias": "[tp]"}},
        PlanError,
        """error[E402]: down: the bias is cut over other axes than the weight's `out`
  why: the weight is `[in: tp]`, the bias `[tp]`: each rank would add a part to the whole sum
  fix: keep the bias whole (`replicate`): it is added once, to what leaves""",
    ),
    "slices that nobody takes": (
        Branches,
        {"up": st.colwise()},
        PlanError,
        """error[E403]: up: this value leaves cut along tp, and no module takes it so
  why: what meets it next would take one rank's part for the whole
  fix: say who takes it: `in: [..., tp]` there, \
or such an `out` on the module around; or gather it: `out: [..., tp] -> replicate`; \
for logits: `use cross_entropy()`""",
    ),
    "a layer between partial sums": (
        Branches,
        {"in": "replicate", "up": st.colwise(), "down": st.rowwise()},
        PlanError,
        """error[E401]: the gradient of `side.weight` along tp is not known
  why: `up` leaves values cut along tp: met by such values, its gradients are partial sums; met by copies, \
they are copies
  fix: write `along("[-, tp, ...]")` if values come cut so, `along("replicate")` if they come whole; \
or move `in` to the modules that are cut, so that this one is not inside""",
    ),
    "a norm that a stream forgot": (
        lambda: Decoder(heads=2, kv_heads=2),
        {key: value for key, value in rules("[-, tp, ...]").items() if key != "norm"},
        PlanError,
        """error[E401]: the gradient of `norm.weight` along tp is not known
  why: `embed` leaves values cut along tp: met by such values, its gradients are partial sums; met by copies, \
they are copies
  fix: write `along("[-, tp, ...]")` if values come cut so, `along("replicate")` if they come whole""",
    ),
    "an argument that is not there": (
        Branches,
        {"in y": "replicate", "up": st.colwise(), "down": st.rowwise(), "side": st.along("replicate")},
        PlanError,
        """error[E303]: `forward` of Branches has no argument `y`
  why: the module is a Branches, and takes x, scale
  fix: name one of them, or write `in` alone""",
    ),
    "two flows of one value": (
        Branches,
        {"{up,side}": st.colwise(), "up": {"out": "[..., tp] -> replicate"}, "down": st.rowwise()},
        PlanError,
        """error[E302]: `out` of `up` is matched by two rules that disagree
  why: a value passes a module in one way: order in the file never decides
  fix: narrow one pattern
  note: the rules are `{up,side} out: [..., tp]` and `up out: [..., tp] -> replicate`""",
    ),
    "a flow with two arrows": (
        Branches,
        {"up": {"in": "replicate -> replicate -> replicate"}},
        PlanError,
        """up.in: a flow has one arrow
  found  replicate -> replicate -> replicate
  fix    write `LAYOUT -> LAYOUT`""",
    ),
    "a whole bias of features that are dealt out": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)),
        {"0": st.colwise(), "1": st.rowwise(to="[..., tp]"), "out": "[..., tp]"},
        PlanError,
        """error[E402]: 1: `out: partial(tp) -> [..., tp]` leaves parts of the features, and the bias is whole
  why: it is added once, to what leaves: each rank would add all of it to its part
  fix: leave the sum whole (`-> replicate`) or cut along tokens; or drop the bias""",
    ),
    "a module of one's own that shall leave partial sums": (
        lambda: nn.Sequential(OfOnesOwn(4, 4)),
        {"0": {"weight": "[in: tp]", "in": "replicate", "out": "partial(tp)"}, "out": "partial(tp) -> replicate"},
        PlanError,
        """error[E402]: 0: this module leaves no partial sums along tp
  why: its class is not known and its parameters are cut, so it works on ShardedTensors, which are summed at once
  fix: write `out: partial(tp) -> replicate`""",
    ),
    "a copy that shall become partial sums": (
        Branches,
        {"up": {**st.colwise(), "in": "replicate -> replicate partial(tp)"}, "down": st.rowwise()},
        PlanError,
        """error[E402]: up: `in: replicate -> partial(tp)` contradicts the layout of the weight
  why: the weight (out=8, in=4) is `[out: tp]`, so what it makes is complete on every rank: nothing is left to sum
  fix: write `in: replicate`""",
    ),
}


def is_told(name: str) -> None:
    make, plan, kind, text = FAULTS[name]
    torch.manual_seed(0)
    assert told(make(), plan, kind) == text


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_told_when_the_module_is_sharded(world, name):
    world(is_told, 2, name=name)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return st.shard_module(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), {"0": st.colwise(), "1": st.rowwise()})


def wrong_values() -> None:
    module = mlp()
    with pytest.raises(st.RuleError, match="a ShardedTensor came where the plan says that plain local values pass"):
        module(st.distribute(torch.ones(2, 4), "[tp, -]"))
    plain = {"0.weight": torch.ones(8, 4)}
    with pytest.raises(st.RuleError) as caught:
        functional_call(module, plain, torch.ones(2, 4))
    assert str(caught.value).splitlines() == [
        "ParallelLinear: its `weight` is sharded, and was called with a plain tensor in its place",
        "  found  Tensor of (8, 4)",
        "  fix    lay it out alike: torch.empty_like(module.weight).copy_(tensor)",
    ]
    wrapper = st.distribute(torch.ones(8, 4), "[tp, -]")
    x = torch.ones(2, 4)
    found = functional_call(module, {"0.weight": wrapper}, x)
    with torch.no_grad():
        module[0].weight.fill_(1)
    assert torch.equal(found, module(x))


@pytest.mark.worlds("sim")
def test_what_is_no_local_value_is_refused(world):
    world(wrong_values, 2)


def comes_and_goes() -> None:
    dense = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    module = copy.deepcopy(dense)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    st.shard_module(module, {"0": st.colwise(), "1": st.rowwise()})
    assert isinstance(module[0], nn.Linear) and isinstance(module[0], ParallelLayer)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
        twin[1].bias.zero_()
    torch.testing.assert_close(module(x), dense(x))
    assert torch.equal(twin(x), torch.zeros(3, 4)), "a copy has weights of its own"
    state = {name: value + 1 for name, value in dense.state_dict().items()}
    module.load_state_dict(state)
    dense.load_state_dict(state)
    torch.testing.assert_close(module(x), dense(x))
    st.unshard_module(module)
    assert type(module[0]) is nn.Linear and "flow" not in vars(module[0])
    torch.testing.assert_close(module(x), dense(x))


@pytest.mark.worlds("sim", "gloo")
def test_copies_loads_and_the_way_back(world):
    world(comes_and_goes, 2)
