"""A spec that does not fit its mesh or its shape: the full text of every message."""

from __future__ import annotations

import pytest

from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.mesh import Mesh
from shardtensor.spec.nodes import Cut, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec

GRID = Mesh((("dp", 2), ("tp", 3)))
PLAIN = Mesh((("*", 4),))
HOLED = Mesh((("*", 2),), (0, 2))

CASES: list[tuple[str, str | ShardingSpec, tuple[int, ...], Mesh, str]] = [
    (
        "chunk dim",
        'chunk(dim=2, placements=["rank:0-3/cpu"])',
        (4, 6),
        PLAIN,
        "Invalid sharding dim: 2 for a tensor of 2 dims\n"
        '  spec   chunk(dim=2, placements=["rank:0-3/cpu"])\n'
        "  shape  4 x 6\n"
        "  fix    use a dim from -2 to 1",
    ),
    (
        "chunk scalar",
        'chunk(dim=0, placements=["rank:0-3/cpu"])',
        (),
        PLAIN,
        "Invalid sharding dim: 0 for a tensor of 0 dims\n"
        '  spec   chunk(dim=0, placements=["rank:0-3/cpu"])\n'
        "  shape  scalar\n"
        "  fix    a scalar cannot be cut: keep it whole",
    ),
    (
        "chunk sizes",
        'chunk(dim=0, placements=["rank:0-1/cpu"], sizes=(1, 2))',
        (4, 6),
        PLAIN,
        "the sizes add up to 3, the dim has 4 elements\n"
        '  spec   chunk(dim=0, placements=["rank:0-1/cpu"], sizes=(1, 2))\n'
        "  shape  4 x 6\n"
        "  fix    give sizes that add up",
    ),
    (
        "chunk rank",
        'chunk(dim=0, placements=["rank:3-5/cpu"])',
        (4, 6),
        PLAIN,
        "Global rank 5 does not exist in input process group\n"
        '  spec   chunk(dim=0, placements=["rank:3-5/cpu"])\n'
        "  ranks  0 to 3\n"
        "  fix    name ranks of the process group, or pass the group that has this rank",
    ),
    (
        "no rank",
        'chunk(dim=0, placements=["trainer0/cpu", "rank:1/cpu"])',
        (4, 6),
        PLAIN,
        "a placement names no rank\n"
        '  spec  chunk(dim=0, placements=["trainer0/cpu", "rank:1/cpu"])\n'
        '  fix   write the rank too, as in "rank:0/cuda:0"',
    ),
    (
        "grid dims",
        'grid(splits=(2, 2), placements=["rank:0-3/cpu"])',
        (4,),
        PLAIN,
        "the grid has 2 splits, the tensor has 1 dims\n"
        '  spec   grid(splits=(2, 2), placements=["rank:0-3/cpu"])\n'
        "  shape  4\n"
        "  fix    give one split for each dim, 1 for a dim that stays whole",
    ),
    (
        "grid twice",
        'grid(splits=(2, 2), placements=["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:2/cpu"])',
        (4, 4),
        PLAIN,
        "a rank has two places in the grid\n"
        '  spec   grid(splits=(2, 2), placements=["rank:0-1/cpu", "rank:1-2/cpu"])\n'
        "  shape  4 x 4\n"
        "  fix    name each rank once, or list the boxes with enum(...)",
    ),
    (
        "enum no rank",
        "enum([0:4])",
        (4,),
        PLAIN,
        'a shard has no rank\n  spec  enum([0:4])\n  fix   give each shard a placement such as "rank:0/cuda:0"',
    ),
    (
        "enum rank",
        'enum([0:4] @ "rank:7/cpu")',
        (4,),
        PLAIN,
        "Global rank 7 does not exist in input process group\n"
        '  spec   enum([0:4] @ "rank:7/cpu")\n'
        "  ranks  0 to 3\n"
        "  fix    name ranks of the process group, or pass the group that has this rank",
    ),
    (
        "axis",
        "[pp, -]",
        (4, 6),
        GRID,
        "no mesh axis is called `pp`\n"
        "  spec   [pp, -]\n"
        "  shape  4 x 6\n"
        "  mesh   (dp=2, tp=3)\n"
        "  fix    use one of dp, tp",
    ),
    (
        "two axes of one group",
        "[dp, tp]",
        (4, 6),
        PLAIN,
        "the spec names the axes dp, tp, but this is one process group with no named axes\n"
        "  spec   [dp, tp]\n"
        "  ranks  4\n"
        "  fix    pass a DeviceMesh with these mesh_dim_names as process_group",
    ),
    (
        "ndim",
        "[tp]",
        (4, 6),
        GRID,
        "the spec has 1 dims, the tensor has 2\n"
        "  spec   [tp]\n"
        "  shape  4 x 6\n"
        "  fix    write one entry for each dim, as in `[-, -]`, or `...` for the dims that stay whole",
    ),
    (
        "ellipsis",
        "[tp, -, ..., dp]",
        (4, 6),
        GRID,
        "the spec has at least 3 dims, the tensor has 2\n"
        "  spec   [tp, -, ..., dp]\n"
        "  shape  4 x 6\n"
        "  fix    write fewer dims",
    ),
    (
        "named",
        "[out: tp]",
        (6, 4),
        GRID,
        "the spec names dims, but the dims of this tensor have no names\n"
        "  spec   [out: tp]\n"
        "  shape  6 x 4\n"
        "  fix    write the cut by position, such as `[tp, -]`",
    ),
    (
        "even",
        "[tp, -]",
        (4, 6),
        GRID,
        "4 elements of dim 0 cannot be cut evenly over tp=3\n"
        "  spec    [tp, -]\n"
        "  shape   4 x 6\n"
        "  mesh    (dp=2, tp=3)\n"
        "  either  write `balanced` or `sizes(...)` or `pad(n)` after the axis\n"
        "  or      choose another axis",
    ),
    (
        "even units",
        "[tp unit(2), -]",
        (8, 6),
        GRID,
        "4 units of 2 of dim 0 cannot be cut evenly over tp=3\n"
        "  spec    [tp unit(2), -]\n"
        "  shape   8 x 6\n"
        "  mesh    (dp=2, tp=3)\n"
        "  either  write `balanced` or `sizes(...)` or `pad(n)` after the axis\n"
        "  or      choose another axis",
    ),
    (
        "unit",
        "[tp unit(4), -]",
        (6, 6),
        GRID,
        "dim 0 has 6 elements, not a multiple of its unit 4\n"
        "  spec   [tp unit(4), -]\n"
        "  shape  6 x 6\n"
        "  mesh   (dp=2, tp=3)\n"
        "  fix    choose a unit that divides the dim, or write pad(n)",
    ),
    (
        "sizes count",
        "[tp sizes(1, 3), -]",
        (4, 6),
        GRID,
        "2 sizes are given for tp=3 pieces\n"
        "  spec   [tp sizes(1, 3), -]\n"
        "  shape  4 x 6\n"
        "  mesh   (dp=2, tp=3)\n"
        "  fix    give one size for each piece",
    ),
    (
        "sizes sum",
        "[tp sizes(1, 1, 1), -]",
        (4, 6),
        GRID,
        "the sizes add up to 3, the dim has 4 elements\n"
        "  spec   [tp sizes(1, 1, 1), -]\n"
        "  shape  4 x 6\n"
        "  fix    give sizes that add up",
    ),
    (
        "sizes unit",
        "[tp unit(2) sizes(1, 1, 2), -]",
        (4, 6),
        GRID,
        "a size is not a multiple of the unit 2\n"
        "  spec   [tp unit(2) sizes(1, 1, 2), -]\n"
        "  shape  4 x 6\n"
        "  mesh   (dp=2, tp=3)\n"
        "  fix    give sizes in whole units",
    ),
    (
        "blocks",
        "[tp blocks(4), -]",
        (6, 6),
        GRID,
        "dim 0 has 6 elements, not a multiple of its 4 block shares\n"
        "  spec   [tp blocks(4), -]\n"
        "  shape  6 x 6\n"
        "  mesh   (dp=2, tp=3)\n"
        "  fix    give block shares whose sum divides the dim",
    ),
    (
        "pad sizes",
        Spec(Cut("tp", pad=4, sizes=(1, 1, 2)), None),
        (4, 6),
        GRID,
        "dim 0 is cut by pad and by sizes, which say different sizes\n"
        "  spec   [tp pad(4) sizes(1, 1, 2), -]\n"
        "  shape  4 x 6\n"
        "  fix    keep one of the two",
    ),
    (
        "pad balanced",
        Spec(Cut("tp", pad=4, balanced=True), None),
        (4, 6),
        GRID,
        "dim 0 is cut by pad and by balanced, which say different sizes\n"
        "  spec   [tp pad(4) balanced, -]\n"
        "  shape  4 x 6\n"
        "  fix    keep one of the two",
    ),
    (
        "blocks sizes",
        Spec(Cut("tp", blocks=2, sizes=(1, 1, 2)), None),
        (4, 6),
        GRID,
        "dim 0 is cut by sizes and by blocks, which say different sizes\n"
        "  spec   [tp blocks(2) sizes(1, 1, 2), -]\n"
        "  shape  4 x 6\n"
        "  fix    keep one of the two",
    ),
    (
        "flat sizes of uneven ranks",
        "[tp balanced, -] flat(dp, sizes=(1, 11))",
        (4, 6),
        GRID,
        "flat has one list of sizes, but the dims leave different numbers of elements on the ranks\n"
        "  spec   [tp balanced, -] flat(dp, sizes=(1, 11))\n"
        "  shape  4 x 6\n"
        "  mesh   (dp=2, tp=3)\n"
        "  fix    drop sizes=(...), or cut the dims evenly",
    ),
    (
        "flat sizes",
        "flat(tp, sizes=(1, 2))",
        (4, 6),
        GRID,
        "flat has 2 sizes that add up to 3\n"
        "  spec   flat(tp, sizes=(1, 2))\n"
        "  shape  4 x 6\n"
        "  mesh   (dp=2, tp=3)\n"
        "  fix    give 3 sizes that add up to 24",
    ),
    (
        "only",
        "[-, -] only(tp, 3)",
        (4, 6),
        GRID,
        "axis `tp` has no coordinate 3\n"
        "  spec   [-, -] only(tp, 3)\n"
        "  shape  4 x 6\n"
        "  mesh   (dp=2, tp=3)\n"
        "  fix    use 0 to 2",
    ),
    (
        "rank not at hand",
        'chunk(dim=0, placements=["rank:0-2/cpu"])',
        (4,),
        HOLED,
        "Global rank 1 does not exist in input process group\n"
        '  spec   chunk(dim=0, placements=["rank:0-2/cpu"])\n'
        "  ranks  0, 2\n"
        "  fix    name ranks of the process group, or pass the group that has this rank",
    ),
]


@pytest.mark.parametrize(
    ("spec", "shape", "mesh", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_messages(spec, shape, mesh, text):
    with pytest.raises(LayoutError) as caught:
        bind(as_spec(spec), shape, mesh)
    assert str(caught.value) == text


def test_names_of_dims():
    assert bind(as_spec("[out: tp]"), (4, 6), GRID, ("in", "out")) == bind(as_spec("[-, tp]"), (4, 6), GRID)
    with pytest.raises(LayoutError) as caught:
        bind(as_spec("[out: tp]"), (6, 4), GRID, ("in", "rows"))
    assert str(caught.value) == (
        "no dim is called `out`\n"
        "  spec   [out: tp]\n"
        "  shape  6 x 4\n"
        "  fix    the dims are in, rows"
    )  # fmt: skip


def test_one_unnamed_axis_takes_any_name():
    assert bind(as_spec("[anything, -]"), (4, 6), PLAIN).cut_dims == (0,)


def test_a_users_own_spec_is_asked_where_its_shards_lie():
    from types import SimpleNamespace

    from shardtensor.spec.devices import ShardMetadata

    class Halves(ShardingSpec):
        def build_metadata(self, tensor_sizes, tensor_properties):
            half = tensor_sizes[0] // 2
            rest = list(tensor_sizes[1:])
            shards = [ShardMetadata([i * half, 0], [half, *rest], f"rank:{1 - i}/cpu") for i in range(2)]
            return SimpleNamespace(shards_metadata=shards)

    layout = bind(Halves(), (4, 3), PLAIN)
    assert [list(map(str, layout.boxes(rank))) for rank in range(3)] == [["[2:4, 0:3]"], ["[0:2, 0:3]"], []]
    with pytest.raises(LayoutError, match="do not cover"):
        bind(Halves(), (5, 3), PLAIN)
