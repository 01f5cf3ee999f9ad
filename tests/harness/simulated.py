"""The pool's stand-in: the same bodies on the ranks of a simulated world, in this process."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch

from harness import worker
from shardtensor.sim.simulate import simulate


class Simulated:
    """Called as `Pool` is; an error comes as the rank raised it. With SHARDTENSOR_TEST_DEVICE=cuda all on one GPU."""

    def __call__(self, body: Callable[..., Any], size: int = 4, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """Run ``body(**kwargs)`` on `size` ranks and return their results, by rank."""
        __tracebackhide__ = True
        worker.set_device(os.environ.get("SHARDTENSOR_TEST_DEVICE", "cpu"))
        try:
            return simulate(size, _seeded, body, kwargs)
        finally:
            worker.set_device("cpu")


def _seeded(body: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    return body(**kwargs)
