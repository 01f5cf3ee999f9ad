"""Groups in pickles: the same ranks in the same place have theirs back, others are refused with what differs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import shardtensor as st
from shardtensor.comm.group import group_along
from shardtensor.comm.process_group import as_group, unpickle_group
from shardtensor.mesh import Mesh


def written() -> tuple[bytes, bytes, bytes]:
    """All ranks, those of the first axis, and two of them."""
    group = as_group()
    grid = group.on_mesh(Mesh((("dp", 2), ("tp", 2))), {})
    pair = group.subgroup([0, 2] if group.rank in (0, 2) else [1, 3])
    return pickle.dumps(group), pickle.dumps(grid), pickle.dumps(pair)


def read_again() -> None:
    group = as_group()
    for text in written():
        again, once_more = pickle.loads(text), pickle.loads(text)
        assert again is once_more
    whole, grid, pair = map(pickle.loads, written())
    assert whole is group
    assert tuple(grid.mesh.axes) == (("dp", 2), ("tp", 2)) and tuple(grid.ranks) == (0, 1, 2, 3)
    assert tuple(grid.axis("dp").ranks) == (group.rank % 2, group.rank % 2 + 2)
    assert tuple(pair.ranks) == (group.rank % 2, group.rank % 2 + 2) and pair.mesh is None
    assert pair is group.subgroup(pair.ranks)


@pytest.mark.worlds("sim", "gloo")
def test_a_rank_in_the_same_place_has_its_group_back(world):
    world(read_again, 4)


def refused(texts: list[tuple[bytes, bytes, bytes]], which: int, by: int) -> tuple[str, str]:
    try:
        pickle.loads(texts[by][which])
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error).splitlines()[0]
    return "", ""


def test_a_rank_in_another_place_is_told_which():
    texts = st.simulate(4, written)
    found: list[Any] = st.simulate(4, refused, texts, 0, 1)
    places = [f"Local rank at save time was 1, but at load time was {rank}" for rank in range(4)]
    assert found == [("RuntimeError", text) if rank != 1 else ("", "") for rank, text in enumerate(places)]
    # Of two ranks, all that are in the group are looked at, before they wait for each other.
    found = st.simulate(4, refused, texts, 2, 1)
    for rank in (0, 2, 3):
        assert found[rank] == ("RuntimeError", f"Global rank at save time was 1, but at load time was {rank}")
    assert found[1] == ("", "")


def test_a_world_of_another_size_is_refused():
    texts = st.simulate(4, written)
    for which in (0, 1):
        for kind, text in st.simulate(2, refused, texts, which, 0):
            assert kind == "LayoutError" and text == "a module was pickled by a group of other ranks"
    few = st.simulate(2, lambda: pickle.dumps(as_group()))

    def read() -> str:
        with pytest.raises(RuntimeError) as caught:
            pickle.loads(few[0])
        return str(caught.value)

    # The two are in this world too, but it is larger than theirs.
    assert set(st.simulate(4, read)) <= {
        "Global world size at save time was 2, but at load time was 4",
        *(f"Global rank at save time was 0, but at load time was {rank}" for rank in (1, 2, 3)),
    }


def test_without_a_process_group_there_is_no_way_back():
    for text in st.simulate(4, written)[0]:
        with pytest.raises(RuntimeError, match="Need to initialize default process group"):
            pickle.loads(text)


def test_alone_a_group_is_read_alone_only():
    text = pickle.dumps(as_group())
    assert pickle.loads(text) is as_group()

    def read() -> str:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            pickle.loads(text)
        return str(caught.value).splitlines()[0]

    said = set(st.simulate(2, read))
    assert said and all("at save time was" in each for each in said)


def test_a_mesh_of_other_ranks_is_refused():
    def read() -> None:
        group = as_group()
        place = (group.index, group.rank, group.size, group.size)
        for axes, ranks in (((("a", 2), ("b", 1)), (0, 1)), ((("a", 2), ("b", 2)), (0, 1, 2, 4))):
            with pytest.raises(ValueError, match="the tensor was made on a mesh of other ranks"):
                unpickle_group(place, (axes, ranks))
        again = unpickle_group(place, ((("a", 2), ("b", 2)), (0, 1, 2, 3)))
        assert again.mesh.names == ("a", "b")
        seen = again.on_mesh(Mesh((("c", 4),)), {})
        assert seen.mesh.names == ("c",)

    st.simulate(4, read)


def test_a_group_that_has_a_mesh_keeps_it():
    """Inside ``load_with_process_group(device_mesh)`` the reader's mesh counts, not the writer's."""

    def read() -> None:
        group = as_group()
        place = (group.index, group.rank, group.size, group.size)
        assert unpickle_group(place, ((("x", 4),), (0, 1, 2, 3))) is group
        assert group.mesh.names == ("a", "b")

    st.simulate("a=2, b=2", read)


def check_subgroups() -> None:
    group = as_group().on_mesh(Mesh((("a", 2), ("b", 2), ("c", 1))), {})
    for names in ((), ("a",), ("b",), ("c",), ("a", "b"), ("b", "a"), ("a", "c"), ("a", "b", "c")):
        axes = [group.mesh.names.index(name) for name in sorted(names)]
        subgroup = group_along(group, iter(names))
        assert tuple(subgroup.ranks) == group.mesh.ranks_along(group.rank, axes)
        assert subgroup is group_along(group, reversed(names))
    with pytest.raises(st.LayoutError, match="no mesh axis is called `d`"):
        group_along(group, ("a", "d"))
    with pytest.raises(st.SpecError, match="no mesh axis is called `d`"):
        group_along(group, ("d",), st.SpecError)
    flat = as_group()
    assert group_along(flat, ("anything",)) is flat


@pytest.mark.worlds("sim")
def test_a_subgroup_is_the_ranks_that_differ_along_some_axes_only(world):
    world(check_subgroups, 4)
