"""The states of a rank's random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

_NUMPY_WORDS = 624  # of its Mersenne twister


def rng_state() -> dict[str, Any]:
    """Return the states of this rank's default generators: of torch on the CPU and its GPU, of Python, of numpy."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the states that `rng_state` returned; those of generators that are not here are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        if not 0 <= state["numpy"][2] <= _NUMPY_WORDS:  # numpy would read memory that is not its own
            raise ValueError("the state of numpy's generator is at a place that it does not have")
        sys.modules["numpy"].random.set_state(state["numpy"])
