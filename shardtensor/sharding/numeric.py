"""``check --numeric`` runs one training step on local ranks and compares every gradient with that of a single rank.

It finds what no static check of a plan can find, a sum that is missing or done twice, at the line of the parameter.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardtensor.comm.process_group import as_group
from shardtensor.comm.redistribute import take
from shardtensor.errors import PlanError, ShardTensorError
from shardtensor.layout.layout import replicated
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.line import Line
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Resolved, layout_text
from shardtensor.sharding.model_info import model_info
from shardtensor.sharding.shard_module import shard_module
from shardtensor.sim.simulate import simulate
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of

Step = Callable[[nn.Module, int], torch.Tensor]
Progress = Callable[[int, int], object]

TOLERANCE = 1e-4
"""Relative; models that compute in float64 agree to 1e-12, but some of their code rounds to float32 on the way."""


Gradient = tuple[torch.Tensor, torch.Tensor | None]
"""The flat gradient of one parameter on one rank: the dense module's part there, and the rank's own."""


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
    """Run one training step of a module under a plan, on ranks in this process, and compare every gradient.

    Args:
        plan: a `Plan`, or what `load_plan` reads.
        make: returns the module, small and dense, with the names in the plan; or the module and ``step(module,
            sample) -> loss``, the loss of the samples of that number. The default step is `example_step`.
        config, world, params: as in `load_plan`.
        seed: of the module's values.
        progress: called with (done, total): steps of the dense module and of each rank.

    Returns:
        the errors that are found without running, if any; else an E405 for each parameter whose gradient differs, at
        the line that gives its layout, in the order of backward; nothing when all are right.

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
    length = plan.world * -(-8 // plan.world)
    step = step or (lambda module, sample: example_step(module, sample, length))
    resolved = resolve(plan, model_info(module))
    errors = tuple(finding for finding in check_plan(resolved) if finding.severity == "error")
    if errors:
        return errors
    mesh, axes = plan.axes.mesh, plan.axes
    data = [i for i, name in enumerate(mesh.names) if name in axes.leaves(axes.data)]
    samples = len(mesh.ranks_along(0, data))
    dense = copy.deepcopy(module)
    ref = torch.stack([step(dense, sample) for sample in range(samples)]).mean()
    ref.backward()
    done, total = itertools.count(1), 1 + 3 * plan.world

    def count() -> None:
        progress(next(done), total)

    count()
    try:
        found = simulate(plan.world, _one_rank, module, plan, step, dense, data, count)
    except Exception as error:
        return (_not_run(error, resolved),)
    return _findings(resolved, ref.item(), found)


def _one_rank(
    module: nn.Module, plan: Plan, step: Step, dense: nn.Module, data: list[int], count: Callable[[], None]
) -> Any:
    rank = as_group().rank
    module = shard_module(copy.deepcopy(module), plan)
    count()
    sample = plan.axes.mesh.ranks_along(rank, data).index(rank)
    try:
        loss = step(module, sample)
        count()
        loss.backward()
        count()
    except Exception as error:
        vars(error)["module_path"] = _path_in(error, module)
        raise
    compared = {}
    for (name, param), other in zip(module.named_parameters(), dense.parameters(), strict=True):
        if other.grad is not None and param.requires_grad:
            compared[unwrapped(name)] = _compared(param, other.grad)
    return local_of(loss.detach()).item(), compared


def _path_in(error: BaseException, module: nn.Module) -> str:
    """Return the path of the innermost module whose code was running when an error was raised."""
    paths = {id(part): unwrapped(path) for path, part in module.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def _compared(param: torch.Tensor, ref: torch.Tensor) -> Gradient:
    """Return this rank's part of the dense gradient, and the rank's own gradient."""
    if isinstance(param, ShardedTensor):
        rank = param._group.rank
        whole = replicated(tuple(ref.shape), param._layout.ranks, param._layout.grid)
        ref = take(ref, whole, param._layout, rank) if rank in param._layout.ranks else ref.new_empty(0)
    got = local_of(param).grad
    return ref.reshape(-1), ref.new_empty(0) if not ref.numel() else None if got is None else got.reshape(-1)


def _findings(resolved: Resolved, ref: float, found: list[tuple[float, dict[str, Gradient]]]) -> tuple[Finding, ...]:
    got = sum(loss for loss, _ in found) / len(found)
    findings = []
    if abs(got - ref) > TOLERANCE * max(abs(ref), 1e-6):
        why = f"one rank computes {ref:.6g}, the mean over {len(found)} ranks is {got:.6g}"
        fix = "a value is counted twice, or a part is taken for the whole: look at the flows of the last layers"
        findings.append(Finding("E405", "the loss is not the dense one", _origin_of(resolved, ""), why, fix))
    scale = max((ref.norm().item() for _, compared in found for ref, _ in compared.values()), default=0.0)
    faults = {name: _fault([compared[name] for _, compared in found], scale) for name in found[0][1]}
    wrong = [(name, fault) for name, fault in reversed(faults.items()) if fault]
    for i, (name, fault) in enumerate(wrong):
        placed = resolved.tensors[name]
        why = f"{name} lies as `{layout_text(placed, resolved)}`; one step on {len(found)} ranks"
        notes = ("backward comes here first: what is wrong before it in the model may follow from it",)
        origin = placed.line.origin if placed.line is not None else None
        fault = f"the gradient of `{name}` is {fault}"
        findings.append(Finding("E405", fault, origin, why, _FIX, notes if len(wrong) > 1 and not i else (), name))
    return tuple(findings)


_FIX = (
    "drop a `grad partial(...)` where it is too large, say `in` or `grad partial(...)` where it is too small: "
    "see how values enter and leave the modules around it"
)


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
    if (got - ratio * ref).norm().item() <= floor and abs(ratio) > TOLERANCE:
        return f"{ratio:.4g} times too large" if ratio > 1 else f"{1 / ratio:.4g} times too small"
    return f"off by {100 * off / length:.0f} %"


def _origin_of(resolved: Resolved, path: str, counts_first: bool = True) -> Origin | None:
    """Return the place in the plan for a module: in its block, at its tensors, or at a module around it."""
    module_flows = resolved.modules.get(path)
    lines: list[Line | None] = [] if path else list(resolved.plan.lines)
    if path and module_flows is not None:
        flows = [line for side in (module_flows.ins, module_flows.outs) for _, line in side.values()]
        counts = [line for _, line in module_flows.locals.values()]
        lines = [*counts, *flows] if counts_first else [*flows, *counts]
        lines += [line for _, line in module_flows.uses]
    lines += [placed.line for name, placed in resolved.tensors.items() if name.rpartition(".")[0] == path]
    found = next((line.origin for line in lines if line is not None and line.origin is not None), None)
    return found if found is not None or not path else _origin_of(resolved, path.rpartition(".")[0], counts_first)


def _not_run(error: Exception, resolved: Resolved) -> Finding:
    """Return the finding for what stopped a rank: an error of this library, or of the module's code on shards."""
    path = vars(error).get("module_path", "")
    fault, *facts = str(error).splitlines() or [""]
    if isinstance(error, ShardTensorError):
        origin = _origin_of(resolved, path, counts_first=False)
        return Finding("E405", fault, origin, "\n       ".join(line.strip() for line in facts), tensor=path)
    where = f"`{path}` does not run so" if path else "the module does not run so"
    fix = "an attribute that counts may want a `local`, or a value an `in` or `out`"
    fault = f"{where}: {type(error).__name__}: {fault}"
    return Finding("E405", fault, _origin_of(resolved, path), "its code meets parts of values", fix, tensor=path)


_IDS = ("input_ids", "ids", "idx", "tokens", "input")
_IMAGES = ("pixel_values", "images", "image")


def example_step(module: nn.Module, sample: int, length: int, samples: int = 2) -> torch.Tensor:
    """Return the loss of a few random samples of `length` tokens, seeded by `sample`; equal on every rank.

    A module whose first layer is an embedding gets ids, also as labels if its forward takes labels; one that begins
    with a convolution gets images; any other gets floats with the number of features of its first linear layer. The
    loss is the one that the module returns, else a weighted mean of its squared results.

    Example:
        >>> example_step(nn.Linear(3, 2), 0, 4).shape
        torch.Size([])
    """
    g = torch.Generator().manual_seed(sample)
    names = list(inspect.signature(module.forward).parameters)
    first = next((m for m in module.modules() if isinstance(m, nn.Embedding | nn.Linear | nn.Conv2d)), None)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    given: dict[str, Any] = {}
    if isinstance(first, nn.Embedding):
        x = torch.randint(0, first.num_embeddings, (samples, length), generator=g)
        given = {"labels": x} if "labels" in names else {}
        given |= {"decoder_input_ids": x} if "decoder_input_ids" in names and not given else {}
    elif isinstance(first, nn.Conv2d):
        size = getattr(getattr(module, "config", None), "image_size", 4 * max(first.kernel_size))
        x = torch.randn(samples, first.in_channels, size, size, generator=g, dtype=dtype)
    elif isinstance(first, nn.Linear):
        x = torch.randn(samples, length, first.in_features, generator=g, dtype=dtype)
    else:
        raise PlanError(
            f"it is not known how to call {type(module).__name__}",
            {"forward takes": ", ".join(names)},
            "give its step, too: let the function return (module, step), with step(module, sample) -> loss",
        )
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    x, given = x.to(device), {key: value.to(device) for key, value in given.items()}
    name = next((n for n in (*_IDS, *_IMAGES) if n in names), None)
    output = module(**{name: x}, **given) if name else module(x, **given)
    return _loss(output)


def _loss(output: Any) -> torch.Tensor:
    named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    if isinstance(named.get("loss"), torch.Tensor):
        return named["loss"]
    parts = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    terms = [_weighted_mean(y) for y in parts if isinstance(y, torch.Tensor) and y.is_floating_point()]
    return torch.stack([term for term in terms if term.requires_grad] or terms).sum()


def _weighted_mean(y: torch.Tensor) -> torch.Tensor:
    """Return a mean of squares with different weights along the last dim, so that no mistake cancels in the sum."""
    weights = torch.linspace(0.5, 1.5, max(y.shape[-1], 1), dtype=y.dtype, device=y.device) if y.dim() else 1.0
    return (y.square() * weights).sum() / max(math.prod(y.shape), 1)
