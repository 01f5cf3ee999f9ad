"""How `shard_placement_fn` cuts a parameter: its stored order, grains, and the spec that says it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from shardtensor.errors import LayoutError, ShardTensorError
from shardtensor.layout.bind import bind
from shardtensor.layout.ranges import ANYWHERE, ShardPlacement
from shardtensor.mesh import Mesh

ASKED = [None, "flat(dp)", "flat(dp, unit=row)", "flat(dp, unit=4)", Shard(0), Shard(1), Shard(-1)]


def form(asked: Any, shape: tuple[int, ...]) -> ShardPlacement:
    return ShardPlacement.of(asked, "w", shape, "dp", True)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_what_is_stored_is_shown_again(asked):
    for shape in ((4, 6), (3, 2, 4), (1, 5), (7, 1)):
        cut = form(asked, shape)
        x = torch.arange(float(math.prod(shape))).view(shape)
        stored = cut.stored(x)
        assert stored.shape == (x.numel(),)
        assert torch.equal(cut.as_param(stored, shape), x)
        grain = cut.grain(shape)
        whole_rows = {"flat(dp)": 1, None: 1, "flat(dp, unit=4)": 4}
        dim = asked.dim % len(shape) if isinstance(asked, Shard) else 0
        assert grain == whole_rows.get(asked if not isinstance(asked, Shard) else "", x.numel() // shape[dim])
        if isinstance(asked, Shard):  # a stretch of grains is a stretch along the dim
            first = cut.as_param(stored[:grain], tuple(1 if d == dim else n for d, n in enumerate(shape)))
            assert torch.equal(first, x.narrow(dim, 0, 1))


def test_a_spec_puts_on_each_rank_what_its_range_holds():
    mesh = Mesh((("dp", 3),))
    for asked, shape in itertools.product(ASKED, ((4, 6), (6, 3), (3, 2, 4))):
        cut = form(asked, shape)
        grain, total = cut.grain(shape), math.prod(shape)
        for counts in ((2, 1), (1, 1), (0, 3)):
            first, second = (min(count * grain, total) for count in counts)
            sizes = (first, min(second, total - first), total - first - min(second, total - first))
            layout = bind(cut.spec(None, shape, "dp", sizes), shape, mesh)
            x = torch.arange(total).view(shape)
            stored = cut.stored(x)
            starts = (0, sizes[0], sizes[0] + sizes[1])
            for rank in range(3):
                held = {int(i) for box in layout.boxes(rank) for i in x[box.slices].flatten()}
                assert held == set(stored[starts[rank] : starts[rank] + sizes[rank]].tolist()), (asked, shape, sizes)


def test_even_stretches_are_said_without_sizes():
    cut = form(Shard(1), (4, 6))
    assert str(cut.spec(None, (4, 6), "dp", (8, 8, 8))) == "[-, dp]"
    assert str(cut.spec(None, (4, 6), "dp", (8, 12, 4))) == "[-, dp sizes(2, 3, 1)]"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("[dp, -]", "what fully_shard cannot do"),
        ("replicate", "what fully_shard cannot do"),
        ("flat(dp, sizes=(1, 2))", "what fully_shard cannot do"),
        ("flat(dp) only(tp, 1)", "what fully_shard cannot do"),
        ("[-] partial(dp)", "what fully_shard cannot do"),
        ("flat(tp)", "over tp, but the data axis is dp"),
        ("flat(dp*tp)", r"over dp\*tp, but the data axis is dp"),
        ("only(dp, 1)", "what fully_shard cannot do"),
        (Shard(2), "cuts dim 2 of `w`, which has 2 dims"),
        (Shard(-3), "cuts dim -3 of `w`, which has 2 dims"),
    ],
    ids=str,
)
def test_what_no_data_ranks_can_hold_is_refused(asked, text):
    with pytest.raises(LayoutError, match=text):
        form(asked, (4, 6))


def test_only_a_shard_of_a_dim_is_torchs():
    class Shard:
        dim = "rows"

    with pytest.raises((TypeError, ShardTensorError)):
        form(Shard(), (4, 6))


def test_an_axis_without_a_name_goes_by_any():
    assert ShardPlacement.of("flat(any)", "w", (4,), "dp", False) == ShardPlacement(axis="any")
    assert form(None, (4,)) is ANYWHERE and form(Shard(0), (4, 6)) == ShardPlacement(unit="row")
