"""Damage to the files of a checkpoint, and which file and tensor an error then has to name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

MANIFEST = "checkpoint.json"


@attrs.frozen
class Damage:
    """A change of a folder; an error has to have all words of one of the lines `named`."""

    name: str
    apply: Callable[[Path], object]
    named: tuple[tuple[str, ...], ...]
    tensor: str = ""

    def is_named_by(self, text: str) -> bool:
        return any(all(word in text for word in words) for words in self.named)


def files_of(folder: Path) -> list[str]:
    """Return the names of all files of a checkpoint that a load reads; an index is for other libraries."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".index.json"))
    return sorted(str(path.relative_to(folder)) for path in files)


def header_of(data: bytes) -> tuple[dict, int]:
    """Return the header of a safetensors file, and where its tensors begin."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def tensor_at(data: bytes, at: int) -> str:
    """Return the name of the tensor that a byte of a safetensors file belongs to; empty for the header."""
    table, begin = header_of(data)
    for name, entry in table.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            if begin + start <= at < begin + stop:
                return name
    return ""


def with_checksum(body: str) -> str:
    """Return a manifest with the checksum of its text up to there, which may have one already."""
    body = body.rpartition(',\n "checksum": "')[0] or body.rstrip().removesuffix("}").rstrip()
    return f'{body},\n "checksum": "{xxh3_128_hexdigest(body.encode())}"\n}}\n'


def with_header(data: bytes, header: bytes, begin: int) -> bytes:
    """Return a safetensors file with another header."""
    return len(header).to_bytes(8, "little") + header + data[begin:]


def record_again(folder: Path, file: str) -> None:
    """Write the size and the checksum of the header of a file, as it is now, into the manifest."""
    data, path = (folder / file).read_bytes(), folder / MANIFEST
    table = json.loads(path.read_text())
    length = int.from_bytes(data[:8], "little")
    table["files"][file] = {"bytes": len(data), "checksum": xxh3_64_hexdigest(data[: 8 + length])}
    del table["checksum"]
    path.write_text(with_checksum(json.dumps(table)))


def flips(folder: Path, count: int, seed: int = 0) -> Iterator[Damage]:
    """Yield damages of one bit each, in `count` bytes of every file, or in all if it has fewer."""
    generator = random.Random(seed)
    for file in files_of(folder):
        data = (folder / file).read_bytes()
        places = sorted(generator.sample(range(len(data)), min(count, len(data))))
        for at in places:
            bit = 1 << generator.randrange(8)
            tensor = "" if file == MANIFEST else tensor_at(data, at)

            def flip(root: Path, file: str = file, at: int = at, bit: int = bit) -> None:
                changed = bytearray((root / file).read_bytes())
                changed[at] ^= bit
                (root / file).write_bytes(changed)

            words = (file, tensor.rpartition("/")[2]) if tensor else (file,)
            yield Damage(f"bit of byte {at} of {file}", flip, (words,), tensor)


def of_files(folder: Path, other: Path) -> Iterator[Damage]:
    """Yield damages of whole files; `other` is a checkpoint of the same model with other values."""
    files = files_of(folder)
    for file in files:
        size = (folder / file).stat().st_size
        for length in sorted({0, 1, 8, 9, size // 2, size - 2}):
            yield Damage(f"{file} cut to {length} bytes", lambda root, f=file, n=length: _cut(root / f, n), ((file,),))
        yield Damage(f"{file} with more at its end", lambda root, f=file: _append(root / f, b"\n\0"), ((file,),))
        yield Damage(f"{file} of zeros", lambda root, f=file, n=size: (root / f).write_bytes(bytes(n)), ((file,),))
        yield Damage(
            f"{file} of another checkpoint",
            lambda root, f=file: _copy(other / f, root / f),
            ((file,),) if file != MANIFEST else tuple((each,) for each in files if each != MANIFEST),
        )
        missing = ((file,),) if file != MANIFEST else (("no", "optimizer"), ("not saved completely",))
        yield Damage(f"{file} missing", lambda root, f=file: (root / f).unlink(), missing)
        yield Damage(f"{file} is a folder", lambda root, f=file: _as_folder(root / f), ((file,), ("directory",)))
    for one in files:
        for two in files:
            if one < two:
                words = ((one,), (two,))
                yield Damage(f"{one} and {two} swapped", lambda root, a=one, b=two: _swap(root / a, root / b), words)
    yield Damage("the folder state missing", lambda root: shutil.rmtree(root / "state"), (("state/",),))


def of_hands(folder: Path) -> Iterator[Damage]:
    """Yield edits of the manifest, without another checksum."""
    text = (folder / MANIFEST).read_text()
    edits = [(f"{old} to {new}", text.replace(old, new, 1)) for old, new in _EDITS if old in text]
    lines = text.splitlines(keepends=True)
    edits += [(f"without line {i}", "".join(lines[:i] + lines[i + 1 :])) for i in range(0, len(lines), 3)]
    for name, edit in edits:
        yield Damage(name, lambda root, edit=edit: (root / MANIFEST).write_text(edit), ((MANIFEST,),))


_EDITS = (('"step": 1', '"step": 2'), ('"world": ', '"world":  '), ("float32", "int32"), ("[5", "[6"), ("Adam", "SGD"))


def _cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def _append(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)


def _copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _swap(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
