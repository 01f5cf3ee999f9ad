"""`check_numeric` runs one training step of a plan on local ranks, and compares it with the step of the dense module.

It finds what the text of a plan does not show, because the module's code determines it: a sum that is missing or
computed twice, a part that is taken for the whole. The first value that differs shows the module; other rules for it
are tried until one gives the dense result.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.process_group import as_group
from shardtensor.comm.redistribute import take
from shardtensor.errors import NotTraced, ShardTensorError
from shardtensor.layout.layout import replicated
from shardtensor.parallel.model_info import model_info
from shardtensor.parallel.shard_module import shard_module
from shardtensor.plan.findings.checking import OF_FLOWS, errors_of
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.sim.simulate import simulate
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of
from shardtensor.trace.borders import TOLERANCE, TORCH, Recorder, Relation
from shardtensor.trace.edits import Edit, edits, loss_edit
from shardtensor.trace.example import example_step
from shardtensor.trace.result import StepResult, data_axes

Step = Callable[[nn.Module, int], torch.Tensor]
Progress = Callable[[int, int], object]

SECONDS = 10.0
"""The CPU time for which other rules are tried for one mistake."""

MISTAKES = 3
"""How many mistakes of a plan are looked for, one after the other: each with the rules that mend those before it."""


def check_numeric(
    plan: Plan | str | Path,
    make: Callable[[], Any],
    *,
    config: Any = None,
    world: int | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> tuple[Finding, ...]:
    """Run one training step of a module under a plan, on ranks in this process, and compare it with the dense step.

    Args:
        plan: a `Plan`, or what `load_plan` reads.
        make: returns the module, small and dense, with the names in the plan; or the module and ``step(module,
            sample) -> loss``, the loss of the samples of that number. The default step is `example_step`.
        config, world, params: as in `load_plan`.
        seed: of the module's values.
        progress: called with (done, total): steps of the dense module and of each rank.

    Raises:
        NotTraced: the step of the dense module does not run.

    Returns:
        the errors that are found without running; else an E405 for each mistake, at the rule to change, with the module
        and the line of code that calls it. Where a change of one rule makes the step right, it is the fix. If none
        was found: an E405 for each parameter whose gradient differs. Nothing when loss and gradients are right.

    Example:
        >>> rules = {"0": {"weight": "[tp, -]", "bias": "[tp]", "in": "replicate", "out": "[..., tp]"},
        ...          "2": {"weight": "[-, tp]", "in": "[..., tp]", "out": "partial(tp) -> replicate"}}
        >>> make = lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4, bias=False))
        >>> check_numeric(Plan.from_rules(rules, "tp=2"), make)
        ()
    """
    if not isinstance(plan, Plan):
        plan = load_plan(plan, config=config, world=world, **(params or {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make()
    module, step = made if isinstance(made, tuple) else (made, None)
    module = module.double().eval()
    model = model_info(module)
    errors = errors_of(resolve(plan, model))
    if any(each.code not in OF_FLOWS for each in errors):
        return errors
    try:
        dense = _Dense.of(plan, module, model, step)
    except NotTraced:
        if errors:
            return errors
        raise
    outcome = dense.run(plan, progress)
    if outcome.is_right:
        return ()
    findings: list[Finding] = []
    for _ in range(MISTAKES):
        found = _best_edit(dense, outcome)
        if found is None:
            return (*findings, *outcome.findings())
        edit, path, after = found
        if outcome.errors and not after.is_right:
            return (*findings, *outcome.errors)
        findings.append(outcome.finding(edit, path, after))
        if after.is_right:
            break
        outcome = after
    return tuple(findings)


@attrs.frozen(eq=False)
class _Dense:
    """The step of the dense module, which every plan's step is compared with.

    Attributes:
        recorder: of sample 0.
        loss: the mean of the samples' losses, of which the parameters have the gradients.
    """

    module: nn.Module
    step: Step
    model: Model
    trained: nn.Module
    recorder: Recorder
    loss: float
    samples: int

    @classmethod
    def of(cls, plan: Plan, module: nn.Module, model: Model, step: Step | None) -> _Dense:
        """Run the step of the dense module; raise NotTraced if it does not run."""
        length = plan.world * -(-8 // plan.world)
        step = step or (lambda module, sample: example_step(module, sample, length))
        samples = len(plan.axes.mesh.ranks_along(plan.axes.mesh.ranks[0], data_axes(plan)))
        trained, recorder = copy.deepcopy(module), Recorder()
        try:
            with recorder.watching(trained):
                losses = [step(trained, 0)]
            losses += [step(trained, sample) for sample in range(1, samples)]
            loss = torch.stack(losses).mean()
            loss.backward()
        except ShardTensorError:
            raise
        except Exception as error:
            path = _path_in(error, trained)
            where = f"`{path or type(module).__name__}` stops at {_line_of(error)}"
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            fix = "let the function return (module, step), with step(module, sample) -> loss"
            raise NotTraced(f"the dense step does not run: {where}: {text}", fix) from error
        return cls(module, step, model, trained, recorder, loss.item(), samples)

    def run(self, plan: Plan, progress: Progress = lambda done, total: None) -> StepResult:
        """Run the step of a plan, on ranks in this process."""
        resolved = resolve(plan, self.model)
        found = StepResult(self, resolved, errors_of(resolved), {rank: Recorder() for rank in plan.axes.mesh.ranks})
        if found.errors:
            return found
        total = 3 * plan.world
        done = iter(range(1, total + 1))
        try:
            results = simulate(plan.world, self._one_rank, plan, found, lambda: progress(next(done), total))
        except Exception as error:
            found.error = error
            return found
        found.loss = sum(loss for loss, _ in results) / len(results)
        found.faults = _faults([compared for _, compared in results])
        return found

    def _one_rank(self, plan: Plan, outcome: StepResult, count: Callable[[], None]) -> Any:
        rank = as_group().rank
        module = shard_module(_with_own_parameters(self.module), plan)
        count()
        sample = plan.axes.mesh.ranks_along(rank, data_axes(plan)).index(rank)
        try:
            with outcome.recorders[rank].watching(module):
                loss = self.step(module, sample)
            count()
            loss.backward()
            count()
        except Exception as error:
            outcome.path = _path_in(error, module)
            raise
        compared = {}
        for (name, param), other in zip(module.named_parameters(), self.trained.parameters(), strict=True):
            if other.grad is not None and param.requires_grad:
                compared[unwrapped(name)] = _compared(param, other.grad)
        return local_of(loss.detach()).item(), compared


def _with_own_parameters(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters are other objects over the same memory."""
    memo = {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in module.parameters()}
    return copy.deepcopy(module, memo)


def _best_edit(dense: _Dense, outcome: StepResult) -> tuple[Edit, str, StepResult] | None:
    """Return the first edit that makes the step right, else the one that makes it right furthest on, with its module
    and what the step then gives; None if no edit makes it better."""
    axes = tuple(name for name, size in outcome.mesh.axes if size > 1)
    best: tuple[Edit, str, StepResult] | None = None
    score, end = outcome.score, time.process_time() + SECONDS
    for path, edit in _edits(outcome, axes):
        if time.process_time() > end:
            break
        after = dense.run(edit.plan)
        if after.is_right:
            return edit, path, after
        if after.score > score:
            best, score = (edit, path, after), after.score
    return best


def _edits(outcome: StepResult, axes: tuple[str, ...]) -> Iterator[tuple[str, Edit]]:
    suspects = outcome.suspects()
    if outcome.error is not None or outcome.is_loss_wrong:
        yield from (("", edit) for edit in loss_edit(outcome.resolved))
    tiers = [(path, edits(outcome.resolved, path, axes)) for path in suspects]
    for likely in range(3):
        for path, found in tiers:
            yield from ((path, edit) for edit in found[likely])


# -- gradients ---------------------------------------------------------------------------------------------------------

Gradient = tuple[torch.Tensor, torch.Tensor | None]
"""The flat gradient of one parameter on one rank: the dense module's part there, and the rank's own."""


def _compared(param: torch.Tensor, ref: torch.Tensor) -> Gradient:
    """Return this rank's part of the dense gradient, and the rank's own gradient."""
    if isinstance(param, ShardedTensor):
        rank = param._group.rank
        whole = replicated(tuple(ref.shape), param._layout.ranks, param._layout.grid)
        ref = take(ref, whole, param._layout, rank) if rank in param._layout.ranks else ref.new_empty(0)
    got = local_of(param).grad
    return ref.reshape(-1), ref.new_empty(0) if not ref.numel() else None if got is None else got.reshape(-1)


def _faults(ranks: list[dict[str, Gradient]]) -> dict[str, str]:
    """Return what is wrong with gradients, by parameter, in the order of the module."""
    scale = max((ref.norm().item() for compared in ranks for ref, _ in compared.values()), default=0.0)
    found = {name: _fault([compared[name] for compared in ranks], scale) for name in ranks[0]}
    return {name: fault for name, fault in found.items() if fault}


def _fault(ranks: list[Gradient], scale: float) -> str:
    """Return what is wrong with a gradient, from its parts on all ranks; empty when nothing is."""
    ref = torch.cat([each for each, _ in ranks])
    length = ref.norm().item()
    parts = [got for _, got in ranks if got is not None]
    if len(parts) < len(ranks):
        return "missing on some rank" if length > TOLERANCE * scale else ""
    got, floor = torch.cat(parts), TOLERANCE * max(length, scale * 1e-3)
    off = (got - ref).norm().item()
    if off <= floor:
        return ""
    if length <= TOLERANCE * scale:
        return "not 0, as it should be"
    ratio = (got @ ref).item() / length**2
    is_multiple = (got - ratio * ref).norm().item() <= floor and abs(ratio) > TOLERANCE
    return str(Relation("wrong", ratio=ratio if is_multiple else 0.0, off=off / length))


# -- places ------------------------------------------------------------------------------------------------------------


def _path_in(error: BaseException, module: nn.Module) -> str:
    """Return the path of the innermost module whose code was running when an error was raised."""
    paths = {id(part): unwrapped(path) for path, part in module.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def _line_of(error: BaseException) -> str:
    """Return the innermost line outside of torch that an error passed, ``file.py:12: y = self.mlp(x)``."""
    lines = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(TORCH)]
    last = lines[-1]
    return f"{Path(last.filename).name}:{last.lineno}: {last.line}"
