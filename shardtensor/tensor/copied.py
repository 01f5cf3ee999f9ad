"""Copies of what are views in the dense program: a row that another rank holds is no view of this rank's memory.

A copy has the values that its source had. It raises where the dense view would behave differently: at a write into the
copy (one made by indexing writes into the source instead), and at a use after the source was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardtensor.errors import RuleError


class Copied(NamedTuple):
    """What a copy records: the view function's `name`, its own local tensor, the local tensor that was read, that one's
    version counter, and functions to read and write the source `again`; None for views not written through.
    """

    name: str
    local: torch.Tensor
    source: torch.Tensor
    version: int
    again: tuple[Callable[[], Any], Callable[[Any], Any]] | None = None

    @property
    def current(self) -> torch.Tensor:
        """The copy's local tensor, unless the source was written after it was read; all ranks raise or none."""
        if version_of(self.source) != self.version:
            raise RuleError(
                "a copy that the dense program would have as a view is used after its source was written",
                {"made by": f"{self.name}, which had to gather here"},
                ["read it again after the write", "clone() it before the write where the old values are meant"],
            )
        return self.local


def version_of(local: torch.Tensor) -> int:
    """Return autograd's count of writes to a tensor; 0 in inference mode, which counts nothing."""
    return 0 if local.is_inference() else local._version


def refuse_lost_write(target: Any, name: str) -> None:
    """Raise RuleError if `target` is a copy. Every handler that writes into a ShardedTensor calls it first."""
    if target._copied is not None:
        raise RuleError(
            f"{name}: in place on a copy that the dense program would have as a view; the write would be lost",
            {"made by": f"{target._copied.name}, which had to gather here"},
            ["write into the source: source[...] = value", "clone() first where the source shall stay as it is"],
        )
