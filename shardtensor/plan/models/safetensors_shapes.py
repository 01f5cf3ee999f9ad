"""The tensors of a model from the headers of its safetensors files: a few kilobytes each, and no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from shardtensor.errors import PlanError
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.models.model import Model, TensorInfo

MAX_HEADER = 100_000_000
"""The largest header that the format allows, in bytes."""

DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""safetensors' name of each dtype -> torch's."""


def model_from_safetensors(
    path: str | Path, dims: Model | None = None, config: Mapping[str, object] | None = None
) -> Model:
    """Return the tensors of a checkpoint, from headers alone.

    Files have no names of dims, no buffers and no ties. Tensors of whole numbers count as buffers, since they are not
    trained.

    Args:
        path: a ``.safetensors`` file; an index ``*.safetensors.index.json`` with its files beside it; or a folder that
            contains one of the two under its usual name.
        dims: a model with names of the dims, see `with_dim_names`.
        config: the keys of the model's config.json.

    Raises:
        PlanError: a file does not exist or has another format; the message has what was found.
    """
    path = _file(Path(path))
    entries = _indexed(path) if path.suffix == ".json" else header(path)
    tensors = tuple(entries[name] for name in sorted(entries, key=_by_number))
    model = Model(tensors, source=str(path), config=config or {})
    return model if dims is None else with_dim_names(model, dims)


def with_dim_names(model: Model, named: Model) -> Model:
    """Return a model with the dim names of another.

    A tensor is found there by its name, or by one with more or fewer modules at the beginning: files of a bare model
    have ``encoder.layer.0...``, those of a model with a head ``bert.encoder.layer.0...``.

    Example:
        >>> file = Model((TensorInfo("h.0.c.weight", (2, 6)),))
        >>> with_dim_names(file, Model((TensorInfo("net.h.0.c.weight", (2, 6), ("in", "out")),))).tensors[0].dims
        ('in', 'out')
    """
    ends: dict[str, TensorInfo] = {}
    for tensor in named.tensors:
        for end in _ends(tensor.name):
            ends.setdefault(end, tensor)

    def with_dims(tensor: TensorInfo) -> TensorInfo:
        longer = (named.by_name[end] for end in _ends(tensor.name) if end in named.by_name)
        there = next(longer, None) or ends.get(tensor.name)
        fits = there is not None and tensor.dims is None and len(there.shape) == len(tensor.shape)
        return attrs.evolve(tensor, dims=there.dims, blocks=there.blocks) if fits and there else tensor

    return attrs.evolve(model, tensors=tuple(map(with_dims, model.tensors)))


def _ends(name: str) -> list[str]:
    """Return a name, and the rests of it without its first modules."""
    segments = name.split(".")
    return [".".join(segments[i:]) for i in range(len(segments))]


def header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one file, by name.

    Raises:
        PlanError: it is no safetensors file.
    """

    def read() -> Any:
        with path.open("rb") as stream:
            size, held = int.from_bytes(stream.read(8), "little"), path.stat().st_size - 8
            if held < 0 or size > min(held, MAX_HEADER):
                facts = {"found": f"{held + 8} bytes", "header": f"{size} bytes, as its first 8 bytes say"}
                raise _refused(path, "it is no safetensors file", facts)
            return stream.read(size)

    entries = _json(path, read, "its header is no JSON")
    if not isinstance(entries, dict):
        raise _refused(path, "its header names no tensors", {"found": type(entries).__name__})
    return {unwrapped(name): _tensor(path, name, entry) for name, entry in entries.items() if name != "__metadata__"}


def _tensor(path: Path, name: str, entry: Any) -> TensorInfo:
    fields = entry if isinstance(entry, dict) else {}
    shape, dtype = fields.get("shape"), fields.get("dtype")
    is_shape = isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**63 for size in shape)
    if not is_shape or shape is None or not isinstance(dtype, str):
        raise _refused(path, f"its header does not say what `{name[:100]}` is", {"found": json.dumps(entry)[:200]})
    if dtype not in DTYPES:
        facts = {"known": ", ".join(DTYPES)}
        raise _refused(path, f"`{name[:100]}` is of the element type {dtype[:40]}, which is not known here", facts)
    is_float = "float" in DTYPES[dtype] or "complex" in DTYPES[dtype]
    return TensorInfo(unwrapped(name), tuple(shape), None, DTYPES[dtype], not is_float, is_float)


def _json(path: Path, read: Callable[[], Any], fault: str) -> Any:
    """Parse a part of a file as JSON; raise PlanError with `fault` if it is none."""
    try:
        return json.loads(read())
    except OSError as error:
        raise _refused(path, "it cannot be read", {"why": error.strerror or str(error)}) from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, fault, {"why": str(error)[:200]}) from None


def _indexed(path: Path) -> dict[str, TensorInfo]:
    index = _json(path, path.read_bytes, "it is no JSON")
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
    """Return the checkpoint file of a folder, or the path of a file itself."""
    if not path.is_dir():
        return path
    usual = ("model.safetensors.index.json", "model.safetensors")
    for name in usual:
        if (path / name).is_file():
            return path / name
    raise PlanError("the folder holds no checkpoint", {"folder": str(path), "looked for": ", ".join(usual)})


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key of names that compares numbers in them as numbers: layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _refused(path: Path, fault: str, facts: Mapping[str, object]) -> PlanError:
    return PlanError(f"{path.name}: {fault}", {"file": str(path), **facts})
