"""The most bytes that tensors take at one time while code runs on tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512
"""CUDA's allocator hands out multiples of this many bytes."""


class LiveBytes(TorchDispatchMode):
    """A mode that counts the bytes of the storages that operations make, from each one's creation to its end.

    Storages that were there before are not counted.

    Args:
        moment: returns a key for the present moment.

    Attributes:
        live: bytes now.
        peaks: the most bytes at one time, by moment.

    Example:
        >>> x = torch.empty(1024, device="meta")
        >>> with LiveBytes() as counted:
        ...     y = (x + 1).exp()
        ...     z = y.view(2, -1)
        >>> counted.peaks[""], counted.live
        (8192, 4096)
    """

    def __init__(self, moment: Callable[[], Hashable] = lambda: "") -> None:
        super().__init__()
        self.live = 0
        self.peaks: dict[Hashable, int] = {}
        self._moment = moment
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor):
                self._hold(each.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._hold(storage, -(-storage.nbytes() // BLOCK) * BLOCK)
        return result

    def _hold(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live += size
            if size:
                moment = self._moment()
                self.peaks[moment] = max(self.peaks.get(moment, 0), self.live)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
