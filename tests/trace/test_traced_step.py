"""What `trace_step` counts on meta tensors is what runs: small models take real steps, each call of which is noted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.tiny import mixtral
from parallel import family_plans
from parallel.decoder import Decoder
from torch import nn

import shardtensor as st
from shardtensor.comm import primitives, process_group
from shardtensor.mesh import read_mesh
from shardtensor.parallel import expert_dispatch
from shardtensor.plan.loading import load_plan
from shardtensor.sim.traffic import CountingGroup
from shardtensor.sim.world import ProcessState
from shardtensor.trace.step import trace_step

BATCH, SEQ = 2, 8

DECODER = """shard 1
include "std/styles.shard"
param sp = false
param kv = 4
param tp = 2
mesh (dp = world / tp, tp (kvg = gcd(tp, kv), kvr = tp / kvg))
data dp
let stream = [-, tp, ...] if sp else replicate
embed: vocab_embedding(tp, pad=8, to=stream)
layers.* {
    norm{1,2}: along(stream)
    attn {
        in: stream -> replicate
        q: colwise(tp, unit=4)
        {k,v}: colwise_shared(kvg, copies=kvr, unit=4)
        o: rowwise(tp, unit=4, to=stream)
    }
    mlp {
        in: stream -> replicate
        {gate,up}: colwise(tp)
        down: rowwise(tp, to=stream)
    }
}
norm: along(stream)
head: vocab_head(tp, pad=8, from=stream)
use cross_entropy()
"""


def noted(world: int, step) -> list[tuple[str, int, int, int]]:
    """Every collective of the second of two calls of `step`, as rank 0 of a world whose other ranks are not there."""
    calls: list[tuple[str, int, int, int]] = []

    def count(kind, ranks, sent, received):
        calls.append((kind, len(ranks), sent, received))

    before = ProcessState.capture()
    token = process_group.simulated.set(CountingGroup(0, read_mesh(world).ranks, count))
    try:
        step = step()
        step()
        calls.clear()
        step()
    finally:
        process_group.simulated.reset(token)
        before.restore()
    return calls


def traced(plan, module, step, rank=0) -> Counter[tuple[str, int, int, int]]:
    """The calls that a trace counts."""
    found: Counter[tuple[str, int, int, int]] = Counter()
    for each in trace_step(module, plan, step, rank=rank).collectives:
        found[each.kind, each.group_size, each.sent_bytes, each.received_bytes] += each.calls
    return found


def loss_of(module) -> torch.Tensor:
    """A forward of ids on the device of the module, and the loss."""
    device = next(module.parameters()).device
    ids = (torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 16).to(device)
    return F.cross_entropy(module(ids).flatten(0, 1), ids.flatten())


def train(plan, make, loss=loss_of):
    """Shard a model by a plan; a step is a forward, the loss, and backward."""

    def start():
        torch.manual_seed(0)
        model = st.shard_module(make(), plan)

        def step():
            loss(model).backward()
            for param in model.parameters():
                param.grad = None

        return step

    return start


CASES = {
    "tensor parallel": (2, {}, {}),
    "sequence parallel": (2, {"sp": True}, {}),
    "grouped heads": (4, {"tp": 4, "kv": 2}, {"heads": 4, "kv_heads": 2}),
    "grouped heads, sequence parallel": (4, {"tp": 4, "kv": 2, "sp": True}, {"heads": 4, "kv_heads": 2}),
    "no biases": (2, {"sp": True}, {"bias": False}),
    "uneven vocabulary": (2, {}, {"words": 19}),
    "data parallel": (2, {"tp": 1}, {}),
    "data and tensor parallel": (4, {}, {}),
    "data and sequence parallel": (4, {"sp": True}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_call_of_a_step_is_counted(name):
    world, params, sizes = CASES[name]
    plan = load_plan(DECODER, world=world, **params)
    ran = noted(world, train(plan, lambda: Decoder(**sizes)))
    assert traced(plan, Decoder(**sizes), loss_of) == Counter(ran)


SHIPPED = {
    "mlp": (4, "mlp", "mlp", {}, (2, 3)),
    "llama": (4, "llama", "llama", {"tp": 4}, (2, 4)),
    "llama, sequence parallel": (4, "llama", "llama", {"tp": 4, "sp": True}, (2, 4)),
    "llama with biases, tied": (4, "llama_tied", "llama", {"tp": 4}, (2, 4)),
    "llama, data parallel": (4, "llama", "llama", {"tp": 2, "sp": True}, (2, 4)),
    "llama in two dimensions": (4, "llama_tied", "llama_2d", {"tp": 2}, (2, 4)),
    "gpt2": (4, "gpt2", "gpt2", {}, (2, 4)),
    "bert": (4, "bert", "bert", {}, (2, 4)),
    "bert with too few heads": (4, "bert_two_heads", "bert", {}, (2, 4)),
    "t5": (4, "t5", "t5", {}, (2, 4)),
    "vit": (4, "vit", "vit", {}, (2, 5)),
    "vocab": (4, "vocab", "vocab", {}, (2, 4)),
    "fsdp": (4, "llama", "fsdp", {}, (2, 4)),
    "hsdp": (4, "llama", "fsdp", {"copies": 2}, (2, 4)),
    "fsdp in grains": (4, "llama", "fsdp", {"grain": 8}, (2, 4)),
    "uneven": (4, "uneven", "uneven", {}, (2, 4)),
    "stored parts of different sizes": (4, "uneven", family_plans.STORED, {}, (2, 4)),
}


def of_family(family, batch):
    """The loss of some samples of a family."""
    each = family_plans.FAMILIES[family]

    def loss(model) -> torch.Tensor:
        device = next(model.parameters()).device
        samples = each.batch(batch, torch.Generator().manual_seed(0)).to(device)
        if samples.is_floating_point() and samples.dim() == 3:
            samples.requires_grad_()
        return each.loss(model, samples)

    return loss


@pytest.mark.parametrize("name", SHIPPED)
def test_every_call_of_a_shipped_plan_is_counted(name):
    world, family, _, _, (batch, _) = SHIPPED[name]
    plan, make, loss = plan_for(name), family_plans.FAMILIES[family].make, of_family(family, batch)
    ran = noted(world, train(plan, make, loss))
    assert traced(plan, make(), loss) == Counter(ran)


def plan_for(name):
    world, family, spec, params, _ = SHIPPED[name]
    return family_plans.plan_for(spec, family, world, **params)


EXPERTS = ["mixtral", "mixtral_stacked"]


def _elements(size: int, sent: torch.Tensor) -> dict[str, tuple[float, float]]:
    """What a rank sends and receives, in elements, of a collective that is given `sent`."""
    own, all_but = sent.numel() / size, (size - 1) / size * sent.numel()
    return {
        "all_reduce": (2 * all_but, 2 * all_but),
        "all_gather": (sent.numel() * (size - 1), sent.numel() * (size - 1)),
        "reduce_scatter": (all_but, own * (size - 1)),
    }


@contextmanager
def handed_over() -> Iterator[list[tuple[str, int, int, int]]]:
    """Note every collective that this process hands to torch.distributed."""
    calls: list[tuple[str, int, int, int]] = []

    def exchanging(call):
        def noted(process_group, flat, came, sent, *args):
            own, item = dist.get_rank(process_group), flat.element_size()
            moved = (sum(counts) - counts[own] for counts in (sent, came))
            calls.append(("all_to_all", dist.get_world_size(process_group), *(each * item for each in moved)))
            return call(process_group, flat, came, sent, *args)

        return noted

    def noting(kind, call, place):
        def noted(process_group, *args, **kwargs):
            sent, size = args[place], dist.get_world_size(process_group)
            moved = _elements(size, sent)[kind]
            calls.append((kind, size, *(math.ceil(each * sent.element_size()) for each in moved)))
            return call(process_group, *args, **kwargs)

        return noted

    ways = {
        "all_reduce": ("all_reduce", 0), "all_reduce_async": ("all_reduce", 0), "all_gather": ("all_gather", 0),
        "all_gather_into": ("all_gather", 1), "reduce_scatter": ("reduce_scatter", 0),
        "reduce_scatter_async": ("reduce_scatter", 0), "reduce_scatter_into": ("reduce_scatter", 1),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, (kind, place) in ways.items():
            patch.setattr(primitives, name, noting(kind, getattr(primitives, name), place))
        patch.setattr(primitives, "all_to_all", exchanging(primitives.all_to_all))
        yield calls


def _on_gloo(name: str) -> None:
    _, family, _, _, (batch, _) = SHIPPED[name]
    plan, make, loss = plan_for(name), family_plans.FAMILIES[family].make, of_family(family, batch)
    step = train(plan, make, loss)()
    step()
    with handed_over() as ran:
        step()
    assert traced(plan, make(), loss, dist.get_rank()) == Counter(ran)


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_counted_is_what_processes_hand_over(world, name):
    world(_on_gloo, SHIPPED[name][0], name=name)


def _in_turn(scores: torch.Tensor, top_k: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts, which take turns, so that all get as many tokens; and their weights."""
    ids = torch.arange(scores.shape[0] * top_k).view(-1, top_k) % scores.shape[1]
    return ids, scores.softmax(-1).gather(1, ids)


def _experts_on_gloo(family: str, params: dict[str, int]) -> None:
    plan = family_plans.plan_for("mixtral", family, 4, **params)
    make, loss = family_plans.FAMILIES[family].make, of_family(family, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixtral, "routed", _in_turn)
        patch.setattr(expert_dispatch, "chosen", _in_turn)
        step = train(plan, make, loss)()
        step()
        with handed_over() as ran:
            step()
    assert any(kind == "all_to_all" for kind, *_ in ran)
    assert traced(plan, make(), loss, dist.get_rank()) == Counter(ran)


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("params", [{"tp": 2, "ep": 2}, {"tp": 1, "ep": 2}, {"tp": 1, "ep": 4}])
def test_experts_count_as_if_they_were_chosen_evenly(world, family, params):
    world(_experts_on_gloo, 4, family=family, params=params)


class Stack(nn.Module):
    """Blocks of more than 64 KiB, between a table and a head of more than a million elements."""

    def __init__(self, words: int = 90_000, blocks: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 2000), nn.GELU(), nn.Linear(2000, 12)) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


STORED = """shard 1
include "std/styles.shard"
param copies = 1
param tp = 1
mesh (rep = copies, dp = world / (copies * tp), tp)
data rep*dp
embed: replicate
blocks.* {
    0: colwise(tp)
    2: rowwise(tp)
}
norm: replicate
head: replicate
store **: flat(dp) by blocks.*
"""
STACKS = {
    "stored": (2, {}, {}),
    "stored, several copies": (4, {"copies": 2}, {}),
    "stored, one rank to a copy": (2, {"copies": 2}, {}),
    "stored and tensor parallel": (4, {"tp": 2}, {}),
    "stored, a small table": (2, {}, {"words": 16}),
    "stored, two blocks": (2, {}, {"blocks": 2}),
}


@pytest.mark.parametrize("name", STACKS)
def test_every_call_of_stored_units_is_counted(name):
    world, params, sizes = STACKS[name]
    plan = load_plan(STORED, world=world, **params)
    ran = noted(world, train(plan, lambda: Stack(**sizes)))
    assert traced(plan, Stack(**sizes), loss_of) == Counter(ran)


LOOSE = """shard 1
param whole = false
param uneven = false
mesh (dp = 2, tp = 2)
data dp
embed: replicate
layers.* {
    norm{1,2}: replicate
    attn.{q,k,v,o}: replicate
    mlp {
        {gate,up} {
            weight: [tp, -]
            optional bias: replicate if whole else [tp]
            out: [..., tp]
        }
        down {
            weight: [-, tp]
            optional bias: replicate
            in: [..., tp]
            out: partial(tp) -> replicate
        }
    }
}
norm: replicate
head: replicate
"""


@pytest.mark.parametrize("whole", [True, False])
def test_products_that_sum_for_themselves_are_counted(whole):
    plan = load_plan(LOOSE, world=4, whole=whole)
    ran = noted(4, train(plan, Decoder))
    assert traced(plan, Decoder(), loss_of) == Counter(ran)


DEEP = ["tensor parallel", "sequence parallel", "data and tensor parallel"]


@pytest.mark.parametrize("name", DEEP)
def test_layers_that_are_alike_count_as_often_as_there_are(name, monkeypatch):
    world, params, sizes = CASES[name]
    plan, module = load_plan(DECODER, world=world, **params), Decoder(**sizes, layers=20)
    few = trace_step(module, plan, loss_of)
    monkeypatch.setattr("shardtensor.trace.layers.DEEP", 100)
    assert few == trace_step(module, plan, loss_of)


@pytest.mark.parametrize("name", ["stored", "stored and tensor parallel"])
def test_stored_layers_that_are_alike_count_as_often_as_there_are(name, monkeypatch):
    world, params, sizes = STACKS[name]
    plan, module = load_plan(STORED, world=world, **params), Stack(**sizes, blocks=20)
    few = trace_step(module, plan, loss_of)
    monkeypatch.setattr("shardtensor.trace.layers.DEEP", 100)
    assert few == trace_step(module, plan, loss_of)


FIRST = f"layers.{{{','.join(map(str, range(8)))}}}"
"""Half of the layers: they are another kind than the rest."""


@pytest.mark.parametrize("checkpointed", ["", FIRST])
def test_checkpointed_layers_that_are_alike_count_as_often_as_there_are(checkpointed, monkeypatch):
    plan, module = load_plan(DECODER, world=2, sp=True), Decoder(layers=17)
    few = trace_step(module, plan, loss_of, checkpointed=checkpointed)
    monkeypatch.setattr("shardtensor.trace.layers.DEEP", 100)
    every = trace_step(module, plan, loss_of, checkpointed=checkpointed)
    assert set(few.collectives) == set(every.collectives)
    assert attrs.evolve(few, collectives=()) == attrs.evolve(every, collectives=())


@pytest.mark.parametrize("words", [16, 4096])
@pytest.mark.parametrize("layers", [17, 60])
@pytest.mark.parametrize("checkpointed", [None, ""])
def test_the_peak_of_many_layers_may_come_at_another_moment_than_that_of_a_few(
    checkpointed, layers, words, monkeypatch
):
    """With few of them it comes with the logits, with many at the end of backward, where all gradients are there."""
    plan, module = load_plan(DECODER, world=2, sp=True), Decoder(layers=layers, words=words)
    few = trace_step(module, plan, loss_of, checkpointed=checkpointed)
    monkeypatch.setattr("shardtensor.trace.layers.DEEP", 100)
    assert few.peak_bytes == trace_step(module, plan, loss_of, checkpointed=checkpointed).peak_bytes


def test_a_module_is_left_as_it_is():
    module = Decoder(layers=20)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trace_step(module, load_plan(DECODER, world=2), loss_of)
    assert len(module.layers) == 20 and type(module.head) is nn.Linear
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("sp", [False, True])
def test_ranks_share_the_work_and_what_autograd_keeps(sp):
    steps = {
        world: trace_step(Decoder(hidden=64), load_plan(DECODER, world=world, tp=world, sp=sp), loss_of)
        for world in (1, 2, 4)
    }
    for world in (2, 4):
        assert steps[world].flops == steps[1].flops / world
        assert steps[world].activation_bytes < steps[1].activation_bytes
    assert not steps[1].collectives


def test_a_product_counts_six_flops_for_each_weight_and_token():
    linear = nn.Linear(8, 4, bias=False)
    x = torch.ones(2, 3, 8, device="meta", requires_grad=True)
    step = trace_step(linear, load_plan("shard 1\nmesh (tp = 1)\n**: replicate\n", world=1), lambda m: m(x).sum())
    assert step.flops == 6 * 8 * 4 * 6
    assert step.activation_bytes == x.nbytes


def test_each_call_says_which_module_makes_it():
    step = trace_step(Decoder(), load_plan(DECODER, world=2, sp=True), loss_of)
    where = {(each.phase, each.kind, each.where) for each in step.collectives}
    assert {
        ("forward", "all_gather", "layers.*.attn"), ("forward", "reduce_scatter", "layers.*.attn.o"),
        ("backward", "all_gather", "layers.*.attn.o"), ("backward", "all_reduce", "norm"),
        ("forward", "all_gather", "head"),
    } <= where  # fmt: skip


def test_code_that_reads_values_says_so():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.sum().item()

    plan = load_plan("shard 1\nmesh (tp = 1)\n**: replicate\n", world=1)
    with pytest.raises(RuntimeError, match="meta"):
        trace_step(Reads(4, 4), plan, lambda module: module(torch.ones(2, 4, device="meta")).sum())
