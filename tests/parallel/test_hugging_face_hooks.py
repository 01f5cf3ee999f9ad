"""Hooks of plans for models of transformers: latent attention, experts of which one gives back what it gets, experts
with biases, state spaces, biases of scores."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.plan.text.reading import read_plan

HEADS, NOPE, ROPE, VALUE, RANK, EMBED, HIDDEN, EXPERTS = 4, 3, 2, 5, 6, 8, 12, 2


class LatentAttention(nn.Module):
    """Keys and values of all heads from one latent; beside it a part of the keys that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = nn.Linear(EMBED, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(EMBED, RANK + ROPE)
        self.kv_a_layernorm = nn.LayerNorm(RANK)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, EMBED, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q = self.q_b_proj(x).view(batch, length, -1, NOPE + ROPE).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([RANK, ROPE], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, -1, NOPE + VALUE).transpose(1, 2)
        nope, value = kv.split([NOPE, VALUE], dim=-1)
        shared = shared.unsqueeze(1).expand(-1, nope.shape[1], -1, -1)
        scores = q @ torch.cat([nope, shared], dim=-1).transpose(-1, -2)
        return self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1))


class Experts(nn.Module):
    """Experts in stacked tensors, each a gate and an up in one; the last choice is to give the token back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, EMBED) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, EMBED, HIDDEN) / 3)
        self.identity_expert = nn.Identity()

    def forward(self, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        total = top_k_weights[..., -1:] * self.identity_expert(hidden_states)
        for e in range(EXPERTS):
            gate, up = (hidden_states @ self.gate_up_proj[e].T).chunk(2, dim=-1)
            total = total + top_k_weights[..., e : e + 1] * ((gate.sigmoid() * up) @ self.down_proj[e].T)
        return total


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = LatentAttention()
        self.gate = nn.Linear(EMBED, EXPERTS + 1, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(x)
        return x + self.experts(x, self.gate(x).softmax(-1))


TP_PLAN = {
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
    "experts.identity_expert": "moe_identity_expert",
    "experts": "moe_tp_experts",
}


class StateSpace(nn.Module):
    """As Mamba has it: parameters of modules that are not called, and a sum that each rank uses for its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(EMBED, 2 * HIDDEN, bias=False)
        self.conv1d = nn.Conv1d(HIDDEN, HIDDEN, 2, padding=1, groups=HIDDEN)
        self.x_proj = nn.Linear(HIDDEN, 2 * RANK)
        self.dt_proj = nn.Linear(RANK, HIDDEN)
        self.states = nn.Parameter(torch.randn(HIDDEN, RANK))
        self.out_proj = nn.Linear(HIDDEN, EMBED)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, gate = self.in_proj(x).transpose(1, 2).chunk(2, dim=1)
        kernel = self.conv1d.weight
        states = F.conv1d(states, kernel, self.conv1d.bias, padding=1, groups=len(kernel))[..., :-1].transpose(1, 2)
        step, b = self.x_proj(states).chunk(2, dim=-1)
        steps = F.softplus(step @ self.dt_proj.weight.T + self.dt_proj.bias)
        return self.out_proj(steps * (b @ self.states.T) * states * gate.transpose(1, 2).sigmoid())


STATE_SPACE = """shard 1
include "std/styles.shard"
include "std/hugging_face.shard"
mesh (tp = world)

use hf_local_params()
in_proj: colwise(tp, blocks=2)
in_proj {
    in: replicate
}
conv1d.{weight,bias}: [tp, ...]
x_proj {
    weight: [-, tp]
    bias: replicate
    in:  [..., tp]
    out: partial(tp) -> replicate grad partial(tp)
}
dt_proj.{weight,bias}: [tp, ...]
states: [tp, -]
out_proj: rowwise(tp)
"""


class OwnProducts(nn.Module):
    """Columns and rows with biases, multiplied by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EMBED, HIDDEN))
        self.up_bias = nn.Parameter(torch.randn(HIDDEN))
        self.down = nn.Parameter(torch.randn(HIDDEN, EMBED))
        self.down_bias = nn.Parameter(torch.randn(EMBED))
        self.unused = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.up + self.up_bias).sigmoid() @ self.down + self.down_bias


OWN_PRODUCTS = """shard 1
include "std/hugging_face.shard"
mesh (tp = world)

before: replicate
products {
    up:        [-, tp]
    up_bias:   [tp]
    down:      [tp, -]
    down_bias: replicate
    in:  replicate grad partial(tp)
    out: partial(tp) -> replicate
    use hf_local_params(added=tp)
}
"""


class ScoresWithBiases(nn.Module):
    """As BLOOM has it: (batch * heads, queries, keys), with a bias of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qk = nn.Linear(EMBED, 2 * EMBED)
        self.dense = nn.Linear(EMBED, EMBED)

    def forward(self, x: torch.Tensor, alibi: torch.Tensor | None) -> torch.Tensor:
        batch, length = x.shape[:2]
        heads = self.qk(x).view(batch, length, self.num_heads, 2, -1).permute(3, 0, 2, 1, 4).flatten(1, 2)
        scores = heads[0] @ heads[1].transpose(1, 2)
        weights = (scores if alibi is None else scores + alibi).softmax(-1)
        values = (weights @ heads[1]).view(batch, self.num_heads, length, -1)
        return self.dense(values.transpose(1, 2).flatten(2))


class WithBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = ScoresWithBiases()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slopes = torch.arange(1, HEADS + 1, device=x.device, dtype=x.dtype).repeat(len(x))
        alibi = slopes[:, None, None] * torch.arange(x.shape[1], device=x.device)
        return self.attention(x, alibi=alibi) + self.attention(x, None)


WITH_BIASES = """shard 1
include "std/styles.shard"
include "std/hugging_face.shard"
mesh (tp = world)

attention {
    qk:    hf_colwise(tp, unit=4)
    dense: rowwise(tp, unit=2)
    local num_heads: [tp]
    use hf_alibi_of_heads(tp)
}
"""


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(EMBED, EMBED)
        self.products = OwnProducts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products(self.before(x))


OWN = {
    "state space": (StateSpace, STATE_SPACE),
    "own products": (Inside, OWN_PRODUCTS),
    "biases of scores": (WithBiases, WITH_BIASES),
}


def off_the_dense_gradients(instead: tuple[str, str] = ("", ""), name: str = "") -> float:
    """How far gradients are from the dense ones, as a part of these; results are compared on the way."""
    make, text = OWN[name] if name else (Layer, st.plan_text_from_hf(TP_PLAN))
    torch.manual_seed(0)
    oracle = make().double().to(device())
    module = copy.deepcopy(oracle)
    text = text.replace(*instead)
    st.shard_module(module, read_plan(text, config={"qk_rope_head_dim": ROPE}, world=as_group().size))
    module = copy.deepcopy(module)  # it keeps its hooks
    x = torch.randn(2, 3, EMBED, dtype=torch.float64, device=device())
    want, got = oracle(x), module(x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    want.square().sum().backward()
    got.square().sum().backward()
    found = dict(module.named_parameters())
    off = 0.0
    for name, parameter in oracle.named_parameters():
        grad = found[name].grad
        grad = grad.full_tensor() if isinstance(grad, st.ShardedTensor) else grad
        off = max(off, float((grad - parameter.grad).norm() / parameter.grad.norm()))
    return off


@pytest.mark.worlds("sim", "gloo")
def test_an_imported_plan_gives_the_dense_results(world):
    assert max(world(off_the_dense_gradients, 2)) < 1e-9


@pytest.mark.worlds("sim")
def test_the_shared_part_of_keys_needs_its_sum(world):
    word = "hf_mla_kv_a_proj(tp, rope=config.qk_rope_head_dim)"
    assert max(world(off_the_dense_gradients, 2, instead=(word, "hf_whole()"))) > 0.01


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", OWN)
def test_modules_that_use_parameters_themselves_give_the_dense_results(world, size, name):
    assert max(world(off_the_dense_gradients, size, name=name)) < 1e-9


@pytest.mark.worlds("sim")
def test_a_sum_that_ranks_use_apart_needs_the_sum_of_its_gradient(world):
    """`check` finds this in a step: no text shows how the module's code uses the sum."""
    assert max(world(off_the_dense_gradients, 2, name="state space", instead=(" grad partial(tp)", ""))) > 0.01


@pytest.mark.worlds("sim")
def test_biases_of_scores_are_for_attention_that_takes_them(world):
    def told() -> str:
        with pytest.raises(st.PlanError) as caught:
            st.shard_module(
                Layer(),
                read_plan(
                    """shard 1
include "std/hugging_face.shard"
mesh (tp = world)

gate {
    use hf_alibi_of_heads(tp)
}
unmatched: replicate
""",
                    world=2,
                ),
            )
        return str(caught.value)

    assert "hf_alibi_of_heads" in world(told, 2)[0]
