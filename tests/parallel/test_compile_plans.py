"""A module sharded by a plan compiles, in one graph where no ShardedTensor is met, and computes what it did before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_plans import FAMILIES, plan_for
from harness import FULL, device
from harness.tiny.llama import LlamaForCausalLM
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import shardtensor as st
from shardtensor.comm.process_group import as_group

SP = {"tp": 2, "sp": True}


def sharded(plan: str, family: str, params: dict[str, Any], checkpoints: bool) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = (LlamaForCausalLM(layers=1) if family == "llama" else FAMILIES[family].make()).to(device())
    st.shard_module(module, plan_for(plan, family, as_group().size, **params))
    if checkpoints:
        apply_activation_checkpointing(module, check_fn=lambda part: type(part).__name__.endswith("DecoderLayer"))
    return module


def step(module: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """The loss and every gradient, which are taken away."""
    loss = run()
    loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    found = [loss.detach(), *((g._local if isinstance(g, st.ShardedTensor) else g).clone() for g in grads)]
    module.zero_grad()
    return found


def same(plan: str, family: str, params: dict[str, Any], fullgraph: bool, part: str = "", checkpoints: bool = False):
    """Two steps of a module, compiled as a whole or in part, against itself uncompiled; the second compiles nothing."""
    module, loss = sharded(plan, family, params, checkpoints), FAMILIES[family].loss
    inner = module.get_submodule(part)
    inner.compile(fullgraph=fullgraph, backend="aot_eager")
    compiled = inner._compiled_call_impl
    for seed in range(2):
        batch = FAMILIES[family].batch(2, torch.Generator().manual_seed(seed)).to(device())
        found = []
        for inner._compiled_call_impl in (compiled, None):
            with torch._dynamo.config.patch(error_on_recompile=bool(seed)):
                found.append(step(module, lambda batch=batch: loss(module, batch)))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(0.5)  # new values are seen


@pytest.mark.parametrize(
    ("plan", "family", "params", "part", "checkpoints"),
    [
        ("llama", "llama", {"tp": 2}, "model", False),
        *(
            *((plan, plan, {}, "", False) for plan in ("bert", "mlp", "vit")),
            ("llama", "llama", SP, "model", torch.__version__ >= (2, 13)),  # before, no graph takes such a checkpoint
            ("llama", "llama_tied", SP, "model", False),
            ("llama", "llama", {"tp": 1}, "model", False),
            ("gpt2", "gpt2", {}, "transformer", False),
        )[: 7 * FULL],
    ],
    ids=str,
)
def test_what_meets_plain_values_is_one_graph(world, plan, family, params, part, checkpoints):
    world(same, 2, plan=plan, family=family, params=params, fullgraph=True, part=part, checkpoints=checkpoints)


@pytest.mark.parametrize(
    ("plan", "family", "params", "checkpoints"),
    [
        ("fsdp", "llama", {}, False),
        *(("llama", "llama", SP, True), ("mixtral", "mixtral", {"tp": 2, "ep": 1}, False))[: 2 * FULL],
        *((plan, plan, {}, False) for plan in ("gpt2", "t5", "vocab") if FULL),
    ],
    ids=str,
)
def test_with_breaks_a_whole_model_compiles(world, plan, family, params, checkpoints):
    """Also one whose loss takes cut logits, whose experts are dealt, or whose parameters are gathered."""
    world(same, 2, plan=plan, family=family, params=params, fullgraph=False, checkpoints=checkpoints)


def refused(plan: str, family: str, params: dict[str, Any], way_out: str) -> None:
    module = torch.compile(sharded(plan, family, params, False), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=way_out):
        FAMILIES[family].loss(module, FAMILIES[family].batch(2, torch.Generator().manual_seed(0)).to(device()))


@pytest.mark.parametrize(
    ("plan", "family", "params", "way_out"),
    [
        ("llama", "llama", {"tp": 2}, "compile what stands before the head"),
        ("fsdp", "llama", {}, "compile it by itself"),
        ("mixtral", "mixtral", {"tp": 2, "ep": 1}, "how many rows an expert gets is data"),
    ],
    ids=["logits", "gathered", "experts"],
)
def test_one_graph_of_what_no_graph_takes_is_refused_with_the_way_out(world, plan, family, params, way_out):
    world(refused, 2, plan=plan, family=family, params=params, way_out=way_out)
