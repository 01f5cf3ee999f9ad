"""Estimated seconds obey what every network does, whatever the profile; profiles read back as they are written."""

from __future__ import annotations

import attrs
import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as some

from shardtensor.cost.profile import KINDS, Curve, profile_names, ranks_in_node, read_profile, received_share, seconds
from shardtensor.errors import LayoutError
from shardtensor.mesh import Mesh

profiles = some.sampled_from(profile_names()).map(read_profile)
kinds = some.sampled_from(KINDS)
sizes = some.integers(1, 1 << 34)


@given(profiles, kinds, sizes, sizes, some.integers(2, 64))
def test_more_bytes_never_take_less(profile, kind, a, b, group_size):
    few, many = sorted((a, b))
    assert 0 < seconds(kind, few, group_size, profile) <= seconds(kind, many, group_size, profile) * (1 + 1e-9)


@given(profiles, kinds, sizes, some.integers(2, 512))
def test_more_ranks_never_take_less_for_the_same_bytes(profile, kind, received, group_size):
    one, more = (seconds(kind, received, n, profile, per_node=1) for n in (group_size, 2 * group_size))
    assert one <= more * (1 + 1e-9)


@given(profiles, kinds, sizes)
def test_what_sends_nothing_costs_nothing(profile, kind, received):
    assert seconds(kind, received, 1, profile) == seconds("slice", received, 8, profile) == 0
    assert seconds(kind, 0, 8, profile) == 0


def test_an_all_reduce_is_about_two_reduce_scatters():
    for name in ("h100", "h200"):
        profile = read_profile(name)
        for size in (1 << 26, 1 << 30):
            both = [
                seconds(kind, size * received_share(kind, 4), 4, profile) for kind in ("all_reduce", "reduce_scatter")
            ]
            assert 1.5 < both[0] / both[1] < 2.5


def test_links_between_nodes_are_the_slower_ones_and_adapters_add_up():
    h100 = read_profile("h100")
    for kind in KINDS:
        inside = seconds(kind, 1 << 28, 8, h100)
        alone, joined = (seconds(kind, 1 << 28, 16, h100, per_node=k) for k in (1, 8))
        assert inside <= joined < alone


@examples(60)
@given(some.lists(some.integers(1, 6), min_size=1, max_size=3), some.data())
def test_ranks_in_node_counts_them(grid, data):
    axes = tuple(data.draw(some.sets(some.integers(0, len(grid) - 1), min_size=1)))
    per_node = data.draw(some.sampled_from([1, 2, 4, 8]))
    mesh = Mesh(tuple((f"a{i}", n) for i, n in enumerate(grid)))
    ranks = mesh.ranks_along(0, axes)
    assert ranks_in_node(tuple(grid), axes, per_node) == sum(rank < per_node for rank in ranks)


@given(
    some.lists(
        some.tuples(some.integers(1, 1 << 30), some.floats(1e-6, 1)), min_size=1, max_size=6, unique_by=lambda x: x[0]
    )
)
def test_a_curve_passes_through_its_points(points):
    points.sort()
    curve = Curve(4, 0.0, tuple(size for size, _ in points), tuple(time for _, time in points))
    assert all(curve.at(size) == pytest.approx(time) for size, time in points)


def test_profiles_read_back(tmp_path):
    for name in profile_names():
        profile = read_profile(name)
        file = tmp_path / f"{name}.json"
        file.write_text(profile.as_text())
        assert read_profile(file) == profile
        assert set(profile.within) == set(profile.between) == set(KINDS)


def test_a_faulty_profile_says_what_is_wrong(tmp_path):
    with pytest.raises(LayoutError) as caught:
        read_profile("h1000")
    assert str(caught.value) == (
        "there is no hardware profile `h1000`\n"
        "  known  cpu, h100, h200\n"
        "  fix    name one of these, or the file that `shardtensor plan --calibrate FILE` wrote"
    )
    file = tmp_path / "mine.json"
    file.write_text("{}")
    with pytest.raises(LayoutError, match="no hardware profile"):
        read_profile(file)
    with pytest.raises(LayoutError, match="no collective is called"):
        seconds("all_reduces", 8, 2, read_profile("cpu"))
    with pytest.raises(LayoutError, match="ascending numbers"):
        attrs.evolve(read_profile("cpu").within["all_gather"], received_bytes=(2, 1, 3))
