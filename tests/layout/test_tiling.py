"""What is wrong with boxes that do not tile, and with specs that do not fit: the full text of each message."""

from __future__ import annotations

import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import elements

from shardtensor.errors import LayoutError
from shardtensor.layout.box import (
    Box,
    check_no_overlap,
    check_tensor,
    check_tiling,
    find_hole,
    validate_non_overlapping_shards_metadata,
    whole,
)
from shardtensor.spec.devices import ShardMetadata


def text_of(call, *args) -> str:
    with pytest.raises(LayoutError) as caught:
        call(*args)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_a_hole_is_named_by_its_first_element():
    owned = [(0, Box((0, 0), (2, 4))), (1, Box((2, 0), (2, 1))), (2, Box((2, 2), (2, 2)))]
    assert text_of(check_tiling, owned, (4, 4)) == (
        "the shards do not cover the entire tensor: no shard holds element (2, 1)\n"
        "  shape   (4, 4)\n"
        "  volume  14 of the shards does not match tensor volume 16\n"
        "  fix     add a shard that starts at (2, 1), or give the true global size"
    )


def test_an_overlap_names_both_boxes_and_ranks_and_a_hole():
    owned = [(3, Box((0, 0), (2, 4))), (1, Box((1, 1), (2, 2)))]
    assert text_of(check_tiling, owned, (3, 4)) == (
        "Shards [0:2, 0:4] of rank 3 and [1:3, 1:3] of rank 1 overlap\n"
        "  both  hold [1:2, 1:3]\n"
        "  and   no shard holds element (2, 0)\n"
        "  fix   give each element to one shard"
    )
    assert text_of(check_no_overlap, [(None, box) for _, box in owned]) == (
        "Shards [0:2, 0:4] and [1:3, 1:3] overlap\n"
        "  both  hold [1:2, 1:3]\n"
        "  fix   give each element to one shard"
    )  # fmt: skip


def test_a_box_that_does_not_fit():
    assert text_of(check_tiling, [(0, Box((0, 2), (2, 3)))], (2, 4)) == (
        "Shard offset 2 and length 3 exceeds tensor dim: 4\n"
        "  shape  (2, 4)\n"
        "  shard  [0:2, 2:5] of rank 0\n"
        "  fix    give the true global size, or a shard that ends inside it"
    )
    assert text_of(check_tiling, [(0, Box((0,), (2,)))], (2, 4)) == (
        "Rank of tensor is 2, but shards rank is 1\n"
        "  shape  (2, 4)\n"
        "  shard  [0:2] of rank 0\n"
        "  fix    give every shard one offset and one size for each dim"
    )


def test_what_tiles():
    check_tiling([(0, Box((0,), (2,))), (1, Box((2,), (3,))), (2, Box((5,), (0,))), (3, Box((1,), (0,)))], (5,))
    check_tiling([(0, Box((), ()))], ())
    check_tiling([], (0, 3))
    check_tiling([(0, Box((0, 0), (0, 3))), (1, Box((0, 0), (0, 0)))], (0, 3))
    assert find_hole([], ()) == ()
    assert find_hole([Box((), ())], ()) is None


def test_torch_spells_the_same_checks():
    shards = [ShardMetadata([0], [2], "rank:0/cpu"), ShardMetadata([1], [2], "rank:1/cpu")]
    with pytest.raises(ValueError, match=r"Shards .*of rank 0.*of rank 1.*overlap"):
        validate_non_overlapping_shards_metadata(shards)
    validate_non_overlapping_shards_metadata([shards[0], ShardMetadata([2], [2])])
    with pytest.raises(ValueError, match="does not match tensor volume"):
        check_tensor([shards[0]], [3])


boxes_2d = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=5
).map(lambda found: [Box((a, b), (min(m, 4 - a), min(n, 4 - b))) for a, b, m, n in found])


@examples(300)
@given(boxes_2d)
def test_holes_and_overlaps_are_what_counting_says(boxes):
    counted = [element for box in boxes for element in elements(box)]
    missing = [element for element in elements(whole((4, 4))) if element not in counted]
    assert find_hole(boxes, (4, 4)) == (missing[0] if missing else None)
    owned = list(enumerate(boxes))
    if len(set(counted)) < len(counted):
        with pytest.raises(LayoutError, match="overlap"):
            check_tiling(owned, (4, 4))
    elif missing:
        with pytest.raises(LayoutError, match="do not cover"):
            check_tiling(owned, (4, 4))
    else:
        check_tiling(owned, (4, 4))
