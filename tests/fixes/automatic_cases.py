"""Errors of the plan "auto", of imported plans and of LoRA layers; modules here stand for those of other packages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import shardtensor as st
from fixes.case import Act, Case, mlp


class Configured(nn.Module):
    """Made of a configuration, as modules of transformers are; no part of it is known."""

    def __init__(self, model_type: str = "odd") -> None:
        super().__init__()
        self.config = SimpleNamespace(to_dict=lambda: {"model_type": model_type})
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class Config:
    """A configuration of a type that no package knows."""

    model_type, vocab_size = "odd", 8

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type, "vocab_size": self.vocab_size}

    def get_text_config(self) -> Config:
        return self


class Plain(nn.Module):
    """A model like those of transformers, without a plan."""

    main_input_name = "input_ids"

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.config = config or Config()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))])

    @classmethod
    def _from_config(cls, config: Config, **options: Any) -> Plain:
        return cls(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.embedding(input_ids))


class Adapted(nn.Module):
    """A layer with LoRA layers, and with one more parameter beside them."""

    def __init__(self, has_more: bool) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 8)
        self.lora_A, self.lora_B = (nn.ModuleDict({"a": nn.Linear(*shape, bias=False)}) for shape in ((4, 2), (2, 8)))
        if has_more:
            self.lora_magnitude_vector = nn.ParameterDict({"a": nn.Parameter(torch.ones(8))})


def sharded(make: Any, plan: Any) -> Act:
    return lambda: st.shard_module(make(), plan)


def from_file() -> None:
    """A plan in a file is read for a configuration of any type."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "own.shard")
        path.write_text("shard 1\nmesh (tp = world)\nunmatched: replicate\n")
        st.load_plan(path, config={"model_type": "odd"}, world=2)


def fully(module: Any) -> Act:
    return lambda: st.shard_module(module(), st.load_plan("fsdp", world=2))


COLUMN = {"weight": "[tp, -]", "bias": "[tp]", "out": "[..., tp] -> replicate"}
UNSHARED = partial(Adapted, has_more=True)
LORA = st.Plan.from_rules({"0": COLUMN, "unmatched": "replicate"}, "tp=2")
OWN = st.Plan.from_rules({"unmatched": "replicate"}, "tp=2")

CASES: dict[str, Case] = {
    "a type without a plan of the package": Case(
        lambda: st.load_plan("auto", config={"model_type": "odd"}, world=2),
        {
            "give the path of a plan": from_file,
            'let `shard_module(model, "auto")` derive one from the model': sharded(Plain, "auto"),
        },
    ),
    "no configuration": Case(
        sharded(mlp, "auto"),
        {
            "write a plan, or rules": sharded(mlp, {"0.weight": "[tp, -]"}),
            'shard it fully with the plan "fsdp"': fully(mlp),
        },
    ),
    "modules that give no plan": Case(
        sharded(Configured, "auto"),
        {"write a plan for it": sharded(Configured, OWN), 'shard it fully with the plan "fsdp"': fully(Configured)},
    ),
    "adapters of another kind": Case(
        sharded(lambda: nn.Sequential(UNSHARED()), LORA),
        {
            "add LoRA layers without more parameters": sharded(lambda: nn.Sequential(Adapted(False)), LORA),
            "merge them: `model.merge_and_unload()`": sharded(lambda: nn.Sequential(nn.Linear(4, 8)), LORA),
        },
    ),
}
