"""Which rank steps what, as integers: owners of parameters, and flat buffers that ranks divide into ranges."""

from __future__ import annotations

import math

import pytest
from harness import SIZES
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from shardtensor.layout.partition import HeldBytes, Param, assign_owners, held_bytes, plan_buckets

RANKS = st.integers(1, 9)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("order", [sorted, lambda x: sorted(x, reverse=True), list], ids=["up", "down", "as_is"])
def test_sizes_that_can_be_balanced_are(world, order):
    loads = [0] * world
    assign_owners(order([9, 7, 5, 3] * world), loads)
    assert loads == [24] * world


@given(st.lists(st.integers(0, 1000), max_size=40), RANKS)
@examples(200)
def test_every_parameter_has_one_owner_and_loads_are_near_the_mean(sizes, ranks):
    loads = [0] * ranks
    owners = assign_owners(sizes, loads)
    assert len(owners) == len(sizes) and set(owners) <= set(range(ranks))
    assert loads == [sum(size for size, own in zip(sizes, owners, strict=True) if own == rank) for rank in range(ranks)]
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)


@given(st.lists(st.lists(st.integers(0, 1000), max_size=12), max_size=4), RANKS)
@examples(100)
def test_groups_added_later_are_balanced_with_those_before(groups, ranks):
    loads = [0] * ranks
    for sizes in groups:
        before = list(loads)
        owners = assign_owners(sizes, loads)
        added = [sum(s for s, own in zip(sizes, owners, strict=True) if own == rank) for rank in range(ranks)]
        assert loads == [was + more for was, more in zip(before, added, strict=True)]
    sizes = [size for group in groups for size in group]
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)


@st.composite
def models(draw):
    """Kinds, lengths and grains of parameters: of elements, of rows or of whole parameters."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20)), min_size=1, max_size=16))
    unit = draw(st.sampled_from(["element", "row", "parameter"]))
    lengths = [rows * columns for rows, columns in shapes]
    grains = {
        "element": [1] * len(shapes),
        "row": [columns for _, columns in shapes],
        "parameter": [max(length, 1) for length in lengths],
    }[unit]
    kinds = draw(st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=len(shapes), max_size=len(shapes)))
    limit = draw(st.sampled_from([0, 1, 50, 300, 10**9]))
    limits = [limit // {"float32": 4, "bfloat16": 2}[kind] for kind in kinds]
    return kinds, lengths, limits, grains


def assert_planned(plans, kinds, lengths):
    """Every parameter is in one bucket, of its kind, and each of its elements has one place there and one rank."""
    assert sorted(i for plan in plans for i in plan.members) == list(range(len(kinds)))
    for plan in plans:
        assert len({kinds[i] for i in plan.members}) == 1
        assert plan.ranges.lengths == tuple(lengths[i] for i in plan.members)
        places = sorted(zip(plan.ranges.starts, plan.ranges.lengths, strict=True))
        for (start, length), (following, _) in zip(places, [*places[1:], (plan.ranges.total, 0)], strict=True):
            assert start >= 0 and start + length <= following
        for place, i in enumerate(plan.members):
            end = 0
            for rank in range(plan.ranges.ranks):
                start, stop = plan.ranges.piece(place, rank)
                if start < stop:
                    assert start == end
                    end = stop
            assert end == lengths[i]


@given(models(), RANKS)
@examples(200)
def test_ranges_cover_each_element_once_and_divide_no_grain(model, ranks):
    kinds, lengths, limits, grains = model
    plans = plan_buckets(kinds, lengths, ranks, limits, "ranges", grains, [0] * ranks)
    assert_planned(plans, kinds, lengths)
    for plan in plans:
        assert list(plan.members) == sorted(plan.members)
        # A bucket is closed by the parameter that fills it: the first in the order of the model, added last.
        assert len(plan.members) == 1 or sum(lengths[i] for i in plan.members[1:]) < limits[plan.members[0]]
        for place, i in enumerate(plan.members):
            ends = [stop for rank in range(ranks) for stop in plan.ranges.piece(place, rank)]
            assert all(end % grains[i] == 0 for end in ends)


@given(models(), RANKS)
@examples(200)
def test_full_buckets_are_closed(model, ranks):
    kinds, lengths, limits, grains = model
    plans = plan_buckets(kinds, lengths, ranks, limits, "ranges", grains, [0] * ranks)
    for kind in set(kinds):
        own = [plan for plan in plans if kinds[plan.members[0]] == kind]
        not_full = [p for p in own if sum(lengths[i] for i in p.members) < limits[p.members[0]]]
        assert len(not_full) <= 1


@given(models(), RANKS)
@examples(200)
def test_in_buckets_with_owners_no_parameter_is_divided(model, ranks):
    kinds, lengths, limits, grains = model
    loads = [0] * ranks
    plans = plan_buckets(kinds, lengths, ranks, limits, "owners", grains, loads)
    assert_planned(plans, kinds, lengths)
    stepped = [0] * ranks
    for plan in plans:
        for place, i in enumerate(plan.members):
            sizes = plan.ranges.sizes(place)
            assert sorted(sizes) == [0] * (ranks - 1) + [lengths[i]]
            for rank, size in enumerate(sizes):
                stepped[rank] += size
    assert stepped == loads
    if all(limit > sum(lengths) for limit in limits) and len(set(kinds)) == 1:
        assert max(loads) <= sum(lengths) / ranks + max(lengths)


@pytest.mark.parametrize("ranks", SIZES)
def test_ranges_are_equal_whatever_the_sizes(ranks):
    lengths = [1600, 16, 320]
    (plan,) = plan_buckets(["float32"] * 3, lengths, ranks, [10**9] * 3, "ranges", [1] * 3, [0] * ranks)
    assert plan.ranges.chunk <= math.ceil(sum(lengths) / ranks / 16) * 16


def trained(*lengths: int) -> list[Param]:
    return [Param(length, 4, True, "float32") for length in lengths]


def test_bytes_of_owners():
    """70,000 floats are sent by themselves; the other two are packed by their owner, each from a multiple of 16."""
    params = [*trained(70_000, 3), Param(5, 4, False, "float32")]
    held = [held_bytes(params, 2, rank, "owners", is_reduced=False) for rank in range(2)]
    assert held == [HeldBytes(280_032, 280_012, state, 32 * 4) for state in (280_000, 12)]


@pytest.mark.parametrize(
    ("lengths", "chunk", "stepped"),
    [
        ((40, 24), 48, (40, 24)),  # one parameter each: stepped without padding
        ((8, 8, 64), 48, (48, 48)),  # the first rank steps all of its range as one tensor
        ((8, 8, 40, 8), 48, (48, 40)),  # from the first to the last element of several parameters
    ],
)
def test_bytes_of_ranges(lengths, chunk, stepped):
    params = trained(*lengths)
    for rank, state in enumerate(stepped):
        found = held_bytes(params, 2, rank, "ranges", is_reduced=False)
        assert found == HeldBytes(8 * chunk, 4 * sum(lengths), 4 * state, 4 * chunk)
        found = held_bytes(params, 2, rank, "ranges", is_reduced=True)
        assert found == HeldBytes(8 * chunk, 4 * chunk, 4 * state, 2 * 8 * chunk)


def test_bytes_of_large_and_of_frozen_parameters():
    """Gradients of large parameters are not copied together; frozen ones have a bucket, and no more."""
    params = [*trained(1 << 20), Param(32, 4, False, "float32")]
    found = held_bytes(params, 2, 1, "ranges", is_reduced=False)
    assert found == HeldBytes(4 * ((1 << 20) + 32), 4 << 20, 2 << 20, 0)


def test_an_empty_parameter_is_the_first_ranks():
    params = trained(16, 0, 16)
    found = [held_bytes(params, 2, rank, "ranges", is_reduced=True).state for rank in range(2)]
    assert found == [16 * 4, 16 * 4]


def test_buckets_with_owners_wait_until_they_are_balanced():
    plans = plan_buckets(["a"] * 5, [32, 32, 96, 32, 32], 2, [32] * 5, "owners", [1] * 5, [0, 0])
    assert [sorted(plan.members) for plan in plans] == [[3, 4], [0, 1, 2]]
    for plan in plans:
        owners = [plan.owner(place) for place in range(len(plan.members))]
        assert owners == sorted(owners) and set(owners) <= {0, 1}
        for place, owner in enumerate(owners):
            assert plan.ranges.sizes(place)[owner] == plan.ranges.lengths[place]
