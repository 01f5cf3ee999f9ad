"""The public models that harness/record_models.py recorded, as `Model`s."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import expanded, model_from_dims
from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo, kind_named
from shardtensor.plan.models.safetensors_shapes import with_dim_names
from shardtensor.plan.resolved import Resolved

MODELS = Path(__file__).parent / "models"
NAMES = sorted(path.parent.name for path in MODELS.glob("*/tensors.json"))


def config_path(name: str) -> Path:
    return MODELS / name / "config.json"


@cache
def recorded(name: str) -> Model:
    """One recorded model; those of published files have no modules."""
    said = json.loads((MODELS / name / "tensors.json").read_text())
    modules = {path: _module(**found) for path, found in unfolded(said["modules"])}
    tensors = tuple(_tensor(full, text, modules) for full, text in unfolded(said["tensors"]))
    config = json.loads(config_path(name).read_text())
    return Model(tensors, said["source"], modules, tuple(map(tuple, said["tied"])), config)


def unfolded(section: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for folded, value in section.items():
        for name in expanded(re.sub(r"\{(\d+)\.\.(\d+)\}", _numbers, folded)):
            yield name, value


def _numbers(run: re.Match[str]) -> str:
    return "{" + ",".join(map(str, range(int(run[1]), int(run[2]) + 1))) + "}"


def _module(forward: str, **rest: Any) -> ModuleInfo:
    return ModuleInfo(rest.pop("class"), tuple(forward.split()), rest)


def _tensor(full: str, text: str, modules: dict[str, ModuleInfo]) -> TensorInfo:
    dtype, *words = text.split()
    path, _, name = full.rpartition(".")
    kind = kind_named(modules[path].class_name) if path in modules else None
    shape = tuple(int(word) for word in words if word.isdigit())
    return TensorInfo(full, shape, kind.dims.get(name) if kind else None, dtype, "buffer" in words)


# plan, recorded model, world, parameters
FROM_DIMS = [
    ("llama", "llama2-7b", 8, {}),
    ("llama", "llama3-8b", 16, {"tp": 8}),
    ("llama", "llama3.1-405b", 16, {"tp": 16}),
    ("llama", "mistral-7b", 8, {"tp": 4}),
    ("llama", "qwen2-7b", 4, {"tp": 4}),
    ("llama", "qwen2-0.5b", 2, {"tp": 2}),
    ("llama_2d", "llama3-8b", 16, {}),
    ("fsdp", "llama3-8b", 8, {}),
    ("gpt2", "gpt2", 4, {}),
    ("bert", "bert-base", 4, {}),
    ("bert", "minilm", 4, {}),
    ("t5", "t5-small", 4, {}),
    ("t5", "flan-t5-small", 2, {}),
    ("mixtral", "mixtral-8x7b", 8, {}),
    ("mixtral", "mixtral-8x7b-file", 16, {"published": True}),
    ("vit", "vit-base", 4, {}),
    ("vit", "vit-base-file", 4, {"published": True}),
]
"""Where config.json alone is enough."""

OTHERS = [
    ("bert", "bert-base-mlm", 4, {}),
    ("gpt2", "gpt2-file", 4, {}),
    ("vit", "vit-base-classifier", 4, {}),
    *(("fsdp", name, 4, {}) for name in NAMES if name != "llama3-8b"),
]
"""Whose tensors come from a file or a module."""

MORE_WORLDS = [
    ("llama", "llama3-8b", 16, {"tp": 16, "sp": True}),  # kv heads on two ranks each
    ("llama", "llama3-8b", 8, {"tp": 8, "sp": True}),
    ("llama", "llama3-8b", 4, {"tp": 1}),
    ("llama", "llama3.1-405b", 16_384, {"tp": 8, "sp": True}),
    ("llama_2d", "llama3.1-405b", 64, {"tp": 16}),
    ("gpt2", "gpt2", 12, {}),
    ("bert", "minilm", 8, {}),  # heads do not divide: the written fallback
    ("mixtral", "mixtral-8x7b", 64, {"tp": 8, "ep": 8}),
    ("mixtral", "mixtral-8x7b", 8, {"tp": 1, "ep": 8}),
    ("mixtral", "mixtral-8x7b", 4, {"tp": 4, "ep": 1}),
    ("fsdp", "mixtral-8x7b", 64, {"copies": 2}),
]


def case_id(value: object) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{key}={found}" for key, found in value.items()) or "-"
    return None


def resolved_for(plan: str, model: str, world: int, params: dict[str, object], *, from_dims: bool = False) -> Resolved:
    """A shipped plan matched to a recorded model, or to what its `dims` lines say of it."""
    read = load_plan(plan, config=config_path(model), world=world, **params)
    real = recorded(model)
    if not real.modules and plan != "fsdp":  # from a file, which knows no names of dims
        real = with_dim_names(real, model_from_dims(read))
    return resolve(read, model_from_dims(read) if from_dims else real)
