"""The step of this rank's part of the parameters. It sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import optim

from shardtensor.optim.flat_groups import FlatGroups, step_without_hooks
from shardtensor.optim.zero.arguments import copy_options
from shardtensor.optim.zero.division import Division
from shardtensor.optim.zero.offload import OffloadedState

Groups = list[dict[str, Any]]


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
