"""Safetensors files: the header that lists the tensors of a file, and a checksum of each block of their bytes.

A file is eight bytes with the length of a header, the header (JSON: name -> dtype, shape, begin and end), and the bytes
of the tensors. The checksums are in the header's ``__metadata__``, so that a rank that reads some ranges of a file can
verify the blocks that contain them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from xxhash import xxh3_64_hexdigest

from shardtensor.errors import CheckpointError
from shardtensor.layout.explain import item_bytes
from shardtensor.plan.models.safetensors_shapes import DTYPES, MAX_HEADER

BLOCK_BYTES = 4 << 20
"""How many bytes one checksum covers; the blocks of each tensor are counted from its first byte."""

_SUM_DIGITS = 16
_OWN = "shardtensor"  # the key of our entry in ``__metadata__``

_OTHERS = {"complex128": 16, "complex32": 4, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1}
"""dtypes that safetensors does not know: a file holds their bytes, and the manifest the dtype."""

ITEM_BYTES = {name: item_bytes(name) for name in DTYPES.values()} | _OTHERS
"""The bytes of an element by the name of a torch dtype."""

_FORMATS = {name: spelled for spelled, name in DTYPES.items()}


@attrs.frozen
class Entry:
    """A tensor in a file: its format, its shape, its range of bytes in the file, and the checksums of its blocks."""

    format: str
    shape: tuple[int, ...]
    start: int
    stop: int
    sums: tuple[str, ...] | None = None

    @property
    def blocks(self) -> int:
        return -(-(self.stop - self.start) // BLOCK_BYTES)


@attrs.frozen
class TensorFile:
    """The header of a file: its tensors by name, its metadata, and the checksum of the header itself."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    checksum: str


def make_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    sums: Mapping[str, Sequence[str]],
    metadata: Mapping[str, str],
) -> bytes:
    """Return the first bytes of a file that holds these tensors (name, torch dtype, shape), in this order.

    Example:
        >>> make_header([("a", "float32", (2,))], {"a": ["0" * 16]}, {"format": "pt"})[8:64]
        b'{"__metadata__": {"format": "pt", "shardtensor": "{\\\\"sum'
    """
    own = json.dumps({"sums": {name: "".join(each) for name, each in sums.items()}})
    table: dict[str, Any] = {"__metadata__": {**metadata, _OWN: own}}
    start = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * ITEM_BYTES[dtype]
        spelled = _FORMATS.get(dtype, "U8")
        lengths = list(shape) if dtype in _FORMATS else [size]
        table[name] = {"dtype": spelled, "shape": lengths, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 64)  # tensors begin at a multiple of 64 bytes, less the eight of the length
    return len(text).to_bytes(8, "little") + text


def read_header(read: Callable[[int, int], bytes], size: int, file: str) -> TensorFile:
    """Return the header of a file of `size` bytes; `read` returns a range of its bytes.

    Every number is checked before it is used: the tensors fill the file without holes or overlaps.

    Raises:
        CheckpointError: it is no such file, or a part of one.
    """
    first = read(0, 8) if size >= 8 else b""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, MAX_HEADER):
        raise _damaged(file, "its first bytes give no length of a header", {"bytes": size})
    text = read(8, 8 + length)
    try:
        table = json.loads(text, object_pairs_hook=_without_repeats)
        metadata = table.pop("__metadata__", {})
        sums = json.loads(metadata.get(_OWN, "{}")).get("sums", {})
        entries = {name: _entry(each, 8 + length, sums.get(name)) for name, each in table.items()}
        is_plain = all(isinstance(x, str) for pair in metadata.items() for x in pair)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"[:120]
        raise _damaged(file, "its header is not that of a safetensors file", {"why": why}) from None
    if not is_plain:
        raise _damaged(file, "its metadata is not text", {})
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].stop)):
        if entry.start != end:
            raise _damaged(file, "its tensors do not lie end to end", {"tensor": name})
        end = entry.stop
    if end != size:
        raise _damaged(file, "it is not as long as its header says", {"bytes": size, "in the header": end})
    return TensorFile(entries, metadata, xxh3_64_hexdigest(first + text))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _entry(value: Any, data: int, sums: Any) -> Entry:
    shape, (start, stop) = tuple(value["shape"]), value["data_offsets"]
    if set(value) != {"dtype", "shape", "data_offsets"} or not all(map(is_size, (start, stop))):
        raise ValueError("an entry is not dtype, shape and data_offsets")
    if stop - start != size_in_file(shape, DTYPES[value["dtype"]]):
        raise ValueError("an entry has another size than its shape and dtype")
    entry = Entry(value["dtype"], shape, data + start, data + stop)
    if sums is None:
        return entry
    if not isinstance(sums, str) or len(sums) != entry.blocks * _SUM_DIGITS:
        raise ValueError("an entry does not have one checksum for each block")
    return attrs.evolve(entry, sums=tuple(sums[i : i + _SUM_DIGITS] for i in range(0, len(sums), _SUM_DIGITS)))


def is_size(value: object) -> bool:
    """Whether a value of a JSON text can be a length or an offset."""
    return type(value) is int and 0 <= value < 1 << 63


def size_in_file(shape: Sequence[object], dtype: str) -> int | None:
    """Return the bytes of a tensor whose shape comes from a JSON text; None if no tensor is of that shape.

    Example:
        >>> size_in_file([2, 3], "float32"), size_in_file([2, -3], "float32"), size_in_file([1 << 62, 1 << 62], "uint8")
        (24, None, None)
    """
    if not all(map(is_size, shape)):
        return None
    count = 0 if 0 in shape else ITEM_BYTES[dtype]
    for length in shape if count else ():
        count *= length  # type: ignore[operator]
        if not is_size(count):  # before the number grows: a text may list thousands of lengths
            return None
    return count


def _damaged(file: str, fault: str, facts: dict[str, object]) -> CheckpointError:
    return CheckpointError(
        f'the file "{file}" is damaged: {fault}; nothing has been loaded', facts, "load an earlier checkpoint"
    )
