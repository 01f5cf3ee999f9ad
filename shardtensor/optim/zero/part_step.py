"""The step of this rank's part of the parameters, whose state may be on the CPU between steps. It sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import optim

from shardtensor.comm.streams import Streams
from shardtensor.optim.flat_groups import FlatGroups, step_without_hooks
from shardtensor.optim.zero.arguments import copy_options
from shardtensor.optim.zero.division import Division

Groups = list[dict[str, Any]]


class OffloadedState:
    """Keeps the state of an optimizer in pinned memory of the CPU between steps. On a CPU it only steps.

    `fetch` starts to copy state to the device, in backward if gradients are reduced there; `step` waits for it. After
    the step the state is copied back beside the next forward. So the device holds it when it holds few activations.

    Args:
        optimizer: this rank's optimizer.
        device: of the parameters.
    """

    def __init__(self, optimizer: optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._streams = optimizer, Streams(device)
        self._in, self._out = self._streams.stream(), self._streams.stream()
        self._on_cpu: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._fetched: dict[torch.Tensor, Any] = {}  # by the tensor that is stepped: the event of its copies
        self._put_back: dict[torch.Tensor, Any] = {}  # the same for copies to the CPU

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to copy the state of tensors that will be stepped to the device."""
        missing = [x for x in tensors if x not in self._fetched] if self._streams.is_cuda else []
        if not missing:
            return
        self._streams.refresh()
        self._in.follow()
        event = self._streams.event()
        for x in missing:
            state = self._optimizer.state.get(x) or {}
            if x in self._put_back:
                self._in.wait(self._put_back[x])
            for key, value in _large(state):
                if value.device != self._streams.device:
                    state[key] = torch.empty_like(value, device=self._streams.device)
                    with self._in:
                        state[key].copy_(value, non_blocking=True)
            self._fetched[x] = event
        self._in.mark(event)

    def step(self, step: Callable[[], Any]) -> Any:
        """Call `step` when the state is on the device, and start to copy it to the CPU; return its result."""
        if not self._streams.is_cuda:
            return step()
        self.fetch(x for group in self._optimizer.param_groups for x in group["params"] if x.grad is not None)
        fetched, self._fetched = self._fetched, {}
        self._streams.refresh()
        for event in {id(event): event for event in fetched.values()}.values():
            self._streams.wait(event)
        result = step()
        self._out.follow()
        for x in fetched:
            self._put(x)
        return result

    def _put(self, x: torch.Tensor) -> None:
        """Start to copy the state of a tensor to the CPU."""
        state, on_cpu = self._optimizer.state.get(x) or {}, self._on_cpu.setdefault(x, {})
        for key, value in _large(state):
            kept = on_cpu.get(key)
            if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
                kept = on_cpu[key] = torch.empty_like(value, device="cpu", pin_memory=True)
            with self._out:
                kept.copy_(value, non_blocking=True)
            self._out.uses(value)
            state[key] = kept
        self._out.mark(self._put_back.setdefault(x, self._streams.event()))

    def synchronize(self) -> None:
        """Make the host wait until the state is on the CPU."""
        self._out.synchronize()


def _large(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0]


class PartStep:
    """Steps an optimizer over this rank's part.

    Args:
        optimizer: over the leaves of the part.
        is_elementwise: whether it may step adjacent leaves as one tensor.
        offloaded: keeps its state on the CPU, or None.
    """

    def __init__(
        self, optimizer: optim.Optimizer, division: Division, *, is_elementwise: bool, offloaded: OffloadedState | None
    ) -> None:
        self._optimizer, self._division, self._is_elementwise = optimizer, division, is_elementwise
        self.offloaded = offloaded
        self.flat_groups = FlatGroups(optimizer)

    def step(self, groups: Groups, closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]) -> Any:
        """Step with the hyperparameters of `groups`, and copy back those that the step changed; return the loss."""
        own = self._optimizer.param_groups
        copy_options(groups, own)
        step = partial(step_without_hooks, self._optimizer, **kwargs)
        as_one = self._is_elementwise and bool(self._division.buckets)
        if as_one or self.offloaded is not None:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._division.set_gradients()
            if self.offloaded is not None:
                step = partial(self.offloaded.step, step)
            self.flat_groups.step(own, step) if as_one else step()
        elif closure is None:
            self._division.set_gradients()
            loss = step()
        else:
            loss = step(closure=partial(self._closure, closure) if callable(closure) else closure)
        copy_options(own, groups)
        return loss

    def _closure(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._division.set_gradients()
        return loss

    def fetch(self, leaves: Iterable[torch.Tensor]) -> None:
        """Start to copy the state of leaves to the device, if it is kept on the CPU."""
        if self.offloaded is not None:
            self.offloaded.fetch([self.flat_groups.stepped_for(leaf) for leaf in leaves])

    def step_with(self, grads: Mapping[torch.Tensor, torch.Tensor], groups: Groups) -> None:
        """Step the leaves that are parameters with a gradient here, with that gradient."""
        own = self._optimizer.param_groups
        params = [group["params"] for group in own]
        stepped = [[param for param in members if param in grads] for members in params]
        before = {param: param.grad for members in stepped for param in members}
        try:
            for group, members in zip(own, stepped, strict=True):
                group["params"] = members
            for param in before:
                param.grad = grads[param]
            self.step(groups, None, {})
        finally:
            for group, members in zip(own, params, strict=True):
                group["params"] = members
            for param, grad in before.items():
                param.grad = grad
