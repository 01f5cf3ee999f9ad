"""The grid of ranks: places, ranks along axes, and what cannot be a grid."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtensor.errors import LayoutError
from shardtensor.mesh import Mesh, as_ranks, coordinate


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = math.prod(sizes)
    ranks = draw(st.permutations(range(10, 10 + count))) if draw(st.booleans()) else range(count)
    return Mesh(tuple((f"axis{i}", size) for i, size in enumerate(sizes)), ranks)


@given(meshes())
def test_places_and_ranks_are_each_others_inverse(mesh):
    places = [mesh.coordinate(rank) for rank in mesh.ranks]
    assert [mesh.rank_at(place) for place in places] == list(mesh.ranks)
    assert places == sorted(places)  # row-major, the last axis fastest
    assert mesh.coordinate(999) is None


@given(meshes(), st.data())
def test_ranks_along_axes_differ_only_there(mesh, data):
    axes = data.draw(st.lists(st.sampled_from(range(len(mesh.sizes))), unique=True))
    rank = data.draw(st.sampled_from(list(mesh.ranks)))
    along = mesh.ranks_along(rank, axes)
    assert rank in along
    assert len(set(along)) == len(along) == math.prod(mesh.sizes[axis] for axis in axes)
    here = mesh.coordinate(rank)
    for other in along:
        place = mesh.coordinate(other)
        assert all(a == b for axis, (a, b) in enumerate(zip(here, place, strict=True)) if axis not in axes)
        assert set(mesh.ranks_along(other, axes)) == set(along)
    assert mesh.ranks_along(999, axes) == ()


def test_a_mesh_is_a_value():
    assert Mesh((("dp", 2), ("tp", 2))) == Mesh((("dp", 2), ("tp", 2)), [0, 1, 2, 3])
    assert hash(Mesh((("dp", 2),))) == hash(Mesh((("dp", 2),), (0, 1)))
    assert Mesh((("dp", 2),)) != Mesh((("dp", 2),), (1, 0))
    mesh = Mesh((("dp", 2), ("tp", 3)))
    assert (str(mesh), mesh.names, mesh.sizes, mesh.size) == ("(dp=2, tp=3)", ("dp", "tp"), (2, 3), 6)
    assert Mesh((("*", 3),)).is_unnamed
    assert not mesh.is_unnamed


def test_consecutive_ranks_are_a_range_whatever_their_number():
    assert as_ranks([3, 4, 5]) == range(3, 6)
    assert as_ranks((5, 4)) == (5, 4)
    assert as_ranks(()) == ()
    assert as_ranks(range(0, 6, 2)) == (0, 2, 4)
    assert coordinate(range(10**12), (10**6, 10**6), 10**6 + 7) == (1, 7)  # arithmetic, not a search


def test_what_is_not_a_grid():
    with pytest.raises(LayoutError) as caught:
        Mesh((("dp", 2), ("tp", 3)), range(4))
    assert str(caught.value) == (
        "the mesh has 6 places for 4 ranks\n"
        "  mesh  (dp=2, tp=3)\n"
        "  fix   make the product of the axis sizes equal to the number of ranks"
    )
    with pytest.raises(LayoutError) as caught:
        Mesh((("dp", 2), ("dp", 3)))
    assert str(caught.value) == (
        "two axes of the mesh have one name\n"
        "  mesh  (dp=2, dp=3)\n"
        "  fix   give each axis its own name"
    )  # fmt: skip
