"""Whole modules sharded by rules: dense results, all or nothing, one error on every rank, and the way back."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size
from torch import nn

import shardtensor as st


class Block(nn.Module):
    """A tied vocabulary, two layers, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(6, 7), "down": nn.Linear(7, 6)}) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["down"](torch.tanh(layer["up"](x)))
        return self.head(self.norm(x) * self.scale)


RULES = {
    "layers.*.up.{weight,bias}": "[tp balanced, ...]",
    "layers.*.down.weight": "[in: tp balanced]",
    "embed": "[tp balanced, -]",
}


def block() -> Block:
    torch.manual_seed(3)
    return Block().to(device(), torch.float64)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def train(module: nn.Module) -> list[torch.Tensor]:
    """What a few steps come to: losses, gradients, parameters."""
    optimizer = st.ShardedOptimizer(module, torch.optim.SGD, lr=0.1)
    ids = torch.arange(10, device=device()).view(2, 5)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(whole(module(ids)).flatten(0, 1), ids.flatten())
        loss.backward()
        found += [loss.detach(), *(whole(p.grad) for p in module.parameters())]
        optimizer.step()
    return [*found, *(whole(p).detach() for p in module.parameters())]


def trains() -> None:
    dense, module = block(), block()
    objects = dict(module.named_parameters())
    assert st.shard_module(module, RULES) is module
    assert all(param is objects[name] for name, param in module.named_parameters())
    assert module.head.weight is module.embed.weight
    cut = {name for name, param in module.named_parameters() if isinstance(param, st.ShardedTensor)}
    assert cut == {"embed.weight"} | {
        f"layers.{i}.{n}" for i in (0, 1) for n in ("up.weight", "up.bias", "down.weight")
    }
    torch.testing.assert_close(train(module), train(dense))


@every_size
def test_a_module_sharded_by_rules_trains_as_dense(world, size):
    world(trains, size)


def back() -> None:
    dense, module = block(), block()
    objects = dict(module.named_parameters())
    st.shard_module(module, {**RULES, "scale": "[tp balanced]"})
    for net in (module, dense):
        whole(net(torch.arange(4, device=device()))).square().sum().backward()
    assert st.unshard_module(module) is module
    assert not any(isinstance(x, st.ShardedTensor) for x in (*module.parameters(), *module.buffers()))
    for (name, param), want in zip(module.named_parameters(), dense.parameters(), strict=True):
        assert param is objects[name]
        assert isinstance(param, nn.Parameter)
        assert torch.equal(param, want)
        torch.testing.assert_close(param.grad, want.grad)
    torch.testing.assert_close(train(module), train(dense))


@every_size
def test_unshard_undoes_it(world, size):
    world(back, size)


def outputs() -> None:
    plan = st.ShardingPlan(
        {"0.weight": "[tp balanced, -]"}, output_plan={"": "[tp balanced, -]"}, return_local_tensor=[""]
    )
    module = nn.Sequential(nn.Linear(3, 5, device=device()))
    dense = copy.deepcopy(module)
    st.shard_module(module, plan)
    x = torch.arange(12.0, device=device()).view(4, 3)
    rows = st.distribute(dense(x), "[tp balanced, -]").local_tensor()
    for net in (module, copy.deepcopy(module)):
        torch.testing.assert_close(net(x), rows)
    assert pickle.dumps(module._forward_hooks)
    twin = st.unshard_module(module)
    torch.testing.assert_close(twin(x), dense(x))


@every_size
def test_outputs_are_laid_out_as_the_plan_says(world, size):
    world(outputs, size)


class Halves(st.Sharder):
    """Cuts a Linear by rows and marks what it made."""

    def shard(self, module: nn.Module) -> nn.Module:
        st.shard_module(module, {"weight": "[tp balanced, -]"})
        return nn.Sequential(module)


def sharders() -> None:
    module = nn.Sequential(nn.ModuleDict({"fc": nn.Linear(3, 5)}), nn.Linear(5, 2)).to(device())
    st.shard_module(module, {"0.fc": Halves(), "1.weight": "[-, tp balanced]"})
    assert isinstance(module[0]["fc"], nn.Sequential)
    assert isinstance(module[0]["fc"][0].weight, st.ShardedTensor)
    assert isinstance(module[1].weight, st.ShardedTensor)


class Bag(st.Sharder):
    """Shards in place and returns what has no forward."""

    def shard(self, module: nn.Module) -> nn.Module:
        st.shard_module(module, {"weight": "[tp balanced, -]"})
        return nn.ModuleList([module])


def bags() -> None:
    module = nn.Sequential(nn.Linear(3, 5, device=device()))
    layer, dense = module[0], copy.deepcopy(module)
    st.shard_module(module, {"0": Bag()})
    assert module[0] is layer
    x = torch.ones(2, 3, device=device())
    torch.testing.assert_close(whole(module(x)), dense(x))


def test_what_cannot_be_called_takes_no_place(world):
    world(bags, 2)


def test_what_a_sharder_returns_takes_the_place_of_the_module(world):
    world(sharders, 2)


FAULTS = {
    "nothing matches": ({"layers.*.upp.weight": "[tp, -]"}, "matches no parameter.*nearest.*layers.0.up.weight"),
    "two rules": (
        {"embed": "[tp balanced, -]", "embed.*": "[-, tp]"},
        "`embed.weight` is matched by two rules.*narrow one.*`embed: .tp balanced, -.`.*`embed.[*]: .-, tp.`",
    ),
    "two rules of a tie": (
        {"embed.weight": "[tp balanced, -]", "head.weight": "[-, tp]"},
        "`head.weight` and `embed.weight` are one tensor with two layouts.*or drop the one of `head.weight`",
    ),
    "no spec": ({"embed.weight": torch.ones(2)}, "Only `ShardingSpec` and `Sharder` are supported"),
    "malformed": ({"embed.weight": "[tp"}, "expected"),
    "uneven": (
        {"norm.weight": "[tp]", "head.weight": "[tp, -]"},
        "head.weight is .out=11.*the rule is `head.weight: .tp, -.`",
    ),
    "root sharder": ({"": Halves()}, "path must not be empty for custom sharder!"),
    "sharder and rule": (
        {"layers.0.up.weight": "[tp balanced, -]", "layers.0": Halves()},
        "should not conflict with the submodule tree",
    ),
    "no such module": (st.ShardingPlan({}, {"tail": "[tp]"}), "has no attribute `tail`"),
    "no output spec": (st.ShardingPlan({}, {"head": 3}), "Only `ShardingSpec` is supported as output_plan"),
}


def faulty(name: str, on: tuple[int, ...]) -> tuple[str, str]:
    module, dense = block(), block()
    plan = FAULTS[name][0] if dist.get_rank() in on else RULES
    with pytest.raises(st.ShardTensorError) as caught:
        st.shard_module(module, plan)
    assert not any(isinstance(x, st.ShardedTensor) for x in module.parameters())
    assert not any(owner._forward_hooks for owner in module.modules())
    assert all(map(torch.equal, module.parameters(), dense.parameters()))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_error_on_every_rank_and_changes_nothing(world, name):
    for on in ((0, 1), (1,)):
        found = world(faulty, 2, name=name, on=on)
        assert len(set(found)) == 1
        (_, text), *_ = found
        assert re.search(FAULTS[name][1], text, re.DOTALL), text


def disagreeing() -> str:
    with pytest.raises(st.DisagreementError) as caught:
        st.shard_module(block(), {"embed.weight": ["[tp balanced, -]", "[-, tp]"][dist.get_rank()]})
    return str(caught.value)


def test_ranks_with_other_plans_are_told_which_rule_differs(world):
    first, second = world(disagreeing, 2)
    assert first == second
    assert "embed.weight" in first


def held_weakly() -> None:
    module, dense = block(), block()
    hold = weakref.ref(module.layers[1]["down"].weight)
    with pytest.raises(st.RuleError, match="something else refers to it"):
        st.shard_module(module, RULES)
    assert hold() is not None
    assert not any(isinstance(x, st.ShardedTensor) for x in module.parameters())
    assert all(map(torch.equal, module.parameters(), dense.parameters()))


def test_a_tensor_that_cannot_change_leaves_all_as_they_were(world):
    world(held_weakly, 2)


def recurrent(kind: type[nn.RNNBase], way: str) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"rnn": kind(4, 6, num_layers=2, bidirectional=True)}).to(device())
    dense = copy.deepcopy(module)
    if way == "plan":
        st.shard_module(module, {"rnn.weight_ih_*": "[tp balanced, -]"})
    else:
        st.shard_parameter(module, "rnn.weight_ih_l0", "[tp balanced, -]")
    assert isinstance(module["rnn"].weight_ih_l0, st.ShardedTensor)
    for step in range(2):  # a forward makes new weak references
        x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(step)).to(device())
        outputs = []
        for each in (module, dense):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", st.GatherWarning)  # the kernel of an RNN takes whole weights
                out, _ = each["rnn"](x)
            out.square().sum().backward()
            outputs.append(out)
        torch.testing.assert_close(*outputs)
    for (name, got), want in zip(module.named_parameters(), dense.parameters(), strict=True):
        grad = got.grad.full_tensor() if isinstance(got, st.ShardedTensor) else got.grad
        torch.testing.assert_close(grad, want.grad, msg=lambda text, name=name: f"{name}: {text}")
    del out, outputs
    st.unshard_module(module)
    assert not any(isinstance(x, st.ShardedTensor) for x in module.parameters())
    torch.testing.assert_close(module["rnn"](x)[0], dense["rnn"](x)[0])


@pytest.mark.parametrize("way", ["plan", "parameter"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_fresh_recurrent_modules_are_sharded_though_they_keep_weak_references(world, kind, way):
    world(recurrent, 2, kind=kind, way=way)


def unsharded_again(kind):
    """The module flattens its parameters for cuDNN as it did before, notices new ones, and can be sharded again."""

    class Counted(kind):
        flattened = 0

        def flatten_parameters(self):
            self.flattened += 1

    module = Counted(3, 4, 2)
    x = torch.ones(5, 2, 3)
    for _ in range(2):
        before, names = module.flattened, set(vars(module))
        st.shard_module(module, {"weight_ih_l0": "[tp balanced, -]"})
        module(x)
        assert module.flattened == before  # sharded parameters lie apart
        st.unshard_module(module)
        assert set(vars(module)) == names
        module(x)
        assert module.flattened == before + 1
        assert all(ref() is param for ref, param in zip(module._flat_weight_refs, module.parameters(), strict=True))
        module(x)
        assert module.flattened == before + 1


@pytest.mark.filterwarnings("ignore::shardtensor.tensor.dispatch.GatherWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_what_they_were_when_unsharded(kind):
    st.simulate("tp=2", unsharded_again, kind)


def test_a_scripted_module_may_stand_beside_and_a_rule_may_name_a_plain_tensor():
    def body():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit
            module = nn.ModuleDict({"scripted": torch.jit.script(nn.Linear(4, 4)), "layer": nn.Linear(4, 4)})
        module["layer"].table = torch.ones(4, 4)
        st.shard_module(module, {"layer.weight": "[tp, -]", "layer.table": "[-, tp]"})
        assert str(module["layer"].weight.sharding_spec()) == "[tp, -]"
        assert module["layer"].table.local_tensor().shape == (4, 2)
        with pytest.raises(st.LayoutError, match=r"Expected Linear.in_features to be a Tensor, but found int"):
            st.shard_module(module, {"layer.in_features": "[tp]"})

    st.simulate("tp=2", body)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_a_tied_table_takes_the_styles_of_both_its_modules():
    def body():
        torch.manual_seed(0)
        module, ids = Tied(), torch.tensor([[0, 3, 7]])
        dense = copy.deepcopy(module)
        head = {**st.vocab_head("tp"), "out": "[..., tp] -> replicate"}
        st.shard_module(module, {"embed": st.vocab_embedding("tp"), "head": head})
        assert module.head.weight is module.embed.weight
        want, got = dense(ids), module(ids)
        torch.testing.assert_close(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(module.embed.weight.grad.full_tensor(), dense.embed.weight.grad)

    st.simulate("tp=2", body)
