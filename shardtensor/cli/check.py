"""``shardtensor check``: all errors of a plan for one model and world, before anything runs.

Imports no torch, except for --module or --numeric.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from shardtensor.cli.arguments import add_model_arguments
from shardtensor.errors import ShardTensorError, SpecError

FAILS, USAGE = 1, 2
NO_TORCH = "install it: `pip install torch`, or check without --numeric: text and layouts"


def add_parser(commands: Any) -> None:
    """Add ``check`` to the command line."""
    parser = commands.add_parser(
        "check",
        help="check a plan for a model and a number of ranks",
        description="Match a plan to a model and say everything that is wrong, with its place; or, when nothing is, "
        "how the tensors lie and what they cost. Needs no GPU and starts no process. Exit status 0 when there are at "
        "most warnings, 1 when there are errors (with --strict: warnings too), 2 when the options are wrong or a file "
        "is not there.",
    )
    parser.add_argument("plan", help="a plan file, or the name of one that comes with the package")
    add_model_arguments(parser)
    parser.add_argument("--format", choices=("text", "json", "github"), default="text")
    parser.add_argument("--strict", action="store_true", help="warnings are errors, too")
    parser.add_argument(
        "--numeric",
        action="store_true",
        help="also run one step of --module, or of transformers' model of a small config.json, on simulated ranks, "
        "and compare every gradient with the dense one",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run ``shardtensor check``; returns the exit status."""
    from shardtensor.plan.findings.report import folded

    ran = ""
    try:
        findings, summary, ran = _checked(options)
    except ShardTensorError as error:
        if not (isinstance(error, SpecError) and error.findings):  # not about a plan: a missing file, for example
            _fail(options, str(error))
            return USAGE
        findings, summary = tuple(error.findings), None
    findings = folded(findings)
    bad = ("error", "warning") if options.strict else ("error",)
    failed = any(finding.severity in bad for finding in findings)
    _print(options, findings, summary, ran)
    return FAILS if failed else 0


def _checked(options: argparse.Namespace) -> tuple[tuple[Any, ...], Any, str]:
    """Return the findings, the summary if none of them is an error, and the name of the step that ran."""
    from shardtensor.cli.model_source import resolved_of
    from shardtensor.plan.estimates.summary import summarize
    from shardtensor.plan.findings.checking import check_plan

    resolved = resolved_of(options.plan, options)
    findings, ran = check_plan(resolved), ""
    if options.numeric and not _errors(findings):
        found, ran = _numeric(options, resolved)
        findings = (*findings, *found)
    return findings, None if _errors(findings) else summarize(resolved, options.plan), ran


def _errors(findings: Sequence[Any]) -> list[Any]:
    return [finding for finding in findings if finding.severity == "error"]


def _numeric(options: argparse.Namespace, resolved: Any) -> tuple[tuple[Any, ...], str]:
    """Return the findings of one step of a small model, none if gradients are right, and the name of what ran."""
    if find_spec("torch") is None:
        raise SpecError("--numeric needs torch, which is not installed", fix=NO_TORCH, code="E303")
    from shardtensor.cli.model_source import small_model
    from shardtensor.sharding.numeric import check_numeric

    make, name = small_model(options, resolved)
    plan, ran = resolved.plan, f"{name} on {options.world:,} ranks"
    return check_numeric(plan, make), ran


def _print(options: argparse.Namespace, findings: Sequence[Any], summary: Any, ran: str) -> None:
    from shardtensor.cli.check_text import looked_at, print_findings, summary_text
    from shardtensor.plan.findings.report import github_report, json_report

    if options.format == "json":
        more = {"summary": None, "numeric": ran}
        if summary is not None:
            more |= {"summary": summary, "checked": looked_at(ran)}
        print(json_report(findings, **{key: value for key, value in more.items() if value}))
    elif options.format == "github":
        print(github_report(findings), end="\n" if findings else "")
    else:
        print_findings(findings)
        if summary is not None:
            print(summary_text(summary, ran))
        if ran:
            text = "every gradient is the dense one" if summary is not None else "what ran"
            print(f"\n{text}: {ran}")


def _fail(options: argparse.Namespace, text: str) -> None:
    """Print an error that has no place in the plan."""
    if options.format == "json":
        print(json.dumps({"findings": [], "error": text}, indent=2))
    elif options.format == "github":
        print("::error::" + text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))
    else:
        print(text, file=sys.stderr)
