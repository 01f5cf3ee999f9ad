"""A measured profile has a curve of each collective, reads back, and counts bytes as every other part does."""

from __future__ import annotations

import pytest

import shardtensor as st
from shardtensor.cli import calibrate
from shardtensor.comm.process_group import as_group
from shardtensor.cost.profile import KINDS, read_profile, received_share, seconds


@pytest.fixture
def quick(monkeypatch):
    """Small messages and short rounds."""
    monkeypatch.setattr(calibrate, "_SIZES", {"cpu": [1 << 10, 1 << 12]})
    monkeypatch.setattr(calibrate, "_ROUND_S", 1e-4)
    monkeypatch.setattr(calibrate, "_WARM_S", 1e-4)
    monkeypatch.setattr(calibrate, "_ROUNDS", 3)


@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (4, 2), (3, 3)])
def test_ranks_measure_a_profile(world, per_node, quick, tmp_path):
    profiles = st.simulate(world, lambda: calibrate.measure_profile(per_node))
    profile = profiles[0]
    assert all(other == profile for other in profiles[1:])
    file = tmp_path / "mine.json"
    file.write_text(profile.as_text())
    assert read_profile(file) == profile
    for kind in KINDS:
        assert profile.within[kind].group_size == per_node
        assert profile.within[kind].received_bytes[0] == pytest.approx(1024 * received_share(kind, per_node), rel=0.01)
        assert seconds(kind, 4096, per_node, profile, per_node) > 0
    if world > per_node:
        assert profile.ranks_per_node == per_node
        assert profile.between["all_gather"].group_size == world // per_node
    else:
        assert profile.between == read_profile("cpu").between


def test_bytes_are_those_that_are_counted(quick):
    def received():
        return [calibrate._call(kind, 4096, as_group(None)) for kind in KINDS]

    for kind, (call, bytes_) in zip(KINDS, st.count_bytes(4, received).result, strict=True):
        traffic = st.count_bytes(4, lambda kind=kind: calibrate._call(kind, 4096, as_group(None))[0]())
        assert [(line.collective, line.received_bytes) for line in traffic.lines] == [(kind, bytes_)]
        assert callable(call)
