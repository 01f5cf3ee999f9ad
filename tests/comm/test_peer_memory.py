"""Memory that all ranks can write to: all of a group have it, or none; a rank that cannot is heard before any waits."""

from __future__ import annotations

import pytest
import torch

import shardtensor as st
from shardtensor.comm import peer_memory
from shardtensor.comm.peer_memory import PeerMemory
from shardtensor.comm.process_group import as_group

MIB = 1 << 20
GPU = torch.device("cuda", 0)


@pytest.fixture
def found(monkeypatch):
    """Stand in for what only GPUs have; returns what each rank did, and which rank fails at what."""
    done: list[tuple[int, str, int]] = []
    fails: dict[str, int] = {}

    def stage(name, value=True):
        def run(*args):
            rank = as_group().rank
            size = args[1] if name == "allocate" else 0
            done.append((rank, name, size))
            return value if fails.get(name) != rank else (None if name == "whereabouts" else False)

        return run

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fails.get("capture") is not None)
    monkeypatch.setattr(peer_memory, "_whereabouts", stage("whereabouts", ("host", 0, "gpu")))
    monkeypatch.setattr(peer_memory, "_reaches", lambda there, device: None not in there and stage("reaches")())
    monkeypatch.setattr(PeerMemory, "_allocate", stage("allocate"))
    monkeypatch.setattr(PeerMemory, "_connect", stage("connect"))
    monkeypatch.setattr(peer_memory, "timeout_of", lambda group: 1.0)
    return done, fails


def ask(*sizes: int) -> list[bool]:
    memory = PeerMemory()
    return [memory.has_room(size, as_group(), GPU) for size in sizes]


def test_it_is_found_once_and_grows_at_least_twofold_within_its_bound(found):
    done, _ = found
    asked = [4 * MIB, 3 * MIB, 5 * MIB, 400 * MIB, 512 * MIB, 500 * MIB]
    assert st.simulate(3, ask, *asked) == [[True] * 6] * 3
    sizes = [size for rank, name, size in done if rank == 1 and name == "allocate"]
    assert sizes == [4 * MIB, 8 * MIB, 400 * MIB, 512 * MIB]


@pytest.mark.parametrize("name", ["whereabouts", "reaches", "allocate", "connect"])
def test_where_one_rank_cannot_none_does_and_none_asks_again(found, name):
    done, fails = found
    fails[name] = 1
    assert st.simulate(3, ask, MIB, MIB, 2 * MIB) == [[False] * 3] * 3
    stages = ["whereabouts", "reaches", "allocate", "connect"]
    last = stages.index(name)
    for rank in range(3):
        assert [n for r, n, _ in done if r == rank] == [n for n in stages[: last + 1] if n != "reaches" or last]


def test_a_rank_whose_environment_says_off_turns_it_off_for_all(found, monkeypatch):
    monkeypatch.setattr(peer_memory, "is_wanted", lambda: as_group().rank != 2)
    assert st.simulate(3, ask, MIB, MIB) == [[False] * 2] * 3


def test_a_graph_that_is_captured_holds_none_of_it(found):
    done, fails = found
    fails["capture"] = 0
    assert st.simulate(2, ask, MIB) == [[False]] * 2
    assert not done


def test_the_environment_says_on_or_off(monkeypatch):
    assert peer_memory.is_wanted()
    monkeypatch.setenv("SHARDTENSOR_PEER_MEMORY", "off")
    assert not peer_memory.is_wanted()
    monkeypatch.setenv("SHARDTENSOR_PEER_MEMORY", "no")
    with pytest.raises(st.SpecError, match="SHARDTENSOR_PEER_MEMORY is `no`"):
        PeerMemory()


def test_ranks_reach_each_other_on_one_host_with_a_gpu_each(monkeypatch):
    names = ["gpu a", "gpu b"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(peer_memory, "_name_of", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    reaches = peer_memory._reaches
    assert reaches([("host", 0, "gpu a"), ("host", 1, "gpu b")], GPU)
    assert not reaches([("host", 0, "gpu a"), None], GPU)
    assert not reaches([("host", 0, "gpu a"), ("other", 1, "gpu b")], GPU)
    assert not reaches([("host", 0, "gpu a"), ("host", 0, "gpu b")], GPU)  # each sees its own as the first
    assert not reaches([("host", 0, "gpu a"), ("host", 1, "gpu c")], GPU)  # its second is another than ours
    assert not reaches([("host", 0, "gpu a"), ("host", 2, "gpu c")], GPU)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    assert not reaches([("host", 0, "gpu a"), ("host", 1, "gpu b")], GPU)


def has_any() -> tuple[bool, str]:
    return peer_memory.peer_memory(as_group()) is not None, as_group().device_type


def test_only_groups_on_nccl_may_have_any(world):
    assert all(may == (kind == "cuda") for may, kind in world(has_any, 2))
    assert not any(may for may, _ in st.simulate(2, has_any))
