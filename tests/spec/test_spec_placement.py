"""Placements against torch's ``_remote_device``, and lists of them as runs."""

import time
import warnings

import pytest
from harness.examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from shardtensor.errors import SpecError
from shardtensor.spec.devices import ChunkShardingSpec, DevicePlacementSpec
from shardtensor.spec.placement import DEVICE_TYPES, DeviceError, Placement, Placements, parse_placement, parse_run

# fmt: off
pieces = st.sampled_from([
    "rank", "rank:0", "rank:12", "rank:007", "rank:²", "rank:٣", "rank:-1", "worker", "a b", "ö", "cuda", "cpu", "Cuda",
    "mps", "cuba", ":", "/", "0", "1", ":0", ":01", ":7", ":127", ":x", " ", "", "\n", "_",
])
# fmt: on
texts = st.lists(pieces, max_size=4).map("".join) | st.text("rank:0/cudap1 ", max_size=12)


@examples(600)
@example("")
@example("rank:0/")
@example("/cpu")
@example("rank:0/cpu/1")
@example("rank:99999999999999999999/cpu")
@example("x/cpu\0")
@given(texts)
def test_reads_what_torch_reads(text):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of mkldnn, by torch
        try:
            theirs = torch.distributed._remote_device(text)
        except (ValueError, RuntimeError) as error:
            with pytest.raises(type(error)) as caught:
                parse_placement(text)
            assert isinstance(caught.value, SpecError)
            return
        ours = parse_placement(text)
        assert str(ours) == str(theirs)
        assert (ours.rank(), ours.worker_name(), ours.device()) == (
            theirs.rank(),
            theirs.worker_name(),
            theirs.device(),
        )
        assert ours == theirs
        assert parse_placement(theirs) == ours


@pytest.mark.filterwarnings("ignore:'mkldnn' is no longer used")
def test_knows_the_device_types_that_torch_knows():
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.device("no_such")
    listed = str(caught.value).partition("Expected one of ")[2].partition(" device type")[0]
    known = {kind for kind in listed.split(", ") if accepted(torch, kind)}  # some are listed and yet refused
    assert known == DEVICE_TYPES


def accepted(torch, kind):
    try:
        return bool(torch.device(kind))
    except RuntimeError:
        return False


def test_a_device_index_does_not_wrap_round():
    """torch reads cuda:256 as cuda:0: the one text that is not read alike."""
    for text in ("cuda:128", "cuda:256", "rank:0/cuda:256", "cuda:" + "9" * 5000):
        with pytest.raises(DeviceError, match="the index of a device is 0 to 127"):
            parse_placement(text)


def test_takes_devices_and_equals_texts():
    torch = pytest.importorskip("torch")
    assert parse_placement(torch.device("cuda", 1)) == "cuda:1"
    assert DevicePlacementSpec(torch.device("cpu")).device == Placement(None, None, "cpu")
    place = parse_placement("rank:0")
    assert place == "rank:0/cpu"
    assert hash(place) == hash("rank:0/cpu")
    assert {place: 1}[parse_placement("rank:0/cpu")] == 1
    assert place != parse_placement("rank:1")
    assert place.device() == torch.device("cpu")
    with pytest.raises(SpecError, match="it is of type int"):
        parse_placement(0)


def test_messages():
    with pytest.raises(DeviceError) as caught:
        parse_placement("rank:0/cuba:1")
    assert str(caught.value) == (
        "no device type is called 'cuba'\n"
        f"  why  Expected one of {', '.join(sorted(DEVICE_TYPES))}\n"
        "  fix  did you mean cuda?"
    )
    with pytest.raises(SpecError) as caught:
        parse_placement("rank:0-3")
    assert str(caught.value) == (
        "Could not parse remote_device: rank:0-3\n"
        "  why  a placement is <worker>/<device>, rank:<n>/<device> or <device>\n"
        "  fix  a range stands for several placements: write it in a list of placements"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Placement("a", 0, "cpu"),
        lambda: Placement("", None, "cpu"),
        lambda: Placement("a/b", None, "cpu"),
        lambda: Placement(None, -1, "cpu"),
        lambda: Placement(None, 0, "cuba"),
        lambda: Placement(None, 0, "cuda", -1),
        lambda: Placement(None, 0, "cuda", 128),
    ],
)
def test_what_exists_is_valid(make):
    with pytest.raises(SpecError):
        make()


# ---------- lists ----------


@pytest.mark.parametrize(
    ("texts", "folded", "ranks"),
    [
        (["rank:0/cuda:0", "rank:1/cuda:1"], ("rank:0-1/cuda:0-1",), range(2)),
        (["rank:0-1/cuda:0-1", "rank:2-3/cuda:2-3"], ("rank:0-3/cuda:0-3",), range(4)),
        (["rank:0-15/cuda"], ("rank:0-15/cuda",), range(16)),
        (["rank:0-7/cuda:0-7", "rank:8-15/cuda:0-7"], ("rank:0-7/cuda:0-7", "rank:8-15/cuda:0-7"), range(16)),
        (["rank:3/cuda:3", "rank:2/cuda:2"], ("rank:3/cuda:3", "rank:2/cuda:2"), (3, 2)),
        (["rank:0", "rank:1-3"], ("rank:0-3/cpu",), range(4)),
        (["rank:0", "rank:0"], ("rank:0/cpu", "rank:0/cpu"), (0, 0)),
        (["rank:4/cuda:0-3"], ("rank:4/cuda:0-3",), (4, 4, 4, 4)),
        (["cuda:0", "cuda:1"], ("cuda:0-1",), (None, None)),
        (["trainer0/cuda:0", "trainer0/cuda:1", "trainer1"], ("trainer0/cuda:0-1", "trainer1/cpu"), (None, None, None)),
        (["rank:5-5"], ("rank:5/cpu",), range(5, 6)),
    ],
)
def test_fold(texts, folded, ranks):
    places = Placements(texts)
    assert places.fold() == folded
    assert places.ranks == ranks
    assert isinstance(places.ranks, type(ranks))
    assert Placements(folded) == places == list(folded)
    assert [str(place) for place in places] == [str(places[i]) for i in range(len(places))]
    known = [rank for rank in ranks if rank is not None]
    assert [places.index_of(rank) for rank in known] == [list(ranks).index(rank) for rank in known]
    assert places.index_of(10**6) is None


runs = ["rank:0-2/cuda:0-2", "rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:1", "rank:1-2/cuda", "cpu"]


@given(st.lists(st.sampled_from(runs), max_size=7))
def test_lists_are_equal_whatever_ranges_wrote_them(texts):
    """The runs made from ranges are the runs made from the same placements one at a time."""
    places = Placements(texts)
    assert Placements(list(places)) == places
    assert Placements([str(place) for place in places]).runs == places.runs
    assert Placements(places[::-1])[::-1] == places
    assert len(places) == len(list(places)) == len(places.ranks)


def test_lists_are_immutable_sequences():
    places = Placements("rank:0-3/cuda:0-3")
    assert places[-1] == "rank:3/cuda:3"
    assert places[1:3] == ["rank:1-2/cuda:1-2"]
    assert "rank:2/cuda:2" in places
    with pytest.raises(IndexError):
        places[4]
    with pytest.raises(AttributeError):
        places.runs = ()
    assert places != ["nonsense/of/a/list"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rank:0-3/cuda:0-2", "4 ranks stand against 3 devices"),
        ("rank:3-0", "the range goes down from 3 to 0"),
        ("rank:0-99999999999", "the range has more than 1048576 placements"),
        ("rank:0-127/cuda:100-227", "Invalid device string: cuda has no index 227"),
        ("worker:0-3/cuda:0-3", "Could not parse remote_device: worker:0/cuda:0"),
    ],
)
def test_ranges_that_cannot_be(text, fault):
    with pytest.raises(SpecError) as caught:
        parse_run(text)
    assert str(caught.value).splitlines()[0] == fault


def best_s(make, repeat=30):
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        make()
        times.append(time.perf_counter() - began)
    return min(times)


def test_a_range_costs_what_one_placement_costs():
    few = best_s(lambda: ChunkShardingSpec(dim=0, placements=["rank:0-7/cuda"]))
    many = best_s(lambda: ChunkShardingSpec(dim=0, placements=["rank:0-1048575/cuda"]))
    assert many < 3 * few  # 131,072 times as many
