"""What cannot be done of a plan is told on every rank before anything changes; what can be undone is."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from family_plans import FAMILIES, plan_for
from harness.tiny.llama import LlamaForCausalLM
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import DisagreementError, PlanError, ShardTensorError
from shardtensor.mesh import Mesh
from shardtensor.parallel.hooks import Use, register_hook
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import canonical_lines

both = pytest.mark.worlds("sim", "gloo")
sim = pytest.mark.worlds("sim")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


RULES: dict[str, Any] = {
    "0": {"weight": "[tp, -]", "bias": "[tp]", "in": "replicate", "out": "[..., tp]"},
    "2": {"weight": "[-, tp]", "bias": "replicate", "in": "[..., tp]", "out": "partial(tp) -> replicate"},
}


def told(module: nn.Module, plan: Any, **options: Any) -> str:
    """What is told of a plan; the module is as it was."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    kinds, forwards = [type(m) for m in module.modules()], [dict(vars(m)) for m in module.modules()]
    with pytest.raises(ShardTensorError) as caught:
        st.shard_module(module, plan, **options)
    assert [type(m) for m in module.modules()] == kinds
    assert [vars(m).keys() for m in module.modules()] == [old.keys() for old in forwards]
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    return f"{type(caught.value).__name__}: {caught.value}"


# -- the ranks ---------------------------------------------------------------------------------------------------------


def of_another_size() -> str:
    return told(mlp(), Plan.from_rules(RULES, "tp=4"))


@sim
def test_a_plan_for_another_number_of_ranks_is_refused(world):
    (text, *_) = world(of_another_size, 2)
    assert text == (
        "PlanError: the plan is for 4 ranks, and there are 2\n"
        "  mesh  (tp=4)\n"
        "  fix   load it for this world: load_plan(..., world=2)"
    )


def on_other_axes() -> str:
    ranks = as_group().on_mesh(Mesh((("a", 2), ("b", 2))), {})
    return told(mlp(), Plan.from_rules(RULES, "dp=2, tp=2", data="dp"), process_group=ranks)


@sim
def test_a_mesh_of_other_axes_is_refused(world):
    (text, *_) = world(on_other_axes, 4)
    assert text.startswith("PlanError: the ranks have other axes than the plan\n  the plan's mesh   (dp=2, tp=2)")


def on_outer_axes() -> list[tuple[int, ...]]:
    mesh = as_group().on_mesh(Mesh((("dp", 1), ("tp", 4))), {})
    module = LlamaForCausalLM()
    st.shard_module(module, plan_for("llama", "llama", 4, tp=4), process_group=mesh)
    attention = module.model.layers[0].self_attn
    return [tuple(getattr(attention, name).weight.local_tensor().shape) for name in ("q_proj", "k_proj")]


@sim
def test_a_mesh_whose_axis_the_plan_makes_of_factors_is_taken(world):
    assert world(on_outer_axes, 4) == [[(4, 8), (8 // 2, 8)]] * 4


def of_two_minds() -> str:
    rules = {**RULES, "0": {**RULES["0"], "bias": "[tp]" if as_group().rank else "replicate"}}
    return told(mlp(), Plan.from_rules(rules, "tp=2"))


@both
def test_ranks_with_different_plans_are_told_the_first_line_that_differs(world):
    texts = world(of_two_minds, 2)
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "DisagreementError: shard_module(Sequential): 0.bias of rank 0 does not match with 0.bias of rank 1; "
        "nothing was moved\n"
        "  0.bias  rank 0  float32 8  replicate  ranks 0-1\n"
        "          rank 1  float32 8  [tp]  ranks 0-1\n"
    )
    assert issubclass(DisagreementError, ValueError)


# -- what the plan says ------------------------------------------------------------------------------------------------


def test_findings_are_the_text_of_the_error():
    plan = load_plan("shard 1\nparam tp = world\nmesh (tp)\n0.weight: [-, tp]\n**.bias: replicate\n", world=1)
    text = told(mlp(), plan)
    assert text.startswith("PlanError: ")
    assert "error[E301]: no rule matches" in text


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.text, self.flag, self.num_heads, self.splits = "four", True, 4, 6


def counts(name: str, spec: str) -> list[int]:
    module, rules = nn.Sequential(Counting()), {"weight": "replicate", "bias": "replicate", f"local {name}": spec}
    st.shard_module(module, Plan.from_rules({"0": rules}, "tp=4"))
    shares = [getattr(module[0], name)]
    st.unshard_module(copy.deepcopy(module))
    st.unshard_module(module)
    return [*shares, getattr(module[0], name)]


@sim
def test_an_attribute_that_counts_becomes_the_share_of_a_rank_and_comes_back(world):
    assert world(counts, 4, name="num_heads", spec="[tp]") == [[1, 4]] * 4
    assert world(counts, 4, name="splits", spec="[tp balanced]") == [[2, 6], [2, 6], [1, 6], [1, 6]]
    assert world(counts, 4, name="splits", spec="replicate") == [[6, 6]] * 4


@sim
@pytest.mark.parametrize("name", ["heads", "text", "flag"])
def test_what_does_not_count_is_refused(world, name):
    with pytest.raises(ShardTensorError, match=f"`{name}`"):
        world(counts, 4, name=name, spec="[tp]")


# -- hooks -------------------------------------------------------------------------------------------------------------


@register_hook("noted")
def noted(site, axis, times=1):
    if times > 2:
        raise site.refused("noted at most twice", fix="write times=2")

    def apply():
        size = site.group_along(axis).size
        return [site.module.register_forward_hook(lambda *_: notes.append((site.path, size))) for _ in range(times)]

    return apply


notes: list[tuple[str, int]] = []


def use(*calls: str) -> Plan:
    return Plan.from_rules({**RULES, "0": {**RULES["0"], "use": calls}}, "dp=1, tp=2")


def noting() -> list[tuple[str, int]]:
    module = mlp()
    st.shard_module(module, use("noted(tp, times=2)"))
    notes.clear()
    module(torch.ones(2, 4))
    st.unshard_module(module)
    found = [*notes]
    module(torch.ones(2, 4))
    assert notes == found
    return found


def test_a_hook_is_applied_and_taken_off():
    assert st.simulate(2, noting)[0] == [("0", 2)] * 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("note(tp)", "0: no hook is called `note`"),
        ("noted()", "0: `use noted`: missing a required argument: 'axis'"),
        ("noted(tp, times=3)", "0: noted at most twice"),
        ("dispatch(tp, top_k=1)", "0: `use dispatch(...)` finds no experts"),
    ],
)
def test_a_hook_that_cannot_be_used_is_refused_before_anything_changes(call, text):
    found = st.simulate(2, lambda: told(mlp(), use(call)))
    assert found[0] == found[1]
    assert found[0].startswith(f"PlanError: {text}")


@register_hook("taking")
def taking(site: Any, takes: bool) -> Use:
    return Use(lambda: None, ("0",) if takes else ())


@pytest.mark.parametrize("make", [dict, lambda rules: Plan.from_rules({**rules, "unmatched": "replicate"}, "tp=2")])
def test_parts_that_no_module_takes_are_those_that_a_hook_says_it_takes(make):
    def rules(call: str) -> Any:
        return make({"0": st.colwise("tp"), "use": call})

    found = st.simulate(2, lambda: told(mlp(), rules("taking(takes=false)")))
    assert found[0].startswith("PlanError: error[E403]: 0: this value leaves cut along tp, and no module takes it so")
    st.simulate(2, lambda: st.shard_module(mlp(), rules("taking(takes=true)")))


def test_logits_that_nobody_leaves_cut_are_told():
    plan = Plan.from_rules({"**": "replicate", "use": "cross_entropy()"}, "tp=2")
    found = st.simulate(2, lambda: told(mlp(), plan))
    assert found[0].startswith("PlanError: error[E403]: this loss finds no head that leaves its logits cut")


# -- results -----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


@dataclass
class Both:
    first: Any
    second: Any


class Giving(nn.Module):
    """Gives what its layer leaves cut, and a copy, in some form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.up, self.form = nn.Linear(4, 8), form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(x * 2, self.up(x))


FORMS = {
    "tuple": (lambda a, b: (a, b), "out 1"),
    "list": (lambda a, b: [a, b], "out 1"),
    "namedtuple": (Pair, "out second"),
    "dict": (lambda a, b: {"first": a, "second": b}, "out second"),
    "dict by place": (lambda a, b: {"first": a, "second": b}, "out 1"),
    "dataclass": (Both, "out second"),
}


def gives(name: str) -> None:
    form, key = FORMS[name]
    torch.manual_seed(0)
    module = nn.Sequential(Giving(form))
    x = torch.randn(2, 4)
    want = module(x)
    up = {"weight": "[tp, -]", "bias": "[tp]", "in": "replicate", "out": "[..., tp]"}
    st.shard_module(module, Plan.from_rules({"0": {"up": up, key: "[..., tp] -> replicate"}}, "tp=2"))
    got = module(x)
    assert type(got) is type(want)
    values = [v["second"] if isinstance(v, dict) else v.second if hasattr(v, "second") else v[1] for v in (got, want)]
    torch.testing.assert_close(*values)


@sim
@pytest.mark.parametrize("name", FORMS)
def test_other_results_are_moved_by_place_or_name(world, name):
    world(gives, 2, name=name)


# -- modules without memory, and copies -------------------------------------------------------------------------------


def loaded(plan: str, family: str, params: dict[str, Any]) -> None:
    real = FAMILIES[family].make()
    with torch.device("meta"):
        module = FAMILIES[family].make()
    st.shard_module(module, plan_for(plan, family, 4, **params))
    module.load_state_dict(real.state_dict())
    ids = torch.arange(8).view(2, 4)
    torch.testing.assert_close(*(FAMILIES[family].loss(m, ids) for m in (module, real)))


@sim
@pytest.mark.parametrize(
    ("plan", "family", "params"), [("llama", "llama", {"tp": 4}), ("llama_2d", "llama_tied", {"tp": 2})]
)
def test_a_module_on_the_meta_device_is_loaded_after_it_is_sharded(world, plan, family, params):
    world(loaded, 4, plan=plan, family=family, params=params)


def copied() -> None:
    family = FAMILIES["mixtral_stacked"]
    module, ids = family.make(), torch.arange(8).view(2, 4)
    st.shard_module(module, plan_for("mixtral", "mixtral_stacked", 4, tp=2, ep=2))
    before = family.loss(module, ids).item()
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(0.5)
    other = family.loss(twin, ids).item()
    st.unshard_module(twin)
    assert family.loss(module, ids).item() == before != other
    torch.testing.assert_close(family.loss(twin, ids).item(), other)


@sim
def test_a_copy_of_a_module_computes_with_its_own_parameters(world):
    world(copied, 4)


# -- the same plan -----------------------------------------------------------------------------------------------------


def test_rules_and_text_make_the_same_plan():
    text = """shard 1
param tp = 4
mesh (dp = world / tp, tp (kvg = 2, kvr = tp / kvg))
data dp
model.layers.* {
    self_attn {
        in: [-, tp, ...] -> replicate
        in memory: replicate
        q_proj {
            weight: [out: tp unit(4)]
            optional bias: [out: tp unit(4)]
            out: [..., tp unit(4)]
        }
        {k,v}_proj {
            weight: [kvg unit(4), -]
            out: [..., kvg unit(4)] grad partial(kvr)
        }
        out 1: replicate
        local num_key_value_groups: [kvr]
    }
    optional moe {
        experts.<kvg>: replicate
        use dispatch(kvg, top_k=2)
    }
}
model.norm: replicate
unmatched: replicate
tie lm_head.weight = model.embed_tokens.weight
store **: flat(dp, unit=row) by model.layers.*, model.norm
use cross_entropy()
"""
    rules = {
        "model.layers.*": {
            "self_attn": {
                "in": "[-, tp, ...] -> replicate",
                "in memory": "replicate",
                "q_proj": st.colwise("tp", unit=4),
                "{k,v}_proj": {"weight": "[kvg unit(4), -]", "out": "[..., kvg unit(4)] grad partial(kvr)"},
                "out 1": "replicate",
                "local num_key_value_groups": "[kvr]",
            },
            "optional moe": {"experts.<kvg>": "replicate", "use": "dispatch(kvg, top_k=2)"},
        },
        "model.norm": "replicate",
        "unmatched": "replicate",
        "tie lm_head.weight": "model.embed_tokens.weight",
        "store **": "flat(dp, unit=row) by model.layers.*, model.norm",
        "use": "cross_entropy()",
    }
    read = load_plan(text, world=8)
    made = Plan.from_rules(rules, "dp=2, tp(kvg=2, kvr=2)", data="dp")
    told = ("pattern", "kind", "value", "name", "module", "is_optional")
    for a, b in zip(read.lines, made.lines, strict=True):
        assert [getattr(a, key) for key in told] == [getattr(b, key) for key in told]
    assert (read.axes, read.world) == (made.axes, made.world)
    assert [(s.pattern, s.flat, s.by) for s in read.stores] == [(s.pattern, s.flat, s.by) for s in made.stores]
    assert [(t.pattern, t.to) for t in read.ties] == [(t.pattern, t.to) for t in made.ties]
    assert read.unmatched.spec == made.unmatched.spec


def test_the_canonical_text_tells_plans_apart_and_nothing_else():
    family = FAMILIES["llama"]
    model = model_info(family.make())
    one, again, other = (
        list(canonical_lines(resolve(plan_for("llama", "llama", 4, **params), model)))
        for params in ({"tp": 4}, {"tp": 4, "sp": False}, {"tp": 2})
    )
    assert one == again
    assert one != other
    assert one[:2] == [
        ("mesh (dp=1, kvg=2, kvr=2), data dp", ""),
        ("lm_head.weight", "float32 21 x 8  [kvg*kvr pad(64), -]  ranks 0-3"),
    ]


def test_errors_of_plans_are_of_the_kind_that_is_documented():
    assert issubclass(PlanError, RuntimeError)
