"""The output of ``shardtensor plan``: plain data for its JSON and its tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from shardtensor.cli.model_source import family_first, is_installed, model_of, resolved_of
from shardtensor.cost.profile import Profile, read_profile
from shardtensor.errors import NotTraced, PlanError
from shardtensor.layout.explain import bytes_text
from shardtensor.plan.estimates.estimate import (
    Batch,
    StepSeconds,
    TracedStep,
    collective_seconds,
    data_ranks,
    model_flops_utilisation,
    step_seconds,
)
from shardtensor.plan.estimates.memory import RankBytes, plan_bytes, rank_bytes
from shardtensor.plan.estimates.search import readable_plan, search
from shardtensor.plan.findings.report import folded, text_report
from shardtensor.plan.loading import read_config
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Resolved


def plan_report(options: argparse.Namespace) -> dict[str, Any]:
    """Return the costs of one plan.

    Raises:
        SpecError, PlanError, LayoutError: the plan has errors, or an option has.
    """
    read_profile(options.hardware)  # its errors come first
    resolved = resolved_of(options.plan, options)
    if resolved.errors:
        raise PlanError(text_report(folded(resolved.errors)))
    return costs(resolved, options)


def costs(resolved: Resolved, options: argparse.Namespace) -> dict[str, Any]:
    """Return the costs of a plan that is matched to a model, without errors.

    Raises:
        PlanError, LayoutError: an option has an error.
    """
    profile = read_profile(options.hardware)
    plan, model = resolved.plan, resolved.model
    batch = Batch(options.batch * data_ranks(resolved), _seq(options, plan.config), model.dtype)
    step, why_not = None, ""
    try:
        step = tracer_of(options, plan.config)(plan, options.batch, batch.seq)
    except NotTraced as error:
        why_not = str(error)
    kept, live = (step.activation_bytes, step.peak_bytes) if step is not None else (0, 0)
    held = {"optimizer": options.optimizer, "zero": options.zero, "master_weights": options.master_weights}
    found = plan_bytes(resolved, **held)
    both = {"most": (found.most, found.most_rank), "least": (found.least, found.least_rank)}
    memory = {name: _held(of, rank, kept, live) for name, (of, rank) in both.items()}
    room = options.memory or profile.memory_bytes
    if options.rank is not None:
        own = rank_bytes(resolved, options.rank, **held)
        memory["rank"] = _held(own, options.rank, kept, live)
    report = {
        **_head(options, resolved, batch),
        "mesh": str(plan.axes.mesh),
        "data_ranks": data_ranks(resolved),
        "memory": memory,
        "memory_bytes": room,
        "fits": memory["most"]["peak"] <= room,
    }
    if step is None:
        return {**report, "not_counted": why_not}
    spent = step_seconds(resolved, step, profile, batch.dtype, found.most)
    return {
        **report,
        "collectives": _rows(resolved, step, profile),
        "activations": [{"where": where, "bytes": size} for where, size in step.kept],
        "flops": step.flops,
        "recomputed_flops": step.recomputed_flops,
        "step": _step(spent, batch) | {"mfu": model_flops_utilisation(step, spent, profile, batch.dtype)},
    }


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
    """Return the meshes of a plan, the shortest step first, or the fewest bytes if no step is counted.

    Raises:
        SpecError, PlanError, LayoutError: the plan has errors, or an option has.
    """
    profile = read_profile(options.hardware)
    (config, source), params = read_config(options.model), dict(options.set)
    with family_first(options, config, source):
        head = readable_plan(options.plan, config=config, world=options.world, params=params)
    model = model_of(head, config=config, config_source=source, safetensors=options.safetensors, module=options.module)
    model = model.cast(options.dtype)
    batch = Batch(options.batch * options.world, _seq(options, config), model.dtype)
    why_not = ""
    arguments: dict[str, Any] = {
        "config": config, "world": options.world, "params": params, "batch": batch, "profile": profile,
        "memory_bytes": options.memory or profile.memory_bytes, "optimizer": options.optimizer,
        "master_weights": options.master_weights,
    }  # fmt: skip
    try:
        choices = search(options.plan, model, **arguments, trace=tracer_of(options, config))
    except NotTraced as error:
        why_not = str(error)
        choices = search(options.plan, model, **arguments)
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
"""The tokens of a sample, if the model takes as many."""


def _seq(options: argparse.Namespace, config: Mapping[str, Any]) -> int:
    lengths = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    return options.seq or min([TOKENS, *(n for n in lengths if type(n) is int and n > 0)])


def _held(held: RankBytes, rank: int, kept: int, live: int) -> dict[str, int]:
    """Return the bytes that a rank holds; `live` are the most at one time that its forward and backward make."""
    total = held.total + kept
    peak = held.total - held.gradients - held.gathered + live if live else total
    return {"rank": rank, **attrs.asdict(held), "activations": kept, "total": total, "peak": peak}


def _step(step: StepSeconds, batch: Batch) -> dict[str, float]:
    return {
        "seconds": step.total, "compute_s": step.compute, "optimizer_s": step.optimizer, "inside_s": step.inside,
        "beside_s": step.beside, "tokens_per_s": batch.tokens / step.total if step.total else 0.0,
    }  # fmt: skip


def _head(options: argparse.Namespace, counted: Resolved | Model, batch: Batch) -> dict[str, Any]:
    model = counted.model if isinstance(counted, Resolved) else counted
    tensors = [p.tensor for p in own_tensors(counted)] if isinstance(counted, Resolved) else model.tensors
    return {
        "plan": str(options.plan), "model": model.source, "architecture": model.class_name,
        "parameters": sum(tensor.numel for tensor in tensors if not tensor.is_buffer), "world": options.world,
        "batch": batch.samples, "seq": batch.seq, "dtype": batch.dtype, "optimizer": options.optimizer,
        "master_weights": options.master_weights, "checkpoint_activations": options.checkpoint_activations,
        "hardware": options.hardware,
    }  # fmt: skip


_ROWS = 12
"""The number of modules whose activations are printed."""

_BYTES = (
    "parameters", "gradients", "optimizer", "master_weights", "buffers", "gathered", "activations", "total", "peak",
)  # fmt: skip


def show_plan(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a plan's report."""
    console = console or _console()
    _print_head(console, report)
    memory = report["memory"]
    columns = {"every rank": memory["most"]}
    if memory["most"]["total"] != memory["least"]["total"]:
        columns = {f"the {name}, rank {memory[name]['rank']}": memory[name] for name in ("most", "least")}
    if "rank" in memory:
        columns[f"rank {memory['rank']['rank']}"] = memory["rank"]
    table = _table("bytes of a rank", "of", *columns)
    for name in _BYTES:
        if any(held[name] for held in columns.values()):
            table.add_row(name.replace("_", " "), *(bytes_text(held[name], 2) for held in columns.values()))
    console.print(table)
    needed, room = bytes_text(memory["most"]["peak"], 2), bytes_text(report["memory_bytes"], 2)
    if report["fits"]:
        console.print(f"fits into {room}\n", highlight=False)
    else:
        console.print(f"does not fit: a rank needs {needed} of {room}\n", style="bold red", highlight=False)
    if "step" not in report:
        console.print(
            f"the step is not counted: {report['not_counted']}", highlight=False, markup=False, soft_wrap=True
        )
        return
    table = _table(
        "collectives of a step", "when", "collective", "over", "calls", "received", "each", "together", "where"
    )
    for row in report["collectives"]:
        over = f"{row['over']}={row['group_size']}"
        times = seconds_text(row["seconds_each"]), seconds_text(row["seconds"])
        received = bytes_text(row["received_bytes"], 2)
        where = row["where"] or "the model"
        table.add_row(row["phase"], row["kind"], over, f"{row['calls']:,}", received, *times, where)
    console.print(table)
    activations = report["activations"]
    if activations:
        table = _table("saved activations", "where", "bytes")
        rest = {
            "where": f"{len(activations) - _ROWS} others",
            "bytes": sum(each["bytes"] for each in activations[_ROWS:]),
        }
        for row in [*activations[:_ROWS], *([rest] if rest["bytes"] else [])]:
            table.add_row(row["where"] or "the model", bytes_text(row["bytes"], 2))
        console.print("", table)
    step = report["step"]
    again = report["recomputed_flops"]
    console.print(
        f"\na step  {seconds_text(step['seconds'])} estimated: {report['flops']:.3g} FLOPs "
        + (f"({again:.3g} of them to recompute checkpointed modules) " if again else "")
        + f"{seconds_text(step['compute_s'])}, beside them {seconds_text(step['beside_s'])} of collectives along data "
        f"axes; in modules {seconds_text(step['inside_s'])}; optimizer {seconds_text(step['optimizer_s'])}",
        highlight=False,
    )
    console.print(
        f"        {step['tokens_per_s']:,.0f} tokens a second, MFU {100 * step['mfu']:.1f} % of the peak of "
        f"{report['hardware']}",
        highlight=False,
    )


def figures(report: dict[str, Any]) -> dict[str, str]:
    """Return what plans are compared by, as text; the step's figures only if it was counted."""
    found = {"model": report["architecture"], "bytes of a rank": bytes_text(report["memory"]["most"]["peak"], 2)}
    if "step" in report:
        step, received = report["step"], sum(row["calls"] * row["received_bytes"] for row in report["collectives"])
        found |= {"estimated step": seconds_text(step["seconds"]), "tokens a second": f"{step['tokens_per_s']:,.0f}"}
        found |= {"MFU": f"{100 * step['mfu']:.1f} %", "received in a step": bytes_text(received, 2)}
    return found


def show_search(report: dict[str, Any]) -> None:
    """Print the meshes that a search found."""
    console = _console()
    _print_head(console, report)
    passed = [row for row in report["choices"] if not row["fault"]]
    if "not_counted" in report:
        console.print(f"the step is not counted: {report['not_counted']}", highlight=False, markup=False)
        table = _table("meshes, the fewest bytes first", "values", "mesh", "bytes")
        for row in passed:
            table.add_row(row["values"], row["mesh"], bytes_text(row["bytes"], 2))
    else:
        table = _table(
            "meshes, the shortest step first", "values", "mesh", "step", "tokens/s", "in modules", "beside", "bytes"
        )
        for row in passed:
            step = row["step"]
            times = (seconds_text(step[key]) for key in ("inside_s", "beside_s"))
            table.add_row(
                row["values"], row["mesh"], seconds_text(step["seconds"]), f"{step['tokens_per_s']:,.0f}", *times,
                bytes_text(row["bytes"], 2),
            )  # fmt: skip
    if table.row_count:
        console.print(table)
    else:
        console.print("no mesh passes", style="bold red")
    by_fault: dict[str, list[str]] = {}
    for row in report["choices"]:
        if row["fault"]:
            by_fault.setdefault(row["fault"], []).append(row["values"])
    for fault, values in by_fault.items():
        more = f" and {len(values) - 3} more" if len(values) > 3 else ""
        console.print(f"not {'; '.join(values[:3])}{more}: {fault}", style="dim", highlight=False, markup=False)


def seconds_text(seconds: float) -> str:
    """Return a time as text with a unit.

    Example:
        >>> seconds_text(0), seconds_text(0.0000123), seconds_text(0.5), seconds_text(75)
        ('-', '12.3 us', '500 ms', '75 s')
    """
    if not seconds:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140)


def _print_head(console: Console, report: dict[str, Any]) -> None:
    of = "  ".join(filter(None, dict.fromkeys((report["plan"], report["architecture"], report["model"]))))
    parts = report.get("data_ranks", 1)
    dtype = report["dtype"] + ", float32 master weights" * report["master_weights"]
    share = f" ({report['batch'] // parts} on each of {parts} data ranks)" if parts > 1 else ""
    console.print(
        f"{of}  {report['parameters']:,} parameters on {report['world']} ranks {report.get('mesh', '')}  "
        f"{report['batch']} x {report['seq']} tokens a step{share}, {dtype}, {report['optimizer']}, "
        f"{report['hardware']}\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="bold")
    left = {"of", "when", "collective", "over", "where", "why", "values", "mesh"}
    for column in columns:
        table.add_column(column, no_wrap=column not in ("where", "why"), overflow="fold")
        table.columns[-1].justify = "left" if column in left else "right"
    return table


# -- a counted step ----------------------------------------------------------------------------------------------------

Tracer = Callable[[Plan, int, int], TracedStep]
"""Counts a step of a plan, given the samples of a data rank and the tokens of a sample."""

_GIVE = "give --module PKG:FN; FN() returns the model, or (model, step) with step(model, sample) -> loss"


def tracer_of(options: argparse.Namespace, config: Mapping[str, Any]) -> Tracer:
    """Return a function that counts steps of the model in a command's options. Imports torch if there is a model.

    The module is that of ``--module``, else the one that transformers, if installed, makes of the config.json.

    Raises:
        NotTraced: there is no such module.
    """
    if options.no_step:
        raise NotTraced("leave out --no-step for its collectives, FLOPs and seconds")
    if not is_installed("torch"):
        raise NotTraced("install torch to count its collectives, FLOPs and seconds")
    module, step = _made(options, config)
    import torch

    from shardtensor.trace.example import example_step
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
            return trace_step(
                module, plan, run, rank=plan.axes.mesh.ranks[0], checkpointed=options.checkpoint_activations
            )
        except NotTraced:
            raise
        except Exception as error:
            raise _not_run(error, seq) from error

    return trace


def _not_run(error: Exception, seq: int) -> NotTraced:
    fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return NotTraced(f"it does not run with --seq {seq} on tensors without memory ({fault}); {_GIVE}")


def _made(options: argparse.Namespace, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the module on the meta device, and its step if one is given."""
    from shardtensor.cli.model_source import builder_of, transformers_model

    if options.module is not None:
        made = builder_of(options.module)()
        return made if isinstance(made, tuple) else (made, None)
    if not is_installed("transformers"):
        raise NotTraced(f"{_GIVE}; or install transformers, which makes it of a config.json")
    try:
        return transformers_model(config), None
    except ValueError as error:
        raise NotTraced(f"{error}; {_GIVE}") from None
