"""What is listed of layers without flows is what their operators send: every call, on layouts of all kinds."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_plan_traffic import calls_of, handed_over, noted
from torch import nn

import shardtensor as st
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.traffic.collectives import step_collectives, uncounted
from shardtensor.sharding.model_info import model_info
from shardtensor.tensor.sharded_tensor import local_of

BATCH, SEQ, WIDTH, HIDDEN = 2, 3, 6, 10


class Conv1D(nn.Module):
    """A product that stores its weight (in, out)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out)), nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], rows.shape[-1])


class Pair(nn.Module):
    """A table, a norm and two products."""

    def __init__(self, product: type = nn.Linear, **options) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = product(WIDTH, HIDDEN, **options), product(HIDDEN, WIDTH, **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(self.embed(ids)))))


HEAD = "shard 1\nmesh (a = 2, b = 2)\nunmatched: replicate\n"
CHUNKS = 'chunk(dim=0, placements=["rank:0/cpu", "rank:1/cpu", "rank:2/cpu", "rank:3/cpu"])'
LAYOUTS = {
    "rows": "up.weight: [out: a*b balanced]\ndown.weight: [in: a*b balanced]",
    "rows of unequal sizes": "up.weight: [out: a*b sizes(1, 2, 3, 4)]\ndown.weight: [in: a*b sizes(1, 2, 3, 4)]",
    "rows over one axis": "up.weight: [out: b]\ndown.weight: [in: b]",
    "rows and biases": "up {\nweight: [out: b]\nbias: [b]\n}\ndown.weight: [in: b]",
    "blocks": "up.weight: [out: b blocks(5)]\ndown.weight: [in: b blocks(5)]",
    "blocks and biases": "up {\nweight: [out: b blocks(5)]\nbias: [b blocks(5)]\n}\ndown.weight: [in: b blocks(5)]",
    "both dims": "up.weight: [out: a, in: b]\ndown.weight: [out: b, in: a]",
    "the first alone": "up.weight: [out: a*b balanced]",
    "the first alone, by its inputs": "up.weight: [in: b]",
    "the last alone": "down.weight: [out: a*b balanced]",
    "the last alone, by its inputs": "down.weight: [in: a*b balanced]",
    "biases alone": "{up,down}.bias: [b]",
    "a bias beside inputs": "up {\nweight: [in: b]\nbias: [b]\n}",
    "across": "up.weight: [out: a]\ndown.weight: [in: b]",
    "other pieces": "up.weight: [out: a*b sizes(1, 2, 3, 4)]\ndown.weight: [in: a*b sizes(4, 3, 2, 1)]",
    "a table's rows": "embed.weight: [a*b, -]",
    "a table's rows over one axis": "embed.weight: [b, -]",
    "a table's columns": "embed.weight: [-, b]",
    "a table's rows in blocks": "embed.weight: [b blocks(2), -]",
    "a norm": "norm.weight: [b]",
    "a norm in blocks": "norm {\nweight: [b blocks(3)]\nbias: [b blocks(3)]\n}",
    "placed by hand": 'up.weight: grid(splits=(2, 2), placements=["rank:0-3/cpu"])',
    "chunks": f"up.weight: {CHUNKS}",
    "chunks of a table": f"embed.weight: {CHUNKS}",
}


def _stepping(plan, make):
    torch.manual_seed(0)
    model = st.shard_module(make(), plan)
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)

    def step():
        local_of(model(ids)).sum().backward()  # the end of the last layer: what comes after is nobody's
        for param in model.parameters():
            param.grad = None

    return step


def _said(plan, make, rank=0):
    resolved = resolve(plan, model_info(make()))
    assert not resolved.errors, resolved.errors[0]
    return resolved, Counter(calls_of(step_collectives(resolved, batch=BATCH, seq=SEQ, dtype="float32", rank=rank)))


MODELS = {"linear": Pair, "no biases": lambda: Pair(bias=False), "conv1d": lambda: Pair(Conv1D)}


def _plan(name: str, model: str):
    text = LAYOUTS[name]
    if model == "no biases":
        text = text.replace("bias:", "optional bias:").replace("{up,down}.optional bias", "optional {up,down}.bias")
    return load_plan(f"{HEAD}{text}\n", world=4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_call_of_an_operator_is_listed(name, model):
    plan = _plan(name, model)
    ran = noted(4, lambda: _stepping(plan, MODELS[model]))
    resolved, said = _said(plan, MODELS[model])
    assert said == Counter(ran)
    left = ["down"] if name in ("both dims", "the last alone") or (name, model) == ("biases alone", "linear") else []
    assert [each.where for each in uncounted(resolved)] == left or (name, model) == ("biases alone", "conv1d")


@pytest.mark.parametrize("trains", ["embed", "norm", "up", "down.bias"])
@pytest.mark.parametrize("name", ["rows", "blocks", "both dims", "a table's columns", "placed by hand"])
def test_what_asks_for_no_gradient_sends_none(name, trains):
    plan = _plan(name, "linear")
    frozen = partial(_frozen, trains)
    ran = noted(4, lambda: _stepping(plan, frozen))
    assert _said(plan, frozen)[1] == Counter(ran)


def _frozen(trains):
    model = Pair()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith(trains))
    return model


@pytest.mark.parametrize("lines", ["", "store **: flat(a)\n"])
@pytest.mark.parametrize("name", [name for name, text in LAYOUTS.items() if not re.search(r"\ba\b|rank:", text)])
def test_along_axes_of_data_gradients_are_averaged_besides(name, lines):
    plan = load_plan(f"{HEAD}data a\n{LAYOUTS[name]}\n{lines}", world=4)
    ran = noted(4, lambda: _stepping(plan, Pair))
    assert _said(plan, Pair)[1] == Counter(ran)


def _on_gloo(name, model):
    plan = _plan(name, model)
    step = _stepping(plan, MODELS[model])
    step()
    with handed_over() as ran:
        step()
    assert _said(plan, MODELS[model], dist.get_rank())[1] == Counter(ran)


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_listed_is_what_processes_send(world, name):
    world(_on_gloo, 4, name=name, model="conv1d" if name == "both dims" else "linear")
