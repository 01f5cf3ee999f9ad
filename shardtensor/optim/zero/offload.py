"""Optimizer state that is kept on the CPU between steps, with transfers beside the steps of other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from shardtensor.comm.streams import Streams


class OffloadedState:
    """Steps an optimizer one tensor at a time, and keeps its state in pinned memory of the CPU.

    While one tensor is stepped, the state of the next is copied to the device, and that of the one before to the CPU.
    On a CPU it only steps.

    Args:
        optimizer: of a class that updates tensors independently of each other.
        device: of the parameters.
    """

    def __init__(self, optimizer: optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._streams = optimizer, Streams(device)
        self._in, self._out = self._streams.stream(), self._streams.stream()
        self._on_cpu: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def step(self, step: Callable[[], Any]) -> Any:
        """Step all tensors of the optimizer's groups that have a gradient; return the last result of `step`."""
        if not self._streams.is_cuda:
            return step()
        self._streams.refresh()
        groups = self._optimizer.param_groups
        members = [group["params"] for group in groups]
        stepped = [(group, x) for group, own in zip(groups, members, strict=True) for x in own if x.grad is not None]
        came, gone = [[self._streams.event() for _ in stepped] for _ in range(2)]
        leaving: list[list[torch.Tensor]] = []
        result = None
        try:
            for group in groups:
                group["params"] = []
            self._fetch(stepped[:1], came[:1])
            for i, (group, x) in enumerate(stepped):
                if i >= 2:  # its memory is used again
                    self._streams.wait(gone[i - 2])
                    leaving[i - 2].clear()
                self._fetch(stepped[i + 1 : i + 2], came[i + 1 : i + 2])
                self._streams.wait(came[i])
                group["params"] = [x]
                result = step()
                group["params"] = []
                leaving.append(self._put(x))
                self._out.mark(gone[i])
        finally:
            for group, own in zip(groups, members, strict=True):
                group["params"] = own
        self._out.join()
        return result

    def _fetch(self, stepped: list[tuple[dict[str, Any], torch.Tensor]], came: list[Any]) -> None:
        """Start to copy the state of a tensor to the device."""
        for (_, x), event in zip(stepped, came, strict=True):
            self._in.follow()
            state = self._optimizer.state.get(x) or {}
            for key, value in _large(state):
                if value.device != self._streams.device:
                    state[key] = torch.empty_like(value, device=self._streams.device)
                    with self._in:
                        state[key].copy_(value, non_blocking=True)
            self._in.mark(event)

    def _put(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Start to copy the state of a tensor to the CPU; return the tensors that are copied."""
        self._out.follow()
        state, on_cpu = self._optimizer.state[x], self._on_cpu.setdefault(x, {})
        copied = []
        for key, value in _large(state):
            kept = on_cpu.get(key)
            if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
                kept = on_cpu[key] = torch.empty_like(value, device="cpu", pin_memory=True)
            with self._out:
                kept.copy_(value, non_blocking=True)
            state[key] = kept
            copied.append(value)
        return copied

    def synchronize(self) -> None:
        """Make the host wait until the state is on the CPU."""
        self._out.synchronize()


def _large(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0]
