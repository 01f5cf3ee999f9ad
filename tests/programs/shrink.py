"""Take away from a failing program what its failure does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from programs.program import Input, Program
from programs.run import Problem

Check = Callable[[Program], Problem | None]


def shrink(program: Program, problem: Problem, check: Check) -> tuple[Program, Problem]:
    """The smallest program found that fails in the same way: same kind of problem, in the same function."""
    while True:
        for smaller in _candidates(program):
            found = check(smaller)
            if found is not None and (found.kind, found.where) == (problem.kind, problem.where):
                program, problem = smaller, found
                break
        else:
            return program, problem


def _candidates(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest cuts first."""
    for number in range(len(program.steps) - 1, -1, -1):
        yield _used(_without(program, number))
    for number, made in enumerate(program.inputs):
        for simpler in _simpler(made):
            inputs = (*program.inputs[:number], simpler, *program.inputs[number + 1 :])
            yield attrs.evolve(program, inputs=inputs)


def _simpler(made: Input) -> Iterator[Input]:
    if made.spec:
        yield attrs.evolve(made, spec="")
    if made.spec not in ("", "replicate"):
        yield attrs.evolve(made, spec="replicate")
    if made.requires_grad:
        yield attrs.evolve(made, requires_grad=False)


def _without(program: Program, number: int) -> Program:
    """The program without a step and all that needs it."""
    gone = set(program.steps[number].outs)
    kept = []
    for i, step in enumerate(program.steps):
        if i == number or step.reads() & gone:
            gone |= set(step.outs)
        else:
            kept.append(step)
    return attrs.evolve(program, steps=tuple(kept))


def _used(program: Program) -> Program:
    read = {name for step in program.steps for name in step.reads()}
    return attrs.evolve(program, inputs=tuple(made for made in program.inputs if made.name in read))
