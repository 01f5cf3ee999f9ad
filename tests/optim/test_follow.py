"""An optimizer follows what becomes of its parameters, or refuses by name; it never steps stale memory."""

from __future__ import annotations

import pytest
import torch
from harness import device
from models import assert_equal, dense, same, set_grads, shard, sharded, whole

import shardtensor as st


def trained(cls, **options):
    oracle = dense()
    model = sharded(oracle)
    plain, ours = cls(oracle.values(), **options), st.ShardedOptimizer(model, cls, **options)
    set_grads(0, oracle, model)
    plain.step()
    ours.step()
    return oracle, model, plain, ours


def new_shard():
    for cls in (torch.optim.AdamW, torch.optim.Adagrad):
        oracle, model, plain, ours = trained(cls)
        old = {}
        for name, param in model.items():
            if isinstance(param, st.ShardedTensor) and param.local_shards() and not param._layout.packed:
                old[name] = param.local_shards()[0].tensor
                param.local_shards()[0].tensor = old[name].detach().clone().requires_grad_()
        assert old
        set_grads(1, oracle, model)
        kept = {name: leaf.detach().clone() for name, leaf in old.items()}
        plain.step()
        ours.step()
        assert_equal(model, oracle, cls)
        assert all(torch.equal(leaf, kept[name]) for name, leaf in old.items())
        for name in oracle:
            slot = "exp_avg" if cls is torch.optim.AdamW else "sum"
            same(ours.state[model[name]][slot], plain.state[oracle[name]][slot])


def test_a_replaced_shard_is_stepped_with_the_state_it_had(world):
    world(new_shard, 3)


def new_dtype():
    oracle, model, plain, ours = trained(torch.optim.AdamW)
    names = ("rows", "vector", "plain")
    doubles = {name: torch.nn.Parameter(oracle[name].detach().double()) for name in names}
    second = torch.optim.AdamW(doubles.values())
    for name, param in doubles.items():
        second.state[param] = {k: v.double() if v.dim() else v for k, v in plain.state[oracle[name]].items()}
        model[name].grad = None
        model[name].data = model[name].data.double()  # what Module.double() does
    set_grads(1, doubles, {name: model[name] for name in names})
    second.step()
    for name in set(model) - set(names):
        model[name].grad = None
    ours.step()
    for name, param in doubles.items():
        assert model[name].dtype == ours.state[model[name]]["exp_avg"].dtype == torch.float64
        same(model[name], param)


def test_state_follows_a_change_of_dtype(world):
    world(new_dtype, 2)


def new_layout():
    oracle, model, plain, ours = trained(torch.optim.AdamW)
    param = model["rows"]
    other = shard(whole(param).detach(), "[-, tp balanced]")
    param._local, param._layout, param._spec = other._local, other._layout, other._spec
    param._grad_wrapper = None
    set_grads(1, oracle, model)
    plain.step()
    ours.step()
    assert_equal(model, oracle)
    assert ours.state[param]["exp_avg"]._layout == param._layout
    same(ours.state[param]["exp_avg"], plain.state[oracle["rows"]]["exp_avg"])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_state_follows_a_change_of_layout(world, size):
    world(new_layout, size)


def replaced(how):
    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(shard(torch.ones(4), "[tp]"))
            self.bias = torch.nn.Parameter(torch.ones(2, device=device()))

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = Inner()

    model = Outer()
    optimizer = st.ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    params = dict(optimizer.named_params)
    for param in params.values():
        param.grad = torch.ones(param.shape, device=device())
    if how == "weight":
        model.fc.weight = torch.nn.Parameter(shard(torch.zeros(4), "[tp]"))
        model.fc.weight.grad = torch.ones(4, device=device())
    elif how == "module":
        model.fc = Inner()
    elif how == "assign":
        model.load_state_dict({"fc.weight": model.fc.weight, "fc.bias": torch.zeros(2, device=device())}, assign=True)
    with pytest.raises(st.StaleParameterError) as error:
        optimizer.step()
    assert all(torch.equal(whole(p), torch.ones(p.shape, device=device())) for p in params.values())
    return str(error.value).split("\n")[1].replace(",", "").split()


@pytest.mark.parametrize(
    ("how", "names"), [("weight", ["fc.weight"]), ("module", ["fc.weight", "fc.bias"]), ("assign", ["fc.bias"])]
)
def test_parameters_replaced_in_the_module_are_refused_by_name(world, how, names):
    for words in world(replaced, 2, how=how):
        assert words[0] == "parameters"
        assert set(names) <= set(words[1:])


def no_leaf():
    param = shard(torch.ones(4), "[tp]")
    optimizer = st.ShardedOptimizer({"fc.weight": param}, torch.optim.SGD, lr=1.0)
    param.local_shards()[0].tensor = param.local_shards()[0].tensor * 2
    with pytest.raises(st.StaleParameterError) as error:
        optimizer.step()
    return str(error.value)


def test_a_shard_set_to_a_result_is_refused_by_name(world):
    assert set(world(no_leaf, 2)) == {
        "the optimizer holds parameters that were replaced; nothing was stepped\n"
        "  parameters  fc.weight\n"
        "  because     their shards were set to results of operations, which are no leaves\n"
        "  fix         make a new ShardedOptimizer for them and load the old one's state_dict() into it"
    }


@pytest.mark.gpu
def test_state_follows_to_another_device(gpu_world):
    gpu_world(to_cuda, 4)


def to_cuda():
    world = torch.distributed.get_world_size()
    spec = f'chunk(dim=0, placements=["rank:0-{world - 1}/cpu"])'
    oracle = torch.nn.Parameter(torch.arange(10.0).to(device()))
    param = st.distribute(torch.arange(10.0), spec, requires_grad=True)
    plain, ours = torch.optim.AdamW([oracle]), st.ShardedOptimizer({"p": param}, torch.optim.AdamW)
    oracle.grad = torch.ones_like(oracle)
    param.grad = torch.ones(10)
    plain.step()
    ours.step()
    param.data = param.data.cuda()
    param.grad = torch.ones(10, device=device())
    plain.step()
    ours.step()
    torch.testing.assert_close(param.full_tensor(), oracle)
    assert ours.state[param]["exp_avg"].device == device()
