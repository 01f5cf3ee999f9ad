"""The model that a command checks a plan against: from its dims file, a safetensors header, or a module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.plan.dims import model_from_dims
from shardtensor.plan.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.reading import read_plan
from shardtensor.plan.sources import PACKAGED


def model_of(
    plan: Plan,
    *,
    config: Mapping[str, Any],
    config_source: str = "config.json",
    safetensors: str | Path | None = None,
    module: str | None = None,
) -> Model:
    """Return the names and shapes of the tensors that a plan is for. Imports torch only for a `module`.

    Args:
        plan: whose ``dims`` lines, or whose file ``NAME.dims.shard``, say them when nothing else does.
        config: the keys of the model's config.json.
        safetensors: an index, or a file, whose header says them.
        module: ``package.module:function``; what it returns is the model.

    Raises:
        SpecError: nothing says them.
    """
    if module is not None:
        return attrs.evolve(_from_module(module), config=config)
    named = _from_dims(plan, config, config_source)
    if safetensors is None:
        if named is None:
            files = ", ".join(dict.fromkeys(path.name for path in _dims_files(plan)))
            raise SpecError(
                "nothing says which tensors the model has",
                {"looked for": files or "a file of dims"},
                ["give --safetensors model.safetensors.index.json", "give --module package.module:function"],
                code="E301",
            )
        return named
    from shardtensor.plan.safetensors_shapes import model_from_safetensors

    model = model_from_safetensors(Path(safetensors))
    known = {} if named is None else named.by_name
    tensors = tuple(
        attrs.evolve(tensor, dims=known[tensor.name].dims, is_buffer=known[tensor.name].is_buffer)
        if tensor.name in known and tensor.dims is None and len(known[tensor.name].shape) == len(tensor.shape)
        else tensor
        for tensor in model.tensors
    )
    return attrs.evolve(model, tensors=tensors, config=config)


def _from_dims(plan: Plan, config: Mapping[str, Any], config_source: str) -> Model | None:
    if plan.dims:
        return attrs.evolve(model_from_dims(plan), config=config)
    path = next((path for path in _dims_files(plan) if path.is_file()), None)
    if path is None:
        return None
    known = set(re.findall(r"^param\s+(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    params = {name: value for name, value in plan.params.items() if name in known}
    dims = read_plan(path, config=config, params=params, config_source=config_source)
    return attrs.evolve(model_from_dims(dims), config=config)


def _dims_files(plan: Plan) -> list[Path]:
    """Where the dims of a plan may stand: beside each of its files, the plan's own first."""
    found = []
    for source in plan.sources:
        name = f"{source.file.removesuffix('.shard')}.dims.shard"
        found += [Path(name), PACKAGED / name]
    return found


def _from_module(text: str) -> Model:
    package, _, name = text.partition(":")
    try:
        build = getattr(import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"--module {text} is not there", {"found": str(error)}, "write package.module:function", code="E303"
        ) from None
    from shardtensor.sharding.model_info import model_info

    return model_info(build())
