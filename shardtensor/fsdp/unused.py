"""The unused-parameter check: which parameters got a gradient in a backward, and whether the ranks agree on it.

Ranks are expected to agree. Each computes a number from the parameters it used; one all-reduce at the end of a backward
returns the largest and the smallest. The next step compares them, when the result has long arrived. In the first
backward, and in each with ``find_unused=True``, the ranks exchange at once which parameters they used, so that a
parameter that any rank used has a gradient on all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import compress, islice
from typing import Any

import torch

from shardtensor.comm.agree import name_ranks
from shardtensor.comm.group import Group
from shardtensor.comm.streams import Streams
from shardtensor.errors import RuleError
from shardtensor.fsdp.data_mesh import DataMesh

_SHOWN = 8
_LOOK_S, _PAUSE_S = 1.0, 2e-5

Pattern = list[tuple[int, list[bool]]]
"""For each reduction of a backward, in order: the group's number, and which of its parameters have a gradient."""


class UnusedCheck:
    """The parameters that this rank used in a backward, and the check that all ranks used the same.

    Args:
        names: of the parameters of each group, in the model.
        is_exact: exchange in each backward which parameters each rank used.
        explain: raises if ranks called different units; called while the host waits for the device.
    """

    def __init__(
        self,
        data_mesh: DataMesh,
        names: Sequence[Sequence[str]],
        streams: Streams,
        is_exact: bool,
        explain: Callable[[], None],
    ) -> None:
        self._explain = explain
        self._data_mesh, self._names, self._streams, self.is_exact = data_mesh, names, streams, is_exact
        self.pattern: Pattern = []
        self._last: Pattern = []
        self._fault: RuleError | None = None
        self._sent: list[int] = []
        self._flag: torch.Tensor | None = None
        self._host: torch.Tensor | None = None
        self._event = streams.event()
        self._is_out = False  # a flag was sent and is not checked yet

    @property
    def is_exchanging(self) -> bool:
        """Whether the ranks exchange in this backward which parameters they used."""
        return self._data_mesh.whole.size > 1 and (self.is_exact or not self._last)

    # -- exactly ----------------------------------------------------------------------------------------------------

    def exchange(self) -> dict[int, list[bool]]:
        """Return for each group the parameters that only other ranks used. Collective."""
        own_masks = self._masks(self.pattern)
        blob = b"".join(own_masks)
        blobs = self._data_mesh.whole.exchange(blob)
        if not self.is_exact and any(other != blob for other in blobs):
            self._fault = self._disagreement(blobs)
        found, start = {}, 0
        for number, mask in enumerate(own_masks):
            others = [other[start : start + len(mask)] for other in blobs]
            start += len(mask)
            missed = [not own and any(column) for own, column in zip(mask, zip(*others, strict=True), strict=True)]
            if any(missed):
                found[number] = missed
        return found

    def _masks(self, pattern: Pattern) -> list[bytes]:
        """Return for each group a byte for each parameter: whether it was used."""
        masks = [[False] * len(names) for names in self._names]
        for number, used in pattern:
            masks[number] = [a or b for a, b in zip(masks[number], used, strict=True)]
        return [bytes(mask) for mask in masks]

    # -- cheaply ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """All-reduce the flag, in the stream of the reductions. All ranks call it at the end of a backward."""
        pattern, self.pattern = self.pattern, []
        if self._data_mesh.whole.size == 1:
            return
        if pattern != self._last:
            self._last, self._flag = pattern, None
        if self.is_exact or self._fault is not None or (self._streams.is_cuda and _is_capturing()):
            return
        if self._flag is None:
            number = int.from_bytes(sha256(b"".join(self._masks(pattern))).digest()[:7], "little")
            self._sent = [number, -number]
            self._flag = torch.tensor(self._sent, device=self._streams.device)
        for group in _groups(self._data_mesh):
            group.all_reduce(self._flag, "max")
        if self._flag.is_meta:  # a traced step has no values
            return
        if self._host is None:
            self._host = torch.empty(2, dtype=torch.int64, pin_memory=self._streams.is_cuda)
        self._host.copy_(self._flag, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._is_out = True

    def check(self, waits: bool) -> None:
        """Raise an error if ranks did not agree in the last backward. All ranks call it at the same places.

        Args:
            waits: check the flag of the last backward too, and wait for the device if needed.

        Raises:
            RuleError: (a RuntimeError) some parameters were used on some ranks only; the error names them.
        """
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if not (self._is_out and waits):
            return
        self._is_out = False
        if self._event is not None:
            self._wait(self._event)  # of a step ago
        assert self._host is not None
        if self._host.tolist() != self._sent:
            self._flag = None
            raise self._disagreement(self._data_mesh.whole.exchange(b"".join(self._masks(self._last))))

    def _wait(self, event: Any) -> None:
        """Wait on the host, and check about once a second whether other ranks wait for this one elsewhere."""
        if _is_capturing():  # in which torch refuses to query events
            event.synchronize()
            return
        looked = time.monotonic()
        while not event.query():
            if time.monotonic() - looked > _LOOK_S:
                self._explain()
                looked = time.monotonic()
            time.sleep(_PAUSE_S)

    def _disagreement(self, blobs: Sequence[bytes]) -> RuleError:
        names = [name for of_flat in self._names for name in of_flat]
        ranks = self._data_mesh.whole.ranks
        some = []
        for name, column in zip(names, zip(*blobs, strict=True), strict=True):
            if any(column) and not all(column):
                some.append(f"{name} on {name_ranks(islice(compress(ranks, column), _SHOWN))}")
        rest = [f"and {len(some) - _SHOWN} more"] if len(some) > _SHOWN else []
        return RuleError(
            "in the last backward ranks used different parameters, and fully_shard takes them to use the same",
            {"used only": "; ".join([*some[:_SHOWN], *rest])},
            [
                "fully_shard(..., find_unused=True): ranks exchange in each backward which parameters they used, and"
                " those that did not use one add zeros",
                "let every rank use every parameter, or none",
            ],
        )


def names_of(states: Sequence[Any]) -> list[list[str]]:
    """Return the names of the parameters of each group of the states."""
    return [
        [f"{state.name}.{info.name}" if state.name else info.name for info in group.params_info]
        for state in states
        for group in state.param_groups
    ]


def _groups(data_mesh: DataMesh) -> tuple[Group, ...]:
    return (data_mesh.reduce,) if data_mesh.replicate is None else (data_mesh.reduce, data_mesh.replicate)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
