"""What ``shardtensor plan`` prints, as plain data: its JSON, and what its tables show."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import attrs

from shardtensor.cli.model_source import family_first, model_of, resolved_of
from shardtensor.cli.traced import NotTraced, tracer_of
from shardtensor.cost.profile import Profile, read_profile
from shardtensor.errors import PlanError
from shardtensor.plan.findings.report import folded, text_report
from shardtensor.plan.loading import read_config
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.models.model import Model
from shardtensor.plan.outlook.estimate import (
    Batch,
    StepSeconds,
    TracedStep,
    collective_seconds,
    data_ranks,
    step_seconds,
)
from shardtensor.plan.outlook.memory import RankBytes, plan_bytes, rank_bytes
from shardtensor.plan.outlook.search import readable_plan, search
from shardtensor.plan.resolved import Resolved


def plan_report(options: argparse.Namespace) -> dict[str, Any]:
    """What one plan costs.

    Raises:
        SpecError, PlanError, LayoutError: the plan has errors, or an option has.
    """
    profile = read_profile(options.hardware)
    resolved = resolved_of(options.plan, options)
    plan, model = resolved.plan, resolved.model
    if resolved.errors:
        raise PlanError(text_report(folded(resolved.errors)))
    batch = Batch(options.batch * data_ranks(resolved), _seq(options, plan.config), options.dtype or model.dtype)
    step, why_not = None, ""
    try:
        step = tracer_of(options, plan.config)(plan, options.batch, batch.seq)
    except NotTraced as error:
        why_not = str(error)
    kept = step.activation_bytes if step is not None else 0
    found = plan_bytes(resolved, optimizer=options.optimizer)
    memory = {
        "most": _held(found.most, found.most_rank, kept),
        "least": _held(found.least, found.least_rank, kept),
    }
    room = options.memory or profile.memory_bytes
    if options.rank is not None:
        own = rank_bytes(resolved, options.rank, optimizer=options.optimizer)
        memory["rank"] = _held(own, options.rank, kept)
    report = {
        **_head(options, resolved, batch),
        "mesh": str(plan.axes.mesh),
        "data_ranks": data_ranks(resolved),
        "memory": memory,
        "memory_bytes": room,
        "fits": memory["most"]["total"] <= room,
    }
    if step is None:
        return {**report, "not_counted": why_not}
    spent = step_seconds(resolved, step, profile, batch.dtype, found.most)
    return {**report, "collectives": _rows(resolved, step, profile), "flops": step.flops, "step": _step(spent, batch)}


def _rows(resolved: Resolved, step: TracedStep, profile: Profile) -> list[dict[str, Any]]:
    rows = []
    for each in step.collectives:
        once = collective_seconds(resolved, each, profile)
        rows.append({
            "phase": each.phase, "kind": each.kind, "over": "*".join(each.axes), "group_size": each.group_size,
            "calls": each.calls, "sent_bytes": each.sent_bytes, "received_bytes": each.received_bytes,
            "seconds_each": once, "seconds": each.calls * once, "where": each.where,
        })  # fmt: skip
    return rows


def search_report(options: argparse.Namespace) -> dict[str, Any]:
    """The meshes of a plan, the shortest step first, or the fewest bytes where no step is counted.

    Raises:
        SpecError, PlanError, LayoutError: the plan has errors, or an option has.
    """
    profile = read_profile(options.hardware)
    (config, source), params = read_config(options.model), dict(options.set)
    with family_first(options, config, source):
        head = readable_plan(options.plan, config=config, world=options.world, params=params)
    model = model_of(head, config=config, config_source=source, safetensors=options.safetensors, module=options.module)
    batch = Batch(options.batch * options.world, _seq(options, config), options.dtype or model.dtype)
    why_not = ""
    said: dict[str, Any] = {
        "config": config, "world": options.world, "params": params, "batch": batch, "profile": profile,
        "memory_bytes": options.memory or profile.memory_bytes, "optimizer": options.optimizer,
    }  # fmt: skip
    try:
        choices = search(options.plan, model, **said, trace=tracer_of(options, config))
    except NotTraced as error:
        why_not = str(error)
        choices = search(options.plan, model, **said)
    rows = []
    for choice in choices:
        values = ", ".join(f"{name}={str(value).lower()}" for name, value in choice.params.items())
        row: dict[str, Any] = {
            "values": values, "params": dict(choice.params), "mesh": choice.mesh, "fault": choice.fault,
            "bytes": choice.bytes,
        }  # fmt: skip
        if choice.seconds is not None:
            row["step"] = _step(choice.seconds, batch)
        rows.append(row)
    return {**_head(options, model, batch), "choices": rows, **({"not_counted": why_not} if why_not else {})}


TOKENS = 4096
"""Of a sample, where the model takes as many."""


def _seq(options: argparse.Namespace, config: Mapping[str, Any]) -> int:
    lengths = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    return options.seq or min([TOKENS, *(n for n in lengths if type(n) is int and n > 0)])


def _held(held: RankBytes, rank: int, kept: int) -> dict[str, int]:
    return {"rank": rank, **attrs.asdict(held), "activations": kept, "total": held.total + kept}


def _step(step: StepSeconds, batch: Batch) -> dict[str, float]:
    return {
        "seconds": step.total, "compute_s": step.compute, "optimizer_s": step.optimizer, "inside_s": step.inside,
        "beside_s": step.beside, "tokens_per_s": batch.tokens / step.total if step.total else 0.0,
    }  # fmt: skip


def _head(options: argparse.Namespace, counted: Resolved | Model, batch: Batch) -> dict[str, Any]:
    tensors = [p.tensor for p in own_tensors(counted)] if isinstance(counted, Resolved) else counted.tensors
    return {
        "plan": str(options.plan), "model": counted.model.source if isinstance(counted, Resolved) else counted.source,
        "parameters": sum(tensor.numel for tensor in tensors if not tensor.is_buffer), "world": options.world,
        "batch": batch.samples, "seq": batch.seq, "dtype": batch.dtype, "optimizer": options.optimizer,
        "hardware": options.hardware,
    }  # fmt: skip
