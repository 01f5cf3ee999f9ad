"""Spec objects as values: frozen where torch's are not shared, copied where torch's can be changed."""

import copy
import pickle
import random
import subprocess
import sys

import attrs
import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from shardtensor.errors import SpecError
from shardtensor.spec.devices import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
    find_overlap,
    infer_sharding_spec,
)
from shardtensor.spec.nodes import Spec
from shardtensor.spec.parse import as_spec, parse_spec

TWO = ["rank:0/cuda:0", "rank:1/cuda:1"]


def test_shard_metadata_is_torchs():
    shard = ShardMetadata((0, 5), [2, 5], "rank:0")
    assert (shard.shard_offsets, shard.shard_sizes, str(shard.placement)) == ([0, 5], [2, 5], "rank:0/cpu")
    assert shard == ShardMetadata([0, 5], (2, 5), "rank:0/cpu")
    assert hash(shard) == hash(ShardMetadata([0, 5], (2, 5), "rank:0/cpu"))
    assert shard != ShardMetadata([0, 5], [2, 5])
    assert copy.deepcopy(shard) == pickle.loads(pickle.dumps(shard)) == shard
    shard.shard_sizes = (3, 5)
    shard.placement = "rank:1"
    assert (shard.shard_sizes, shard.placement) == ([3, 5], "rank:1/cpu")
    with pytest.raises(SpecError, match="shard_sizes should be >= 0"):
        shard.shard_sizes = [-1, 5]


def test_specs_copy_shards_on_entry():
    """One metadata object, reused and changed by the caller, is no concern of specs made from it."""
    given, shards = [0, 0], []
    for rank in range(2):
        given[0] = rank
        shards.append(ShardMetadata(given, [1, 4], f"rank:{rank}"))
    spec = EnumerableShardingSpec(shards)
    text = str(spec)
    shards[0].shard_offsets[0] = 7
    given[1] = 9
    spec.shards[1].shard_sizes[0] = 5
    assert str(spec) == text == 'enum([0:1, 0:4] @ "rank:0/cpu", [1:2, 0:4] @ "rank:1/cpu")'
    with pytest.raises(SpecError, match=r'Shards \[7:8, .* @ "rank:0/cpu" and \[7:8, .* @ "rank:1/cpu" overlap'):
        EnumerableShardingSpec([shards[0], ShardMetadata([7, 0], [1, 4], "rank:1")])


def test_shards_keep_their_order_and_equal_boxes_are_equal_specs():
    shards = [ShardMetadata([2], [2], "rank:1"), ShardMetadata([0], [2], "rank:0")]
    spec, turned = EnumerableShardingSpec(shards), EnumerableShardingSpec(shards[::-1])
    assert spec.shards == shards
    assert spec == turned
    assert spec.boxes == turned.boxes
    assert pickle.loads(pickle.dumps(spec)).shards == shards


def test_axis_specs_are_frozen():
    spec = Spec("tp", None)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec.dims = ()
    assert spec.axis_names == {"tp"}
    assert spec.flat("dp").partial("ep").axis_names == {"tp", "dp", "ep"}
    assert spec.flat("dp") is not spec
    assert str(spec) == "[tp, -]"


def test_a_chunk_spec_may_be_assigned_to_and_is_copied_by_what_takes_it():
    text = 'chunk(dim=0, placements=["rank:0-1/cuda:0-1"])'
    spec = parse_spec(text)
    kept = as_spec(spec)
    spec.placements = TWO[::-1]
    assert str(spec) == 'chunk(dim=0, placements=["rank:1/cuda:1", "rank:0/cuda:0"])'
    assert [place.rank() for place in spec.placements] == [1, 0]
    assert hash(spec) != hash(kept)
    assert str(kept) == str(parse_spec(text)) == text
    with pytest.raises(NotImplementedError):
        spec.dim = "N"
    uneven = ChunkShardingSpec(0, TWO, sizes=(5, 3))
    with pytest.raises(SpecError, match="2 sizes are given for 1 placements"):
        uneven.placements = ["rank:0"]
    assert uneven == ChunkShardingSpec(0, TWO, sizes=(5, 3))


# ---------- overlap ----------


def boxes_of(ndim):
    offsets, sizes = (st.lists(st.integers(0, most), min_size=ndim, max_size=ndim) for most in (4, 3))
    return st.lists(st.tuples(offsets, sizes), max_size=6)


@examples(300)
@given(st.integers(0, 3).flatmap(boxes_of))
def test_overlap_is_two_boxes_with_one_element(boxes):
    def elements(i):
        offsets, sizes = boxes[i]
        cells = {()}
        for start, size in zip(offsets, sizes, strict=True):
            cells = {(*cell, k) for cell in cells for k in range(start, start + size)}
        return cells

    pair = find_overlap(boxes)
    if pair is not None:
        assert pair[0] != pair[1]
        assert elements(pair[0]) & elements(pair[1])
    else:
        assert not any(elements(i) & elements(j) for i in range(len(boxes)) for j in range(i))


# ---------- inference ----------


def chunks(ndim, dim, length, places, offset_of_empty):
    """The shards that a chunk spec makes; an empty one starts at its chunk, as torch says, or where the dim ends."""
    split, shards = -(-length // len(places)), []
    for i, place in enumerate(places):
        start = split * i if offset_of_empty == "chunk" else min(split * i, length)
        size = max(min(split, length - split * i), 0)
        offsets, sizes = [0] * ndim, [7] * ndim
        offsets[dim], sizes[dim] = start, size
        shards.append(ShardMetadata(offsets, sizes, place))
    return shards


@examples(100)
@given(st.integers(1, 4), st.data(), st.sampled_from(["chunk", "end"]))
def test_the_shards_of_a_chunk_spec_give_it_back(ndim, data, offset_of_empty):
    dim = data.draw(st.integers(0, ndim - 1))
    places = data.draw(st.permutations([f"rank:{i}/cuda:{i}" for i in range(data.draw(st.integers(2, 5)))]))
    shards = chunks(ndim, dim, data.draw(st.integers(2, 20)), places, offset_of_empty)
    nonempty = sum(1 for shard in shards if shard.shard_sizes[dim])
    random.Random(nonempty).shuffle(shards[:nonempty])
    spec = infer_sharding_spec(shards)
    assert spec == ChunkShardingSpec(dim, [place for place in places]) or nonempty < len(places)
    assert isinstance(spec, ChunkShardingSpec)


@pytest.mark.parametrize(
    "shards",
    [
        [([0, 0], [5, 5]), ([5, 0], [10, 5])],  # not torch.chunk's sizes
        [([0, 0], [5, 5]), ([5, 0], [5, 4])],  # ragged
        [([0, 0], [5, 5]), ([5, 0], [5, 5]), ([0, 5], [5, 5]), ([5, 5], [5, 5])],  # a grid
        [([0, 0], [2, 4]), ([2, 0], [2, 4]), ([0, 4], [4, 2])],  # first cut on dim 0, then on dim 1
        [([0, 0], [5, 5])],  # one shard says no dim
        [([1, 0], [2, 2]), ([3, 0], [2, 2])],  # does not begin at 0
    ],
)
def test_other_shards_are_listed(shards):
    metadata = [ShardMetadata(*box, f"rank:{rank}") for rank, box in enumerate(shards)]
    spec = infer_sharding_spec(metadata)
    assert isinstance(spec, EnumerableShardingSpec)
    assert spec.shards == metadata


# ---------- without torch ----------

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it is an ImportError from here on
import shardtensor.spec.parse, shardtensor.spec.devices
spec = shardtensor.spec.parse.parse_spec('chunk(dim=0, placements=["rank:0-3/cuda:0-3"])')
assert str(spec.placements[3]) == "rank:3/cuda:3"
assert "lark" in sys.modules
"""


def test_runs_where_torch_cannot_be_imported():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, timeout=60)
