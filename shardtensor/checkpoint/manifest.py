"""The manifest of a checkpoint: one JSON file that lists its tensors, its files and its other values.

It is written last, so a folder without one is no checkpoint. Nothing in it is executed; every name, number and text is
checked when it is read.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import Any, NoReturn

import attrs
import cattrs
from xxhash import xxh3_128_hexdigest

from shardtensor.checkpoint.tensor_file import ITEM_BYTES, is_size, size_in_file
from shardtensor.errors import CheckpointError
from shardtensor.layout.bind import bind
from shardtensor.layout.cutting import axis_form, axis_names
from shardtensor.layout.layout import FlatLayout, Layout, MeshLayout, same_boxes
from shardtensor.mesh import Mesh, Ranks, as_ranks, ranks_text, read_mesh
from shardtensor.spec.devices import EnumerableShardingSpec, ShardMetadata
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import parse_spec

NAME = "checkpoint.json"
INDEX = "model.safetensors.index.json"
"""The name of the list of a model's files that Hugging Face's libraries read."""
FORMAT = "shardtensor checkpoint"
VERSION = 1

_FILE = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)  # in the folder, or in one folder below
_CHECKSUM = re.compile(r',\n "checksum": "([0-9a-f]{32})"\n}\n?\Z')


@attrs.frozen
class FileRecord:
    """A file: its size, and the checksum of its header, which has those of its tensors."""

    bytes: int
    checksum: str


@attrs.frozen
class TensorRecord:
    """Where a tensor is: whole in one `file`, or, under the layout that `spec` and `mesh` describe, in a file of each
    rank that holds some of it; of replicas, in those of replica `copy`. `dtype` is the name of a torch dtype."""

    shape: tuple[int, ...]
    dtype: str
    file: str = ""
    spec: str = ""
    mesh: str = ""
    ranks: str = ""
    copy: int = 0

    @property
    def layout(self) -> Layout:
        """The layout of a tensor that is not whole in one file."""
        return _bound(self.spec, self.shape, self.mesh, self.ranks)


@attrs.frozen(kw_only=True)
class Manifest:
    """All that a checkpoint holds.

    Attributes:
        world: the number of ranks that wrote it; `rank_file` names the file of each.
        files: by name, with / as separator.
        tensors: by name: ``model/<parameter>``, ``optimizer/<parameter>/<key>``, ...
        aliases: the other names of tied tensors in the model, and the name in `tensors`.
        values: all that is no tensor, as `values.encode` made it.
        fingerprint: that of the model and of the optimizer, or empty.
    """

    library: str = ""
    step: int | None = None
    saved_at: float = 0.0
    world: int = 1
    files: dict[str, FileRecord] = attrs.field(factory=dict)
    tensors: dict[str, TensorRecord] = attrs.field(factory=dict)
    aliases: dict[str, str] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)
    fingerprint: dict[str, str] = attrs.field(factory=dict)

    def to_text(self) -> str:
        """Return the JSON text, which ends with its own checksum."""
        table = {"format": FORMAT, "version": VERSION, **_converter.unstructure(self)}
        body = "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in table.items())
        return f'{body},\n "checksum": "{xxh3_128_hexdigest(body.encode())}"\n}}\n'


def folder_of(section: str) -> str:
    """Return the folder of a model's files, with a slash: of one of several models, ``model.<key>``, its key's.

    Example:
        >>> folder_of("model.actor"), folder_of("model")
        ('actor/', '')
    """
    key = section.partition(".")[2]
    return f"{key}/" if key else ""


def rank_file(rank: int, world: int) -> str:
    """Return the name of the file in which a rank writes its parts of tensors."""
    return f"state/rank-{rank:05d}-of-{world:05d}.safetensors"


def read_manifest(text: str) -> Manifest:
    """Return the manifest of a text.

    Raises:
        CheckpointError: the text is not a manifest, was changed after it was written, or is of another version.
    """
    found = _CHECKSUM.search(text)
    try:
        table = json.loads(text)
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise CheckpointError(
                f'"{NAME}" is not the manifest of a checkpoint', fix="name the folder of a checkpoint"
            )
        is_whole = found is not None and xxh3_128_hexdigest(text[: found.start()].encode()) == found[1]
        if table.get("version") != VERSION and (is_whole or found is None):
            raise CheckpointError(
                "the checkpoint has another version of the format",
                {
                    "saved": str(table.get("version"))[:20],
                    "read here": VERSION,
                    "saved by": str(table.get("library"))[:40],
                },
                "load it with the version of shardtensor that saved it",
            )
        if not is_whole:
            raise CheckpointError(
                f'"{NAME}" is damaged, or was edited after it was saved: it does not match its checksum',
                fix="load an earlier checkpoint",
            )
        for key in ("format", "version", "checksum"):
            del table[key]
        manifest = _converter.structure(table, Manifest)
        _check(manifest)
    except CheckpointError:
        raise
    except Exception as error:  # cattrs passes on whatever its hooks raise
        why = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError(f'"{NAME}" cannot be read', {"why": why}, "load an earlier checkpoint") from None
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise CheckpointError unless the names and numbers of a manifest fit each other."""

    def refuse(what: str, name: str) -> NoReturn:
        raise CheckpointError(f'"{NAME}" is damaged: {what}', {"name": name[:200]}, "load an earlier checkpoint")

    if manifest.world < 1 or (manifest.step or 0) < 0 or not math.isfinite(manifest.saved_at):
        refuse("its numbers are not those of a save", "world, step")
    for name, record in manifest.files.items():
        if not _FILE.fullmatch(name) or not is_size(record.bytes):
            refuse("a file has no legal name or size", name)
    own_files = [record.bytes for name, record in manifest.files.items() if name.startswith("state/")]
    left = {"": sum(own_files)} | {name: record.bytes for name, record in manifest.files.items()}
    for name, tensor in manifest.tensors.items():
        size = size_in_file(tensor.shape, tensor.dtype) if tensor.dtype in ITEM_BYTES else None
        if size is None or not is_size(tensor.copy):
            refuse("a tensor has no legal dtype or shape", name)
        if bool(tensor.file) == bool(tensor.spec) or tensor.file not in left:
            refuse("a tensor is in no file", name)
        if tensor.spec and not _are_in(tensor, manifest.world, len(own_files)):
            refuse("a tensor is in files that are not listed", name)
        left[tensor.file] -= size  # so that no tensor asks for more memory than there are bytes to read
        if left[tensor.file] < 0:
            refuse("a tensor is larger than the files that hold it", name)
    for name, target in manifest.aliases.items():
        if f"model/{target}" not in manifest.tensors and target not in manifest.tensors:
            refuse("a tied tensor is missing", name)


def _are_in(tensor: TensorRecord, world: int, files: int) -> bool:
    """Whether the ranks that hold some of a tensor are among `world`, and no more than there are files of ranks; found
    at once, however large the numbers are."""
    ranks = _ranks(tensor.ranks)
    if ranks is None:
        return _mesh_size(tensor.mesh) <= min(world, files)
    if isinstance(ranks, range):
        return 0 <= ranks[0] <= ranks[-1] < min(world, ranks[0] + files)
    return min(ranks) >= 0 and max(ranks) < world and len(set(ranks)) == len(ranks) <= files


def describe(layout: Layout) -> tuple[Layout, dict[str, str]]:
    """Return the texts of a layout for a `TensorRecord`, and the layout that they give back.

    It has the same boxes, in the same order; a layout that no spec in axes gives, is written as a list of boxes.

    Example:
        >>> from shardtensor.layout.bind import bind
        >>> describe(bind(parse_spec("[tp, -]"), (8, 4), read_mesh("dp=2, tp=2")))[1]
        {'spec': '[tp, -]', 'mesh': 'dp=2, tp=2', 'ranks': ''}
    """
    if isinstance(layout, MeshLayout | FlatLayout):
        mesh = ", ".join(f"{name}={size}" for name, size in zip(axis_names(layout), layout.grid, strict=True))
        ranks = "" if layout.ranks == range(len(layout.ranks)) else _ranks_text(layout.ranks)
        texts = {"spec": str(axis_form(layout)), "mesh": mesh, "ranks": ranks}
        back = _bound(texts["spec"], layout.shape, mesh, ranks)
        if back == layout:
            return layout, texts
    shards = [
        ShardMetadata(box.offsets, box.sizes, f"rank:{rank}/cpu")
        for rank in sorted(layout.ranks)
        if layout.holds_first_copy(rank)
        for box in layout.boxes(rank)
    ]
    texts = {"spec": str(EnumerableShardingSpec(shards)), "mesh": "", "ranks": _ranks_text(sorted(layout.ranks))}
    back = _bound(texts["spec"], layout.shape, "", texts["ranks"])
    return (layout if same_boxes(back, layout) else back), texts


@lru_cache(maxsize=8192)
def _bound(spec: str, shape: tuple[int, ...], mesh: str, ranks: str) -> Layout:
    return bind(_parsed(spec), shape, _mesh(mesh, ranks))


@lru_cache(maxsize=1024)
def _parsed(spec: str) -> ShardingSpec:
    return parse_spec(spec)


@lru_cache(maxsize=1024)
def _mesh(mesh: str, ranks: str) -> Mesh:
    found = _ranks(ranks)
    if not mesh:
        return Mesh((("*", len(found or ())),), found or ())
    axes = read_mesh(mesh)
    return axes if found is None else Mesh(axes.axes, found)


@lru_cache(maxsize=1024)
def _mesh_size(mesh: str) -> int:
    return read_mesh(mesh).size


def _ranks_text(ranks: Ranks | list[int]) -> str:
    """Return ranks in their order: ``0-3`` or ``2,0,1``."""
    ranks = as_ranks(ranks)
    return ranks_text(ranks) if isinstance(ranks, range) else ",".join(map(str, ranks))


@lru_cache(maxsize=1024)
def _ranks(text: str) -> Ranks | None:
    if not text:
        return None
    first, dash, last = text.partition("-")
    if dash:
        return range(int(first), int(last) + 1)
    return as_ranks([int(rank) for rank in text.split(",")])


def _lines(value: Any) -> str:
    """Return a value as JSON, each item of a dict on a line of its own."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n }"


def _strict(kind: type) -> Any:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"{str(value)[:40]!r} is not of type {kind.__name__}")
        return value

    return structure


_converter = cattrs.Converter(forbid_extra_keys=True, omit_if_default=True, detailed_validation=False)
for _kind in (int, float, str, bool):
    _converter.register_structure_hook(_kind, _strict(_kind))
