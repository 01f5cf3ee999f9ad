"""What code around an optimizer does with it: groups, schedulers, closures, hooks, ties, scaling."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import RankFailed, device
from models import assert_equal, dense, same, set_grads, shard, sharded, whole

import shardtensor as st


def what_people_see():
    model = sharded(dense())
    optimizer = st.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert list(optimizer.named_params) == list(model)
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.values(), strict=True))
    set_grads(0, model)
    optimizer.step()
    for param in model.values():
        entry = optimizer.state[param]
        assert type(entry["exp_avg"]) is (st.ShardedTensor if isinstance(param, st.ShardedTensor) else torch.Tensor)
        assert entry["exp_avg"].shape == param.shape
        assert not isinstance(entry["step"], st.ShardedTensor)
    assert [id(p) for p in optimizer.state] == [id(p) for p in model.values()]
    rows = optimizer.state[model["rows"]]
    rows["exp_avg"] = torch.ones(5, 3, device=device())  # a whole tensor: each rank keeps its part
    same(rows["exp_avg"], torch.ones(5, 3, device=device()))
    vector = optimizer.state[model["vector"]]
    vector["exp_avg"] = torch.arange(float(model["vector"].numel()), device=device())
    same(vector["exp_avg"], torch.arange(float(model["vector"].numel()), device=device()))
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(whole(p.grad), torch.zeros_like(whole(p))) for p in model.values())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.values())
    assert "rows" in repr(optimizer.state)


def test_groups_and_state_show_sharded_tensors(world):
    world(what_people_see, 3)


def forms():
    model = torch.nn.Linear(3, 2)
    weight, bias = shard(model.weight, "[-, tp balanced]"), model.bias
    lone = shard(torch.ones(4), "[tp]")
    module = torch.nn.Module()
    module.weight, module.bias = torch.nn.Parameter(weight), bias
    module.lone = lone
    names = ["weight", "bias", "lone"]
    for params in (
        {"weight": weight, "bias": bias, "lone": lone},
        iter([("weight", weight), ("bias", bias), ("lone", lone)]),
        st.named_params_with_sharded_tensor(module),
        module,
    ):
        optimizer = st.ShardedOptimizer(params, functools.partial(torch.optim.SGD, lr=0.5))
        assert list(optimizer.named_params) == names
        assert optimizer.param_groups[0]["lr"] == 0.5
    groups = [{"params": {"weight": weight}, "lr": 0.1}, {"params": iter([("bias", bias)])}]
    optimizer = st.ShardedOptimizer(groups, torch.optim.SGD, 0.7)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.7]


def test_parameters_are_taken_in_every_named_form(world):
    world(forms, 2)


def test_what_has_no_name_is_refused():
    param = torch.nn.Parameter(torch.ones(2))
    for params in ([param], param, [{"params": [param]}], {"params": {"w": param}}.values()):
        with pytest.raises(TypeError, match="needs the name of every parameter"):
            st.ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="empty parameter list"):
        st.ShardedOptimizer([], torch.optim.SGD, lr=0.1)
    with pytest.raises(st.LayoutError, match='two parameters are called "w"'):
        st.ShardedOptimizer([("w", param), ("w", torch.nn.Parameter(torch.ones(2)))], torch.optim.SGD)
    with pytest.raises(st.LayoutError, match='parameter "w" is the result of an operation'):
        st.ShardedOptimizer({"w": param * 2}, torch.optim.SGD)
    with pytest.raises(TypeError, match='parameter "w" is a list'):
        st.ShardedOptimizer({"w": [param]}, torch.optim.SGD)
    optimizer = st.ShardedOptimizer({"w": param}, torch.optim.SGD)
    for _ in range(2):  # a refusal leaves nothing behind
        with pytest.raises(st.LayoutError, match="in another group already: v"):
            optimizer.add_param_group({"params": {"v": param}})
    assert len(optimizer.param_groups) == len(optimizer.named_params) == 1


def disagreement(what):
    model = sharded(dense(names=["rows", "vector"]))
    rank = dist.get_rank()
    if what == "order":
        st.ShardedOptimizer(list(model.items())[:: 1 if rank else -1], torch.optim.SGD)
    st.ShardedOptimizer(model, torch.optim.SGD, lr=0.1 * (1 + rank))


@pytest.mark.parametrize(("what", "text"), [("order", "parameters"), ("lr", "options")])
def test_ranks_that_disagree_are_told(world, what, text):
    with pytest.raises(RankFailed, match=f"DisagreementError: ShardedOptimizer: .*{text}.*nothing was moved"):
        world(disagreement, 2, what=what)


def b20_ties():
    def train(weight, whole_weight):
        ids = torch.arange(7, device=device())
        optimizer = st.ShardedOptimizer([("emb.weight", weight), ("head.weight", weight)], torch.optim.SGD, lr=0.5)
        assert list(optimizer.named_params) == ["emb.weight"]
        assert len(optimizer.param_groups[0]["params"]) == 1
        first = None
        for _ in range(3):
            optimizer.zero_grad()
            hidden = F.embedding(ids, whole_weight(weight))
            F.cross_entropy(F.linear(hidden, whole_weight(weight)), ids).backward()
            first = first if first is not None else whole(weight.grad).clone()
            optimizer.step()
        saved = optimizer.state_dict()
        saved["param_groups"][0]["params"] = ["head.weight"]  # the other name of the same parameter
        optimizer.load_state_dict(saved)
        return whole(weight).detach(), first

    torch.manual_seed(0)
    full = torch.randn(7, 4, device=device())
    ours = train(shard(full, "[tp balanced, -]"), lambda w: w.full_tensor())
    want = train(torch.nn.Parameter(full), lambda w: w)
    for x, y in zip(ours, want, strict=True):
        assert torch.equal(x, y)


def test_b20_a_tied_parameter_is_held_once(world):
    world(b20_ties, 2)


def b25_scheduler():
    model = {"p0": shard(torch.ones(2), "[tp]"), "p1": shard(torch.ones(2), "[tp]")}

    def make(names):
        optimizer = st.ShardedOptimizer({name: model[name] for name in names}, torch.optim.SGD, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)

    optimizer, scheduler = make(["p0"])
    optimizer.add_param_group({"params": {"p1": model["p1"]}, "lr": 1.0})
    for loss in (1, 2, 3):
        scheduler.step(loss)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.001, 0.01])
    for param in model.values():
        param.grad = torch.ones(2, device=device())
    optimizer.step()
    assert whole(model["p0"]).tolist() == pytest.approx([0.999] * 2)
    assert whole(model["p1"]).tolist() == pytest.approx([0.99] * 2)
    saved = optimizer.state_dict(), scheduler.state_dict()
    restored, again = make(["p0"])
    restored.add_param_group({"params": {"p1": model["p1"]}})
    restored.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert [group["lr"] for group in restored.param_groups] == again.get_last_lr() == scheduler.get_last_lr()


def test_b25_scheduler_add_param_group_restore(world):
    world(b25_scheduler, 2)


SCHEDULES = {
    "StepLR": {"step_size": 1},
    "CosineAnnealingLR": {"T_max": 5},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 8},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": False},
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
    "LinearLR": {},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
}


def schedules(name):
    oracle = dense()
    model = sharded(oracle)
    plain = torch.optim.AdamW(oracle.values(), lr=0.1)
    ours = st.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    schedulers = [getattr(torch.optim.lr_scheduler, name)(o, **SCHEDULES[name]) for o in (plain, ours)]
    for step in range(4):
        set_grads(step, oracle, model)
        plain.step()
        ours.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_equal(model, oracle)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stock_schedulers_drive_it(world, name):
    world(schedules, 2, name=name)


def added_groups():
    for cls in (torch.optim.Adagrad, torch.optim.Adam):
        oracle = dense()
        model = sharded(oracle)
        plain = cls(oracle.values(), lr=0.1)
        names = list(model)
        ours = st.ShardedOptimizer({name: model[name] for name in names[:3]}, cls, lr=0.1)
        ours.add_param_group({"params": [(name, model[name]) for name in names[3:]]})
        for step in range(2):
            set_grads(step, oracle, model)
            plain.step()
            ours.step()
        assert_equal(model, oracle, cls)
        assert list(ours.named_params) == names


def test_added_parameters_are_stepped_like_the_first(world):
    world(added_groups, 3)


def closures_and_hooks():
    model = sharded(dense(names=["rows", "plain"]))
    optimizer = st.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o)))
    handle = (
        torch.optim.optimizer.register_optimizer_step_post_hook(lambda o, a, k: seen.append(("any", o)))
        if hasattr(torch.optim, "optimizer")
        else None
    )

    def closure():
        assert torch.is_grad_enabled()
        set_grads(0, model)
        return torch.tensor(4.25)

    assert optimizer.step(closure).item() == 4.25
    assert optimizer.step() is None
    assert [(kind, o is optimizer) for kind, o in seen if kind != "any"] == [("pre", True), ("post", True)] * 2
    if handle is not None:
        handle.remove()


def test_step_returns_the_loss_and_hooks_run_once(world):
    world(closures_and_hooks, 2)


def scaling(bad_rank):
    model = {"w": shard(torch.ones(4), "[tp]"), "b": torch.nn.Parameter(torch.ones(2, device=device()))}
    for make in (
        lambda: st.ShardedOptimizer(model, torch.optim.SGD, lr=1.0),
        lambda: torch.optim.SGD(list(model.values()), lr=1.0, fused=True),
    ):
        with torch.no_grad():
            for param in model.values():
                getattr(param, "_local", param).fill_(1.0)
        optimizer = make()
        scaler = torch.amp.GradScaler(device().type, init_scale=8.0, growth_interval=1)
        scaler.scale(torch.ones((), device=device()))
        for bad, scale, value in ((True, 4.0, 1.0), (False, 8.0, 0.0)):
            model["b"].grad = torch.full((2,), scaler.get_scale(), device=device())
            model["w"].grad = torch.full((4,), scaler.get_scale(), device=device())
            if bad and dist.get_rank() == bad_rank:
                model["w"]._local.grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
            assert whole(model["w"]).tolist() == [value] * 4
            assert model["b"].tolist() == [value] * 2


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_inf_on_one_ranks_shard_skips_the_step_on_all(world, bad_rank):
    world(scaling, 2, bad_rank=bad_rank)


def copies():
    model = sharded(dense())
    optimizer = st.ShardedOptimizer(model, torch.optim.Adam)
    set_grads(0, model)
    optimizer.step()
    before = {name: whole(param).detach().clone() for name, param in model.items()}
    again = copy.deepcopy(optimizer)
    set_grads(1, again.named_params)
    again.step()
    assert_equal(model, before)
    set_grads(1, model)
    optimizer.step()
    assert_equal(again.named_params, model)


def test_a_deep_copy_is_independent(world):
    world(copies, 2)


def no_messages():
    model = sharded(dense())
    optimizer = st.ShardedOptimizer(model, torch.optim.AdamW)
    set_grads(0, model)
    count = dist.group.WORLD._get_sequence_number_for_group()
    for _ in range(3):
        optimizer.step()
    optimizer.state_dict()
    optimizer.zero_grad()
    assert dist.group.WORLD._get_sequence_number_for_group() == count


def test_elementwise_steps_send_nothing(world):
    world(no_messages, 2)
