"""The tensors of a model from the `dims` lines of a plan and of `*.dims.shard` files beside it; no model needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.plan.line import Dims
from shardtensor.plan.match.patterns import CHOICE, expanded
from shardtensor.plan.models.model import BYTES, Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.reading import plan_error, read_plan
from shardtensor.plan.text.sources import PACKAGED
from shardtensor.spec.diagnostics import Source

MAX_TENSORS = 2**20
WAYS_ON = (
    "for this plan or `fsdp`, give the model, --module package.module:function",
    "or its file, --safetensors model.safetensors.index.json",
    "or make a plan of its own: `shardtensor import hf config.json > plan.shard`",
)
"""Fixes for a plan whose own lines are for another model family: other sources of tensors."""
_PARAM = re.compile(r"^[ \t]*param[ \t]+(\w+)", re.MULTILINE)


def model_from_dims(plan: Plan, config_source: str = "config.json") -> Model:
    """Return the tensors that a plan's ``dims`` lines name, for its configuration and parameters.

    The file ``llama.dims.shard`` beside ``llama.shard``, or beside a plan that it includes, is read too.

    Args:
        plan: as read, with the configuration of the model.
        config_source: the name of the configuration in messages.

    Raises:
        SpecError: no line names tensors, two lines have different sizes for one tensor, or a file has an error.

    Example:
        >>> from shardtensor.plan.text.reading import read_plan
        >>> plan = read_plan("shard 1\\nlet L = 2\\ndims h.<L>.{q,k}.weight (out = 4, in = 8)\\n")
        >>> [(tensor.name, tensor.shape) for tensor in model_from_dims(plan).tensors][:2]
        [('h.0.q.weight', (4, 8)), ('h.0.k.weight', (4, 8))]
    """
    lines = list(plan.dims)
    for source in filter(None, map(source_beside, plan.sources)):
        declared = set(_PARAM.findall(source.text))
        params = {name: value for name, value in plan.params.items() if name in declared}
        lines += _read(source, plan.config, plan.world, params, config_source).dims
    refuse_quantised(plan.config, config_source)
    if not lines:
        raise no_tensors(plan)
    return Model(_tensors(lines, dtype_of(plan.config)), source=config_source, config=plan.config)


def no_tensors(plan: Plan, facts: Mapping[str, object] | None = None, ways: Iterable[str] = ()) -> SpecError:
    """Return the error (E301) that no line names the tensors of a plan, with more `facts` and fixes (`ways`)."""
    files = [source.file for source in plan.sources if not source.file.startswith("<")]
    return SpecError(
        "nothing says which tensors the model has",
        {"looked for": ", ".join(map(_beside, files)) or "dims lines", **(facts or {})},
        [
            *ways,
            'include the lines of a family, as in `include "llama.dims.shard"`',
            "give --safetensors model.safetensors.index.json",
            "give --module package.module:function",
        ],
        code="E301",
    )


def refuse_quantised(config: Mapping[str, Any], config_source: str) -> None:
    """Raise SpecError (E106) for a quantised model: its config.json does not describe its packed tensors."""
    if config.get("quantization_config"):
        raise SpecError(
            "the tensors of a quantised model are not known from its config.json",
            {"found": f"quantization_config in {config_source}"},
            WAYS_ON[:2],
            code="E106",
        )


def other_family(
    sources: Iterable[Source], config: Mapping[str, Any], world: int, config_source: str
) -> SpecError | None:
    """Return the error that the tensors beside some plans are for another family than a configuration; None if not.

    Check this first for a plan that cannot be read for a configuration: its missing keys do not matter then.
    """
    for source in filter(None, map(source_beside, sources)):
        try:
            _read(source, config, world, {}, config_source)
        except SpecError as error:
            if error.code == "E106":
                return error
    return None


def _read(source: Source, config: Mapping[str, Any], world: int, params: Mapping[str, Any], config_source: str) -> Plan:
    """Parse a file of dims. If it is for another family the error has only that fault, with `WAYS_ON`."""
    try:
        return read_plan(source, config=config, world=world, params=params, config_source=config_source)
    except SpecError as error:
        if not error.findings:
            raise
        ways = "; ".join(WAYS_ON)
        of_family = [attrs.evolve(each, fix=ways) for each in error.findings if each.code == "E106"]
        raise plan_error(of_family or error.findings) from None


def source_beside(plan: Source) -> Source | None:
    """Return the file with names and sizes beside a plan; None if there is none."""
    name = plan.file
    if not name.endswith(".shard") or name.endswith(".dims.shard"):
        return None
    for path in (Path(name), PACKAGED / name):  # packaged files are named by their place in the package
        beside = Path(_beside(str(path)))
        if path.is_file() and beside.is_file() and path.read_text(encoding="utf-8") == plan.text:
            return Source(beside.read_text(encoding="utf-8"), _beside(name))
    return None


def _beside(name: str) -> str:
    return f"{name.removesuffix('.shard')}.dims.shard"


def _tensors(lines: list[Dims], dtype: str) -> tuple[TensorInfo, ...]:
    found: dict[str, tuple[TensorInfo, Dims]] = {}
    total = 0
    for line in lines:
        total += prod(int(number or options.count(",") + 1) for options, number in CHOICE.findall(line.pattern))
        if total > MAX_TENSORS:
            raise _located(line, f"these are more than {MAX_TENSORS} tensors")
    for _, run in groupby(lines, lambda line: line.pattern.partition(">")[0] if "<" in line.pattern else id(line)):
        for name, line in _layer_by_layer(list(run)):
            tensor = TensorInfo(name, line.sizes, line.names, dtype, blocks=line.blocks)
            other, place = found.setdefault(name, (tensor, line))
            if other != tensor:
                raise _located(line, f"{name} is ({_text(tensor)}) here, and ({_text(other)}) at {place.origin}")
    return tuple(tensor for tensor, _ in found.values())


def _text(tensor: TensorInfo) -> str:
    sizes = dict(zip(tensor.dims or (), tensor.shape, strict=True)) | dict(tensor.blocks)
    return ", ".join(f"{dim}={size}" for dim, size in sizes.items())


def _layer_by_layer(lines: list[Dims]) -> Iterator[tuple[str, Dims]]:
    """Yield the names of lines that begin with the same numbered modules, in the order of a model: layer 0 first."""
    first = re.search(r"<(\d+)>", lines[0].pattern)
    for number in range(int(first[1])) if first else [0]:
        for line in lines:
            pattern = re.sub(r"<\d+>", str(number), line.pattern, count=1)
            for name in expanded(pattern):
                yield name, line


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the element type in a configuration: ``dtype`` in newer ones, ``torch_dtype`` in older ones."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return name if name in BYTES else "float32"


def _located(line: Dims, fault: str) -> SpecError:
    if line.origin is None:
        return SpecError(fault)
    return line.origin.source.error("E206", line.origin.span, fault, fix="keep one of the two lines")
