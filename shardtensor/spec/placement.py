"""Where one shard lives: ``rank:0/cuda:0``. Reads what torch's ``_remote_device`` reads, and no torch.

One difference is on purpose: torch keeps a device index in eight bits, so that ``cuda:256`` wraps round to ``cuda:0``;
here an index above 127 is refused.
"""

from __future__ import annotations

import re
import sys
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.spec.diagnostics import printable

if TYPE_CHECKING:
    import torch

# fmt: off
DEVICE_TYPES = frozenset({
    "cpu", "cuda", "fpga", "hip", "hpu", "ideep", "ipu", "lazy", "maia", "meta", "mkldnn", "mps", "mtia", "opencl",
    "opengl", "privateuseone", "ve", "vulkan", "xla", "xpu",
})
# fmt: on
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
        device_index: index on its host; None is "its own device" for a rank.

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
        """The global rank, or None."""
        return self.rank_

    def worker_name(self) -> str | None:
        """The name of the RPC worker, or None."""
        return self.worker

    def device(self) -> torch.device:
        """The device on its host, as torch's object."""
        import torch

        return torch.device(self._device_text())

    def _key(self) -> tuple[str | int | None, ...]:
        return self.worker, self.rank_, self.device_type, self.device_index

    def _device_text(self) -> str:
        return self.device_type if self.device_index is None else f"{self.device_type}:{self.device_index}"

    def __str__(self) -> str:
        if self.rank_ is not None:
            return f"rank:{self.rank_}/{self._device_text()}"
        return self._device_text() if self.worker is None else f"{self.worker}/{self._device_text()}"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Placement):
            return self._key() == other._key()
        if isinstance(other, str) or type(other).__name__ == "_remote_device":
            return str(self) == str(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))


def parse_placement(place: Any) -> Placement:
    """Return the placement that a text, torch's ``_remote_device`` or a ``torch.device`` means.

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
    if "/" in device:
        raise _unreadable(text, _FORMS)
    if not slash:
        local = _DEVICE.fullmatch(text)
        if local and local[1] in device_types():
            return Placement(None, None, *_parse_device(text))
        device = "cpu"
    if not owner:
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
    if match is None:
        if not text:
            raise DeviceError("Device string must not be empty", fix='name a device, as in "rank:0/cpu"', code="E501")
        raise DeviceError(
            f"Invalid device string: {text!r}",
            {"why": "a device is a type and perhaps an index, as in cuda:0"},
            code="E501",
        )
    index = None if match[2] is None else int(match[2][:9])
    _check_device(match[1], index)
    return match[1], index


def _check_device(kind: str, index: int | None) -> None:
    if kind not in DEVICE_TYPES and kind not in (known := device_types()):
        raise DeviceError(
            f"no device type is called {kind!r}",
            {"why": f"Expected one of {', '.join(sorted(known))}"},
            [f"did you mean {name}?" for name in get_close_matches(kind, known, n=1)],
            code="E501",
        )
    if index is not None and (type(index) is not int or not 0 <= index <= MAX_DEVICE_INDEX):
        raise DeviceError(
            f"Invalid device string: {kind} has no index {index}",
            {"why": f"the index of a device is 0 to {MAX_DEVICE_INDEX} on its own host, whatever the rank"},
            code="E501",
        )


def device_types() -> frozenset[str]:
    """The device types that torch knows, with the name that a plug-in backend took when torch is loaded."""
    torch = sys.modules.get("torch")
    renamed = getattr(getattr(torch, "_C", None), "_get_privateuse1_backend_name", None)
    return DEVICE_TYPES if renamed is None else DEVICE_TYPES | {renamed()}


def _nearest(owner: str, number: str) -> str:
    if re.fullmatch("[0-9]+-[0-9]+", number):
        return "a range stands for several placements: write it in a list of placements"
    near = get_close_matches(owner.partition(":")[0], ["rank", *DEVICE_TYPES], n=1)
    return f"did you mean {near[0]}:<n>?" if near else ""


def _unreadable(place: object, why: str, fix: str = "") -> SpecError:
    shown = printable(str(place))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return SpecError(f"Could not parse remote_device: {shown}", {"why": why}, fix, code="E501")
