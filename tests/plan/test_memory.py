"""The bytes that a plan names are those of the tensors that ranks come to hold; the extremes are extremes."""

from __future__ import annotations

import time

import pytest
import torch
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as some
from resolved_by_hand import MEGATRON, decoder, resolved
from torch import nn

import shardtensor as st
from shardtensor.errors import PlanError
from shardtensor.fsdp import fully_shard
from shardtensor.plan.estimates.memory import OPTIMIZERS, RankBytes, plan_bytes, rank_bytes
from shardtensor.plan.match.units import gather_units
from shardtensor.plan.models.model import Model, TensorInfo

SPECS = (
    "replicate", "[tp balanced, -]", "[tp pad(4), -]", "[tp sizes(1, 5, 2), -]", "[-, dp balanced]",
    "[-, -] only(dp, 1)", "[tp*dp balanced, -]", "[dp pad(2), tp balanced]", "[tp balanced, -] flat(dp)",
    'chunk(dim=0, placements=["rank:1/cpu", "rank:4/cpu"])',
)  # fmt: skip


@examples(60)
@given(some.lists(some.sampled_from(SPECS), min_size=1, max_size=5), some.sampled_from(sorted(OPTIMIZERS)))
def test_least_and_most_are_those_of_all_ranks(specs, optimizer):
    model = Model(tuple(TensorInfo(f"m{i}.weight", (8, 7)) for i in range(len(specs))))
    plan = resolved(model, "dp=2, tp=3", {f"m{i}.weight": spec for i, spec in enumerate(specs)})
    found = plan_bytes(plan, optimizer=optimizer)
    each = [rank_bytes(plan, rank, optimizer=optimizer) for rank in range(6)]
    assert found.least.total == min(rank.total for rank in each)
    assert found.most.total == max(rank.total for rank in each)
    assert each[found.least_rank] == found.least
    assert each[found.most_rank] == found.most


@examples(60)
@given(some.lists(some.integers(1, 400), min_size=1, max_size=4), some.integers(2, 9), some.booleans(), some.booleans())
def test_least_and_most_of_stored_ranges_are_those_of_all_ranks(lengths, dp, is_joint, is_apart):
    model = Model(tuple(TensorInfo(f"m{i}.weight", (2, 3 * n)) for i, n in enumerate(lengths)))
    plan = resolved(
        model, f"rep=2, dp={dp}, tp=2", {"m0.weight": "[tp, -]", "m1.weight": "[-, tp balanced]"},
        store=("rep", "dp") if is_joint else ("dp",), by=("*",) if is_apart else (),
    )  # fmt: skip
    found = plan_bytes(plan)
    each = [rank_bytes(plan, rank).total for rank in range(4 * dp)]
    assert (found.least.total, found.most.total) == (min(each), max(each))


@given(some.integers(1, 3), some.integers(1, 4))
def test_what_is_cut_over_all_ranks_adds_up_to_the_model(dp, tp):
    model = Model((TensorInfo("a.weight", (24, 5)), TensorInfo("b.weight", (7, 24), dtype="bfloat16")))
    plan = resolved(model, f"dp={dp}, tp={tp}", {"a.weight": "[dp*tp balanced, -]", "b.weight": "[-, tp*dp balanced]"})
    each = [rank_bytes(plan, rank) for rank in range(dp * tp)]
    assert sum(rank.parameters for rank in each) == 24 * 5 * 4 + 7 * 24 * 2
    assert all(rank.optimizer == 2 * rank.gradients == 2 * rank.parameters for rank in each)


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(24, 50, bias), nn.Linear(50, 24, bias), nn.LayerNorm(24)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, bias, layers=11):
        super().__init__()
        self.table = nn.Embedding(1100, 24)
        self.layers = nn.ModuleList(Block(bias) for _ in range(layers))
        self.head = nn.Linear(24, 40, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale[0]


def model_of(module):
    """Names and shapes; dims from the type of the layer."""
    dims = {nn.Linear: ("out", "in"), nn.Embedding: ("vocab", "embed"), nn.LayerNorm: ("embed",)}
    found = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        owner = module.get_submodule(name.rpartition(".")[0])
        known = dims.get(type(owner)) if name.endswith("weight") else None
        found.append(
            TensorInfo(
                name, tuple(tensor.shape), known, str(tensor.dtype)[6:], not isinstance(tensor, nn.Parameter),
                tensor.requires_grad,
            )
        )  # fmt: skip
    return Model(tuple(found))


def storages(tensors):
    """The bytes of distinct storages."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def held(module, optimizer):
    """What this rank came to hold after a step."""
    leaves = [getattr(param, "_local", param) for param in module.parameters()]
    state = [x for values in optimizer.state.values() for x in values.values() if torch.is_tensor(x) and x.dim()]
    state = [getattr(x, "_local", x) for x in state]
    grads = [leaf.grad for leaf in leaves]
    return storages(map(torch.Tensor.detach, leaves)), storages(grads), storages(state), storages(module.buffers())


@pytest.mark.parametrize(("world", "bias", "unit"), [(2, True, 1), (3, False, 1), (4, True, "row")])
def test_fully_sharded_ranks_hold_what_the_plan_says(world, bias, unit):
    plan = resolved(model_of(Net(bias)), f"dp={world}", data=("dp",), store=("dp",), unit=unit, by=("layers.*",))

    def train():
        net = Net(bias)
        placement = None if unit == 1 else lambda _: f"flat(dp, unit={unit})"
        for layer in net.layers:
            fully_shard(layer, shard_placement_fn=placement)
        fully_shard(net, shard_placement_fn=placement)
        optimizer = st.ShardedOptimizer(net, torch.optim.AdamW)
        net(torch.arange(6)).sum().backward()
        optimizer.step()
        return held(net, optimizer)

    for rank, found in enumerate(st.simulate(world, train)):
        said = rank_bytes(plan, rank)
        assert found == (said.parameters, said.gradients, said.optimizer, said.buffers)


def test_units_are_those_of_fully_shard():
    plan = resolved(model_of(Net(True)), "dp=2", data=("dp",), store=("dp",), by=("layers.*",))
    said = {unit.path: [flat.ranges(0) for flat in unit.flats] for unit in gather_units(plan)}

    def shard():
        net = Net(True)
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
        net(torch.arange(6)).sum().backward()
        runtime = fully_shard.state(net).runtime
        found = {unit.name: [group.bucket.ranges for group in unit.param_groups] for unit in runtime.states}
        slots = {}
        for unit in runtime.states:
            size = sum(group.unsharded_bytes for group in unit.param_groups)
            slots[id(unit.buffer)] = max(size, slots.get(id(unit.buffer), 0))
        groups = runtime.reducer.param_groups
        packed = max(group.bucket.total * group.gradients.reduce_dtype.itemsize for group in groups)
        return found, sum(slots.values()) + 2 * packed

    found, memory = st.simulate(2, shard)[0]
    assert found == said
    assert rank_bytes(plan, 0).gathered == pytest.approx(memory, abs=512 * 8)


def test_ranks_of_a_tensor_parallel_plan_hold_what_it_says():
    rules = {"layers.*.up.{weight,bias}": "[tp, ...]", "layers.*.down.weight": "[-, tp]"}
    plan = resolved(model_of(Net(True)), "tp=2", {**rules, "table.weight": "[tp pad(64), -]"})

    def train():
        net = Net(True)
        for name in [name for name, _ in net.named_parameters()]:
            placed = plan.tensors[name]
            owner, _, last = name.rpartition(".")
            if placed.layout.cut_dims:
                st.shard_parameter(net.get_submodule(owner), last, placed.spec)
        optimizer = st.ShardedOptimizer(net, torch.optim.AdamW)
        net(torch.arange(6)).sum().backward()
        optimizer.step()
        return held(net, optimizer)

    for rank, found in enumerate(st.simulate(2, train)):
        said = rank_bytes(plan, rank)
        assert found == (said.parameters, said.gradients, said.optimizer, said.buffers)


def test_tied_and_frozen_tensors_count_once_and_without_a_gradient():
    model = decoder()
    tied = resolved(model, "tp=2", MEGATRON, ties={"lm_head.weight": "model.embed_tokens.weight"})
    apart = resolved(model, "tp=2", MEGATRON)
    table = tied.tensors["lm_head.weight"].layout.numel(0) * 4
    assert rank_bytes(apart, 0).parameters - rank_bytes(tied, 0).parameters == table
    frozen = resolved(decoder(requires_grad=False), "tp=2", MEGATRON)
    assert rank_bytes(frozen, 0).gradients == rank_bytes(frozen, 0).optimizer == 0
    assert rank_bytes(frozen, 0).parameters == rank_bytes(apart, 0).parameters


def test_a_405b_plan_on_16384_ranks_takes_no_time():
    model = decoder(126, 16384, 53248, 128256, 1024, dtype="bfloat16")
    plan = resolved(model, "dp=2048, tp=8", MEGATRON, data=("dp",), store=("dp",), by=("model.layers.*",))
    start = time.perf_counter()
    found = plan_bytes(plan)
    assert time.perf_counter() - start < 1
    weights = 2 * sum(tensor.numel for tensor in model.tensors)
    assert found.most.parameters == pytest.approx(weights / 16384, rel=0.01)
    assert found.most.total == pytest.approx(found.least.total, rel=1e-6)


def test_unknown_optimizers_and_ranks_are_refused():
    plan = resolved(decoder(), "tp=2")
    with pytest.raises(PlanError, match='no optimizer is called "adamm"'):
        plan_bytes(plan, optimizer="adamm")
    with pytest.raises(PlanError, match="no rank 2"):
        rank_bytes(plan, 2)
    assert RankBytes(1, 2, 3, 4, 5).total == 15
