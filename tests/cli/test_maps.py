"""Maps show which rank holds what."""

from __future__ import annotations

from shardtensor.layout.box import Box
from shardtensor.layout.picture import EVERYBODY, map_cells


def test_columns_copies_and_vectors():
    columns = [[Box((0, 0), (2, 3))], [Box((0, 3), (2, 1))]]
    assert map_cells((2, 4), columns, split=1, lines=4) == [[0, 0, 0, 1]]
    copies = [[Box((0, 0), (1, 2))], [Box((0, 0), (1, 2))]]
    assert map_cells((1, 2), copies, split=1, lines=4) == [[EVERYBODY] * 2]
    assert map_cells((3,), [[Box((0,), (1,))], [Box((1,), (2,))]], split=1, lines=4) == [[0, 1, 1]]
    assert map_cells((), [[Box((), ())]], split=1, lines=4) == [[EVERYBODY]]


def test_a_large_tensor_is_shrunk_to_the_map():
    boxes = [[Box((0, 0), (512, 1024))], [Box((512, 0), (512, 1024))]]
    assert map_cells((1024, 1024), boxes, split=1, lines=4) == [[0] * 16] * 2 + [[1] * 16] * 2
