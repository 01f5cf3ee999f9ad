"""What a rank must be sent for another layout is counted right: against the elements of every rank."""

from __future__ import annotations

from itertools import islice, product

import attrs
from cut_layouts import MESH, counted_part, cut_layouts

from shardtensor.layout.bind import bind
from shardtensor.layout.layout import Layout, replicated
from shardtensor.mesh import Mesh
from shardtensor.rules.propagate import EVERY, received
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shardtensor.spec.parse import parse_spec

SHAPE = (5, 4)


def lacking(source: Layout, target: Layout) -> int:
    """The most that a rank of the target needs and does not hold, element by element."""

    def held(layout: Layout, rank: int) -> set[int]:
        return set(counted_part(layout, rank).flatten().tolist()) if rank in layout.ranks else set()

    return max(len(held(target, rank) - held(source, rank)) for rank in target.ranks)


def other_layouts() -> list[Layout]:
    """Of other ranks, of another grid, flat, and boxes written out."""
    few = [bind(ChunkShardingSpec(dim, ["rank:4/cpu", "rank:0/cpu"]), SHAPE, MESH) for dim in (0, 1)]
    lines = [bind(parse_spec(text), SHAPE, Mesh((("a", 6),))) for text in ("[a balanced, -]", "[-, a balanced]")]
    flat = [bind(parse_spec(text), SHAPE, MESH) for text in ("flat(tp)", "[-, dp] flat(tp)", "flat(dp*tp)")]
    boxes = [((0, 0), (2, 4), 3), ((2, 0), (3, 1), 3), ((2, 1), (3, 3), 5)]
    listed = EnumerableShardingSpec([ShardMetadata(list(o), list(n), f"rank:{r}/cpu") for o, n, r in boxes])
    few += [attrs.evolve(layout, ranks=range(6)) for layout in cut_layouts(SHAPE)[::5]]  # the same places, other ranks
    return [
        *few,
        *lines,
        *flat,
        bind(listed, SHAPE, MESH),
        replicated(SHAPE, (4, 0)),
        replicated(SHAPE, range(8), (8,)),
    ]


def test_what_is_received_is_what_is_lacking():
    cut, others = cut_layouts(SHAPE), other_layouts()
    pairs = [*islice(product(cut, cut), 0, None, 4), *product(cut, others), *product(others, cut)]
    pairs += product(others, others)
    for source, target in pairs:
        assert received(source, target) == lacking(source, target), (source, target)


def test_a_larger_grid_is_counted_by_some_of_its_ranks():
    mesh = Mesh((("dp", 3), ("tp", 4)))
    assert mesh.size > EVERY
    texts = ("[dp balanced, tp]", "[dp balanced, -]", "[-, dp*tp]", "[tp*dp balanced, -]", "replicate", "flat(dp)")
    layouts = [bind(parse_spec(text), (13, 24), mesh) for text in texts]
    for source, target in product(layouts, layouts):
        most = lacking(source, target)
        assert 0.75 * most <= received(source, target) <= most, (source, target)
