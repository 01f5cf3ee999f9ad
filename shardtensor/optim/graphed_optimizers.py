"""Optimizers whose step is part of a CUDA graph: what a replay reads anew, and what it cannot.

A graph repeats kernels with the numbers they were captured with. So a learning rate is put into a tensor on the device
for as long as the optimizer steps, and ``param_groups`` show what schedulers wrote there. All else that a step takes
from the host is compared before each replay.
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
from shardtensor.tensor.copied import wrote_each
from shardtensor.tensor.sharded_tensor import local_of

_NOT_BAKED_IN = frozenset({"params", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr"})
"""Keys of a group that may change: read anew, or notes of schedulers."""


class GraphedOptimizers:
    """The optimizers that a step runs; they are found when they step.

    Args:
        device: where learning rates are put.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, GraphedOptimizer] = {}
        self._baked_in: list[Any] = []
        self._held: list[torch.Tensor] = []  # so that their ids are not given to others
        self._kept_grads: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, optimizers step with learning rates on the device; one that was not met before is taken in."""
        rates = [known.shown_rates() for known in self._known.values()]

        def enter(optimizer: optim.Optimizer, *_: Any) -> None:
            if id(optimizer) not in self._known:
                self._known[id(optimizer)] = GraphedOptimizer(optimizer, self._device)
                rates.append(self._known[id(optimizer)].shown_rates())
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
        if rates != [known.shown_rates() for known in self._known.values()]:
            raise CaptureError(
                "a learning rate was changed inside the step; a replay would not change it",
                fix="call scheduler.step() after the graphed step, not in it",
            )

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Inside, a step is captured; see that replays will do what calls would.

        Raises:
            CaptureError: the step made state of an optimizer, or left gradients that it found none of.
        """
        counts = {key: known.state_count() for key, known in self._known.items()}
        before = [(leaf, leaf.grad) for leaf in self._leaves()]
        try:
            with self.followed():
                yield
            if counts != {key: known.state_count() for key, known in self._known.items()}:
                raise CaptureError(
                    "an optimizer made new state while the step was captured; every replay would make it anew",
                    fix="a larger warmup=, in which every parameter has a gradient and every optimizer steps",
                )
            if any(grad is None and leaf.grad is not None for leaf, grad in before):
                raise CaptureError(
                    "the step leaves gradients that are dropped outside of it; replays would not add to them",
                    fix="call optimizer.zero_grad() inside the step, before backward or after optimizer.step()",
                )
        except BaseException:
            for leaf, grad in before:  # nothing has run: what the capture put there has no values
                leaf.grad = grad
            raise
        self._held = [leaf for leaf, _ in before]
        self._kept_grads = [(leaf, grad) for leaf, grad in before if grad is not None and leaf.grad is grad]
        self._baked_in = self._find_baked_in()

    def has_changed(self) -> bool:
        """Whether a replay would no longer do what a call does: other hyperparameters, parameters, state, gradients.

        Raises:
            StaleParameterError: as `ShardedOptimizer.step`.
        """
        return (
            self._find_baked_in() != self._baked_in
            or any(leaf.grad is not grad for leaf, grad in self._kept_grads)
            or any([known.was_loaded() for known in self._known.values()])
        )

    def refresh(self) -> None:
        """Bring the learning rates that ``param_groups`` show to the device. Sends only what changed."""
        for known in self._known.values():
            known.refresh()

    def wrote(self) -> None:
        """Note that a replay wrote into the parameters."""
        for known in self._known.values():
            for group in known.groups:
                wrote_each(group["params"])

    def close(self) -> None:
        """Leave the optimizers alone."""
        for known in self._known.values():
            known.hook.remove()
        self._known, self._held, self._kept_grads = {}, [], []

    def _leaves(self) -> Iterator[torch.Tensor]:
        for known in self._known.values():
            yield from known.leaves()

    def _find_baked_in(self) -> list[Any]:
        return [known.baked_in() for known in self._known.values()]


class GraphedOptimizer:
    """One optimizer, and the tensors that its learning rates are put into.

    Raises:
        CaptureError: it decides on the host, and tells how to make one that does not.
    """

    def __init__(self, optimizer: optim.Optimizer, device: torch.device) -> None:
        self._inner = optimizer._inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        for group in optimizer.param_groups:
            _check_can_be_captured(self._inner, group)
        self._optimizer, self._device = optimizer, device
        self._rates: list[torch.Tensor] = []
        self._sent: list[Any] = []
        self._put_aside: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._was_loaded = False
        self.hook = optimizer.register_load_state_dict_post_hook(self._note_load)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def leaves(self) -> Iterator[torch.Tensor]:
        """This rank's part of every parameter."""
        for group in self.groups:
            yield from map(local_of, group["params"])

    def enter(self) -> None:
        """Put the tensors in the place of the learning rates."""
        if len(self._rates) < len(self.groups):
            self.refresh()
        for group, rate in zip(self.groups, self._rates, strict=True):
            put: dict[str, Any] = {"lr": rate} if "lr" in group else {}
            if group.get("fused") and "capturable" in group:
                put["capturable"] = True  # a fused step is: Adam asks for the word
            self._put_aside.append((group, {key: group[key] for key in put}))
            group.update(put)

    def leave(self) -> None:
        """Put back what people see."""
        while self._put_aside:
            group, values = self._put_aside.pop()
            group.update(values)

    def refresh(self) -> None:
        """Write the learning rates that changed."""
        for i, value in enumerate(self.shown_rates()):
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

    def shown_rates(self) -> list[Any]:
        """The learning rates as people see them; of a tensor, which one and how often it was written."""
        return [
            (rate, rate._version) if isinstance(rate, torch.Tensor) else rate
            for rate in (group.get("lr", 0.0) for group in self.groups)
        ]

    def baked_in(self) -> tuple[Any, ...]:
        """What a graph takes from the host: hyperparameters, and where parameters lie."""
        if isinstance(self._optimizer, ShardedOptimizer) and self._optimizer._watch is not None:
            self._optimizer._watch.check()
        options = [[value for key, value in group.items() if key not in _NOT_BAKED_IN] for group in self.groups]
        return options, [(id(leaf), leaf.data_ptr()) for leaf in self.leaves()]

    def state_count(self) -> int:
        return sum(len(state) for state in self._inner.state.values())

    def was_loaded(self) -> bool:
        """Whether a state dict was loaded since this was last asked: the graph writes into the tensors of before."""
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
            f"{name}, as it was made, steps with numbers of the host, which a CUDA graph repeats for ever",
            {"found": found},
            ways,
        )
    elif type(optimizer).__module__.startswith("torch.optim"):
        raise CaptureError(
            f"{name} decides on the host how it steps, so no CUDA graph can hold it",
            fix="call its step() after the graphed step, or use AdamW(..., fused=True)",
        )
