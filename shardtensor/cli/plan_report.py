"""What ``shardtensor plan`` tells, as plain data: the JSON that it prints, and what its tables show."""

from __future__ import annotations

import argparse
from typing import Any

import attrs

from shardtensor.cli.model_source import family_first, model_of, resolved_of
from shardtensor.cost.profile import read_profile
from shardtensor.errors import PlanError
from shardtensor.plan.findings.report import folded, text_report
from shardtensor.plan.loading import read_config
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.models.model import Model
from shardtensor.plan.outlook.estimate import StepSeconds, collective_seconds, step_seconds
from shardtensor.plan.outlook.memory import RankBytes, plan_bytes, rank_bytes
from shardtensor.plan.outlook.search import passing_values, readable_plan, search
from shardtensor.plan.outlook.work import Batch, data_ranks, kept_bytes
from shardtensor.plan.resolved import Resolved
from shardtensor.plan.traffic.collectives import step_collectives, uncounted


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
    batch = Batch(options.batch * data_ranks(resolved), options.seq, options.dtype or model.dtype)
    kept = kept_bytes(resolved, batch)
    found = plan_bytes(resolved, optimizer=options.optimizer)
    memory = {
        "most": _held(found.most, found.most_rank, kept),
        "least": _held(found.least, found.least_rank, kept),
    }
    room = options.memory or profile.memory_bytes
    if options.rank is not None:
        own = rank_bytes(resolved, options.rank, optimizer=options.optimizer)
        memory["rank"] = _held(own, options.rank, kept)
    sent = step_collectives(resolved, batch=options.batch, seq=batch.seq, dtype=batch.dtype)
    step = step_seconds(resolved, batch, profile, optimizer=options.optimizer, collectives=sent, held=found.most)
    rows = []
    for collective in sent:
        once = collective_seconds(resolved, collective, profile)
        rows.append({
            "phase": collective.phase, "kind": collective.kind, "over": "*".join(collective.axes),
            "group_size": collective.group_size, "calls": collective.count, "bytes": collective.bytes,
            "received_bytes": collective.received_bytes, "dtype": collective.dtype, "seconds_each": once,
            "seconds": collective.count * once, "where": collective.where, "why": collective.why,
        })  # fmt: skip
    return {
        **_head(options, resolved, batch),
        "mesh": str(plan.axes.mesh),
        "data_ranks": data_ranks(resolved),
        "memory": memory,
        "memory_bytes": room,
        "fits": memory["most"]["total"] <= room,
        "collectives": rows,
        "uncounted": [{"where": each.where, "why": each.why} for each in uncounted(resolved)],
        "step": _step(step, batch),
        "passing": {
            name: list(values)
            for name, values in passing_values(
                options.plan, model, config=plan.config, world=options.world, params=dict(options.set)
            ).items()
        },
    }


def search_report(options: argparse.Namespace) -> dict[str, Any]:
    """The meshes of a plan, the shortest step first.

    Raises:
        SpecError, PlanError, LayoutError: the plan has errors, or an option has.
    """
    profile = read_profile(options.hardware)
    (config, source), params = read_config(options.model), dict(options.set)
    with family_first(options, config, source):
        head = readable_plan(options.plan, config=config, world=options.world, params=params)
    model = model_of(head, config=config, config_source=source, safetensors=options.safetensors, module=options.module)
    batch = Batch(options.batch * options.world, options.seq, options.dtype or model.dtype)
    choices = search(
        options.plan, model, config=config, world=options.world, params=params, batch=batch, profile=profile,
        memory_bytes=options.memory or profile.memory_bytes, optimizer=options.optimizer,
    )  # fmt: skip
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
    return {**_head(options, model, batch), "choices": rows}


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
