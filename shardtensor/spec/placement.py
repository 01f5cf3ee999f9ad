"""Placements of shards, ``rank:0/cuda:0``, and lists of them, stored as runs: ``rank:0-16383/cuda`` costs as one does.

This module parses the texts of torch's ``_remote_device``, without torch.
One difference is intended: torch keeps a device index in eight bits, so that ``cuda:256`` wraps round to ``cuda:0``;
here an index above 127 raises.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.spec.diagnostics import printable
from shardtensor.spec.parts import quoted

if TYPE_CHECKING:
    import torch

DEVICE_TYPES = frozenset(
    """cpu cuda fpga hip hpu ideep ipu lazy maia meta mkldnn mps mtia opencl opengl privateuseone ve vulkan xla
    xpu""".split()
)
MAX_DEVICE_INDEX = 127

_DEVICE = re.compile(r"([A-Za-z_]+)(?::(0|[1-9][0-9]*))?")
_FORMS = "a placement is <worker>/<device>, rank:<n>/<device> or <device>"


class DeviceError(SpecError, RuntimeError):
    """The device of a placement does not exist; also a RuntimeError, as from ``torch.device``."""


@attrs.frozen(repr=False, eq=False)
class Placement:
    """A device, and the rank or the worker that owns it.

    A placement equals another one, torch's ``_remote_device``, or a string, when their canonical texts are equal.

    Args:
        worker: name of an RPC worker, or None.
        rank_: global rank, or None; a placement has a worker or a rank or neither, never both.
        device_type: one of `DEVICE_TYPES`.
        device_index: index on its host; for a rank None means its own device.

    Example:
        >>> place = parse_placement("rank:1/cuda:1")
        >>> place.rank(), place.device_type, place.device_index, place == "rank:1/cuda:1"
        (1, 'cuda', 1, True)
        >>> str(parse_placement("rank:1")), str(parse_placement("cuda")), str(parse_placement("trainer0"))
        ('rank:1/cpu', 'cuda', 'trainer0/cpu')
    """

    worker: str | None
    rank_: int | None
    device_type: str
    device_index: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.worker is not None and (self.rank_ is not None or not self.worker or re.search("[:/]", self.worker)):
            raise _unreadable(self.worker, "the name of a worker is not empty and has no `:` and no `/`")
        if self.rank_ is not None and (type(self.rank_) is not int or self.rank_ < 0):
            raise _unreadable(self.rank_, "a rank is a whole number from 0")
        _check_device(self.device_type, self.device_index)

    def rank(self) -> int | None:
        """Return the global rank, or None."""
        return self.rank_

    def worker_name(self) -> str | None:
        """Return the name of the RPC worker, or None."""
        return self.worker

    def device(self) -> torch.device:
        """Return the device on its host, as torch's object."""
        import torch

        return torch.device(self._device_text())

    def _device_text(self) -> str:
        return self.device_type if self.device_index is None else f"{self.device_type}:{self.device_index}"

    def __str__(self) -> str:
        if self.rank_ is not None:
            return f"rank:{self.rank_}/{self._device_text()}"
        return self._device_text() if self.worker is None else f"{self.worker}/{self._device_text()}"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Placement | str) or type(other).__name__ == "_remote_device":
            return str(self) == str(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))


def parse_placement(place: Any) -> Placement:
    """Return the placement of a text, of torch's ``_remote_device`` or of a ``torch.device``.

    Raises:
        SpecError: not a placement (a ValueError), or a device that does not exist (`DeviceError`, a RuntimeError too).
    """
    if isinstance(place, Placement):
        return place
    if isinstance(place, str):
        return _parse(place)
    if type(place).__name__ == "_remote_device":
        device = place.device()
        return Placement(place.worker_name(), place.rank(), device.type, device.index)
    if type(place).__name__ == "device" and hasattr(place, "type") and hasattr(place, "index"):
        return Placement(None, None, place.type, place.index)
    raise _unreadable(place, f"it is of type {type(place).__name__}; {_FORMS}")


@lru_cache(maxsize=4096)
def _parse(text: str) -> Placement:
    owner, slash, device = text.partition("/")
    if not slash:
        local = _DEVICE.fullmatch(text)
        if local and local[1] in device_types():
            return Placement(None, None, *_parse_device(text))
        device = "cpu"
    if "/" in device or not owner:
        raise _unreadable(text, _FORMS)
    kind, index = _parse_device(device)
    name, colon, number = owner.partition(":")
    if not colon:
        return Placement(owner, None, kind, index)
    if name != "rank" or not number.isdigit():
        raise _unreadable(text, _FORMS, _nearest(owner, number))
    try:
        return Placement(None, int(number), kind, index)
    except ValueError as error:  # a digit such as "²", or more digits than Python reads
        raise _unreadable(text, "a rank is a whole number from 0") from error


def _parse_device(text: str) -> tuple[str, int | None]:
    match = _DEVICE.fullmatch(text)
    if not text:
        raise DeviceError("Device string must not be empty", fix='name a device, as in "rank:0/cpu"', code="E501")
    if match is None:
        why = "a device is a type and perhaps an index, as in cuda:0"
        raise DeviceError(f"Invalid device string: {text!r}", {"why": why}, code="E501")
    index = None if match[2] is None else int(match[2][:9])
    _check_device(match[1], index)
    return match[1], index


def _check_device(kind: str, index: int | None) -> None:
    if kind not in DEVICE_TYPES and kind not in (known := device_types()):
        why, near = f"Expected one of {', '.join(sorted(known))}", get_close_matches(kind, known, n=1)
        fix = [f"did you mean {name}?" for name in near]
        raise DeviceError(f"no device type is called {kind!r}", {"why": why}, fix, code="E501")
    if index is not None and (type(index) is not int or not 0 <= index <= MAX_DEVICE_INDEX):
        why = f"the index of a device is 0 to {MAX_DEVICE_INDEX} on its own host, whatever the rank"
        raise DeviceError(f"Invalid device string: {kind} has no index {index}", {"why": why}, code="E501")


def device_types() -> frozenset[str]:
    """Return torch's device types, and the name of its plug-in backend if torch is imported."""
    torch = sys.modules.get("torch")
    renamed = getattr(getattr(torch, "_C", None), "_get_privateuse1_backend_name", None)
    return DEVICE_TYPES if renamed is None else DEVICE_TYPES | {renamed()}


def _nearest(owner: str, number: str) -> str:
    if re.fullmatch("[0-9]+-[0-9]+", number):
        return "a range stands for several placements: write it in a list of placements"
    near = get_close_matches(owner.partition(":")[0], ["rank", *DEVICE_TYPES], n=1)
    return f"did you mean {near[0]}:<n>?" if near else ""


def _unreadable(place: object, why: str, fix: str = "") -> SpecError:
    return SpecError(f"Could not parse remote_device: {_short(str(place))}", {"why": why}, fix, code="E501")


def _short(text: str) -> str:
    return printable(text if len(text) <= 80 else text[:77] + "...")


# ---------- lists ----------

MAX_PLACEMENTS = 2**20

_RANGE = re.compile("(?<=:)([0-9]+)-([0-9]+)(?=/|$)")
_RANK_RANGE = re.compile("rank:([0-9]+)-([0-9]+)")
_DEVICE_RANGE = re.compile("[A-Za-z_]+:([0-9]+)-([0-9]+)")


@attrs.frozen
class Run:
    """`count` placements at equal steps: `rank_step` between ranks, `index_step` between device indices."""

    first: Placement
    rank_step: int = 0
    index_step: int = 0
    count: int = 1

    def __getitem__(self, i: int) -> Placement:
        if not i:
            return self.first
        place = self.first
        rank = None if place.rank_ is None else place.rank_ + i * self.rank_step
        index = None if place.device_index is None else place.device_index + i * self.index_step
        return Placement(place.worker, rank, place.device_type, index)

    @property
    def ranks(self) -> Sequence[int | None]:
        """The global rank of each placement."""
        first = self.first.rank_
        if first is None or (not self.rank_step and self.count > 1):
            return (first,) * self.count
        return range(first, first + self.count)

    def rest(self) -> Run:
        """Return the run without its first placement; a run of one has no steps."""
        count = self.count - 1
        return Run(self[1], self.rank_step, self.index_step, count) if count > 1 else Run(self[1])

    def __str__(self) -> str:
        if self.count == 1:
            return str(self.first)
        place, last = self.first, self[self.count - 1]
        owner = place.worker
        if place.rank_ is not None:
            owner = f"rank:{place.rank_}-{last.rank_}" if self.rank_step else f"rank:{place.rank_}"
        device = place.device_type
        if place.device_index is not None:
            device += f":{place.device_index}-{last.device_index}" if self.index_step else f":{place.device_index}"
        return device if owner is None else f"{owner}/{device}"


def parse_run(text: Any) -> Run:
    """Parse a placement or a range of them, such as ``rank:0-3/cuda:0-3``.

    Raises:
        SpecError: not a placement, ranges of two lengths, a range that goes down or is too long.

    Example:
        >>> run = parse_run("rank:4-7/cuda:0-3")
        >>> run.count, str(run[3])
        (4, 'rank:7/cuda:3')
    """
    if not isinstance(text, str):
        return Run(parse_placement(text))
    owner, slash, device = text.partition("/")
    ranks = _RANK_RANGE.fullmatch(owner)
    indices = _DEVICE_RANGE.fullmatch(device) if slash else None if ranks else _DEVICE_RANGE.fullmatch(owner)
    if ranks is None and indices is None:
        return Run(parse_placement(text))
    counts = [_count(text, *match.groups()) for match in (ranks, indices) if match]
    if len(set(counts)) > 1:
        raise _bad_range(text, f"{counts[0]} ranks stand against {counts[1]} devices", "give both ranges one length")
    first, last = (parse_placement(_RANGE.sub(end, text)) for end in (r"\1", r"\2"))
    if counts[0] == 1:
        return Run(first)
    return Run(first, int(first.rank_ != last.rank_), int(first.device_index != last.device_index), counts[0])


def _count(text: str, first: str, last: str) -> int:
    if max(len(first), len(last)) > 18 or int(last) - int(first) >= MAX_PLACEMENTS:
        raise _bad_range(text, f"the range has more than {MAX_PLACEMENTS} placements", "name fewer ranks")
    if int(last) < int(first):
        raise _bad_range(text, f"the range goes down from {first} to {last}", "write the smaller number first")
    return int(last) - int(first) + 1


def _bad_range(text: str, fault: str, fix: str) -> SpecError:
    return SpecError(fault, {"placement": _short(text)}, fix, code="E501")


@attrs.frozen(init=False, eq=False, repr=False)
class Placements(Sequence[Placement]):
    """An immutable list of placements; lists of the same placements are equal, whatever ranges they were written with.

    Args:
        places: texts (ranges too), placements, torch's ``_remote_device`` or ``torch.device`` objects; or one text.

    Attributes:
        ranks: the global rank of each, a ``range`` when consecutive; None where a placement has no rank.

    Example:
        >>> places = Placements(["rank:0/cuda:0", "rank:1/cuda:1", "rank:2-3/cuda:2-3"])
        >>> len(places), str(places[-1]), places.ranks, places.fold()
        (4, 'rank:3/cuda:3', range(0, 4), ('rank:0-3/cuda:0-3',))
    """

    runs: tuple[Run, ...]
    ranks: Sequence[int | None]
    _starts: tuple[int, ...]
    _length: int
    _hash: int

    def __init__(self, places: Iterable[Any] | str) -> None:
        if isinstance(places, Placements):
            runs = places.runs
        else:
            runs = _fold([places] if isinstance(places, str) else places)
        *starts, length = accumulate((run.count for run in runs), initial=0)
        if length > MAX_PLACEMENTS:
            raise SpecError(f"more than {MAX_PLACEMENTS} placements", fix="name fewer ranks", code="E501")
        self.__attrs_init__(runs, _ranks(runs), tuple(starts), length, hash(runs))

    def index_of(self, rank: int) -> int | None:
        """Return the first index whose placement has `rank`; None if there is none."""
        return self.ranks.index(rank) if rank in self.ranks else None

    def fold(self) -> tuple[str, ...]:
        """Return the placements as texts, as few as possible: runs are written as ranges."""
        return tuple(map(str, self.runs))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Placements(self[k] for k in range(*i.indices(self._length)))
        k = i + self._length if i < 0 else i
        if not 0 <= k < self._length:
            raise IndexError(f"placement {i} of {self._length}")
        at = bisect_right(self._starts, k) - 1
        return self.runs[at][k - self._starts[at]]

    def __iter__(self) -> Iterator[Placement]:
        return (run[i] for run in self.runs for i in range(run.count))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            try:
                other = Placements(other)
            except SpecError:
                return False
        return self.runs == other.runs if isinstance(other, Placements) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"[{', '.join(map(quoted, self.fold()))}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return Placements, (list(self.fold()),)


def _fold(places: Iterable[Any]) -> tuple[Run, ...]:
    """Join placements at equal steps into runs, from the left, one by one: equal lists give equal runs."""
    runs: list[Run] = []
    for place in places:
        run = place if isinstance(place, Run) else parse_run(place)
        steps = _steps(runs[-1], run.first) if runs else None
        if steps is None:
            runs.append(run)
        elif run.count == 1 or steps == (run.rank_step, run.index_step):
            runs[-1] = Run(runs[-1].first, *steps, runs[-1].count + run.count)
        else:  # only its first placement continues the run before
            runs[-1] = Run(runs[-1].first, *steps, runs[-1].count + 1)
            runs.append(run.rest())
    return tuple(runs)


def _steps(run: Run, place: Placement) -> tuple[int, int] | None:
    """Return the steps from the last placement of `run` to `place`; None if `place` does not continue the run."""
    last = run[run.count - 1]
    if (last.worker, last.device_type) != (place.worker, place.device_type):
        return None
    if (last.rank_ is None) != (place.rank_ is None) or (last.device_index is None) != (place.device_index is None):
        return None
    if (place.rank_ or 0) >= 10**18:  # more digits than a range may have
        return None
    steps = ((place.rank_ or 0) - (last.rank_ or 0), (place.device_index or 0) - (last.device_index or 0))
    allowed = {(run.rank_step, run.index_step)} if run.count > 1 else {(1, 0), (0, 1), (1, 1)}
    return steps if steps in allowed else None


def _ranks(runs: tuple[Run, ...]) -> Sequence[int | None]:
    parts = [run.ranks for run in runs]
    if len(parts) == 1:
        return parts[0]
    ranges = [part for part in parts if isinstance(part, range)]
    if ranges and len(ranges) == len(parts) and all(one.stop == other.start for one, other in pairwise(ranges)):
        return range(ranges[0].start, ranges[-1].stop)
    return tuple(chain.from_iterable(parts))
