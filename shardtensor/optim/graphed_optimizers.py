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
from shardtensor.optim.sharded_optimizer import ShardedOptimizer, inner_optimizer
from shardtensor.tensor.sharded_tensor import local_of

_NOT_CAPTURED = frozenset({"params", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr"})
"""Keys of a group that may change: learning rates, which a replay reads, and values that only schedulers use."""


class GraphedOptimizers:
    """The optimizers of a step, each added when it first steps, and the device tensors of their learning rates.

    Args:
        device: of the learning rates.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._optimizers: dict[int, optim.Optimizer] = {}
        self._hooks: list[Any] = []
        self._rates: dict[tuple[int, int], torch.Tensor] = {}  # by the optimizer's id and the number of its group
        self._sent: dict[tuple[int, int], Any] = {}  # the learning rates that were copied to the tensors
        self._saved: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        self._loads: list[int] = []  # of state dicts: after one, the graph still uses the tensors of the old state
        self._captured: Any = None
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # keeps leaves, so that their ids stay unique

    def add(self, optimizer: optim.Optimizer) -> None:
        """Add an optimizer that steps.

        Raises:
            CaptureError: its step reads numbers on the host; the message shows how to make one that does not.
        """
        for group in optimizer.param_groups:
            _check_can_be_captured(inner_optimizer(optimizer), group)
        self._optimizers[id(optimizer)] = optimizer
        self._hooks.append(optimizer.register_load_state_dict_post_hook(lambda it: self._loads.append(id(it))))

    def groups(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return {(key, i): group for key, own in self._optimizers.items() for i, group in enumerate(own.param_groups)}

    def leaves(self) -> list[torch.Tensor]:
        """Return the local tensors of all parameters."""
        return [local_of(param) for group in self.groups().values() for param in group["params"]]

    # -- learning rates ---------------------------------------------------------------------------------------------

    def learning_rates(self) -> dict[tuple[int, int], Any]:
        """Return the learning rates of ``param_groups``; for a tensor, the object and its version."""
        rates = {key: group.get("lr", 0.0) for key, group in self.groups().items()}
        return {key: (x, x._version) if isinstance(x, torch.Tensor) else x for key, x in rates.items()}

    def refresh(self) -> None:
        """Copy the learning rates of ``param_groups`` that changed into the device tensors."""
        for key, value in self.learning_rates().items():
            if key not in self._rates:
                self._rates[key] = torch.zeros((), dtype=torch.float32, device=self._device)
            if key in self._sent and value == self._sent[key]:
                continue
            self._sent[key] = value
            if isinstance(value, tuple):
                self._rates[key].copy_(value[0].detach().view(()), non_blocking=True)
            else:
                self._rates[key].fill_(value)

    def enter(self, optimizer: optim.Optimizer) -> None:
        """Set the learning rates of an optimizer to the device tensors."""
        self.refresh()
        saved = self._saved.setdefault(id(optimizer), [])
        for i, group in enumerate(optimizer.param_groups):
            put: dict[str, Any] = {"lr": self._rates[id(optimizer), i]} if "lr" in group else {}
            if "capturable" in group:
                put["capturable"] = True  # fused steps are, but Adam checks the flag
            saved.append((group, {key: group[key] for key in put}))
            group.update(put)

    def leave(self, optimizer: optim.Optimizer) -> None:
        """Restore the learning rates of an optimizer as the user set them."""
        for group, values in reversed(self._saved.pop(id(optimizer), [])):
            group.update(values)

    @contextmanager
    def with_device_rates(self) -> Iterator[None]:
        """Make optimizers step with learning rates on the device; add each optimizer that steps for the first time."""
        rates = self.learning_rates()

        def enter(optimizer: optim.Optimizer, *_: Any) -> None:
            if id(optimizer) not in self._optimizers:
                self.add(optimizer)
                rates.update(self.learning_rates() | rates)
            self.enter(optimizer)

        hooks = (
            register_optimizer_step_pre_hook(enter),
            register_optimizer_step_post_hook(lambda optimizer, *_: self.leave(optimizer)),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for optimizer in self._optimizers.values():
                self.leave(optimizer)
        if rates != self.learning_rates():
            raise CaptureError(
                "a learning rate was changed inside the step; a replay would not change it",
                fix="call scheduler.step() after the graphed step, not in it",
            )

    # -- the capture ------------------------------------------------------------------------------------------------

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Check that replays of a step, which is captured inside ``with``, do the same as calls.

        Raises:
            CaptureError: the step made optimizer state, or it left gradients of parameters that had none before.
        """
        counts = self._state_counts()
        before = [(leaf, leaf.grad) for leaf in self.leaves()]
        try:
            with self.with_device_rates():
                yield
            if counts != self._state_counts():
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
            for leaf, grad in before:  # no kernel has run, so gradients of the capture have no values
                leaf.grad = grad
            raise
        self._grads = [(leaf, grad if leaf.grad is grad else None) for leaf, grad in before]
        self._captured = self.host_values()

    def has_changed(self) -> bool:
        """Whether hyperparameters, parameters, state or gradients changed, so that a replay differs from a call.

        Raises:
            StaleParameterError: as in `ShardedOptimizer.step`.
        """
        return self.host_values() != self._captured or any(
            grad is not None and leaf.grad is not grad for leaf, grad in self._grads
        )

    def host_values(self) -> Any:
        """Return what must be as in the capture: hyperparameters, addresses of parameters, number of loaded states."""
        for optimizer in self._optimizers.values():
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.check_not_replaced()
        groups = self.groups().values()
        options = [[value for key, value in group.items() if key not in _NOT_CAPTURED] for group in groups]
        return options, [(id(leaf), leaf.data_ptr()) for leaf in self.leaves()], len(self._loads)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._optimizers, self._hooks, self._grads = {}, [], []

    def _state_counts(self) -> dict[int, int]:
        return {key: sum(map(len, inner_optimizer(own).state.values())) for key, own in self._optimizers.items()}


def _check_can_be_captured(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> None:
    name = type(optimizer).__name__
    if group.get("fused"):
        return
    fixes = [f"{name}(..., {key}=True)" for key in ("fused", "capturable") if key in group]
    if group.get("capturable"):
        low = {p.dtype for p in group["params"]} - {torch.float32, torch.float64}
        if low:
            raise CaptureError(
                f"{name} would round the learning rate to the parameters' dtype in a CUDA graph, unlike in a call",
                {"dtype": ", ".join(sorted(map(str, low)))},
                [*fixes[:-1], "parameters in float32"],
            )
    elif fixes:
        found = ", ".join(f"{key}={group[key]}" for key in ("fused", "capturable") if key in group)
        raise CaptureError(
            f"{name} with these options reads numbers on the host, so every replay would repeat those of the capture",
            {"found": found},
            fixes,
        )
    elif type(optimizer).__module__.startswith("torch.optim"):
        raise CaptureError(
            f"{name} computes its step on the host, so a CUDA graph cannot contain it",
            fix="call its step() after the graphed step, or use AdamW(..., fused=True)",
        )
