"""Findings in their three formats carry the same fields."""

from __future__ import annotations

import json

from plan.design_llama import resolved

from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.report import fields, folded, github_report, json_report, text_report

CHANGE = ("colwise_shared(kvg, copies=kvr, unit=hd)", "colwise(tp, unit=hd)")
FALLBACK = ("[-, tp, ...] if sp else replicate", "[-, tp, ...] if sp and true else replicate")


def findings() -> tuple[Finding, ...]:
    return folded(check_plan(resolved(CHANGE, FALLBACK, world=16, tp=16)))


def test_json_says_what_the_text_says():
    told = json.loads(json_report(findings(), summary=None))
    note, error = sorted(told["findings"], key=lambda finding: finding["code"] != "N001")
    assert (note["code"], note["severity"], note["line"]) == ("N001", "note", 15)
    assert error == {
        "code": "E205",
        "severity": "error",
        "file": "specs/llama.shard",
        "line": 24,
        "col": 25,
        "end_line": 24,
        "end_col": 45,
        "fault": "8 heads of 128 cannot be split evenly over tp=16",
        "why": "model.layers.0.self_attn.k_proj.weight is (out=1024, in=4096); 1024 = 8 units of 128 and 8 % 16 = 8",
        "fix": "use the factor `kvg` (8): `colwise_shared(kvg, copies=kvr, unit=hd)`; "
        "line 11 makes tp=16 of kvg=8 and kvr=2",
        "notes": [
            "the layout is `weight: [out: ax blocks(blocks) unit(unit)]`, std/styles.shard:5",
            "found for 64 names: model.layers.{0..31}.self_attn.{k_proj,v_proj}.weight",
            "to cut inside a head on purpose, drop `unit = hd`",
        ],
        "tensor": "model.layers.0.self_attn.k_proj.weight",
    }
    text = text_report(findings())
    for finding in told["findings"]:
        for key in ("fault", "why", "fix"):
            assert finding[key] in text


def test_workflow_commands():
    note, error = github_report(findings()).splitlines()
    assert note == (
        "::notice file=specs/llama.shard,line=15,col=14,endColumn=56,title=N001::"
        "the `else` side was taken: `replicate`%0Awhy: sp=false"
    )
    assert error.startswith("::error file=specs/llama.shard,line=24,col=25,endColumn=45,title=E205::8 heads of 128")
    assert error.count("%0A") == 5 and "8 %25 16" in error


def test_what_moves_the_text_of_a_command_is_escaped():
    finding = Finding("W301", "a:b,c%\nd", tensor="x")
    assert github_report([finding]) == "::warning title=W301::a:b,c%25%0Ad"


def test_findings_come_in_the_order_of_the_text():
    changes = [
        ("{gate,up}", "{gate,upp}"),
        ("    norm: along(stream)\n", "    norm.weight: [tp, -]\n"),
        CHANGE,
        FALLBACK,
    ]
    places = [fields(finding)["line"] for finding in folded(check_plan(resolved(*changes, world=16, tp=16)))]
    assert places == sorted(places) and len(places) == 4
