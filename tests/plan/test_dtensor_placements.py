"""Specs <-> DTensor's placements: what is read back is the same layout, and what DTensor cannot say is an error."""

from __future__ import annotations

from itertools import product

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardtensor import LayoutError, parse_spec
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import same_boxes
from shardtensor.mesh import read_mesh
from shardtensor.plan.interop.dtensor import placements_from_spec, read_placements, spec_from_placements

CHOICES = [Replicate(), Shard(0), Shard(1), Shard(-1), Partial(), _StridedShard(0, split_factor=2)]
SHAPES = [(8, 12), (5, 3), (12, 24), (2, 1)]


def test_there_and_back_is_the_same_layout():
    mesh, refused = read_mesh("dp=2, tp=2"), 0
    for shape, placements in product(SHAPES, product(CHOICES, repeat=2)):
        try:
            spec = spec_from_placements(placements, mesh, shape)
        except LayoutError:
            refused += 1  # blocks that are not equal
            continue
        back = placements_from_spec(spec, mesh, shape)
        again = spec_from_placements(back, mesh, shape)
        assert same_boxes(bind(spec, shape, mesh), bind(again, shape, mesh)), (shape, placements, str(spec), back)
        assert [p.is_partial() for p in back] == [p.is_partial() for p in placements]
    assert refused < len(SHAPES) * len(CHOICES)


@pytest.mark.parametrize(
    ("spec", "placements"),
    [
        ("[dp, tp]", (Shard(0), Shard(1))),
        ("[dp*tp, -]", (Shard(0), Shard(0))),
        ("[tp*dp, -]", (_StridedShard(0, split_factor=4), Shard(0))),
        ("[tp blocks(3), -]", (Replicate(), _StridedShard(0, split_factor=3))),
        ("[-, tp] partial(dp)", (Partial(), Shard(1))),
        ("replicate partial(tp, op=max)", (Replicate(), Partial("max"))),
        ("replicate", (Replicate(), Replicate())),
    ],
)
def test_pairs(spec, placements):
    shape = (24, 16)
    assert placements_from_spec(spec, "dp=2, tp=4", shape) == placements
    assert spec_from_placements(placements, "dp=2, tp=4", shape) == parse_spec(spec)


def test_an_uneven_cut_is_padding_or_sizes():
    assert placements_from_spec("[tp pad(1), -]", "tp=4", (10, 8)) == (Shard(0),)
    assert str(spec_from_placements([Shard(0)], "tp=4", (10, 8))) == "[tp sizes(3, 3, 3, 1), -]"


@pytest.mark.parametrize("spec", ["[tp balanced, -]", "[tp sizes(1, 2, 3, 4), -]", "[tp unit(2) balanced, -]"])
def test_what_dtensor_cannot_say(spec):
    with pytest.raises(LayoutError, match=r"DTensor cannot say this layout\n[^$]*\(3, 3, 3, 1\)"):
        placements_from_spec(spec, "tp=4", (10, 8))


def test_faults_are_told():
    with pytest.raises(LayoutError, match="there are 1 placements for 2 axes"):
        spec_from_placements([Shard(0)], "dp=2, tp=4", (8, 8))
    with pytest.raises(LayoutError, match="names a dim that the tensor does not have"):
        spec_from_placements([Shard(2)], "tp=4", (8, 8))

    class _MaskPartial:
        reduce_op = "sum"

    with pytest.raises(LayoutError, match="has no meaning outside of DTensor"):
        read_placements([_MaskPartial()], (8, 8))
