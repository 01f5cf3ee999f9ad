"""A parameter outside of its unit's forward: a plain tensor is the rank's own there, and is never taken for a copy."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from fsdp.twins import same_gradients
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import RuleError
from shardtensor.fsdp import fully_shard, register_fsdp_forward_method

sim, both = pytest.mark.worlds("sim"), pytest.mark.worlds("sim", "gloo")


class Net(nn.Module):
    """A root unit with a layer of many kinds, and an inner unit."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.emb, self.bag = nn.Embedding(5, 6), nn.EmbeddingBag(5, 6)
        self.norm, self.rms, self.group = nn.LayerNorm(6), nn.RMSNorm(6), nn.GroupNorm(2, 6)
        self.conv, self.bilinear = nn.Conv1d(6, 4, 1), nn.Bilinear(6, 6, 3)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.lstm, self.act = nn.LSTM(6, 6, batch_first=True), nn.PReLU()
        self.head = nn.Linear(6, 3)
        self.scale, self.factor = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(()))

    def forward(self, x):
        return self.head(self.norm(self.inner(x)) * self.scale)

    def features(self, x):
        return F.relu(self.head(self.inner(x) * self.scale) * self.factor)


IDS = torch.tensor([[0, 1, 4]])


def _whole(x):
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


WAYS = {
    "a method": lambda m, x: m.features(x),
    "head": lambda m, x: m.head(x),
    "no bias": lambda m, x: F.linear(x, m.head.weight),
    "transposed": lambda m, x: x @ m.head.weight.t(),
    "mT": lambda m, x: x @ m.head.weight.mT,
    "computed": lambda m, x: x @ (m.head.weight * 2).transpose(0, 1),
    "cast": lambda m, x: F.linear(x.float(), m.head.weight.float()),
    "detached": lambda m, x: F.linear(x, m.head.weight.detach()),
    "data": lambda m, x: F.linear(x, m.head.weight.data),
    "from a state dict": lambda m, x: F.linear(x, m.state_dict()["head.weight"]),
    "einsum": lambda m, x: torch.einsum("b s k, n k -> b s n", x, m.head.weight),
    "addmm": lambda m, x: torch.addmm(m.head.bias, x[0], m.head.weight.t()),
    "scale": lambda m, x: x * m.scale,
    "scale, from the left": lambda m, x: m.scale * x,
    "times its norm": lambda m, x: x * m.head.weight.norm(),
    "times a column's sum": lambda m, x: x[..., :3] * m.head.weight.sum(1),
    "whole": lambda m, x: F.linear(x, _whole(m.head.weight)),
    "another dtype, whole": lambda m, x: F.linear(x, _whole(m.head.weight.to(torch.float64))),
    "another dtype": lambda m, x: F.linear(x.float(), m.head.weight.to(torch.float32)),
    "added in place": lambda m, x: x.clone().add_(m.scale),
    "a number": lambda m, x: x * m.factor,
    "a number, computed": lambda m, x: x * m.factor.exp(),
    "a loss": lambda m, x: x.square().mean() * m.factor,
    "where": lambda m, x: torch.where(x > 0, x, m.scale),
    "cat": lambda m, x: torch.cat([x[0], m.scale[None]]),
    "embedding": lambda m, x: m.emb(IDS.to(x.device)),
    "rows": lambda m, x: m.emb.weight[IDS.to(x.device)],
    "embedding bag": lambda m, x: m.bag(IDS.to(x.device)),
    "layer norm": lambda m, x: m.norm(x),
    "rms norm": lambda m, x: m.rms(x),
    "group norm": lambda m, x: m.group(x.mT),
    "conv": lambda m, x: m.conv(x.mT),
    "bilinear": lambda m, x: m.bilinear(x, x),
    "attention": lambda m, x: m.attention(x, x, x)[0],
    "lstm": lambda m, x: m.lstm(x)[0],
    "prelu": lambda m, x: m.act(x),
    "an inner unit's": lambda m, x: F.linear(x, m.inner.weight),
}


def _net(**options):
    torch.manual_seed(0)
    dense = Net().double().to(device())
    model = copy.deepcopy(dense)
    fully_shard(model.inner, **options)
    return dense, fully_shard(model, **options)


def _batch(rows=2):
    group = as_group()
    whole = torch.randn(group.size * rows, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = whole.to(device())
    return whole, whole[group.index * rows :][:rows]


def _right_or_refused(way, after, with_grad):
    dense, model = _net()
    if after:
        for each, x in zip((dense, model), _batch(), strict=True):
            each(x).square().mean().backward()
    whole, mine = (x.requires_grad_(with_grad) for x in _batch())
    with torch.set_grad_enabled(with_grad):
        try:
            y = WAYS[way](model, mine)
        except RuleError as error:
            return str(error)
        torch.testing.assert_close(y.detach(), WAYS[way](dense, mine).detach())
        if with_grad and y.requires_grad:
            y.square().mean().backward()
            WAYS[way](dense, whole).square().mean().backward()
            same_gradients(dense, model)
    return "right"


def _check(answers, way, after):
    first, second = answers
    assert first == second
    assert (first == "right") is (way in SAFE)
    if first != "right":
        module = "(Net)" if way != "an inner unit's" else "inner (Linear)" if after else "(Linear)"
        assert f"module        {module}" in first and "register_fsdp_forward_method" in first


# Every rank has the whole where it meets a plain tensor.
SAFE = {"times its norm", "whole", "another dtype, whole"}


@sim
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_plain_tensor_meets_a_parameter(world, way):
    _check(world(_right_or_refused, 2, way=way, after=False, with_grad=True), way, False)


@sim
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_it_does_after_a_step(world, way, with_grad):
    answers = world(_right_or_refused, 2, way=way, after=True, with_grad=with_grad)
    if way == "a loss" and not with_grad:  # a number that no gradient comes to may be a learning rate
        assert answers == ["right"] * 2
    else:
        _check(answers, way, True)


@both
def test_what_the_error_says(world):
    expected = """\
Tensor.mul: a parameter of a fully sharded module met a plain tensor outside of the module's forward
  module        (Net)
  parameter     scale
  plain tensor  (2, 3, 6) torch.float64, this rank's own
  either        register_fsdp_forward_method(module, "features") gathers the parameters around that method
  or            call the module itself, or compute with parameter.full_tensor()"""
    assert world(_right_or_refused, 2, way="a method", after=False, with_grad=True) == [expected] * 2


def _followed():
    dense, model = _net()
    register_fsdp_forward_method(model, "features")
    for each, x in zip((dense, model), _batch(), strict=True):
        each.features(x).square().mean().backward()
    same_gradients(dense, model)
    torch.testing.assert_close(
        F.linear(_batch()[1], model.head.weight.full_tensor()), F.linear(_batch()[1], dense.head.weight)
    )


@both
def test_the_way_out(world):
    world(_followed, 2)


def _one_rank(way):
    dense, model = _net()
    torch.testing.assert_close(WAYS[way](model, _batch()[0]), WAYS[way](dense, _batch()[0]))


@sim
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")
@pytest.mark.parametrize("way", ["head", "layer norm", "embedding"])
def test_one_rank_has_the_whole_batch(world, way):
    world(_one_rank, 1, way=way)


def _what_goes_on():
    """What meets a parameter and is the same on every rank, or becomes its value."""
    dense, model = _net()
    weight, expected = model.head.weight, dense.head.weight.detach().clone()
    step = torch.tensor(0.5, dtype=torch.float64, device=device())
    with torch.no_grad():
        weight.mul_(step).add_(torch.ones_like(expected)).copy_(weight * step)
        weight[0].zero_()
        weight += weight
    expected = (expected * 0.5 + 1) * 0.5
    expected[0] = 0
    torch.testing.assert_close(weight.full_tensor(), expected * 2)
    model.load_state_dict(dense.state_dict())
    torch.testing.assert_close(weight.full_tensor(), dense.head.weight)
    ((weight * step).square().sum() + weight.norm()).backward()
    ((dense.head.weight * step).square().sum() + dense.head.weight.norm()).backward()
    torch.testing.assert_close(weight.grad.full_tensor(), dense.head.weight.grad)
    torch.testing.assert_close((weight * torch.ones_like(weight)).full_tensor(), dense.head.weight)
    fresh = torch.zeros_like(weight.detach()) + torch.ones_like(expected)
    torch.testing.assert_close(fresh.full_tensor(), torch.ones_like(expected))


@sim
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")
def test_what_is_the_same_on_every_rank_goes_on(world):
    world(_what_goes_on, 2)


def _optimized(kind, options):
    dense, model = _net()
    sharded = kind(model.parameters(), lr=torch.tensor(0.1) if options.get("foreach") is False else 0.1, **options)
    plain = kind(dense.parameters(), lr=0.1, **options)
    for _ in range(2):
        for each, optimizer, x in zip((dense, model), (plain, sharded), _batch(), strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


@sim
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_optimizers_of_torch_go_on(world, options):
    world(_optimized, 2, kind=torch.optim.AdamW, options=options)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


OVER_TP = {
    "column": lambda m, x: m.up(x),
    "row": lambda m, x: m.down(x),
    "weight": lambda m, x: F.linear(x, m.up.weight),
    "bias": lambda m, x: x * m.down.bias,
}


def _over_tensor_parallel(way):
    torch.manual_seed(0)
    model = Pair()
    st.shard_module(model, {"up.weight": "[tp, -]", "up.bias": "[tp]", "down.weight": "[-, tp]"})
    fully_shard(model, mesh="dp")
    with pytest.raises(RuleError) as caught:
        OVER_TP[way](model, torch.ones(2, 8))
    return str(caught.value)


@pytest.mark.parametrize("way", OVER_TP)
def test_over_tensor_parallel_ranks(way):
    said = st.simulate("dp=2, tp=2", _over_tensor_parallel, way)
    assert len(set(said)) == 1
    assert "met a plain tensor outside of the module's forward\n  module        (Pair)\n  parameter     " in said[0]


def _classes():
    model = fully_shard(nn.Linear(4, 4))
    values = fully_shard(nn.Linear(4, 4)).state_dict()  # of a module that is gone
    gc.collect()
    for x in (model.weight, values["weight"]):
        again = nn.Parameter(x)
        assert type(again) is type(x.detach()) is type(x)


@sim
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_is_made_of_one(world, ranks):
    world(_classes, ranks)
