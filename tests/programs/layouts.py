"""Random specs of every kind for a shape on a mesh, as text."""

from __future__ import annotations

import math
from random import Random

from shardtensor.errors import LayoutError, SpecError
from shardtensor.layout.bind import bind
from shardtensor.mesh import Mesh
from shardtensor.spec.parse import parse_spec


def random_spec(rng: Random, shape: tuple[int, ...], mesh: Mesh, partial: bool = True, joined: bool = True) -> str:
    """A spec that fits, any kind with like chances; `joined`: also flat ranges over several axes."""
    for _ in range(20):
        text = rng.choice(KINDS)(rng, shape, mesh)
        if partial and text and not text.startswith(("chunk", "grid", "enum")) and rng.random() < 0.25:
            text = _partial(rng, text, mesh)
        if not text or (not joined and "flat(dp*tp" in text):
            continue
        if "flat(dp*tp" in text and rng.random() < 0.5:
            text = text.replace("dp*tp", "tp*dp")
        try:
            bind(parse_spec(text), shape, mesh)
        except (LayoutError, SpecError):
            continue
        return text
    return "replicate"


def _names(mesh: Mesh) -> list[str]:
    return ["tp"] if mesh.is_unnamed else list(mesh.names)


def _size(mesh: Mesh, names: tuple[str, ...]) -> int:
    sizes = {"tp": mesh.size} if mesh.is_unnamed else dict(mesh.axes)
    return math.prod(sizes[name] for name in names)


def _parts(rng: Random, total: int, count: int) -> list[int]:
    cuts = sorted(rng.randint(0, total) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _cut(rng: Random, length: int, names: tuple[str, ...], mesh: Mesh) -> str:
    text, count = "*".join(names), _size(mesh, names)
    kind = rng.choice(["even", "balanced", "balanced", "pad", "sizes", "blocks", "unit"])
    if kind == "balanced":
        return f"{text} balanced"
    if kind == "pad":
        return f"{text} pad({rng.choice([1, 2, 3])})"
    if kind == "sizes":
        return f"{text} sizes({', '.join(map(str, _parts(rng, length, count)))})"
    if kind == "blocks":
        return f"{text} blocks(2)" + rng.choice(["", " balanced"])
    if kind == "unit":
        return f"{text} unit(2) balanced"
    return text


def _axes(rng: Random, shape: tuple[int, ...], mesh: Mesh) -> str:
    if not shape:
        return ""
    entries = ["-"] * len(shape)
    names = _names(mesh)
    rng.shuffle(names)
    if len(names) > 1 and rng.random() < 0.3:
        dim = rng.randrange(len(shape))
        entries[dim] = _cut(rng, shape[dim], tuple(names), mesh)
    else:
        for name, dim in zip(names, rng.sample(range(len(shape)), len(shape)), strict=False):
            if rng.random() < 0.8:
                entries[dim] = _cut(rng, shape[dim], (name,), mesh)
    return f"[{', '.join(entries)}]"


def _chunk(rng: Random, shape: tuple[int, ...], mesh: Mesh) -> str:
    if not shape:
        return ""
    dim = rng.randrange(-len(shape), len(shape))
    ranks = rng.sample(range(mesh.size), rng.randint(1, mesh.size))
    places = ", ".join(f'"rank:{rank}/cpu"' for rank in ranks)
    sizes = f", sizes=({', '.join(map(str, _parts(rng, shape[dim], len(ranks))))},)" if rng.random() < 0.3 else ""
    return f"chunk(dim={dim}, placements=[{places}]{sizes})"


def _grid(rng: Random, shape: tuple[int, ...], mesh: Mesh) -> str:
    splits = [rng.choice([1, 1, 2]) for _ in shape]
    count = math.prod(splits)
    if not shape or count > mesh.size:
        return ""
    places = ", ".join(f'"rank:{rank}/cpu"' for rank in rng.sample(range(mesh.size), count))
    return f"grid(splits=({', '.join(map(str, splits))},), placements=[{places}])"


def _enum(rng: Random, shape: tuple[int, ...], mesh: Mesh) -> str:
    if not shape:
        return ""
    boxes = [tuple((0, size) for size in shape)]  # halved again and again
    for _ in range(rng.randint(0, 3)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        low, high = box[dim]
        at = rng.randint(low, high)
        for part in ((low, at), (at, high)):
            boxes.append(tuple(part if i == dim else bounds for i, bounds in enumerate(box)))
    texts = []
    for box in boxes:
        where = ", ".join(f"{low}:{high}" for low, high in box)
        texts.append(f'[{where}] @ "rank:{rng.randrange(mesh.size)}/cpu"')
    return f"enum({', '.join(texts)})"


def _flat(rng: Random, shape: tuple[int, ...], mesh: Mesh) -> str:
    names = _names(mesh)
    if len(names) > 1 and rng.random() < 0.5 and shape:
        rng.shuffle(names)
        dim = rng.randrange(len(shape))
        entries = ["-"] * len(shape)
        entries[dim] = f"{names[0]} balanced"
        return f"[{', '.join(entries)}] flat({names[1]})"
    if rng.random() < 0.5:
        unit = rng.choice([", unit=2", ", unit=row"])
    elif rng.random() < 0.3:
        total = math.prod(shape)
        unit = f", sizes=({', '.join(map(str, _parts(rng, total, _size(mesh, tuple(names)))))})"
    else:
        unit = ""
    return f"flat({'*'.join(names)}{unit})"


def _replicate(rng: Random, shape: tuple[int, ...], mesh: Mesh) -> str:
    return "replicate"


def _partial(rng: Random, text: str, mesh: Mesh) -> str:
    free = [name for name in _names(mesh) if name not in text]
    if not free:
        return text
    op = rng.choice(["", "", "", "", ", op=max", ", op=min", ", op=avg"])
    return f"{text} partial({rng.choice(free)}{op})"


KINDS = (_axes, _axes, _axes, _axes, _chunk, _chunk, _grid, _enum, _flat, _replicate)
