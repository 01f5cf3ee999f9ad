"""State that each process has and threads share: the simulator swaps it when it switches to another rank."""

from __future__ import annotations

import random
import warnings
from typing import Any

import attrs
import torch


@attrs.frozen
class ProcessState:
    """The default generators of torch and Python's `random`, the default dtype, and the filters of warnings.

    NumPy's global generator is left out: swapping it would cost more than all the rest.
    """

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    python: Any
    dtype: torch.dtype
    warned: tuple[Any, ...]

    @classmethod
    def capture(cls) -> ProcessState:
        """Return the state of this process; takes about 10 microseconds."""
        on_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        return cls(
            torch.default_generator.get_state(),
            tuple(generator.get_state() for generator in on_cuda),
            random.getstate(),
            torch.get_default_dtype(),
            tuple(getattr(warnings, name) for name in _WARNINGS),
        )

    def restore(self) -> None:
        """Set the state of this process."""
        torch.default_generator.set_state(self.cpu)
        for generator, state in zip(torch.cuda.default_generators, self.cuda, strict=False):
            generator.set_state(state)
        random.setstate(self.python)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        if warnings.filters is not self.warned[0]:
            for name, value in zip(_WARNINGS, self.warned, strict=True):
                setattr(warnings, name, value)
            warnings._filters_mutated()  # type: ignore[attr-defined]


_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")  # what warnings.catch_warnings saves
