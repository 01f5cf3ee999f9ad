"""Tensors that no pattern of a plan stands for, told where the pattern that was perhaps meant is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from shardtensor.plan.findings.brief import brief_names, skeleton
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.origin import Origin
from shardtensor.plan.findings.places import pattern_place, segment_place
from shardtensor.plan.match.patterns import OneOf, Pattern, Segment, pattern
from shardtensor.plan.match.unused import Nothing
from shardtensor.plan.plan import Plan

ALIKE = 0.6
"""How alike a word and a name are (0 to 1) for the one to be a slip of the other."""

MOST = 4
"""Patterns of tensors that one finding lists."""


def unplaced(plan: Plan, names: Sequence[str], nothing: Iterable[Nothing]) -> tuple[list[Finding], list[Nothing]]:
    """E301 for tensors without a rule, each told at the pattern that nearly stands for it; the patterns so used.

    Where no pattern is near, it is told at the innermost block or style around the tensor.
    """
    nothing = list(nothing)
    slips: dict[str, tuple[Nothing, str] | None] = {}
    around: dict[str, Origin | None] = {}
    groups: dict[object, list[str]] = {}
    for name in names:
        kind = skeleton(name)
        if kind not in slips:
            slips[kind] = slip = _nearest(name, nothing)
            around[kind] = _around(plan, name) if slip is None else None
        slip, place = slips[kind], around[kind]
        key = (id(slip[0]), slip[1]) if slip is not None else None if place is None else (place.source.file, place.span)
        groups.setdefault(key, []).append(name)
    findings, used = [], []
    for group in groups.values():
        slip, place = slips[skeleton(group[0])], around[skeleton(group[0])]
        notes = ["to accept copies on every rank: `unmatched: replicate`"]
        if slip is None:
            fix = f"write a rule for {'it' if len(group) == 1 else 'them'}: `PATTERN: LAYOUT`"
        else:
            each, meant = slip
            used.append(each)
            fix = f"the nearest pattern is this one: did you mean `{meant}`?"
            if each.finding.code == "W303":
                place = pattern_place(each.line) or each.place
                said = f"`{each.text}`" if each.text else "the empty alternative"
                notes.insert(0, f"{said} in the braces matches nothing (W303)")
            else:
                place = each.place
                notes.insert(0, "the pattern matches nothing (W301)")
        fault = f"no rule matches {_listed(group)}"
        findings.append(Finding("E301", fault, place, "every tensor needs a layout", fix, tuple(notes), group[0]))
    return findings, used


def _listed(names: Sequence[str]) -> str:
    """So many tensors, and which."""
    brief = list(brief_names(names))
    more = f" and {len(brief) - MOST} patterns more" if len(brief) > MOST else ""
    return f"{len(names)} tensor{'s' * (len(names) != 1)}: {', '.join(brief[:MOST])}{more}"


def _around(plan: Plan, name: str) -> Origin | None:
    """Where the innermost block or style that stands for a module around a tensor is written; else the first line."""
    words = name.split(".")
    modules = [(line, pattern(line.module).segments) for line in plan.lines if line.module]
    for depth in range(len(words) - 1, 0, -1):
        above = ".".join(words[:depth])
        for line, segments in modules:
            for end in range(len(segments), 0, -1):
                if isinstance(segments[end - 1], Segment) and Pattern(segments[:end]).captures(above) is not None:
                    return segment_place(line, str(segments[end - 1]))
    return Origin(plan.sources[0], (0, plan.sources[0].text.find("\n"))) if plan.sources else None


def _nearest(name: str, nothing: Sequence[Nothing]) -> tuple[Nothing, str] | None:
    """The pattern that would stand for a name but for one word, and the pattern with the right word."""
    words = name.split(".")
    best: tuple[float, Nothing, str] | None = None
    for each in nothing:
        before = Pattern(each.segments[: each.at])
        for at, meant in enumerate(words):
            if before.captures(".".join(words[:at])) is None:
                continue
            for word in each.words:
                alike = SequenceMatcher(None, word, meant).ratio()
                if alike >= ALIKE and (best is None or alike > best[0]):
                    best = alike, each, _corrected(each, word, meant)
    return None if best is None else best[1:]


def _corrected(each: Nothing, word: str, meant: str) -> str:
    """The pattern as it was written, with `meant` in place of `word`."""
    segment = each.segments[each.at]
    place = pattern_place(each.line) if each.finding.code == "W303" else each.place
    written = place.text if place is not None else ".".join(map(str, each.segments))
    only = each.text if each.finding.code == "W303" else None
    return written.replace(str(segment), _respelled(segment, word, meant, only))


def _respelled(segment: object, word: str, meant: str, only: str | None) -> str:
    """A segment that stands for `meant` where it stood for `word`, its braces kept as far as they are right.

    Args:
        only: the alternative in the braces that is wrong; None where the braces are right.
    """
    parts = segment.parts if isinstance(segment, Segment) else ()
    braces = next((part for part in parts if isinstance(part, OneOf) and only in (None, *part.options)), None)
    if braces is None:
        return meant
    head, _, tail = str(segment).partition(str(braces))
    option = word[len(head) : len(word) - len(tail)]
    if only is not None:
        if not (meant.startswith(head) and meant.endswith(tail)):
            return meant
        right = meant[len(head) : len(meant) - len(tail)]
        return f"{head}{OneOf(tuple(right if each == only else each for each in braces.options))}{tail}"
    if meant.startswith(f"{head}{option}"):
        return f"{head}{braces}{meant[len(head) + len(option) :]}"
    if meant.endswith(f"{option}{tail}"):
        return f"{meant[: len(meant) - len(option) - len(tail)]}{braces}{tail}"
    return meant
