"""What an optimizer reads, holds and watches; inputs of a graphed step; options as text. One process."""

from __future__ import annotations

import copy
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import shardtensor as st
from shardtensor.comm.agree import call_text
from shardtensor.comm.process_group import as_group
from shardtensor.errors import CaptureError, StaleParameterError
from shardtensor.mesh import Mesh
from shardtensor.optim.graphed_optimizers import GraphedOptimizers
from shardtensor.optim.graphs import StaticInputs
from shardtensor.optim.named_params import (
    ParamRecord,
    StalenessCheck,
    changed,
    named_params_with_sharded_tensor,
    params_text,
    read_groups,
    read_pairs,
)
from shardtensor.optim.state import sharded_value

CPU = torch.device("cpu")


class Holder(nn.Module):
    """Parameters, one of them under two names, and sharded tensors that are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(st.distribute(torch.ones(4), "[tp]"))
        self.weight = nn.Parameter(torch.ones(2))
        self.tied = self.weight
        self.cache = st.distribute(torch.ones(3), "replicate")
        self.same = self.cache
        self.also = self.inner.weight
        self.inner.cache = st.distribute(torch.ones(2), "replicate")
        self.inner.buffer = torch.ones(3)
        vars(self)["seen"] = self.inner.weight  # a parameter is no plain attribute, too


def test_parameters_come_first_and_each_once():
    model = Holder()
    names = [name for name, _ in named_params_with_sharded_tensor(model)]
    assert names == ["weight", "also", "cache", "inner.cache"]
    assert [name for name, _ in named_params_with_sharded_tensor(model, "m")] == [f"m.{name}" for name in names]
    assert [n for n, _ in named_params_with_sharded_tensor(model, recurse=False)] == ["weight", "also", "cache"]
    pairs = named_params_with_sharded_tensor(model, "m", recurse=False)
    assert [n for n, _ in pairs] == ["m.weight", "m.also", "m.cache"]


def test_parameters_in_any_form():
    weight, bias = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    pairs = [("w", weight), ("b", bias)]
    for form in (pairs, dict(pairs), iter(pairs), tuple(pairs), (pair for pair in pairs)):
        (group,) = read_groups(form)
        assert group == {"params": pairs}
    groups = read_groups([{"params": dict(pairs[:1]), "lr": 1.0}, {"params": pairs[1:]}])
    assert groups == [{"params": pairs[:1], "lr": 1.0}, {"params": pairs[1:]}]
    assert read_groups(iter([{"params": pairs}])) == [{"params": pairs}]
    model = nn.Linear(2, 1)
    assert read_pairs(model) == list(model.named_parameters()) == read_groups(model)[0]["params"]


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ([], ValueError, "empty parameter list"),
        ({}, ValueError, "empty parameter list"),
        (torch.ones(2), TypeError, "needs the name of every parameter"),
        ([torch.ones(2)], TypeError, "needs the name of every parameter"),
        ({torch.ones(2)}, TypeError, "in a set have no order"),
        ([("w", torch.ones(1), 3)], TypeError, "needs the name of every parameter"),
        ([["w", torch.ones(1)]], TypeError, "needs the name of every parameter"),
        ([(1, torch.ones(1))], TypeError, "needs the name of every parameter"),
        ([("w", 3.0)], TypeError, 'parameter "w" is a float, not a tensor'),
        ([{"params": [torch.ones(2)]}], TypeError, "needs the name of every parameter"),
        ([{"lr": 2}], TypeError, "needs the name of every parameter"),
    ],
)
def test_parameters_without_names_are_refused(params, error, text):
    with pytest.raises(error, match=text):
        read_groups(params)


def test_a_change_of_anything_that_state_was_made_for_is_seen():
    def held() -> list[ParamRecord]:
        plain = nn.Parameter(torch.ones(4))
        return [
            ParamRecord.of("p", plain),
            ParamRecord.of("s", st.distribute(torch.ones(4), "[tp]", requires_grad=True)),
        ]

    for plain, sharded in (held(), held()):
        assert changed([plain, sharded]) == [] and plain.now is plain.leaf is plain.param
        assert sharded.now is sharded.leaf is sharded.param._local
    plain, sharded = held()
    plain.param.data = plain.param.data.double()
    assert changed([plain, sharded]) == [plain]
    plain.device = torch.device("meta")
    plain.dtype = torch.float64
    assert changed([plain]) == [plain]
    sharded.param._local = sharded.param._local.detach().clone()
    assert changed([sharded]) == [sharded]
    _, sharded = held()
    sharded.param._layout = copy.copy(sharded.param._layout)
    assert changed([sharded]) == [sharded]
    _, sharded = held()
    sharded.dtype = torch.float64
    assert changed([sharded]) == [sharded]


def test_a_copy_of_what_is_held_is_of_the_copied_parameter():
    held = ParamRecord.of("p", nn.Parameter(torch.ones(2)))
    memo: dict[int, Any] = {}
    again = copy.deepcopy(held, memo)
    assert again.param is again.leaf is memo[id(held.param)] and again.param is not held.param
    assert again.name == "p" and again.now is again.leaf


def test_state_of_the_shape_of_a_leaf_is_sharded_as_its_parameter():
    plain = ParamRecord.of("p", nn.Parameter(torch.ones(4)))
    sharded = ParamRecord.of("s", st.distribute(torch.ones(4), "[tp]", requires_grad=True))
    number = ParamRecord.of("n", st.distribute(torch.tensor(1.0), "replicate", requires_grad=True))
    value = torch.rand(4)
    assert sharded_value(value, plain) is value
    found = sharded_value(value, sharded)
    assert type(found) is st.ShardedTensor and found._local is value and found._layout is sharded.param._layout
    step, twice = torch.tensor(1.0), st.distribute(torch.ones(4), "[tp]")
    for other in (3, 0.5, "text", None, [1.0], step, torch.ones(2), twice):
        assert sharded_value(other, sharded) is other
    assert sharded_value(step, number) is step


def tree() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))


def stale(model: nn.Module, watch: StalenessCheck) -> list[str]:
    with pytest.raises(StaleParameterError) as caught:
        watch.check()
    line = str(caught.value).splitlines()[1]
    return line.split("parameters")[1].replace(" ", "").split(",")


def test_what_was_replaced_is_named_and_nothing_else():
    def watched() -> tuple[nn.Module, StalenessCheck]:
        model = tree()
        return model, StalenessCheck(model, [ParamRecord.of(*pair) for pair in model.named_parameters()])

    model, watch = watched()
    watch.check()
    model[0].weight.data = torch.zeros(2, 2)
    watch.check()
    model[1][0].weight = nn.Parameter(torch.zeros(2, 2))
    assert stale(model, watch) == ["1.0.weight"]
    model, watch = watched()
    model[0] = nn.Linear(2, 2)
    assert stale(model, watch) == ["0.weight", "0.bias"]
    model, watch = watched()
    model[1][1] = nn.Linear(2, 1)
    assert stale(model, watch) == ["1.1.weight", "1.1.bias"]
    model, watch = watched()
    model[1] = nn.Sequential(model[1][0], model[1][1])
    assert stale(model, watch) == ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"]
    model, watch = watched()
    del model[1][1].bias
    assert stale(model, watch) == ["1.1.bias"]
    holder = Holder()
    watch = StalenessCheck(holder, [ParamRecord.of(*pair) for pair in named_params_with_sharded_tensor(holder)])
    watch.check()
    holder.cache = st.distribute(torch.ones(3), "replicate")
    assert stale(holder, watch) == ["cache"]


def test_of_many_names_eight_are_shown():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(10)))
    watch = StalenessCheck(model, [ParamRecord.of(*pair) for pair in model.named_parameters()])
    weights = list(model.parameters())
    for layer in model:
        layer.weight = nn.Parameter(torch.ones(1, 1))
    assert stale(model, watch)[-1] == "7.weightand2more"
    for layer, weight in zip(model[8:], weights[8:], strict=True):
        layer.weight = weight
    assert stale(model, watch)[-1] == "7.weight"


# -- text --------------------------------------------------------------------------------------------------------------


def test_options_as_text_tell_apart_what_ranks_must_agree_on():
    options = [
        (torch.optim.SGD, (0.1,), {}),
        (torch.optim.SGD, (0.2,), {}),
        (torch.optim.Adam, (0.1,), {}),
        (torch.optim.SGD, (), {"lr": 0.1}),
        (torch.optim.SGD, (), {"lr": 0.1, "nesterov": True}),
        (torch.optim.SGD, (torch.tensor(0.1),), {}),
        (torch.optim.SGD, (torch.tensor([0.1]),), {}),
        (torch.optim.Adam, (), {"betas": (0.9, 0.95)}),
        (torch.optim.Adam, (), {"betas": (0.9, 0.99)}),
        (torch.optim.Adam, (), {"params": object()}),
    ]
    texts = [call_text(*each) for each in options]
    assert len(set(texts)) == len(texts)
    assert texts[4] == "SGD(lr=0.1, nesterov=True)" and texts[5] == "SGD(tensor () torch.float32)"
    assert texts[7] == "Adam(betas=(0.9, 0.95))" and texts[9] == "Adam(params=object)"
    assert call_text(partial(torch.optim.SGD, lr=1), (), {}) == "SGD()"
    assert call_text(None, (), {"lr": None}) == "(lr=None)"
    pairs = [("w", torch.ones(2, 3)), ("b", torch.ones(3).double())]
    assert params_text({"params": pairs}) == "w (2, 3) torch.float32\nb (3,) torch.float64"
    assert params_text({"params": []}) == "(none)"


# -- inputs of a graphed step ------------------------------------------------------------------------------------------


def kinds() -> list[Any]:
    x = torch.arange(4.0)
    return [
        x, x[:3], x.view(2, 2), x.double(), x.clone().requires_grad_(),
        st.distribute(x, "[tp]"), st.distribute(x, "replicate"), 1.0, 2.0, 1, True, "a", None,
    ]  # fmt: skip


def test_inputs_like_the_captured_ones_are_taken_and_no_others():
    for i, first in enumerate(kinds()):
        for j, second in enumerate(kinds()):
            inputs = StaticInputs((torch.ones(1), {"x": first}), {"y": 3}, CPU)
            call = (torch.zeros(1), {"x": second}), {"y": 3}
            if i != j:
                with pytest.raises(CaptureError, match=r"(input 1|arguments) of a graphed step: not as in the capture"):
                    inputs.fill(*call)
                continue
            inputs.fill(*call)
            (zero, found), more = inputs.arguments()
            assert not zero.any() and more == {"y": 3}
            assert type(found["x"]) is type(second)
            if isinstance(second, torch.Tensor):
                assert found["x"] is not first and found["x"].requires_grad == second.requires_grad
                assert torch.equal(whole(found["x"]), whole(second))
            else:
                assert found["x"] is second or found["x"] == second


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, st.ShardedTensor) else x).detach()


def test_another_structure_is_refused_before_anything_is_copied():
    x = torch.arange(2.0)
    inputs = StaticInputs((x, x), {}, CPU)
    for args, kwargs in (((x,), {}), ((x, x, x), {}), ((x, [x]), {}), ((x,), {"b": x}), ((), {"a": x, "b": x})):
        with pytest.raises(CaptureError, match="arguments of a graphed step"):
            inputs.fill(args, kwargs)
    with pytest.raises(CaptureError, match="input 1"):
        inputs.fill((x + 5, x[:1]), {})
    (a, b), more = inputs.arguments()
    assert torch.equal(a, x) and torch.equal(b, x) and more == {}
    inputs.fill((x + 1, (x + 2).requires_grad_(False)), {})
    assert torch.equal(a, x + 1) and torch.equal(b, x + 2), "the same memory"


def test_the_copy_of_an_input_is_outside_of_its_graph():
    x = torch.ones(2, requires_grad=True)
    inputs = StaticInputs((x,), {}, CPU)
    inputs.fill((x * 2,), {})
    [memory] = inputs._memory
    assert memory.grad_fn is None and torch.equal(memory, torch.full((2,), 2.0))


def test_plain_tensors_of_the_cpu_are_copied_to_the_device_of_the_step():
    x = torch.ones(4)
    sharded = st.distribute(x, "[tp]")
    (plain, kept, there), _ = StaticInputs((x, sharded, x.to("meta")), {}, torch.device("meta")).arguments()
    assert plain.is_meta and there.is_meta and kept._local.is_cpu


def test_inputs_on_another_mesh_are_others():
    def body() -> None:
        x = torch.arange(4.0)
        first = st.distribute(x, "[tp]")
        inputs = StaticInputs((first,), {}, CPU)
        inputs.fill((st.distribute(x + 1, "[tp]"),), {})
        assert torch.equal(inputs.arguments()[0][0].full_tensor(), x + 1)
        grid = as_group().on_mesh(Mesh((("tp", 2),)), {})
        for other in (st.distribute(x, "[tp]", process_group=grid), st.distribute(x, "replicate"), x):
            with pytest.raises(CaptureError, match="input 0"):
                inputs.fill((other,), {})

    st.simulate(2, body)


# -- optimizers in a graph ---------------------------------------------------------------------------------------------


def test_a_rate_is_sent_when_it_changed_and_seen_as_it_was_given():
    weight = nn.Parameter(torch.ones(2))
    rate = torch.tensor([0.5])
    optimizer = torch.optim.SGD(
        [{"params": [weight], "lr": 0.25}, {"params": [nn.Parameter(torch.ones(1))]}], lr=rate, fused=True
    )
    graphed = GraphedOptimizers(CPU)
    graphed.add(optimizer)
    graphed.enter(optimizer)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.5]
    assert all(
        group["lr"] is own and own.dim() == 0
        for group, own in zip(optimizer.param_groups, graphed._rates.values(), strict=True)
    )
    assert all("capturable" not in group for group in optimizer.param_groups)
    graphed.leave(optimizer)
    graphed.leave(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[1]["lr"] is rate
    first = graphed._rates[id(optimizer), 0]
    first.fill_(9.0)
    graphed.refresh()
    assert float(first) == 9.0, "nothing changed, nothing is sent"
    optimizer.param_groups[0]["lr"] = 0.125
    rate.fill_(0.75)
    graphed.refresh()
    assert [float(x) for x in graphed._rates.values()] == [0.125, 0.75]


def test_adam_takes_a_fused_step_in_a_graph_for_a_capturable_one():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], fused=True)
    graphed = GraphedOptimizers(CPU)
    graphed.add(optimizer)
    graphed.enter(optimizer)
    assert optimizer.param_groups[0]["capturable"] is True
    graphed.leave(optimizer)
    assert optimizer.param_groups[0]["capturable"] is False


def test_what_is_baked_in_is_all_but_rates_and_notes():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    graphed = GraphedOptimizers(CPU)
    graphed.add(optimizer)
    before = graphed.host_values()
    optimizer.param_groups[0] |= {"lr": 9.0, "initial_lr": 1.0, "max_lr": 2.0, "min_lr": 0.0, "swa_lr": 1.0}
    assert graphed.host_values() == before
    for key, value in (("weight_decay", 0.5), ("betas", (0.5, 0.5)), ("eps", 1.0), ("maximize", True)):
        kept = optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = value
        assert graphed.host_values() != before
        optimizer.param_groups[0][key] = kept
    assert graphed.host_values() == before
    weight.data = torch.ones(2)
    assert graphed.host_values() != before
    for make in (
        lambda w: st.ShardedOptimizer({"w": w}, torch.optim.AdamW, fused=True),
        lambda w: st.ShardedOptimizer(nn.ParameterDict({"w": w}), torch.optim.AdamW, fused=True),
    ):
        own, optimizer = GraphedOptimizers(CPU), make(nn.Parameter(torch.ones(2)))
        own.add(optimizer)
        assert own.host_values() == own.host_values() and own._state_counts() == {id(optimizer): 0}
        before = own.host_values()
        optimizer.load_state_dict(optimizer.state_dict())
        assert before != own.host_values() == own.host_values()


def test_each_pair_of_options_that_a_graph_cannot_hold():
    for cls, options in combinations((torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam, torch.optim.LBFGS), 2):
        for make in (cls, options):
            with pytest.raises(CaptureError):
                GraphedOptimizers(CPU).add(make([nn.Parameter(torch.ones(2))]))

    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"rate": 1.0})

    own, optimizer = GraphedOptimizers(CPU), Own([nn.Parameter(torch.ones(2))])
    own.add(optimizer)
    own.enter(optimizer)
    assert "lr" not in optimizer.param_groups[0]
    own.leave(optimizer)
    for kind, fits in ((torch.float32, True), (torch.float64, True), (torch.bfloat16, False)):
        optimizer = torch.optim.NAdam([nn.Parameter(torch.ones(2, dtype=kind))], capturable=True)
        if fits:
            GraphedOptimizers(CPU).add(optimizer)
        else:
            with pytest.raises(CaptureError, match="would round the learning rate"):
                GraphedOptimizers(CPU).add(optimizer)
