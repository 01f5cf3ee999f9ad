"""Copies of what the dense program has as views: read anew, when next used, if their source was written since.

A row that another rank holds cannot be a view of this rank's memory. Shells over the same memory share one count of
the writes into it; a copy compares that count with the one it was made at whenever it is used. Programs write and use
at the same places on every rank, so all ranks read anew together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardtensor.layout.layout import replicated
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap

Make = Callable[[ShardedTensor], Any]


class Memory:
    """What a tensor and its views share: how often it was written."""

    __slots__ = ("writes",)

    def __init__(self) -> None:
        self.writes = 0


def memory_of(x: ShardedTensor) -> Memory:
    """The memory that `x` and its views share."""
    if x._memory is None:
        x._memory = Memory()
    return x._memory


def wrote(x: Any) -> None:
    """Count a write into `x`, if that is sharded. What writes into a ShardedTensor calls it when it has."""
    if isinstance(x, ShardedTensor) and x._memory is not None:
        x._memory.writes += 1


def wrote_each(tensors: Iterable[Any]) -> None:
    """Count a write into each of `tensors`."""
    for x in tensors:
        if isinstance(x, ShardedTensor) and x._memory is not None:  # as `wrote`, without a call for each
            x._memory.writes += 1


def stepped(optimizer: torch.optim.Optimizer, shown: Iterable[Any]) -> None:
    """Count a write into what an optimizer stepped, and into the tensors that show it.

    Fused kernels count no version of what they write, which autograd and fully sharded modules go by.
    """
    wrote_each(shown)
    for group in optimizer.param_groups:
        if group.get("fused"):
            torch._C._increment_version(group["params"])


def over_memory_of(x: ShardedTensor, shell: ShardedTensor) -> ShardedTensor:
    """Return `shell`, which shows the memory of `x` or a part of it; a copy where `x` is one."""
    shell._memory = memory_of(x)
    return shell if x._origin is None else _become_copy(shell, x._origin)


def detached(x: ShardedTensor) -> ShardedTensor:
    """The same bytes, without the graph."""
    local = x._local.detach()
    shell = wrap(local, x._layout, x._spec, x._group)
    origin = x._origin
    if origin is None:
        return over_memory_of(x, shell)
    shell._memory = memory_of(x)  # an origin of its own: the other keeps the graph of the source alive
    return _become_copy(shell, Origin(origin.name, detached(origin.source), origin.make, shell))


def mark(value: Any, source: ShardedTensor, name: str, make: Make) -> Any:
    """Return `value` as a copy of what the dense program has as a view of `source`.

    Args:
        value: the result of the view function, plain or sharded; what is no tensor is returned as it is.
        name: of the view function, for errors.
        make: makes the value of a source.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, ShardedTensor):
        value = wrap(value, replicated(tuple(value.shape), source._group.ranks), None, source._group)
    return _become_copy(value, Origin(name, source, make, value))


class Origin:
    """What a copy was made of, and how.

    Attributes:
        name: of the view function, for errors.
        source: a shell of its own over the memory that was viewed, so that it stays as it was then.
        make: the view function, of a source.
        copy: a shell of its own over the whole memory of the copy.
    """

    def __init__(self, name: str, source: ShardedTensor, make: Make, copy: ShardedTensor) -> None:
        self.name, self.make = name, make
        self.source = over_memory_of(source, wrap(source._local, source._layout, source._spec, source._group))
        self.copy = wrap(copy._local, copy._layout, copy._spec, copy._group)
        self.copy._memory = memory_of(copy)
        self.seen = memory_of(source).writes

    def __str__(self) -> str:
        return self.name

    def catch_up(self) -> None:
        """Read the copy anew where the source was written since. All ranks of the group call it."""
        if self.source._origin is not None:
            self.source._origin.catch_up()
        writes = memory_of(self.source).writes
        if writes == self.seen:
            return
        self.seen = writes
        copy = self.copy
        is_followed_leaf = copy._local.is_leaf and copy._local.requires_grad
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_followed_leaf):
            fresh = local_as(self.make(self.source), copy._layout, copy._group)
            # What is expanded shows one place of memory many times, and torch writes each but once.
            once = tuple(slice(None) if step else slice(0, 1) for step in copy._local.stride())
            copy._local[once].copy_(fresh[once])
        wrote(copy)


class CopiedView(ShardedTensor):
    """A copy that behaves as the view it stands for: it shows what was written into its source since it was made."""

    _held: torch.Tensor

    @property
    def _local(self) -> torch.Tensor:
        if self._origin is not None:
            self._origin.catch_up()
        return self._held

    @_local.setter
    def _local(self, value: torch.Tensor) -> None:
        self._held, self._origin = value, None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        for x in tree_leaves((args, kwargs)):  # before a handler runs, of which ranks take different ways
            if isinstance(x, CopiedView):
                x._local  # noqa: B018
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(wrap(self._held, self._layout, self._spec, self._group))


def _become_copy(shell: ShardedTensor, origin: Origin) -> ShardedTensor:
    local = shell._held if isinstance(shell, CopiedView) else shell._local
    shell.__dict__.pop("_local", None)
    shell.__class__ = CopiedView
    shell._local = local
    shell._origin = origin
    return shell
