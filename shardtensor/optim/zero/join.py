"""Steps under ``torch.distributed.algorithms.Join``, with which ranks may have different numbers of inputs."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from shardtensor.comm.group import Group
from shardtensor.errors import RuleError


class JoinableStep(Joinable):
    """An optimizer whose steps a rank without inputs left takes part in."""

    group: Group
    param_groups: list[dict[str, Any]]
    gradients: Any

    @abstractmethod
    def step_again(self) -> Any:
        """Step, on a rank that has joined already."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook by which a rank without inputs left takes part in the steps of the others.

        Another joinable has to set the gradients on that rank before; DDP's does not.

        Raises:
            RuleError: such a rank runs no backward, in which `overlap_gradients` reduces.
        """
        if self.gradients is not None:
            raise RuleError(
                "a rank without inputs left runs no backward, so it cannot take part in reductions there",
                fix="leave overlap_gradients out, and pass Join a Joinable before this one that averages gradients",
            )
        return _StepHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return next(param.device for group in self.param_groups for param in group["params"])

    @property
    def join_process_group(self) -> Any:
        """The process group of the ranks."""
        return self.group.process_group


class _StepHook(JoinHook):
    def __init__(self, optimizer: JoinableStep) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Step once; the caller has set the gradients."""
        self._optimizer.step_again()
