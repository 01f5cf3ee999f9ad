"""What `step_collectives` lists is what runs: small models are sharded by plans, and every call of a step is noted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import family_plans
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoder import Decoder
from harness.tiny import mixtral
from test_plan_parity import STORED
from torch import nn

import shardtensor as st
from shardtensor.comm import primitives, process_group
from shardtensor.mesh import read_mesh
from shardtensor.plan.flows.gradients import check_flows
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.traffic.collectives import step_collectives, uncounted
from shardtensor.sharding import expert_dispatch
from shardtensor.sharding.model_info import model_info
from shardtensor.sim.counting_group import CountingGroup
from shardtensor.sim.process_state import ProcessState

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


def listed(plan, module, clipping=False) -> list[tuple[str, int, int, int]]:
    resolved = resolve(plan, model_info(module))
    assert not resolved.errors, resolved.errors[0]
    return calls_of(step_collectives(resolved, batch=BATCH, seq=SEQ, dtype="float32", clipping=clipping))


def calls_of(collectives) -> list[tuple[str, int, int, int]]:
    return [
        (each.kind, each.group_size, each.sent_bytes, each.received_bytes)
        for each in collectives
        for _ in range(each.count)
    ]


def train(plan, make):
    """Shard a model by a plan; a step is a forward of ids, the loss, backward, and clipping by the global norm."""

    def start():
        torch.manual_seed(0)
        model = st.shard_module(make(), plan)
        ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 16

        def step():
            logits = model(ids)
            F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
            st.clip_grad_norm_(model.parameters(), 1.0)
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
def test_every_call_of_a_step_is_listed(name):
    world, params, sizes = CASES[name]
    plan = load_plan(DECODER, world=world, **params)
    module = Decoder(**sizes)
    ran = noted(world, train(plan, lambda: Decoder(**sizes)))
    said = listed(plan, module, clipping=True)
    assert Counter(said) == Counter(ran)


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
    "stored parts of different sizes": (4, "uneven", STORED, {}, (2, 4)),
}


def _loss_of_all(model, ids):
    """Of all tokens, where the model's own loss leaves one out."""
    return F.cross_entropy(model(ids)["logits"].flatten(0, 1), ids.flatten())


def _stepping(plan, family, batch):
    """Shard a model of a family by a plan; a forward of some samples, the loss, and backward."""
    each = family_plans.FAMILIES[family]
    torch.manual_seed(0)
    model = st.shard_module(each.make(), plan)
    samples = each.batch(batch, torch.Generator().manual_seed(0))
    if samples.is_floating_point() and samples.dim() == 3:
        samples.requires_grad_()

    def step():
        is_shifted = "llama" in family or "mixtral" in family
        loss = _loss_of_all(model, samples) if is_shifted else each.loss(model, samples)
        loss.backward()
        for param in model.parameters():
            param.grad = None

    return step


@pytest.mark.parametrize("name", SHIPPED)
def test_every_call_of_a_shipped_plan_is_listed(name):
    world, family, spec, params, (batch, seq) = SHIPPED[name]
    plan = family_plans.plan_for(spec, family, world, **params)
    ran = noted(world, lambda: _stepping(plan, family, batch))
    resolved = resolve(plan, model_info(family_plans.FAMILIES[family].make()))
    said = calls_of(step_collectives(resolved, batch=batch, seq=seq, dtype="float32"))
    assert not check_flows(resolved)
    assert Counter(said) == Counter(ran)


EXPERTS = ["mixtral", "mixtral_stacked"]


@pytest.mark.parametrize("params", [{"tp": 2, "ep": 2}, {"tp": 1, "ep": 2}])
def test_experts_send_what_is_listed_but_for_whom_tokens_choose(params):
    plan = family_plans.plan_for("mixtral", "mixtral_stacked", 4, **params)
    ran = Counter(noted(4, lambda: _stepping(plan, "mixtral_stacked", 2)))
    resolved = resolve(plan, model_info(family_plans.FAMILIES["mixtral_stacked"].make()))
    said = Counter(calls_of(step_collectives(resolved, batch=2, seq=4, dtype="float32")))

    def chosen(calls):  # rows go where the router says; the plan takes them to be dealt evenly
        return sum(count for (kind, *_), count in calls.items() if kind == "all_to_all")

    def fixed(calls):  # ranks that are not there bring no counts, so each layer asks once who is right: an exchange
        return {call: count for call, count in calls.items() if call[0] not in ("all_to_all", "exchange")}

    assert chosen(said) == chosen(ran) and fixed(said) == fixed(ran)


OWN_CODE = [
    *[("all_reduce", 4, 48, 48)] * 2,  # what h.*.gate gives is averaged over its columns
    ("all_to_all", 4, 80, 80),  # odd takes four columns of what big gives; its weight lies otherwise
    ("all_to_all", 4, 0, 0),
    ("all_reduce", 2, 320, 320),
]
"""What operators of the model's own code send of `uneven`, on ShardedTensors."""


def _uneven():
    plan = family_plans.plan_for("uneven", "uneven", 4)
    return plan, resolve(plan, model_info(family_plans.FAMILIES["uneven"].make()))


def test_sharded_tensors_send_what_is_listed_and_where_it_is_not_known_that_is_said():
    plan, resolved = _uneven()
    ran = Counter(noted(4, lambda: _stepping(plan, "uneven", 2)))
    said = Counter(calls_of(step_collectives(resolved, batch=2, seq=4, dtype="float32")))
    assert [each.where for each in uncounted(resolved)] == ["big", "odd", "h.*.gate"]
    assert said == ran - Counter(OWN_CODE) and not said - ran


def test_of_other_shipped_plans_all_is_known():
    for world, family, spec, params, _ in [
        *SHIPPED.values(),
        *((4, each, "mixtral", {"ep": 2}, ()) for each in EXPERTS),
    ]:
        plan = family_plans.plan_for(spec, family, world, **params)
        assert not uncounted(resolve(plan, model_info(family_plans.FAMILIES[family].make()))), spec


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
    world, family, spec, params, (batch, seq) = SHIPPED[name]
    plan = family_plans.plan_for(spec, family, world, **params)
    step = _stepping(plan, family, batch)
    step()
    with handed_over() as ran:
        step()
    resolved = resolve(plan, model_info(family_plans.FAMILIES[family].make()))
    said = step_collectives(resolved, batch=batch, seq=seq, dtype="float32", rank=dist.get_rank())
    assert Counter(calls_of(said)) == Counter(ran)


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_listed_is_what_processes_hand_over(world, name):
    world(_on_gloo, SHIPPED[name][0], name=name)


def _in_turn(scores: torch.Tensor, top_k: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts, which take turns, so that all get as many tokens; and their weights."""
    ids = torch.arange(scores.shape[0] * top_k).view(-1, top_k) % scores.shape[1]
    return ids, scores.softmax(-1).gather(1, ids)


def _experts_on_gloo(family: str, params: dict[str, int]) -> None:
    plan = family_plans.plan_for("mixtral", family, 4, **params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixtral, "routed", _in_turn)
        patch.setattr(expert_dispatch, "chosen", _in_turn)
        step = _stepping(plan, family, 2)
        step()
        with handed_over() as ran:
            step()
    resolved = resolve(plan, model_info(family_plans.FAMILIES[family].make()))
    said = step_collectives(resolved, batch=2, seq=4, dtype="float32", rank=dist.get_rank())
    assert any(kind == "all_to_all" for kind, *_ in ran)
    assert Counter(calls_of(said)) == Counter(ran)


def _uneven_on_gloo() -> None:
    plan, resolved = _uneven()
    step = _stepping(plan, "uneven", 2)
    step()
    with handed_over() as ran:
        step()
    said = Counter(calls_of(step_collectives(resolved, batch=2, seq=4, dtype="float32", rank=dist.get_rank())))
    more = Counter(ran) - said
    assert not said - Counter(ran)
    assert Counter((kind, size) for kind, size, *_ in more.elements()) == Counter(
        (kind, size) for kind, size, *_ in OWN_CODE
    )


@pytest.mark.worlds("gloo")
def test_sharded_tensors_of_processes_send_what_is_listed(world):
    world(_uneven_on_gloo, 4)


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("params", [{"tp": 2, "ep": 2}, {"tp": 1, "ep": 2}, {"tp": 1, "ep": 4}])
def test_experts_that_are_chosen_evenly_send_what_is_listed(world, family, params):
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
def test_every_call_of_stored_units_is_listed(name):
    world, params, sizes = STACKS[name]
    plan = load_plan(STORED, world=world, **params)
    ran = noted(world, train(plan, lambda: Stack(**sizes)))
    assert Counter(listed(plan, Stack(**sizes), clipping=True)) == Counter(ran)


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
def test_products_that_sum_for_themselves_are_listed(whole):
    plan = load_plan(LOOSE, world=4, whole=whole)
    ran = noted(4, train(plan, Decoder))
    assert Counter(listed(plan, Decoder(), clipping=True)) == Counter(ran)


def test_the_order_is_that_of_the_run_where_the_model_is_in_order():
    plan = load_plan(STORED.replace("store **", "# store **"), world=4, tp=4)
    ran = noted(4, train(plan, Stack))
    resolved = resolve(plan, model_info(Stack()))
    found = step_collectives(resolved, batch=BATCH, seq=SEQ, dtype="float32", clipping=True)
    assert [each.phase for each in found] == ["forward", "backward", "optimizer"]
    assert calls_of(found) == ran
