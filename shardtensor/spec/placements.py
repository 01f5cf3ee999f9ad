"""Lists of placements, kept as runs: ``"rank:0-16383/cuda"`` costs what one placement costs."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, overload

import attrs

from shardtensor.errors import SpecError
from shardtensor.spec.diagnostics import printable
from shardtensor.spec.parts import quoted
from shardtensor.spec.placement import Placement, parse_placement

MAX_PLACEMENTS = 2**20

_RANGE = re.compile("(?<=:)([0-9]+)-([0-9]+)(?=/|$)")
_RANK_RANGE = re.compile("rank:([0-9]+)-([0-9]+)")
_DEVICE_RANGE = re.compile("[A-Za-z_]+:([0-9]+)-([0-9]+)")


@attrs.frozen
class Run:
    """`count` placements that step together: the ranks by `rank_step`, the device indices by `index_step`."""

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

    def rest(self) -> Run:
        """The run without its first placement; a run of one has no steps."""
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
    """Read a placement or a range of them, such as ``rank:0-3/cuda:0-3``.

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
    return SpecError(fault, {"placement": printable(text if len(text) <= 80 else text[:77] + "...")}, fix, code="E501")


@attrs.frozen(init=False, eq=False, repr=False)
class Placements(Sequence[Placement]):
    """An immutable list of placements; equal lists are equal whatever ranges they were written with.

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
    ranks: range | tuple[int | None, ...]
    _starts: tuple[int, ...]
    _length: int
    _hash: int

    def __init__(self, places: Iterable[Any] | str) -> None:
        if isinstance(places, Placements):
            runs = places.runs
        else:
            runs = _fold([places] if isinstance(places, str) else places)
        starts, length = [], 0
        for run in runs:
            starts.append(length)
            length += run.count
        if length > MAX_PLACEMENTS:
            raise SpecError(f"more than {MAX_PLACEMENTS} placements", fix="name fewer ranks", code="E501")
        self.__attrs_init__(runs, _ranks(runs), tuple(starts), length, hash(runs))

    def index_of(self, rank: int) -> int | None:
        """The first index whose placement has `rank`, None when there is none. Costs a step per run."""
        for start, run in zip(self._starts, self.runs, strict=True):
            first = run.first.rank_
            if first is None:
                continue
            if rank == first:
                return start
            if run.rank_step and first < rank < first + run.count:
                return start + rank - first
        return None

    def fold(self) -> tuple[str, ...]:
        """The fewest texts that say this list, runs written as ranges."""
        return tuple(map(str, self.runs))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, i: int) -> Placement: ...
    @overload
    def __getitem__(self, i: slice) -> Placements: ...
    def __getitem__(self, i: int | slice) -> Placement | Placements:
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
    """Join what steps together, from the left, as if every placement stood alone: so equal lists fold equally."""
    runs: list[Run] = []
    for place in places:
        run: Run | None = place if isinstance(place, Run) else parse_run(place)
        while run is not None:
            last = runs[-1] if runs else None
            steps = _steps(last, run.first) if last else None
            if last is None or steps is None:
                runs.append(run)
                break
            if run.count > 1 and steps == (run.rank_step, run.index_step):
                runs[-1] = Run(last.first, *steps, last.count + run.count)
                break
            runs[-1] = Run(last.first, *steps, last.count + 1)
            run = run.rest() if run.count > 1 else None
    return tuple(runs)


def _steps(run: Run, place: Placement) -> tuple[int, int] | None:
    """The steps with which `run` goes on to `place`, None when it does not."""
    last = run[run.count - 1]
    if (last.worker, last.device_type) != (place.worker, place.device_type):
        return None
    if (last.rank_ is None) != (place.rank_ is None) or (last.device_index is None) != (place.device_index is None):
        return None
    if (place.rank_ or 0) >= 10**18:  # more digits than a range is read with
        return None
    steps = ((place.rank_ or 0) - (last.rank_ or 0), (place.device_index or 0) - (last.device_index or 0))
    wanted = {(run.rank_step, run.index_step)} if run.count > 1 else {(1, 0), (0, 1), (1, 1)}
    return steps if steps in wanted else None


def _ranks(runs: tuple[Run, ...]) -> range | tuple[int | None, ...]:
    first = runs[0].first.rank_ if runs else None
    if first is not None:
        end: int = first
        for run in runs:
            if run.first.rank_ != end or (run.count > 1 and run.rank_step != 1):
                break
            end += run.count
        else:
            return range(first, end)
    return tuple(chain.from_iterable(map(_run_ranks, runs)))


def _run_ranks(run: Run) -> Iterable[int | None]:
    first = run.first.rank_
    if first is None or not run.rank_step:
        return (first,) * run.count
    return range(first, first + run.count)
