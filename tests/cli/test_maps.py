"""Maps show which rank holds what."""

from __future__ import annotations

from shardtensor.cli.show_text import draw_boxes
from shardtensor.layout.box import Box


def test_columns_rows_copies_and_vectors():
    columns = [[Box((0, 0), (2, 3))], [Box((0, 3), (2, 1))]]
    assert draw_boxes((2, 4), columns).plain == "0001"
    copies = [[Box((0, 0), (1, 2))], [Box((0, 0), (1, 2))]]
    assert draw_boxes((1, 2), copies).plain == "  "
    assert draw_boxes((3,), [[Box((0,), (1,))], [Box((1,), (2,))]]).plain == "011"
    assert draw_boxes((), [[Box((), ())]]).plain == " "


def test_many_ranks_and_whole_tensors():
    rows = [[Box((rank, 0), (1, 2))] for rank in range(6)]
    assert draw_boxes((6, 2), rows).plain == "00\n11\n22\n33\n44\n55"
    assert draw_boxes((6, 2), [[Box((0, 0), (6, 2))]] * 3).plain == "  "


def test_a_large_tensor_is_shrunk_to_the_map():
    boxes = [[Box((0, 0), (512, 1024))], [Box((512, 0), (512, 1024))]]
    lines = draw_boxes((1024, 1024), boxes).plain.splitlines()
    assert lines == ["0" * 16] * 2 + ["1" * 16] * 2
