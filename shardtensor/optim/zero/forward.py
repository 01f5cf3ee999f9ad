"""New values of parameters that are sent while the next forward runs, which waits for each before its first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardtensor.comm.streams import Streams
from shardtensor.comm.untraced import untraced
from shardtensor.optim.zero.values import ParamBucket


class ForwardWaits:
    """Sends the values of buckets, and makes the forward of a module wait for them.

    A submodule with parameters of its own waits for these and for those of its submodules, which it may read without
    calling them. Parameters of other modules are waited for at once.

    Args:
        module: has the parameters.
        buckets: in the order of their gradients: the last parameters first.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[ParamBucket]) -> None:
        first = buckets[0].params[0]
        self._streams = Streams(first.device)
        self._stream = self._streams.stream()
        self._buckets = list(reversed(buckets))
        self._events = {bucket: self._streams.event() for bucket in self._buckets}
        bucket_of = {id(param): bucket for bucket in buckets for param in bucket.params}
        waited: set[ParamBucket] = set()
        self._handles: list[Any] = [
            # A module that only reads parameters of its submodules does not wait for them. Backward notices; without
            # one, no later forward reads old values.
            module.register_forward_hook(WaitHook(self, self._buckets, with_grad=False)),
            module.register_load_state_dict_pre_hook(WaitHook(self, self._buckets)),
        ]
        for submodule in module.modules():
            if any(param is not None for param in submodule._parameters.values()):
                found = [bucket_of[id(param)] for param in submodule.parameters() if id(param) in bucket_of]
                needed = list(dict.fromkeys(found))
                waited.update(needed)
                self._handles.append(submodule.register_forward_pre_hook(WaitHook(self, needed), prepend=True))
            self._handles.append(submodule.register_state_dict_pre_hook(WaitHook(self, self._buckets)))
        self._outside = [bucket for bucket in self._buckets if bucket not in waited]

    def remove(self) -> None:
        """Wait for all values, and remove the hooks from the module."""
        self.wait()
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def send(self) -> None:
        """Start to send the values to all ranks, in the order of their use. All ranks call it."""
        self._streams.refresh()
        self._stream.follow()
        for bucket in self._buckets:
            with self._stream:
                bucket.start()
            self._stream.mark(self._events[bucket])
        self.wait(self._outside)

    def check(self) -> None:
        """Raise RuleError if backward computed gradients of parameters whose values are still being sent."""
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.refuse_early_use()

    def wait(self, buckets: Sequence[ParamBucket] | None = None) -> None:
        """Wait for buckets that are being sent; for all by default."""
        pending = [bucket for bucket in (self._buckets if buckets is None else buckets) if bucket.pending is not None]
        if pending:
            self._streams.refresh()
        for bucket in pending:
            bucket.finish()
            self._streams.wait(self._events[bucket])


class WaitHook:
    """Waits before a module's forward, or before its state dict is made or loaded.

    Args:
        with_grad: whether it waits if gradients are recorded, too.
    """

    def __init__(self, waits: ForwardWaits, buckets: Sequence[ParamBucket], with_grad: bool = True) -> None:
        self._waits, self._buckets, self._with_grad = waits, buckets, with_grad

    def __reduce__(self) -> Any:
        self._waits.wait()  # the module is being copied
        return NoWait, ()  # the copy has parameters of its own

    @untraced("the wait for new values cannot be compiled: compile submodules without fullgraph=True")
    def __call__(self, *args: Any) -> None:
        """Wait for the buckets that are being sent."""
        for bucket in self._buckets:
            if bucket.pending is not None and (self._with_grad or not torch.is_grad_enabled()):
                self._waits.wait(self._buckets)
                return


class NoWait:
    """The hook of a copy of a module."""

    def __call__(self, *args: Any) -> None:
        """Do nothing."""
