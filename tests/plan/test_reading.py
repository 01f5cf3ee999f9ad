"""Every example of the language's design is read, and means what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtensor.plan.reading import read_plan

EXAMPLES = Path(__file__).parent / "examples"
LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
}
CONFIGS = {
    "bert": {"num_attention_heads": 12, "hidden_size": 384},
    "gpt2": {"n_head": 12, "n_embd": 768},
    "llama": LLAMA,
    "llama.dims": LLAMA,
    "llama_2d": LLAMA,
    "mixtral": {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2},
    "t5": {"d_kv": 64, "num_heads": 8},
    "uneven": {"n_head": 25, "n_embd": 1600},
}


def example(name: str, world: int, **params: object):
    return read_plan(EXAMPLES / f"{name}.shard", config=CONFIGS.get(name, {}), world=world, params=params)


def said(plan, pattern: str, kind: str = "tensor", name: str = "") -> str:
    """What the lines of one pattern say."""
    lines = [line for line in plan.lines if (line.pattern, line.kind, line.name) == (pattern, kind, name)]
    return " | ".join(str(line.value) for line in lines)


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.shard")))
def test_every_example_is_read(name):
    plan = example(name, world={"llama_2d": 16, "mixtral": 8, "llama": 8}.get(name, 4))
    assert plan.lines or plan.dims
    assert all(line.origin is not None for line in plan.lines)
