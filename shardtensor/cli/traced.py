"""The module whose training step ``shardtensor plan`` runs on meta tensors, to count what a rank sends and computes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from shardtensor.plan.outlook.estimate import TracedStep
from shardtensor.plan.plan import Plan

Tracer = Callable[[Plan, int, int], TracedStep]
"""What counts a step of a plan, of so many samples of a data rank, of so many tokens."""

_GIVE = "give --module PKG:FN; FN() returns the model, or (model, step) with step(model, sample) -> loss"


class NotTraced(Exception):
    """A step cannot be counted; the text says why, and what to give."""


def tracer_of(options: argparse.Namespace, config: Mapping[str, Any]) -> Tracer:
    """Return what counts the steps of the model that a command's options name. Imports torch where there is one.

    The module is that of ``--module``, else the one that transformers makes of the config.json, where it is installed.

    Raises:
        NotTraced: there is no such module.
    """
    if options.no_step:
        raise NotTraced("leave out --no-step for its collectives, FLOPs and seconds")
    if not _is_installed("torch"):
        raise NotTraced("install torch to count its collectives, FLOPs and seconds")
    module, step = _made(options, config)
    import torch

    from shardtensor.sharding.numeric import example_step
    from shardtensor.trace.step import trace_step

    if options.dtype is not None:
        module = module.to(getattr(torch, options.dtype))

    def trace(plan: Plan, samples: int, seq: int) -> TracedStep:
        def run(of: Any) -> torch.Tensor:
            try:
                return step(of, 0) if step is not None else example_step(of, 0, seq, samples)
            except Exception as error:
                raise _not_run(error, seq) from error

        try:
            return trace_step(module, plan, run, rank=plan.axes.mesh.ranks[0])
        except NotTraced:
            raise
        except Exception as error:
            raise _not_run(error, seq) from error

    return trace


def _not_run(error: Exception, seq: int) -> NotTraced:
    fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return NotTraced(f"it does not run with --seq {seq} on tensors without memory ({fault}); {_GIVE}")


def _made(options: argparse.Namespace, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The module on the meta device, and its step where one is given."""
    from shardtensor.cli.model_source import builder_of, transformers_model

    if options.module is not None:
        made = builder_of(options.module)()
        return made if isinstance(made, tuple) else (made, None)
    if not _is_installed("transformers"):
        raise NotTraced(f"{_GIVE}; or install transformers, which makes it of a config.json")
    try:
        return transformers_model(config), None
    except ValueError as error:
        raise NotTraced(f"{error}; {_GIVE}") from None


def _is_installed(package: str) -> bool:
    return sys.modules[package] is not None if package in sys.modules else find_spec(package) is not None
