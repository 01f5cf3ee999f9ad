"""`compile`: a decorator that makes a train step for one device run on many."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardtensor.spmd.compiled import CompiledStep
from shardtensor.spmd.parallel_mode import DataParallel


def compile(
    step: Callable[..., Any] | None = None,
    *,
    parallel_mode: DataParallel | None = None,
    backend: str = "inductor",
    graphed: bool = False,
    cache_dir: str | Path | None = None,
) -> Any:
    """Compile a whole train step, written for one device, into one graph for each rank of a data-parallel run."""
    mode = DataParallel() if parallel_mode is None else parallel_mode

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = CompiledStep(function, mode, backend, graphed, None if cache_dir is None else Path(cache_dir))
        functools.update_wrapper(compiled, function)
        return compiled

    if step is None:
        return decorate
    assert inspect.isroutine(step) or callable(step)
    return decorate(step)
