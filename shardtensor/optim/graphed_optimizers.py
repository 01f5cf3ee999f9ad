"""Optimizers whose step is part of a CUDA graph.

A replay repeats kernels with the numbers of the capture. So learning rates are in tensors on the device while the
optimizer steps; outside of the step ``param_groups`` have the values that schedulers wrote. All other values that a
step reads from the host are compared before each replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardtensor.errors import CaptureError
from shardtensor.optim.sharded_optimizer import ShardedOptimizer
from shardtensor.tensor.sharded_tensor import local_of

_NOT_CAPTURED = frozenset({"params", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr"})
"""Keys of a group that may change: learning rates, which a replay reads, and values that only schedulers use."""


class GraphedOptimizers:
    """The optimizers of a step; each is found when it first steps.

    Args:
        device: of the learning rates.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, GraphedOptimizer] = {}
        self._captured_values: list[Any] = []
        self._kept_leaves: list[torch.Tensor] = []  # kept alive, so that their ids stay unique
        self._kept_grads: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def with_device_rates(self) -> Iterator[None]:
        """Make optimizers step with learning rates on the device; add each optimizer that steps for the first time."""
        rates = [known.learning_rates() for known in self._known.values()]

        def enter(optimizer: optim.Optimizer, *_: Any) -> None:
            if id(optimizer) not in self._known:
                self._known[id(optimizer)] = GraphedOptimizer(optimizer, self._device)
                rates.append(self._known[id(optimizer)].learning_rates())
            self._known[id(optimizer)].enter()

        def leave(optimizer: optim.Optimizer, *_: Any) -> None:
            self._known[id(optimizer)].leave()

        hooks = register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for known in self._known.values():
                known.leave()
        if rates != [known.learning_rates() for known in self._known.values()]:
            raise CaptureError(
                "a learning rate was changed inside the step; a replay would not change it",
                fix="call scheduler.step() after the graphed step, not in it",
            )

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Check a step that is captured inside: that replays will do the same as calls.

        Raises:
            CaptureError: the step made optimizer state, or it left gradients of parameters that had none before.
        """
        counts = {key: known.state_count() for key, known in self._known.items()}
        before = [(leaf, leaf.grad) for leaf in self._leaves()]
        try:
            with self.with_device_rates():
                yield
            if counts != {key: known.state_count() for key, known in self._known.items()}:
                raise CaptureError(
                    "an optimizer made new state while the step was captured; every replay would make it again",
                    fix="a larger warmup=, in which every parameter has a gradient and every optimizer steps",
                )
            if any(grad is None and leaf.grad is not None for leaf, grad in before):
                raise CaptureError(
                    "the step leaves gradients that are dropped outside of it; replays would not add to them",
                    fix="call optimizer.zero_grad() inside the step, before backward or after optimizer.step()",
                )
        except BaseException:
            for leaf, grad in before:  # nothing has run, so gradients of the capture have no values
                leaf.grad = grad
            raise
        self._kept_leaves = [leaf for leaf, _ in before]
        self._kept_grads = [(leaf, grad) for leaf, grad in before if grad is not None and leaf.grad is grad]
        self._captured_values = self._host_values()

    def has_changed(self) -> bool:
        """Whether hyperparameters, parameters, state or gradients changed, so that a replay differs from a call.

        Raises:
            StaleParameterError: as in `ShardedOptimizer.step`.
        """
        return (
            self._host_values() != self._captured_values
            or any(leaf.grad is not grad for leaf, grad in self._kept_grads)
            or any([known.was_loaded() for known in self._known.values()])
        )

    def refresh(self) -> None:
        """Copy the learning rates of ``param_groups`` that changed to the device."""
        for known in self._known.values():
            known.refresh()

    def close(self) -> None:
        """Remove the hooks."""
        for known in self._known.values():
            known.hook.remove()
        self._known, self._kept_leaves, self._kept_grads = {}, [], []

    def _leaves(self) -> Iterator[torch.Tensor]:
        for known in self._known.values():
            yield from known.leaves()

    def _host_values(self) -> list[Any]:
        return [known.host_values() for known in self._known.values()]


class GraphedOptimizer:
    """One optimizer, and the device tensors of its learning rates.

    Raises:
        CaptureError: its step reads numbers on the host; the message says how to make one that does not.
    """

    def __init__(self, optimizer: optim.Optimizer, device: torch.device) -> None:
        self._inner = optimizer._inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        for group in optimizer.param_groups:
            _check_can_be_captured(self._inner, group)
        self._optimizer, self._device = optimizer, device
        self._rates: list[torch.Tensor] = []
        self._sent: list[Any] = []
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._was_loaded = False
        self.hook = optimizer.register_load_state_dict_post_hook(self._note_load)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def leaves(self) -> Iterator[torch.Tensor]:
        """Yield the local tensor of every parameter."""
        for group in self.groups:
            yield from map(local_of, group["params"])

    def enter(self) -> None:
        """Set the learning rates to the device tensors."""
        if len(self._rates) < len(self.groups):
            self.refresh()
        for group, rate in zip(self.groups, self._rates, strict=True):
            put: dict[str, Any] = {"lr": rate} if "lr" in group else {}
            if group.get("fused") and "capturable" in group:
                put["capturable"] = True  # fused steps are, but Adam checks the flag
            self._saved.append((group, {key: group[key] for key in put}))
            group.update(put)

    def leave(self) -> None:
        """Restore the learning rates as the user set them."""
        while self._saved:
            group, values = self._saved.pop()
            group.update(values)

    def refresh(self) -> None:
        """Copy the learning rates that changed into the tensors."""
        for i, value in enumerate(self.learning_rates()):
            if i == len(self._rates):
                self._rates.append(torch.zeros((), dtype=torch.float32, device=self._device))
                self._sent.append(None)
            if value != self._sent[i]:
                self._sent[i] = value
                rate: Any = self.groups[i].get("lr", 0.0)
                if isinstance(rate, torch.Tensor):
                    self._rates[i].copy_(rate.detach().view(()), non_blocking=True)
                else:
                    self._rates[i].fill_(rate)

    def learning_rates(self) -> list[Any]:
        """Return the learning rates of ``param_groups``; for a tensor, the object and its version."""
        return [
            (rate, rate._version) if isinstance(rate, torch.Tensor) else rate
            for rate in (group.get("lr", 0.0) for group in self.groups)
        ]

    def host_values(self) -> tuple[Any, ...]:
        """Return the values that a graph has from the host: hyperparameters, and addresses of parameters."""
        if isinstance(self._optimizer, ShardedOptimizer) and self._optimizer._staleness is not None:
            self._optimizer._staleness.check()
        options = [[value for key, value in group.items() if key not in _NOT_CAPTURED] for group in self.groups]
        return options, [(id(leaf), leaf.data_ptr()) for leaf in self.leaves()]

    def state_count(self) -> int:
        return sum(len(state) for state in self._inner.state.values())

    def was_loaded(self) -> bool:
        """Whether a state dict was loaded since the last call: the graph would write into the tensors before it."""
        was, self._was_loaded = self._was_loaded, False
        return was

    def _note_load(self, optimizer: optim.Optimizer) -> None:
        self._was_loaded = True


def _check_can_be_captured(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> None:
    name = type(optimizer).__name__
    if group.get("fused"):
        return
    ways = [f"{name}(..., {key}=True)" for key in ("fused", "capturable") if key in group]
    if group.get("capturable"):
        low = {p.dtype for p in group["params"]} - {torch.float32, torch.float64}
        if low:
            raise CaptureError(
                f"{name} would round the learning rate to the parameters' dtype in a CUDA graph, unlike in a call",
                {"dtype": ", ".join(sorted(map(str, low)))},
                [*ways[:-1], "parameters in float32"],
            )
    elif ways:
        found = ", ".join(f"{key}={group[key]}" for key in ("fused", "capturable") if key in group)
        raise CaptureError(
            f"{name} with these options reads numbers on the host, so every replay would repeat those of the capture",
            {"found": found},
            ways,
        )
    elif type(optimizer).__module__.startswith("torch.optim"):
        raise CaptureError(
            f"{name} computes its step on the host, so a CUDA graph cannot contain it",
            fix="call its step() after the graphed step, or use AdamW(..., fused=True)",
        )
