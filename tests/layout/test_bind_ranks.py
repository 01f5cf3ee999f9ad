"""A spec that names ranks is bound to a mesh that has all of them, whatever way either says its ranks."""

from __future__ import annotations

from itertools import product

import pytest

from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import ChunkShardingSpec

MESHES = (range(4), range(3), range(1, 5), (0, 1, 2, 3), (0, 1, 3), (3, 1, 2, 0), (0, 2, 4, 6))
NAMED = (["rank:0-3/cpu"], ["rank:0-1/cpu"], ["rank:2/cpu", "rank:0/cpu"], ["rank:0/cpu", "rank:2/cpu", "rank:4/cpu"])


@pytest.mark.parametrize(("ranks", "places"), [*product(MESHES, NAMED)])
def test_a_rank_that_the_mesh_lacks_is_named(ranks, places):
    spec, mesh = ChunkShardingSpec(0, places), Mesh((("*", len(ranks)),), ranks)
    named = [place.rank() for place in spec.placements]
    missing = [rank for rank in named if rank not in ranks]
    if not missing:
        assert list(bind(spec, (8,), mesh).ranks) == named
        return
    with pytest.raises(LayoutError) as caught:
        bind(spec, (8,), mesh)
    assert any(str(rank) in str(caught.value).splitlines()[0] for rank in missing)
