"""The tensors of a model from the headers of its safetensors files: a few kilobytes each, and no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs

from shardtensor.errors import PlanError
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.models.model import BYTES, Model, TensorInfo

MAX_HEADER = 100_000_000
"""Bytes; what the format itself allows."""

DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""As safetensors names them -> as torch does."""


def model_from_safetensors(
    path: str | Path, dims: Model | None = None, config: Mapping[str, object] | None = None
) -> Model:
    """Return the tensors of a checkpoint, from headers alone.

    Files know no names of dims, no buffers and no ties. Tensors of whole numbers are taken as buffers, for they are
    not trained.

    Args:
        path: a ``.safetensors`` file; an index ``*.safetensors.index.json`` with its files beside it; or a folder that
            holds one of the two under its usual name.
        dims: gives the names of the dims, see `with_dim_names`.
        config: the keys of the model's config.json.

    Raises:
        PlanError: a file is not there or is no such file; the message names what was found.
    """
    path = _file(Path(path))
    entries = _indexed(path) if path.suffix == ".json" else header(path)
    tensors = tuple(entries[name] for name in sorted(entries, key=_by_number))
    model = Model(tensors, source=str(path), config=config or {})
    return model if dims is None else with_dim_names(model, dims)


def with_dim_names(model: Model, named: Model) -> Model:
    """Return a model whose dims have the names that they have in another.

    A tensor is known there by its name, or by one that only begins with more modules or fewer: files of a bare model
    say ``encoder.layer.0...`` where those with a head say ``bert.encoder.layer.0...``.

    Example:
        >>> file = Model((TensorInfo("h.0.c.weight", (2, 6)),))
        >>> with_dim_names(file, Model((TensorInfo("net.h.0.c.weight", (2, 6), ("in", "out")),))).tensors[0].dims
        ('in', 'out')
    """
    ends: dict[str, TensorInfo] = {}
    for tensor in named.tensors:
        for end in _ends(tensor.name):
            ends.setdefault(end, tensor)

    def known(tensor: TensorInfo) -> TensorInfo:
        longer = (named.by_name[end] for end in _ends(tensor.name) if end in named.by_name)
        there = next(longer, None) or ends.get(tensor.name)
        fits = there is not None and tensor.dims is None and len(there.shape) == len(tensor.shape)
        return attrs.evolve(tensor, dims=there.dims, blocks=there.blocks) if fits and there else tensor

    return attrs.evolve(model, tensors=tuple(map(known, model.tensors)))


def _ends(name: str) -> list[str]:
    """A name, and what is left of it without its first modules."""
    segments = name.split(".")
    return [".".join(segments[i:]) for i in range(len(segments))]


def header(path: Path) -> dict[str, TensorInfo]:
    """The tensors that one file holds, by name.

    Raises:
        PlanError: it is no such file.
    """
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            held = path.stat().st_size - 8
            if held < 0 or size > min(held, MAX_HEADER):
                facts = {"found": f"{held + 8} bytes", "header": f"{size} bytes, as its first 8 bytes say"}
                raise _refused(path, "it is no safetensors file", facts)
            entries = json.loads(stream.read(size), object_pairs_hook=_once)
    except OSError as error:
        raise _refused(path, "it cannot be read", {"why": error.strerror or str(error)}) from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, "its header is no JSON", {"why": str(error)[:200]}) from None
    if not isinstance(entries, dict):
        raise _refused(path, "its header names no tensors", {"found": type(entries).__name__})
    entries.pop("__metadata__", None)
    return {(found := _tensor(path, name, entry, held - size)).name: found for name, entry in entries.items()}


def _tensor(path: Path, name: str, entry: Any, data_bytes: int) -> TensorInfo:
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = _counts(fields.get("shape")), _counts(fields.get("data_offsets")), fields.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or not isinstance(dtype, str):
        raise _refused(path, f"its header does not tell what `{name[:100]}` is", {"found": json.dumps(entry)[:200]})
    if dtype not in DTYPES:
        facts = {"known": ", ".join(DTYPES)}
        raise _refused(path, f"`{name[:100]}` is of the element type {dtype[:40]}, which is not known here", facts)
    torch_dtype = DTYPES[dtype]
    if prod(shape) * BYTES[torch_dtype] != offsets[1] - offsets[0] or offsets[1] > data_bytes:
        facts = {
            "shape": f"{shape} of {torch_dtype}, {prod(shape) * BYTES[torch_dtype]} bytes",
            "place": f"bytes {offsets[0]} to {offsets[1]} of {data_bytes}",
        }
        raise _refused(path, f"the bytes of `{name[:100]}` do not fit its shape", facts)
    is_float = "float" in torch_dtype
    return TensorInfo(unwrapped(name), shape, None, torch_dtype, not is_float, is_float)


def _indexed(path: Path) -> dict[str, TensorInfo]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(path, "it cannot be read", {"why": error.strerror or str(error)}) from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, "it is no JSON", {"why": str(error)[:200]}) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise _refused(path, "it is no index of safetensors files", {"missing": "weight_map"})
    files = sorted(set(weight_map.values()))
    if outside := [file for file in files if Path(file).name != file]:
        raise _refused(path, f"it names a file that is not beside it: {outside[0][:100]}", {})
    if missing := [file for file in files if not (path.parent / file).is_file()]:
        raise PlanError(
            f"{len(missing)} of the {len(files)} files that {path.name} names are not there",
            {"looked in": str(path.parent), "missing": ", ".join(missing[:4]) + (", ..." if missing[4:] else "")},
            [
                "put them beside it: shapes stand in their headers",
                "give --model config.json alone, if the plan has dims",
            ],
        )
    held = {file: header(path.parent / file) for file in files}
    found = {}
    for name, file in weight_map.items():
        if unwrapped(name) not in held[file]:
            raise _refused(path, f"it says that {file} holds `{name[:100]}`, which it does not", {})
        found[unwrapped(name)] = held[file][unwrapped(name)]
    return found


def _file(path: Path) -> Path:
    """The file that is meant, when a folder was given."""
    if not path.is_dir():
        return path
    usual = ("model.safetensors.index.json", "model.safetensors")
    for name in usual:
        if (path / name).is_file():
            return path / name
    raise PlanError("the folder holds no checkpoint", {"folder": str(path), "looked for": ", ".join(usual)})


def _counts(value: Any) -> tuple[int, ...] | None:
    """Whole numbers from 0, or None where something else was found."""
    is_list = isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
    return tuple(value) if is_list else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _by_number(name: str) -> list[tuple[int, str]]:
    """Names in order, their numbers as numbers: layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _refused(path: Path, fault: str, facts: Mapping[str, object]) -> PlanError:
    return PlanError(f"{path.name}: {fault}", {"file": str(path), **facts})
