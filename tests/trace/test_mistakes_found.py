"""What no reading tells of a wrong plan, or of a model that is not as its plan takes it to be, one step shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from harness.tiny.attention import attend, heads_of
from harness.tiny.bert import BertIntermediate, BertSelfAttention
from harness.tiny.gpt2 import Conv1D, GPT2Attention
from harness.tiny.llama import LlamaAttention, LlamaMLP
from harness.tiny.mlp import MLP
from harness.tiny.model import tiny_model
from plan.recorded_models import config_path
from plan.test_plan_mutations import LOUD, MUTATIONS, NUMERIC, SPECS, Mutation
from torch import nn

from shardtensor.plan.findings.checking import OF_FLOWS
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.trace.check import check_numeric

OF_PLANS = {name: each for name, each in MUTATIONS.items() if each.code in (NUMERIC, LOUD)}
"""Of which reading tells nothing."""

AT = {
    "a stream enters products as it is": "layers.*.mlp",
    "a sum is not dealt out": "self_attn.o_proj",
    "the head does not gather": "lm_head",
    "inputs of a row product stay whole": ("mlp.down_proj", "mlp.up_proj", "mlp.gate_proj"),
    "inputs of a row product are gathered": ("mlp.down_proj", "mlp.up_proj", "mlp.gate_proj"),
    "a row product is cut along its outputs": "mlp.down_proj",
    "logits leave cut, and no loss takes them": "",
    "attention ends in a column product": "self_attn.o_proj",
    "attention ends in a column product, beside a stream": "self_attn.o_proj",
    "attention of GPT-2 ends in a column product": "attn.c_proj",
    "attention of T5 ends in a column product": "SelfAttention.o",
    "the mlp of GPT-2 begins with a row product": "mlp.c_fc",
    "the mlp of GPT-2 begins whole": "mlp.c_fc",
    "the attention of GPT-2 begins whole": "attn.c_attn",
    "a row product leaves cut features": "self_attn.o_proj",
    "a row product takes whole values": "self_attn.o_proj",
    "only one product of two is cut": "intermediate.dense",
    "a table is cut by features": "embed_tokens",
    "a sum is dealt out along another dim": "self_attn.o_proj",
    "a stream is gathered along another dim": "self_attn",
    "norms are cut among plain values": "ln_1",
    "a table of positions passes a ShardedTensor": "SelfAttention.relative_attention_bias",
    "a head says what enters it and not what leaves": "lm_head",
    "the last norm gathers what the head gathers": "lm_head",
    "the second input is not named": "EncDecAttention",
    "the first layer deals nothing out": "embed_tokens",
    "an attribute that counts heads is not said": "attention.self",
    "a whole product beside cut ones": "attention.output.dense",
    "a product before another is cut along its inputs": "mlp.up_proj",
    "a stream is not gathered": "",
}
"""The module that is named."""

RIGHT = "with this change the step gives the dense loss and gradients"


def told(plan: str, model: str, params: dict[str, Any], text: str, change: Callable[[nn.Module], Any]) -> list[Finding]:
    """What one step on a few ranks finds."""
    config = config_path(model) if model else None
    params = {"tp": 2, **params, **({"ep": 2} if plan == "mixtral" else {})}
    said = {"config": config, "world": 4 if plan == "mixtral" else params["tp"], **params}
    right = load_plan(plan, **said)
    resolved = resolve(load_plan(text, **said) if text else right, model_from_dims(right))
    tiny = tiny_model(text or plan, resolved, params)
    return list(check_numeric(tiny.plan, partial(changed, tiny.make, change)))


def changed(make: Callable[[], nn.Module], change: Callable[[nn.Module], Any]) -> nn.Module:
    module = make()
    for part in list(module.modules()):
        change(part)
    return module


def lines_of(findings: list[Finding]) -> list[str]:
    return [f.origin.source.text.splitlines()[f.origin.line - 1] for f in findings if f.origin is not None]


@pytest.mark.parametrize("name", OF_PLANS)
def test_a_mistake_is_found_at_its_module_with_a_change_that_mends_it(name):
    each: Mutation = OF_PLANS[name]
    text = (SPECS / f"{each.plan}.shard").read_text()
    params = {key: value for key, value in each.params.items() if key == "sp"}
    found = told(each.plan, each.model, params, text.replace(each.was, each.becomes, 1), lambda part: None)
    assert {finding.code for finding in found} == {"E405"}
    assert starred(found[0].tensor).endswith(AT[name])
    assert found[-1].notes[-1] == RIGHT


FLOWS = {name: each for name, each in MUTATIONS.items() if each.code in OF_FLOWS}
"""Found without a step; what mends them is found by steps."""

BY_THE_CHECK = (
    "the head is a row product",
    "routing weights meet partial sums",
    "no token is sent to experts",
    "experts are dealt along ranks with the same samples",
    "a stream is not gathered",
    "an in around a residual",
)
"""Those that no change of one rule mends among those tried in time: the finding keeps its own way out."""


@pytest.mark.parametrize("name", FLOWS)
def test_a_change_that_mends_a_wrong_flow_is_found_by_steps(name):
    each: Mutation = FLOWS[name]
    text = (SPECS / f"{each.plan}.shard").read_text()
    params = {key: value for key, value in each.params.items() if key in ("sp", "tp")}
    found = told(each.plan, each.model, params, text.replace(each.was, each.becomes, 1), lambda part: None)
    assert each.code in {finding.code for finding in found}
    assert all(finding.fix for finding in found)
    assert (found[-1].notes[-1:] == (RIGHT,)) or name in BY_THE_CHECK


# -- models ------------------------------------------------------------------------------------------------------------


class OwnProjection(nn.Module):
    """A product of nobody's class: its bias is added on every rank, before the sum."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + (0 if self.bias is None else self.bias)


def own_projection(part: nn.Module) -> None:
    if isinstance(part, MLP):
        part.fc2 = OwnProjection(part.fc2.weight, part.fc2.bias)


def transposed(part: nn.Module) -> None:
    if isinstance(part, MLP):
        part.fc1 = Conv1D(part.fc1.out_features, part.fc1.in_features)


class ScaledByHeads(BertSelfAttention):
    def forward(self, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
        return super().forward(hidden_states) / self.num_attention_heads


class NormedOverHeads(LlamaAttention):
    """Queries are divided by their length over all heads, of which a rank has some."""

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> tuple[torch.Tensor, None]:
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q = q / q.norm(dim=-1, keepdim=True)
        q, k, v = (heads_of(x, self.head_dim) for x in (q, k, v))
        k, v = (x.repeat_interleave(self.num_key_value_groups, 1) for x in (k, v))
        return self.o_proj(attend(q, k, v, causal=True)), None


class RepeatedOtherwise(LlamaAttention):
    """Key head i serves the queries i, i + kv, ...: not those that lie on its rank."""

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> tuple[torch.Tensor, None]:
        q, k, v = (heads_of(f(hidden_states), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (x.repeat(1, self.num_key_value_groups, 1, 1) for x in (k, v))
        return self.o_proj(attend(q, k, v, causal=True)), None


class ResidualInside(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.tanh()


class NormedInside(BertIntermediate):
    """Features are normalized where a rank has some of them."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).softmax(-1)


class Interleaved(GPT2Attention):
    """Queries, keys and values of a head lie side by side; the plan takes them for three blocks."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.c_attn(hidden_states)
        q, k, v = x.view(*x.shape[:2], self.num_heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        return self.c_proj(attend(q, k, v, causal=True))


def of_class(old: type[nn.Module], new: type[nn.Module]) -> Callable[[nn.Module], None]:
    def change(part: nn.Module) -> None:
        if type(part) is old:
            part.__class__ = new

    return change


@attrs.frozen
class OfModel:
    """A model that is otherwise than its plan takes it to be, and what stands on a line that is told."""

    plan: str
    model: str
    change: Callable[[nn.Module], Any]
    at: str


OF_MODELS = {
    "a weight lies transposed": OfModel("mlp", "", transposed, "in:  replicate"),
    "values are divided by the number of heads": OfModel(
        "bert", "minilm", of_class(BertSelfAttention, ScaledByHeads), "{query,key,value}: colwise"
    ),
    "queries are normalized over all heads": OfModel(
        "llama", "qwen2-0.5b", of_class(LlamaAttention, NormedOverHeads), "q_proj:     colwise"
    ),
    "key heads serve other queries": OfModel(
        "llama", "qwen2-0.5b", of_class(LlamaAttention, RepeatedOtherwise), "q_proj:     colwise"
    ),
    "a residual runs inside of an in": OfModel("llama", "qwen2-0.5b", of_class(LlamaMLP, ResidualInside), "along("),
    "features are normalized before the sum": OfModel(
        "bert", "minilm", of_class(BertIntermediate, NormedInside), "intermediate.dense:"
    ),
    "queries, keys and values are interleaved": OfModel(
        "gpt2", "gpt2", of_class(GPT2Attention, Interleaved), "c_attn: colwise"
    ),
}


@pytest.mark.parametrize("name", OF_MODELS)
def test_one_step_finds_what_is_otherwise_in_a_model(name):
    each = OF_MODELS[name]
    found = told(each.plan, each.model, {}, "", each.change)
    assert found, "it is told"
    assert any(each.at in line for line in lines_of(found)), [str(finding) for finding in found]


def test_a_projection_of_ones_own_may_add_its_bias_where_it_likes():
    """It works on ShardedTensors, whose products are summed before anything is added."""
    assert not told("mlp", "", {}, "", own_projection)


def test_thirty_and_more_mutations_are_told():
    assert len(MUTATIONS) + len(OF_MODELS) >= 30
