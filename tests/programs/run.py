"""Run a program densely and on ranks, and say how the two differ."""

from __future__ import annotations

import warnings
from typing import Any

import attrs
import torch

import shardtensor as st
from programs.generate import DENSE, put
from programs.halves import HALF
from programs.program import Input, Program, function, substitute, values
from shardtensor.comm.process_group import as_group
from shardtensor.errors import DisagreementError
from shardtensor.mesh import Mesh, coordinate
from shardtensor.tensor.sharded_tensor import local_as


@attrs.define
class Outcome:
    """What a program made.

    Attributes:
        env: the variables at the end.
        error: of the first step that erred: its number, its type's name, and the text.
        backward: the text of the error in backward, or "".
        grads: by input.
    """

    env: dict[str, Any]
    error: tuple[int, str, str] | None = None
    backward: str = ""
    grads: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Problem:
    """How a rank differs from the dense program.

    Attributes:
        kind: "wrong", "error" or "no error"; "refused" is a RuleError where the dense program has an answer.
        where: the step, by function, or "backward".
        text: the details.
    """

    kind: str
    where: str
    text: str
    step: int = -1


def run_dense(program: Program) -> Outcome:
    """The dense outcome, on this process alone."""
    return _run(program, {made.name: values(made).requires_grad_(made.requires_grad) for made in program.inputs}, DENSE)


def run_sharded(program: Program) -> Problem | None:
    """Run on this rank of a world of the program's size; all ranks call it."""
    here = _run_here(program)
    try:
        faults = as_group().exchange_objects((here.error, here.backward))
    except DisagreementError as error:
        where = program.steps[here.error[0]].func if here.error is not None else "backward"
        return Problem("out of step", where, f"{here.error} {here.backward}\n{error}")
    if len({(error and error[:2], bool(backward)) for error, backward in faults}) > 1:
        steps = [error[0] for error, _ in faults if error is not None]
        where = program.steps[min(steps)].func if steps else "backward"
        text = "\n".join(f"rank {rank}: {error} {backward}" for rank, (error, backward) in enumerate(faults))
        return Problem("out of step", where, text)
    return compare(program, run_dense(program), here, _gathered(here))


def _run_here(program: Program) -> Outcome:
    group = as_group()
    if len(program.mesh) > 1:
        group = group.on_mesh(Mesh(program.mesh), {})
    own = {
        "reshard": lambda x, spec: st.reshard(x, spec, group),
        "reshard_": lambda x, spec: x.reshard(spec) if isinstance(x, st.ShardedTensor) else None,
        "put": put,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(program, {made.name: _sharded(made, group) for made in program.inputs}, own)


def _sharded(made: Input, group: Any) -> torch.Tensor:
    whole = values(made)
    if not made.spec:
        return whole.requires_grad_(made.requires_grad)
    tensor = st.distribute(whole, made.spec, process_group=group)
    _scatter_partials(tensor, made)
    return tensor.requires_grad_(made.requires_grad)


def _scatter_partials(tensor: st.ShardedTensor, made: Input) -> None:
    """Give the ranks of a partial sum partial sums that are all different."""
    layout = tensor._layout
    if not layout.partial or any(op != "sum" for _, op in layout.partial):
        return
    noise = values(attrs.evolve(made, seed=made.seed + 1, kind="int"))
    local = local_as(noise, layout.reduced(), tensor._group)
    (axis, _), *_ = layout.partial
    place = coordinate(layout.ranks, layout.grid, tensor._group.rank)
    if place is None or layout.grid[axis] < 2:
        return
    sign = {0: 1, 1: -1}.get(place[axis], 0)
    if all(place[other] == 0 for other, _ in layout.partial[1:]):
        tensor._local.add_(local, alpha=sign)


def _run(program: Program, env: dict[str, Any], own: dict[str, Any]) -> Outcome:
    torch.manual_seed(program.seed)
    outcome = Outcome(env)
    leaves = {made.name: env[made.name] for made in program.inputs if made.requires_grad}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, step in enumerate(program.steps):
            try:
                result = function(step.func, own)(*substitute(step.args, env), **substitute(step.kwargs, env))
            except Exception as error:
                outcome.error = (number, type(error).__name__, f"{error}")
                return outcome
            if step.outs:
                made = (
                    list(result)
                    if len(step.outs) > 1
                    else [
                        result[0]
                        if isinstance(result, tuple | list) and len(result) == 1 and not isinstance(result, torch.Size)
                        else result
                    ]
                )
                env.update(zip(step.outs, made, strict=True))
        if not program.has_backward:
            return outcome
        try:
            loss = sum((_term(env[name], i) for i, name in enumerate(env) if _counts(env[name])), torch.zeros(()))
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.backward()
        except Exception as error:
            outcome.backward = f"{type(error).__name__}: {error}"
            return outcome
        outcome.grads = {name: leaf.grad for name, leaf in leaves.items()}
    return outcome


def _counts(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point()


def _term(x: torch.Tensor, seed: int) -> torch.Tensor:
    weights = torch.randint(-2, 3, tuple(x.shape), generator=torch.Generator().manual_seed(seed)).to(x.dtype)
    return (x * weights).sum()


def _gathered(outcome: Outcome) -> dict[int, torch.Tensor]:
    """Every tensor of an outcome whole, by id: all at once, so that ranks which find a fault do not leave the rest."""
    tensors = [x for x in [*outcome.env.values(), *outcome.grads.values()] if isinstance(x, torch.Tensor)]
    return {id(x): full(x) for x in tensors}


def compare(program: Program, dense: Outcome, here: Outcome, wholes: dict[int, torch.Tensor]) -> Problem | None:
    """How `here`, of whose tensors `wholes` are the wholes, differs from `dense`."""
    if here.error is not None and (dense.error is None or dense.error[0] > here.error[0]):
        step, kind, text = here.error
        known = "refused" if kind == "RuleError" else "error"
        return Problem(known, program.steps[step].func, f"step {step}: {program.steps[step]}\n{kind}: {text}", step)
    if dense.error is not None:
        step, kind, text = dense.error
        if "is being modified inplace" in text or "created in no_grad mode" in text:
            return None  # a limit of autograd that need not hold where a part is no such view
        if here.error is None or here.error[0] > step:
            return Problem(
                "no error", program.steps[step].func, f"step {step}: {program.steps[step]}\n{kind}: {text}", step
            )
    loosely = any(isinstance(x, torch.Tensor) and x.dtype in HALF for x in dense.env.values())
    makers = {out: number for number, step in enumerate(program.steps) for out in step.outs}
    for name, wanted in dense.env.items():
        fault = difference(here.env[name], wanted, wholes, loosely)
        if fault:
            step = makers.get(name, -1)
            func = program.steps[step].func if step >= 0 else f"input {name}"
            return Problem(
                "wrong", func, f"{name} of {program.steps[step] if step >= 0 else 'the input'}\n{fault}", step
            )
    if dense.error is not None or dense.backward:
        return None
    if here.backward:
        kind = "refused" if here.backward.startswith("RuleError") else "error"
        return Problem(kind, "backward", here.backward)
    for name, wanted in dense.grads.items():
        got = here.grads[name]
        if (got is None) != (wanted is None):
            zero = wanted if got is None else wholes[id(got)]
            if zero is not None and zero.numel() and zero.abs().max() == 0:
                continue
            return Problem("wrong", "backward", f"gradient of {name}: {_say(got, wholes)} instead of {_say(wanted)}")
        fault = difference(got, wanted, wholes, loosely) if wanted is not None else ""
        if fault:
            return Problem("wrong", "backward", f"gradient of {name}\n{fault}")
    return None


def full(x: Any) -> Any:
    """The whole of a tensor; None where it refuses, as the copy of what was written since."""
    try:
        return x.detach().full_tensor() if isinstance(x, st.ShardedTensor) else x.detach()
    except st.RuleError as error:
        if "is used after its source was written" not in str(error):
            raise
        return None


def difference(got: Any, wanted: Any, wholes: dict[int, torch.Tensor], loosely: bool = False) -> str:
    """What is wrong with a value; "" when nothing is. `loosely`: what was rounded to half precision is in it."""
    if id(got) in wholes and wholes[id(got)] is None:
        return ""
    if not isinstance(wanted, torch.Tensor):
        return "" if got == wanted else f"{got!r} instead of {wanted!r}"
    if not isinstance(got, torch.Tensor):
        return f"{got!r} instead of a tensor"
    for question in ("shape", "dtype", "requires_grad"):
        if getattr(got, question) != getattr(wanted, question):
            return f"{question} is {getattr(got, question)} instead of {getattr(wanted, question)}"
    if isinstance(got, st.ShardedTensor):
        local = got._layout.local_shape(got._group.rank)
        if tuple(got._local.shape) != tuple(local):
            return f"the local tensor is {tuple(got._local.shape)} where the layout says {tuple(local)}"
    whole, wanted = wholes[id(got)], wanted.detach()
    if tuple(whole.shape) != tuple(wanted.shape) or whole.dtype != wanted.dtype:
        return f"gathered it is {_say(whole)}"
    if not wanted.is_floating_point():
        same = torch.equal(whole, wanted)
    else:
        exact = torch.equal(wanted, wanted.round()) and bool((wanted.abs() < 1e5).all())
        tolerance = {torch.float64: 1e-7, torch.float32: 2e-3}.get(wanted.dtype, 5e-2)
        if loosely:
            exact, tolerance = False, 0.1
        scale = 1 + (wanted.abs().nan_to_num(0, 0, 0).max().item() if wanted.numel() else 0)
        same = torch.allclose(
            whole, wanted, rtol=0, atol=tolerance * scale if not exact else 1e-3 * tolerance * scale, equal_nan=True
        )
    return "" if same else f"{_say(whole)}\ninstead of {_say(wanted)}"


def _say(x: Any, wholes: dict[int, torch.Tensor] | None = None) -> str:
    return "None" if x is None else f"{tuple(x.shape)} {x.dtype} {(wholes or {}).get(id(x), x).detach().tolist()}"


def verdict(problems: list[Problem | None]) -> Problem | None:
    """What the ranks found together; that they found different things is a problem, too."""
    if len({problem and (problem.kind, problem.where) for problem in problems}) > 1:
        found = "\n".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems))
        first = next(problem for problem in problems if problem is not None)
        return attrs.evolve(first, kind=f"{first.kind} on some ranks", text=found)
    return problems[0]


def simulated(program: Program) -> Problem | None:
    """Run in the simulator."""
    try:
        return verdict(st.simulate(program.size, run_sharded, program))
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return Problem("crash", type(error).__name__, f"{type(error).__name__}: {error}\n{notes}")
