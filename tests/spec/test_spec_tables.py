"""The tables of the language reference, row by row: text, Python, canonical text."""

import pytest

from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.nodes import Cut, Replicate, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec, parse_spec
from shardtensor.spec.placement import parse_placement

TWO = ["rank:0/cuda:0", "rank:1/cuda:1"]

ROWS = [
    ("replicate", Replicate()),
    ("[tp, -]", Spec("tp", None)),
    ("[tp, ...]", Spec("tp", ...)),
    ("[..., tp]", Spec(..., "tp")),
    ("[-, tp, ...]", Spec(None, "tp", ...)),
    ("[out: tp]", Spec(out="tp")),
    ("[vocab: tp, in: dp]", Spec(vocab="tp", **{"in": "dp"})),
    ("[tp*dp, -]", Spec(("tp", "dp"), None)),
    ("[dp, tp]", Spec("dp", "tp")),
    ("[tp unit(128), -]", Spec(Cut("tp", unit=128), None)),
    ("[out: tp unit(128)]", Spec(out=Cut("tp", unit=128))),
    ("[tp blocks(3), -]", Spec(Cut("tp", blocks=3), None)),
    ("[tp blocks(32, 8, 8) unit(128), -]", Spec(Cut("tp", blocks=(32, 8, 8), unit=128), None)),
    ("[tp pad(64), -]", Spec(Cut("tp", pad=64), None)),
    ("[tp balanced, -]", Spec(Cut("tp", balanced=True), None)),
    ("[tp sizes(12, 12, 8, 8), -]", Spec(Cut("tp", sizes=(12, 12, 8, 8)), None)),
    ("[dp, -] partial(tp)", Spec("dp", None).partial("tp")),
    ("replicate partial(tp)", Replicate().partial("tp")),
    ("[dp, -] partial(tp, op=max)", Spec("dp", None).partial("tp", op="max")),
    ("replicate partial(tp, op=avg) partial(dp, op=min)", Spec().partial("tp", op="avg").partial("dp", op="min")),
    ("flat(dp)", Spec().flat("dp")),
    ("[tp, -] flat(dp)", Spec("tp", None).flat("dp")),
    ("flat(dp, unit=128)", Replicate().flat("dp", unit=128)),
    ("flat(dp, unit=row)", Replicate().flat("dp", unit="row")),
    ("flat(rep*dp)", Replicate().flat("rep", "dp")),
    ("flat(dp, sizes=(4096, 0, 8192, 100))", Replicate().flat("dp", sizes=[4096, 0, 8192, 100])),
    ("replicate only(ep, 1)", Replicate().only("ep", 1)),
    ("[tp] flat(dp) only(ep, 1) partial(cp)", Spec("tp").partial("cp").only("ep", 1).flat("dp")),
    ('chunk(dim=0, placements=["rank:0-1/cuda:0-1"])', ChunkShardingSpec(dim=0, placements=TWO)),
    ('chunk(dim=-1, placements=["rank:0-15/cuda"])', ChunkShardingSpec(-1, ["rank:0-15/cuda"])),
    ('chunk(dim=0, placements=["rank:0-1/cuda:0-1"], sizes=(5, 3))', ChunkShardingSpec(0, TWO, sizes=(5, 3))),
    ('chunk(dim=0, placements=["rank:3/cuda:3"], sizes=(5,))', ChunkShardingSpec(0, ["rank:3/cuda:3"], [5])),
    (
        'grid(splits=(2, 2), placements=["rank:0-3/cuda:0-3"])',
        GridShardingSpec(splits=(2, 2), placements=["rank:0-3/cuda:0-3"]),
    ),
    (
        'enum([0:5, 0:4] @ "rank:0/cuda:0", [5:10, 0:4] @ "rank:1/cuda:1")',
        EnumerableShardingSpec([ShardMetadata((5, 0), (5, 4), TWO[1]), ShardMetadata((0, 0), (5, 4), TWO[0])]),
    ),
]


@pytest.mark.parametrize(("text", "spec"), ROWS, ids=[text for text, _ in ROWS])
def test_text_and_python_are_the_same_object(text, spec):
    assert parse_spec(text) == spec
    assert str(spec) == text
    assert hash(parse_spec(text)) == hash(spec)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        (" [ tp ,\n - ]  # rows", "[tp, -]"),
        ("[tp balanced unit(2) blocks(3) pad(8)]", "[tp pad(8) blocks(3) unit(2) balanced]"),
        ("[tp unit(1) blocks(1)]", "[tp]"),
        ("[tp] partial(cp, op=sum) only(ep, 1) flat(dp, unit=1)", "[tp] flat(dp) only(ep, 1) partial(cp)"),
        ("partial(tp)", "replicate partial(tp)"),
        ("replicate flat(dp)", "flat(dp)"),
        ('chunk(0, ["rank:0", "rank:1",])', 'chunk(dim=0, placements=["rank:0-1/cpu"])'),
        (
            'chunk(placements=["rank:0/cuda:0", "rank:1/cuda:1", "rank:4-5/cuda:0-1"], dim=(0))',
            'chunk(dim=0, placements=["rank:0-1/cuda:0-1", "rank:4-5/cuda:0-1"])',
        ),
        ('enum([2:2] @ "rank:1", [0:2] @ "rank:0")', 'enum([0:2] @ "rank:0/cpu", [2:2] @ "rank:1/cpu")'),
        (r'chunk(dim=0, placements=["a\"b\\c/cpu"])', r'chunk(dim=0, placements=["a\"b\\c/cpu"])'),
    ],
)
def test_canonical_text(written, canonical):
    assert str(parse_spec(written)) == canonical


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("rank:0/cuda:0", "rank:0/cuda:0"),
        ("rank:0/cpu", "rank:0/cpu"),
        ("rank:0", "rank:0/cpu"),
        ("trainer0/cpu", "trainer0/cpu"),
        ("trainer0", "trainer0/cpu"),
        ("cuda:1", "cuda:1"),
        ("cuda", "cuda"),
        ("rank:0/cuda", "rank:0/cuda"),
    ],
)
def test_placements(text, canonical):
    assert str(parse_placement(text)) == canonical


def test_as_spec_takes_what_callers_have():
    class Own(ShardingSpec):
        pass

    own = Own()
    assert as_spec(own) is own
    assert as_spec("[tp]") == as_spec(Spec("tp")) == Spec("tp")
    with pytest.raises(NotImplementedError, match="Own does not say where its shards lie: define build_metadata"):
        own.build_metadata((2, 2), None)
    with pytest.raises(NotImplementedError, match="define shard"):
        own.shard(None)


def test_as_spec_takes_torchs_own_specs():
    api = pytest.importorskip("torch.distributed._shard.sharding_spec")
    assert as_spec(api.ChunkShardingSpec(0, list(TWO))) == ChunkShardingSpec(0, TWO)
    shards = [api.ShardMetadata([0], [2], "rank:0"), api.ShardMetadata([2], [1], "rank:1")]
    assert str(as_spec(api.EnumerableShardingSpec(shards))) == 'enum([0:2] @ "rank:0/cpu", [2:3] @ "rank:1/cpu")'
