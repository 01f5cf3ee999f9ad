"""The public models that harness/record_models.py recorded, as `Model`s."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from shardtensor.plan.dims import expanded
from shardtensor.plan.layer_kinds import kind_named
from shardtensor.plan.model import Model, ModuleInfo, TensorInfo

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
