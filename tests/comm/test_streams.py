"""Side streams on a stand-in for CUDA that records what waits for what; on the CPU streams do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardtensor.comm.streams import Streams


class Event:
    """Records on which stream it was recorded last."""

    def __init__(self) -> None:
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream


class Stream:
    """A stream of a device; `log` has what all of them did, in order."""

    device_index, device_type = 0, 1
    log: list[tuple[str, int, int]] = []
    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.stream_id = Stream.made

    def wait_event(self, event: Event) -> None:
        self.log.append(("waits", self.stream_id, event.stream.stream_id))

    def synchronize(self) -> None:
        self.log.append(("host waits", self.stream_id, 0))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The streams of a device whose current stream is the attribute `current`."""

    class Device:
        current = Stream()

    Stream.log = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Device.current)
    use = lambda stream_id, **_: Stream.log.append(("current", stream_id, 0))  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_setStream", use, raising=False)
    return Device


def test_a_side_stream_waits_for_the_caller_and_the_caller_for_it_once(cuda):
    caller = cuda.current.stream_id
    streams = Streams(torch.device("cuda"))
    side = streams.stream()
    number = Stream.made
    side.join()  # nothing ran in it
    assert Stream.log == []
    side.follow()
    with side:
        Stream.log.append(("work", number, 0))
    side.join()
    side.join()
    assert Stream.log == [
        ("waits", number, caller),
        ("current", number, 0),
        ("work", number, 0),
        ("current", caller, 0),
        ("waits", caller, number),
    ]
    side.follow()
    side.join()
    assert Stream.log[-2:] == [("waits", number, caller), ("waits", caller, number)]
    side.synchronize()
    assert Stream.log[-1] == ("host waits", number, 0)


def test_the_caller_waits_for_what_a_stream_did_until_its_mark(cuda):
    streams = Streams(torch.device("cuda"))
    side, event = streams.stream(), streams.event()
    side.mark(event)
    streams.wait(event)
    assert Stream.log == [("waits", cuda.current.stream_id, side._stream.stream_id)]


def test_the_callers_stream_is_the_one_of_the_last_refresh(cuda):
    streams = Streams(torch.device("cuda"))
    side = streams.stream()
    assert streams.refresh() is False
    before, cuda.current = cuda.current, Stream()
    side.follow()
    assert Stream.log[-1][2] == before.stream_id
    assert streams.refresh() is True and streams.refresh() is False
    side.follow()
    assert Stream.log[-1][2] == cuda.current.stream_id


def test_on_the_cpu_nothing_waits():
    streams = Streams(torch.device("cpu"))
    side = streams.stream()
    assert streams.refresh() is False and streams.event() is None and streams.caller is None
    streams.wait(None)
    for step in (side.follow, side.join, side.synchronize, lambda: side.mark(None)):
        assert step() is None
    with side:
        pass
