"""Where in a plan to look when a module does not run by it: at what is said of the module whose code stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from shardtensor.plan.findings.finding import Origin
from shardtensor.plan.line import Line
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.resolved import Resolved

_NAMED = re.compile(r"`([\w.]+)`|^([\w.]+):|\b(\w+(?:\.\w+)+)\b")


class Stopped(Exception):
    """What a rank raised, as its cause, and the path of the module whose code raised it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def stopped_in(error: BaseException, module: nn.Module) -> Stopped:
    """The innermost of a module's parts whose code was running when an error was raised; the module itself if none."""
    paths = {id(part): unwrapped(path) for path, part in module.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return Stopped(found)


def said_of(resolved: Resolved, path: str, text: str = "") -> Origin | None:
    """The place in the plan that says most of a module: in its block, of its tensors, or of what is around it.

    Args:
        path: of the module.
        text: of a refusal, which is of flows and tensors: those that it names are looked at first. Without one it is
            the module's own code that stopped; it stumbles most on attributes that count.
    """
    counts_first = not text
    for match in _NAMED.finditer(text):
        name = next(filter(None, match.groups()))
        if name in resolved.tensors or name in resolved.modules:
            origin = _first(_lines(resolved, name, counts_first))
            if origin is not None:
                return origin
    while path:
        origin = _first(_lines(resolved, path, counts_first))
        if origin is not None:
            return origin
        path = path.rpartition(".")[0]
    return _first(iter(resolved.plan.lines))


def _lines(resolved: Resolved, name: str, counts_first: bool) -> Iterator[Line | None]:
    """What is said of a tensor or a module."""
    if name in resolved.tensors:
        yield resolved.tensors[name].line
    passing = resolved.modules.get(name)
    if passing is not None:
        flows = [line for said in (passing.ins, passing.outs) for _, line in said.values()]
        counts = [line for _, line in passing.locals.values()]
        yield from (*counts, *flows) if counts_first else (*flows, *counts)
        yield from (line for _, line in passing.uses)
    for full, placed in resolved.tensors.items():
        if full.rpartition(".")[0] == name:
            yield placed.line


def _first(lines: Iterator[Line | None]) -> Origin | None:
    return next((line.origin for line in lines if line is not None and line.origin is not None), None)
