"""``shardtensor check``: all errors of a plan for one model and world, before anything runs on devices.

Text, layouts and names are checked without torch. Where the module can be made (``--module``, or transformers makes it
of the config.json), one step of it, or of a small model of its structure, runs on all ranks in this process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from shardtensor.cli.arguments import add_model_arguments
from shardtensor.errors import NotTraced, PlanError, ShardTensorError, SpecError

FAILS, USAGE = 1, 2


def add_parser(commands: Any) -> None:
    """Add ``check`` to the command line."""
    parser = commands.add_parser(
        "check",
        help="check a plan for a model and a number of ranks",
        description="Match a plan to a model and print everything that is wrong, with its place; or, if nothing is, "
        "how the tensors are sharded and what they cost. Where the module can be made, by --module or by transformers, "
        "one training step of a small one runs on ranks in this process, and each value and gradient is compared with "
        "the dense one. Needs no GPU and starts no process. Exit status 0 if there are at most warnings, 1 if there "
        "are errors (with --strict: warnings too), 2 if the options are wrong or a file is missing.",
    )
    parser.add_argument("plan", help="a plan file, or the name of one that comes with the package")
    add_model_arguments(parser)
    parser.add_argument("--format", choices=("text", "json", "github"), default="text")
    parser.add_argument("--strict", action="store_true", help="warnings are errors, too")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--numeric", action="store_true", help="it is an error if no step can run")
    steps.add_argument("--no-step", action="store_true", help="run no step, and import neither torch nor the module")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run ``shardtensor check``; returns the exit status."""
    from shardtensor.plan.findings.report import folded

    ran = Ran()
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


@attrs.frozen
class Ran:
    """The step that ran, in words; or why none did."""

    text: str = ""
    why_not: str = ""


def _checked(options: argparse.Namespace) -> tuple[tuple[Any, ...], Any, Ran]:
    """Return the findings, the summary if none of them is an error, and the step that ran."""
    from shardtensor.cli.check_text import summarize
    from shardtensor.cli.model_source import resolved_of
    from shardtensor.plan.findings.checking import OF_FLOWS, check_plan

    resolved = resolved_of(options.plan, options)
    findings, ran = check_plan(resolved), Ran()
    errors = _errors(findings)
    if all(each.code in OF_FLOWS for each in errors):
        found, ran = compare_step(options, resolved)
        if _errors(found):
            findings = tuple(each for each in findings if each.severity != "error")
        findings = (*findings, *found)
    return findings, None if _errors(findings) else summarize(resolved, options.plan), ran


def _errors(findings: Sequence[Any]) -> list[Any]:
    return [finding for finding in findings if finding.severity == "error"]


def compare_step(options: argparse.Namespace, resolved: Any) -> tuple[tuple[Any, ...], Ran]:
    """Run a step, if a module can be made: return its findings, none if loss and gradients are right."""
    from shardtensor.cli.model_source import OWN_MODEL, case_of

    if options.no_step:
        return (), Ran(why_not="--no-step")
    try:
        case = case_of(options, resolved)
        from shardtensor.trace.check import check_numeric

        return check_numeric(case.plan, case.make), Ran(case.text)
    except NotTraced as error:
        if options.numeric:
            raise SpecError(f"--numeric: {error.text}", fix=[OWN_MODEL, *error.ways], code="E303") from None
        return (), Ran(why_not=str(error))
    except PlanError as error:
        if options.numeric:
            raise
        return (), Ran(why_not=str(error).partition("\n")[0])


def _print(options: argparse.Namespace, findings: Sequence[Any], summary: Any, ran: Ran) -> None:
    from shardtensor.cli.check_text import looked_at, print_findings, summary_text
    from shardtensor.plan.findings.report import github_report, json_report

    if options.format == "json":
        more = {"summary": summary, "step": ran.text, "no_step": ran.why_not}
        if summary is not None:
            more["checked"] = looked_at(ran.text)
        print(json_report(findings, **{key: value for key, value in more.items() if value}))
    elif options.format == "github":
        print(github_report(findings), end="\n" if findings else "")
    else:
        print_findings(findings)
        if summary is not None:
            print(summary_text(summary, ran.text))
        if ran.text:
            text = "one step gives the dense loss and gradients" if summary is not None else "what ran"
            print(f"\n{text}: {ran.text}")
        elif ran.why_not and not _errors(findings):
            print(f"\nnot checked, how values pass between modules: {ran.why_not}")


def _fail(options: argparse.Namespace, text: str) -> None:
    """Print an error that has no place in the plan."""
    if options.format == "json":
        print(json.dumps({"findings": [], "error": text}, indent=2))
    elif options.format == "github":
        print("::error::" + text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))
    else:
        print(text, file=sys.stderr)
