"""All checks of a plan that was matched to a model."""

from __future__ import annotations

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.gradients import Flows, check_flows
from shardtensor.plan.outlook.balance import imbalances
from shardtensor.plan.resolved import Resolved


def check_plan(resolved: Resolved, flows: Flows | None = None) -> tuple[Finding, ...]:
    """Find everything that is wrong with a plan for a model: what resolving found, flows, and the balance of ranks.

    Flows are looked at when every tensor lies somewhere, and the balance when nothing is wrong.

    Args:
        flows: of the plan, where they are worked out already.
    """
    findings = resolved.findings
    if not resolved.errors:
        findings = (*findings, *(flows.findings() if flows is not None else check_flows(resolved)))
    if not any(finding.severity == "error" for finding in findings):
        findings = (*findings, *imbalances(resolved))
    return findings
