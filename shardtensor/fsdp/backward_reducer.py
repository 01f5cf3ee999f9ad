"""Reductions of gradients that start while backward runs, in one order on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from shardtensor.errors import LayoutError, RuleError
from shardtensor.fsdp.gradient_buckets import Gradient


class Reduction(Protocol):
    """A bucket of gradients that are reduced together.

    Attributes:
        gradients: in the order they are packed.
        waiting: how many of them backward has not computed yet.
        pending: the collective, once it is started.
    """

    @property
    def gradients(self) -> Sequence[Gradient]: ...

    waiting: int
    pending: Any

    def reset(self) -> None:
        """Wait for all gradients again."""

    def start(self) -> None:
        """Start the reduction. All ranks start buckets in the same order."""


class BackwardReducer:
    """Starts buckets while backward fills them, and finishes them when it ends.

    Hooks on leaves refer to it weakly, because Python's collector does not see through them.

    Args:
        finish: waits for buckets that were all started, and sets the results as gradients.

    Attributes:
        is_on: whether backward reduces gradients; else it accumulates them.
        has_unreduced: whether a backward accumulated gradients since the last reduction.
    """

    def __init__(self, finish: Callable[[Sequence[Any]], None]) -> None:
        self._finish = finish
        self.is_on, self.has_unreduced = True, False
        self.gradients: list[Gradient] = []
        self.buckets: Sequence[Reduction] = []
        self._bucket_of: list[Reduction | None] = []
        self._leaf_handles: list[Any] = []
        self._nodes: list[Any] = []
        self._start_round()

    # -- hooks on leaves --------------------------------------------------------------------------------------------

    def set_buckets(self, gradients: list[Gradient], buckets: Sequence[Reduction]) -> None:
        """Reduce these gradients from now on, in these buckets; a gradient in none is not reduced."""
        self.remove_leaf_hooks()
        self.gradients, self.buckets = gradients, buckets
        places = {id(gradient): bucket for bucket in buckets for gradient in bucket.gradients}
        self._bucket_of = [places.get(id(gradient)) for gradient in gradients]
        for i, gradient in enumerate(gradients):
            self._hook(i, gradient)
        self._start_round()

    def _hook(self, index: int, gradient: Gradient) -> None:
        leaf = gradient.leaf
        if self.buckets:
            hook = partial(if_alive, weakref.ref(self), BackwardReducer._on_gradient, index)
            self._leaf_handles.append(leaf.register_post_accumulate_grad_hook(hook))
        if gradient.share != 1.0:  # before accumulation: the accumulated gradient is scaled already
            with torch.enable_grad():
                node = torch.autograd.graph.get_gradient_edge(leaf).node
            self._nodes.append(node)
            self._leaf_handles.append(node.register_prehook(partial(_scaled, gradient.share)))

    def remove_leaf_hooks(self) -> None:
        """Remove all hooks from the leaves."""
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles, self._nodes = [], []

    # -- backward ---------------------------------------------------------------------------------------------------

    def start_over(self) -> None:
        """Forget a backward that an error stopped."""
        if self._tasks or any(self._is_ready):
            self._start_round()

    def _start_round(self) -> None:
        # Of running backwards; autograd drops the callback of one that an error stopped.
        self._tasks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._task = -1  # autograd's number of the backward that called `begin` last
        self._next = 0
        self._is_ready = [False] * len(self.gradients)
        for bucket in self.buckets:
            bucket.reset()

    def begin(self) -> None:
        """Make the running backward call `_end` when it ends."""
        task = torch._C._current_graph_task_id()
        if task == self._task:  # most calls
            return
        if self.is_on and task not in self._tasks:
            if not self._tasks and any(self._is_ready):  # an error stopped the last backward
                self._start_round()
            end = partial(self._end, task)
            self._tasks[task], self._task = end, task
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _on_gradient(self, index: int) -> None:
        """Count a gradient that has been accumulated, and start the buckets that are full, in order."""
        if not self.is_on:
            self.has_unreduced = True
            return
        self.begin()
        bucket, was_ready = self._bucket_of[index], self._is_ready[index]
        self._is_ready[index] = True
        if bucket is None:
            return
        if was_ready:
            if bucket.pending is not None:
                raise RuleError(
                    f"a gradient came to `{self.gradients[index].name}` after its bucket had been sent",
                    {"because": "the parameter is used in several checkpoints whose backward runs apart"},
                    "checkpoint(..., use_reentrant=False)",
                )
            return
        bucket.waiting -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._start_next()

    def _start_next(self) -> None:
        self.buckets[self._next].start()
        self._next += 1

    def _end(self, task: int) -> None:
        self._tasks.pop(task, None)
        if self._tasks or not any(self._is_ready):  # an outer backward still runs, or no gradient was accumulated
            return
        try:
            while self._next < len(self.buckets):
                self._start_next()
            self._finish(self.buckets)
            self.has_unreduced = False
        finally:
            self._start_round()


def reduced_already(
    named: Iterable[tuple[str, torch.Tensor]], fix: str, *allowed: BackwardReducer | None
) -> LayoutError | None:
    """Return the error if the gradient of a leaf is reduced by a reducer that is not in `allowed`."""
    for name, leaf in named:
        for hook in (getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values():
            if getattr(hook, "func", None) is if_alive and hook.args[0]() not in (None, *allowed):
                return LayoutError(
                    f"another optimizer or data_parallel reduces the gradient of `{name}` already", fix=fix
                )
    return None


def if_alive(find: weakref.ref[BackwardReducer], method: Callable[..., None], *args: Any) -> None:
    """Call `method` if its reducer is alive; drop the last argument, the tensor of the hook."""
    reducer = find()
    if reducer is not None:
        method(reducer, *args[:-1])


def _scaled(share: float, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(None if grad is None else grad * share for grad in grads)
