"""Lanes have every place once, are even, start after what came before, and are waited for."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from shardtensor.ops import lanes


class Stream:
    """Notes down who waits for whom, and what runs where."""

    log: list[tuple[str, ...]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A CUDA graph seems to be captured on the CPU."""

    @contextmanager
    def entered(stream):
        Stream.log.append((stream.name, "entered"))
        yield

    monkeypatch.setattr(Stream, "log", [])
    monkeypatch.setattr(lanes, "_are_recorded", lambda x: True)
    monkeypatch.setattr(lanes, "ONE_LAUNCH", 10)
    monkeypatch.setattr(lanes, "_side_streams", lambda device: [Stream("side")])
    monkeypatch.setattr(lanes, "_current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(lanes, "_entered", entered)
    return Stream.log


@pytest.mark.parametrize("sizes", [[1] * 7, [9, 1, 1, 1, 9], [100, 1], [0, 0, 11], [5, 4, 3, 2, 1], [20]])
def test_lanes_have_every_place_once_and_differ_by_one_tensor_at_most(monkeypatch, sizes):
    monkeypatch.setattr(lanes, "ONE_LAUNCH", 0)
    found = lanes._split(sizes)
    assert sorted(i for lane in found for i in lane) == list(range(len(sizes)))
    assert all(lane == sorted(lane) for lane in found)
    loads = [sum(sizes[i] for i in lane) for lane in found]
    assert len(found) <= lanes.LANES
    assert len(found) == 1 or max(loads) - min(loads) <= max(sizes)


def test_a_lane_starts_after_what_came_before_and_is_waited_for(recorded):
    tensors = [torch.zeros(n) for n in (8, 3, 6)]
    assert lanes.in_lanes(tensors, lambda places: places) == [[0], [1, 2]]
    assert recorded == [
        ("side", "waits for", "main"),
        ("main", "entered"),
        ("side", "entered"),
        ("main", "waits for", "side"),
    ]


@pytest.mark.parametrize("sizes", [(5, 5), (20,), (), (0, 0)])
def test_what_is_one_launch_is_one_call(recorded, sizes):
    assert lanes.in_lanes([torch.zeros(n) for n in sizes], lambda places: places) == [list(range(len(sizes)))]
    assert not recorded


def test_outside_of_a_capture_there_is_one_call(monkeypatch):
    monkeypatch.setattr(lanes, "ONE_LAUNCH", 0)
    assert lanes.in_lanes([torch.zeros(5), torch.zeros(6)], lambda places: places) == [[0, 1]]
