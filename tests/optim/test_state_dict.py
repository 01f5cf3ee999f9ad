"""State dicts by name: round trips over layouts, worlds of groups, dense runs, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import RankFailed, device, every_size
from models import LAYOUTS, assert_equal, dense, same, set_grads, shard, sharded

import shardtensor as st

OTHER = {"rows": "[-, tp balanced]", "columns": "flat(tp)", "vector": "replicate", "flat": None}


def relaid(oracle):
    """The same values under other layouts than `sharded` gives."""
    return {name: shard(param, OTHER.get(name, LAYOUTS[name][1])) for name, param in oracle.items()}


def run(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        set_grads(step, model)
        optimizer.step()


def resume(names, target, source):
    """Save after two steps, load into new layouts, go on: equal to a run that never stopped."""
    for cls, options in ((torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})):
        oracle = dense(names=names)
        plain = cls(oracle.values(), lr=0.1, **options)
        run(oracle, plain, 2)
        model = sharded(dense(names=names)) if source == "sharded" else dense(names=names)
        first = st.ShardedOptimizer(model, cls, lr=0.1, **options)
        run(model, first, 2)
        first.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.03
        saved = copy.copy(first.state_dict())
        later = {"relaid": relaid, "sharded": sharded, "dense": lambda m: m}[target](
            {name: torch.nn.Parameter(p.detach().clone()) for name, p in oracle.items()}
        )
        second = st.ShardedOptimizer(reversed(later.items()), cls, lr=1.0, **options)
        second.load_state_dict(saved)
        assert second.param_groups[0]["lr"] == 0.03
        run(model, first, 1, first=7)  # does not disturb what was loaded
        run(oracle, plain, 2, first=2)
        run({name: later[name] for name in oracle}, second, 2, first=2)
        assert_equal(later, oracle, cls)


@every_size
@pytest.mark.parametrize(("source", "target"), [("sharded", "relaid"), ("sharded", "dense"), ("dense", "sharded")])
def test_training_resumes_under_other_layouts(world, size, source, target):
    world(resume, size, names=list(LAYOUTS), source=source, target=target)


def b23_empty_group():
    torch.manual_seed(1)
    oracle = torch.nn.Linear(2, 2).to(device())
    names = {"weight": "[tp, -]", "bias": "[tp]"}
    values = {name: param.detach().clone() for name, param in oracle.named_parameters()}

    def make(lr):
        model = {name: shard(values[name], spec) for name, spec in names.items()}
        return model, st.ShardedOptimizer([{"params": model}, {"params": {}}], torch.optim.AdamW, lr=lr)

    plain = torch.optim.AdamW(oracle.parameters(), lr=0.1)
    model, optimizer = make(0.1)
    set_grads(0, dict(oracle.named_parameters()), model)
    optimizer.step()
    plain.step()
    values = dict(oracle.named_parameters())
    model, fresh = make(7.0)
    fresh.load_state_dict(optimizer.state_dict())
    for group in fresh.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.9, 0.999), 1e-8, 0.01)
    set_grads(1, dict(oracle.named_parameters()), model)
    fresh.step()
    plain.step()
    assert_equal(model, dict(oracle.named_parameters()))


def b23_reordered_groups():
    oracle = dense(names=["rows", "vector"])
    model = sharded(oracle)
    first = st.ShardedOptimizer(
        [
            {"params": {"rows": model["rows"]}, "lr": 0.1},
            {"params": {"vector": model["vector"]}, "lr": 0.2},
            {"params": []},
        ],
        torch.optim.AdamW,
    )
    run(model, first, 1)
    second = st.ShardedOptimizer(
        [{"params": []}, {"params": {"vector": model["vector"]}}, {"params": {"rows": model["rows"]}}],
        torch.optim.AdamW,
    )
    second.load_state_dict(first.state_dict())
    assert [group["lr"] for group in second.param_groups] == [1e-3, 0.2, 0.1]
    for name in model:
        same(second.state[model[name]]["exp_avg"], first.state[model[name]]["exp_avg"])


@pytest.mark.parametrize("body", [b23_empty_group, b23_reordered_groups])
def test_b23_groups_keep_their_hyperparameters(world, body):
    world(body, 2)


def frozen_and_never_stepped():
    model = sharded(dense())
    model["rows"].requires_grad_(False)
    optimizer = st.ShardedOptimizer(model, torch.optim.Adam)
    fresh = st.ShardedOptimizer(model, torch.optim.Adam, lr=5.0)
    fresh.load_state_dict(optimizer.state_dict())  # nothing was stepped yet
    assert fresh.param_groups[0]["lr"] == 1e-3
    assert not fresh.state
    active = {name: param for name, param in model.items() if name != "rows"}
    run(active, optimizer, 1)
    fresh.load_state_dict(optimizer.state_dict())
    assert "rows" not in fresh.state_dict()["state"]
    assert sorted(fresh.state_dict()["state"]) == sorted(active)
    assert sorted(fresh.state_dict()["param_groups"][0]["params"]) == sorted(model)


def test_frozen_and_never_stepped_parameters_have_no_state(world):
    world(frozen_and_never_stepped, 3)


def torch_dicts():
    oracle = dense()
    plain = torch.optim.Adam(oracle.values(), lr=0.3)
    named = torch.optim.Adam(list(reversed(oracle.items())), lr=0.3)
    run(oracle, plain, 1)
    named.load_state_dict(torch.optim.Adam(list(reversed(oracle.items())), lr=0.3).state_dict())
    run(oracle, named, 1)
    for dictionary, source in ((plain.state_dict(), plain), (named.state_dict(), named)):
        model = sharded(oracle)
        ours = st.ShardedOptimizer(model, torch.optim.Adam)
        ours.load_state_dict(dictionary)
        assert ours.param_groups[0]["lr"] == 0.3
        for name in oracle:
            same(ours.state[model[name]]["exp_avg_sq"], source.state[oracle[name]]["exp_avg_sq"])


def test_dicts_of_torch_optimizers_are_matched_by_name_or_position(world):
    world(torch_dicts, 2)


def refusals():
    model = sharded(dense(names=["rows", "vector"]))
    optimizer = st.ShardedOptimizer(model, torch.optim.AdamW)
    run(model, optimizer, 1)
    before = copy.deepcopy(
        {k: {n: getattr(v, "_local", v) for n, v in e.items()} for k, e in optimizer.state_dict()["state"].items()}
    )
    texts = []

    def refused(change):
        saved = optimizer.state_dict()
        saved["param_groups"] = [dict(group) for group in saved["param_groups"]]
        change(saved)
        with pytest.raises(ValueError) as error:
            optimizer.load_state_dict(saved)
        assert type(error.value) is st.LayoutError
        texts.append(str(error.value))

    refused(lambda saved: saved["param_groups"][0].update(params=["rows", "vektor"]))
    refused(lambda saved: saved["state"]["rows"].update(exp_avg=torch.zeros(3, 5)))
    refused(lambda saved: saved["state"].update(extra={}))
    refused(
        lambda saved: saved.update(param_groups=[{"params": ["rows"], "lr": 0.1}, {"params": ["vector"], "lr": 0.2}])
    )
    for name, entry in before.items():
        for key, value in entry.items():
            now = optimizer.state_dict()["state"][name][key]
            assert torch.equal(getattr(now, "_local", now), value)
    return texts


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_loaded(world):
    first, second = world(refusals, 2)
    assert first == second
    assert first == [
        "the state dict is of other parameters; nothing has been loaded\n"
        "  missing  vector\n"
        "  unknown  vektor\n"
        "  fix      rename its keys, or leave these parameters out on both sides",
        'the saved "exp_avg" of parameter "rows" has another shape; nothing has been loaded\n'
        "  saved   (3, 5)\n"
        "  needed  (5, 3)\n"
        "  fix     load a state dict of this model; whole tensors have the global shape",
        "the state dict has state of other parameters; nothing has been loaded\n  unknown  extra",
        "parameters of one group were saved with different hyperparameters; nothing has been loaded\n"
        "  lr   0.1 for rows, 0.2 for vector\n"
        "  fix  make the groups as they were when it was saved",
    ]


def disagreement():
    import torch.distributed as dist

    model = sharded(dense(names=["rows", "vector"]))
    optimizer = st.ShardedOptimizer(model, torch.optim.AdamW)
    run(model, optimizer, 1)
    saved = optimizer.state_dict()
    if dist.get_rank() == 1:
        del saved["state"]["rows"]
    optimizer.load_state_dict(saved)


def test_ranks_with_different_dicts_are_told(world):
    with pytest.raises(RankFailed, match=r"DisagreementError: load_state_dict: .*state.*nothing was moved"):
        world(disagreement, 2)


def hooks():
    model = sharded(dense(names=["rows"]))
    optimizer = st.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: {k: v for k, v in d.items() if k != "more"})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["more"] == 1
    optimizer.load_state_dict(saved)
    assert seen == ["pre", "loaded"]


def test_state_dict_hooks(world):
    world(hooks, 2)
