"""The part of a rank without inputs left in the steps of the others (``torch.distributed.algorithms.Join``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.join import JoinHook


class StepHook(JoinHook):
    """Steps on a rank without inputs left; the caller has set the gradients."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step

    def main_hook(self) -> None:
        """Step once."""
        self._step()
