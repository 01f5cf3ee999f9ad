"""Any spec of the language, with a shape it fits, for hypothesis; and the elements of a box."""

from __future__ import annotations

import math
from itertools import pairwise, product

from hypothesis import strategies as st

from shardtensor.layout.box import Box, whole
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.nodes import Cut, Replicate, ShardingSpec, Spec

AXES = (("dp", 2), ("tp", 3))
MESH = Mesh(AXES)


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))))


def places(count: int) -> list[str]:
    return [f"rank:0-{count - 1}/cpu"]


def parts(total: int, count: int) -> st.SearchStrategy[tuple[int, ...]]:
    cuts = st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1).map(sorted)
    return cuts.map(lambda inner: tuple(b - a for a, b in pairwise([0, *inner, total])))


@st.composite
def device_specs(draw: st.DrawFn) -> tuple[ShardingSpec, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    ranks = MESH.size
    kind = draw(st.sampled_from(["chunk", "chunk sizes", "chunk twice", "grid", "enum"]))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    if kind == "chunk":
        count = draw(st.integers(1, ranks))
        return ChunkShardingSpec(dim, draw(st.permutations([f"rank:{i}/cpu" for i in range(count)]))), shape
    if kind == "chunk sizes":
        count = draw(st.integers(1, ranks))
        return ChunkShardingSpec(dim, places(count), draw(parts(shape[dim], count))), shape
    if kind == "chunk twice":
        return ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu", "rank:0/cpu"]), shape
    if kind == "grid":
        splits = tuple(draw(st.integers(1, 2)) for _ in shape)
        count = math.prod(splits)
        return (GridShardingSpec(splits, places(count)), shape) if count <= ranks else (Replicate(), shape)
    boxes = [whole(shape)]  # halved again and again: any guillotine tiling, with empty boxes
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[d]))
        for start, size in ((0, at), (at, box.sizes[d] - at)):
            offsets = tuple(o + start * (i == d) for i, o in enumerate(box.offsets))
            boxes.append(Box(offsets, tuple(size if i == d else n for i, n in enumerate(box.sizes))))
    ranked = [ShardMetadata(b.offsets, b.sizes, f"rank:{draw(st.integers(0, ranks - 1))}/cpu") for b in boxes]
    return EnumerableShardingSpec(ranked), shape


@st.composite
def axis_specs(draw: st.DrawFn) -> tuple[ShardingSpec, tuple[int, ...]]:
    ndim = draw(st.integers(1, 3))
    axes = draw(st.sampled_from([("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")]))
    left = [axis for axis, _ in AXES if axis not in axes]
    count = math.prod(dict(AXES)[axis] for axis in axes)
    unit = draw(st.sampled_from([1, 2]))
    kind = draw(st.sampled_from(["even", "pad", "balanced", "sizes", "blocks", "uneven blocks"]))
    if kind == "even":
        cut, length = Cut(axes, unit=unit), count * unit * draw(st.integers(0, 2))
    elif kind == "pad":
        cut, length = Cut(axes, pad=draw(st.integers(1, 4)), unit=unit), draw(st.integers(0, 13))
    elif kind == "balanced":
        cut, length = Cut(axes, unit=unit, balanced=True), unit * draw(st.integers(0, 8))
    elif kind == "sizes":
        sizes = tuple(draw(st.integers(0, 4)) * unit for _ in range(count))
        cut, length = Cut(axes, unit=unit, sizes=sizes), sum(sizes)
    else:
        blocks = 2 if kind == "blocks" else (2, 1, 1)
        shares = blocks if isinstance(blocks, int) else sum(blocks)
        balanced = draw(st.booleans())
        length = shares * (draw(st.integers(0, 4)) if balanced else count * draw(st.integers(0, 1)))
        cut = Cut(axes, blocks=blocks, balanced=balanced)
    dim = draw(st.integers(0, ndim - 1))
    dims: list[Cut | str | None] = [None] * ndim
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    dims[dim], shape[dim] = cut, length
    if left and ndim > 1 and draw(st.booleans()):
        other = (dim + 1) % ndim
        dims[other], shape[other] = Cut(left.pop(), balanced=True), draw(st.integers(0, 5))
    spec = Spec(*dims)
    suffix = draw(st.sampled_from(["", "flat", "row", "only"])) if left else ""
    if suffix in ("flat", "row"):
        spec = spec.flat(left[0], unit="row" if suffix == "row" else draw(st.integers(1, 3)))
    elif suffix == "only":
        spec = spec.only(left[0], 1)
    return spec, tuple(shape)
