"""Report patterns of a plan that match nothing, and tensors that no pattern matches, each at the nearest pattern."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import islice, product

import attrs

from shardtensor.plan.findings.brief import listed_briefly
from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.line import Line, pattern_place, segment_place, statement, style_note
from shardtensor.plan.match.name_tree import Matches, NameTree, Way
from shardtensor.plan.match.patterns import Pattern, Segment, matches, one_of, pattern, starred
from shardtensor.plan.plan import Plan


@attrs.frozen(eq=False)
class UnmatchedPattern:
    """A pattern, or one alternative in its braces, that matches nothing.

    Attributes:
        at: the number of the segment without a match.
        words: the texts of that segment that have no match.
        text, place: as it is written, and where.
    """

    line: Line
    segments: Way
    at: int
    words: tuple[str, ...]
    text: str
    place: Origin | None
    finding: Finding


def unused(plan: Plan, tree: NameTree, matches: Matches) -> tuple[list[UnmatchedPattern], list[Finding], set[str]]:
    """Return W301 for rules and W303 for alternatives that match nothing; E303 for blocks and styles without a module.

    The last result are tensors that have a style instead of a layout: no E301 is reported for these.
    """
    nothing: list[UnmatchedPattern] = []
    findings: list[Finding] = []
    reported: set[object] = set()
    styled: set[str] = set()
    for line in plan.lines:
        key = statement(line.origin, line)
        module = _missing_module(line, tree)
        if module is not None and tree.tensors(module):
            if key not in reported:
                findings.append(_no_module(line, module, tree))
            reported.add(key)
            styled.update(tree.tensors(module))
        elif not line.is_optional and (module is not None or not matches.names[id(line)]):
            each = _rule(line, line.pattern if module is None else module, tree)
            missing = each.segments[: each.at + 1]
            if key not in reported and missing not in reported:
                nothing.append(each)
            reported |= {key, missing}
    nothing += _alternatives(plan, tree, {each.text for each in nothing})
    return nothing, findings, styled


def _missing_module(line: Line, tree: NameTree) -> str | None:
    """Return the pattern of modules that a line needs and the model lacks."""
    needed = [line.module] * bool(line.module) + [line.pattern] * (line.kind != "tensor")
    return next((text for text in needed if not tree.modules(text)), None)


def _rule(line: Line, head: str, tree: NameTree) -> UnmatchedPattern:
    segments = pattern(head).segments
    at = next((at for at in range(len(segments)) if not tree.has(segments[: at + 1])), len(segments) - 1)
    word = str(segments[at]) if segments else ""
    is_inside = head != line.module and line.origin is not None and line.origin.through is not None
    place = line.origin if is_inside else segment_place(line, word)  # a rule in a style has no pattern in the plan
    notes = style_note(line.origin, "entry") if is_inside else ()
    is_whole = at == len(segments) - 1
    what = "block" if not is_whole else "rule" if line.kind == "tensor" or line.module else line.kind
    shown = ".".join(map(str, segments[: at + 1])) if not is_whole else head
    finding = Finding(
        "W301", f"this {what} matches nothing: `{shown}`", place,
        "the model has no such name; a plan that says more than the model has is often a slip",
        "correct the pattern, or write `optional` before it", notes,
    )  # fmt: skip
    words = _words(segments[at]) if segments else ()
    return UnmatchedPattern(line, segments, at, words, word, place, finding)


def _no_module(line: Line, head: str, tree: NameTree) -> Finding:
    what = "a style or a block" if line.module else f"`{line.kind} {line.name}`".replace(" `", "`")
    name = tree.tensors(head)[0]
    module, _, leaf = name.rpartition(".")
    fix = f"write a layout for the tensor, such as `[tp, -]`; or name the module `{module}`, without `.{leaf}`"
    return Finding(
        "E303", f"{what} stands before `{head}`, which is no module", pattern_place(line),
        f"{name} is a tensor", fix, (), name,
    )  # fmt: skip


def _alternatives(plan: Plan, tree: NameTree, reported: set[str]) -> list[UnmatchedPattern]:
    """Return alternatives in braces that match the beginning of no name of the model."""
    found: list[UnmatchedPattern] = []
    optional: dict[Way, bool] = {}
    first: dict[Way, UnmatchedPattern] = {}
    for line in plan.lines:
        segments = pattern(line.pattern).segments if "{" in line.pattern else ()
        for at, segment in enumerate(segments):
            for i, part in enumerate(segment.parts):
                for option in part.options if len(part.options) > 1 else ():
                    one = Segment((*segment.parts[:i], one_of((option,)), *segment.parts[i + 1 :]))
                    key = (*segments[:at], one)
                    if key in optional:
                        optional[key] &= line.is_optional
                        continue
                    optional[key] = line.is_optional
                    if not tree.has(key) and tree.has(segments[: at + 1]):
                        first[key] = _alternative(line, segments, at, one, option)
    found += [each for key, each in first.items() if not optional[key] and each.text not in reported]
    return found


def _alternative(line: Line, segments: Way, at: int, one: Segment, option: str) -> UnmatchedPattern:
    text = str(segments[at])
    place = segment_place(line, text)
    subject = f"`{option}`" if option else "the empty alternative"
    finding = Finding(
        "W303", f"{subject} in the braces of `{text}` matches nothing", place,
        "no name of the model has it there", "correct it, or drop it from the braces",
    )  # fmt: skip
    return UnmatchedPattern(line, segments, at, _words(one), option, place, finding)


def _words(segment: Segment) -> tuple[str, ...]:
    """Return the words that a segment without stars matches."""
    if not all(part.options for part in segment.parts):
        return ()
    return tuple("".join(words) for words in islice(product(*(part.options for part in segment.parts)), 64))


ALIKE = 0.6
"""The similarity (0 to 1) from which a word counts as a misspelled name."""


def unplaced(
    plan: Plan, names: Sequence[str], nothing: Iterable[UnmatchedPattern]
) -> tuple[list[Finding], list[UnmatchedPattern]]:
    """Return E301 for tensors without a rule, each at the pattern that nearly matches it; and those patterns.

    If no pattern is near, the finding is at the beginning of the plan.
    """
    nothing = list(nothing)
    corrections: dict[str, tuple[UnmatchedPattern, str] | None] = {}
    groups: dict[object, list[str]] = {}
    for name in names:
        kind = starred(name)
        if kind not in corrections:
            corrections[kind] = _nearest(name, nothing)
        correction = corrections[kind]
        groups.setdefault((id(correction[0]), correction[1]) if correction is not None else None, []).append(name)
    findings, used = [], []
    for group in groups.values():
        correction = corrections[starred(group[0])]
        notes = ["to accept copies on every rank: `unmatched: replicate`"]
        if correction is None:
            place = Origin(plan.sources[0], (0, plan.sources[0].text.find("\n"))) if plan.sources else None
            fix = f"write a rule for {'it' if len(group) == 1 else 'them'}: `PATTERN: LAYOUT`"
        else:
            each, corrected = correction
            used.append(each)
            place, note = each.place, "the pattern matches nothing (W301)"
            if each.finding.code == "W303":
                place = pattern_place(each.line) or each.place
                note = f"`{each.text}`" if each.text else "the empty alternative"
                note += " in the braces matches nothing (W303)"
            notes.insert(0, note)
            fix = f"the nearest pattern is this one: did you mean `{corrected}`?"
        fault = f"no rule matches {len(group)} tensor{'s' * (len(group) != 1)}: {listed_briefly(group)}"
        findings.append(Finding("E301", fault, place, "every tensor needs a layout", fix, tuple(notes), group[0]))
    return findings, used


def _nearest(name: str, nothing: Sequence[UnmatchedPattern]) -> tuple[UnmatchedPattern, str] | None:
    """Return the pattern that matches a name except for one word, and its text with the right word."""
    words = name.split(".")
    best: tuple[float, UnmatchedPattern, str] | None = None
    for each in nothing:
        before = Pattern(each.segments[: each.at])
        for at, actual in enumerate(words):
            if before.captures(".".join(words[:at])) is None:
                continue
            for word in each.words:
                alike = SequenceMatcher(None, word, actual).ratio()
                if alike >= ALIKE and (best is None or alike > best[0]):
                    best = alike, each, _corrected(each, word, actual)
    return None if best is None else best[1:]


def _corrected(each: UnmatchedPattern, word: str, actual: str) -> str:
    """Return the pattern as it was written, changed so that `actual` is matched in place of `word`."""
    segment = each.segments[each.at]
    place = pattern_place(each.line) if each.finding.code == "W303" else each.place
    written = place.text if place is not None else ".".join(map(str, each.segments))
    start = _alike(word, actual)
    end = _alike(word[start:][::-1], actual[start:][::-1])
    wrong, right = word[start : len(word) - end], actual[start : len(actual) - end]
    text, needed = str(segment), {actual, *_words(segment)} - {*each.words}
    ways = (f"{text[:i]}{right}{text[i + len(wrong) :]}" for i in range(len(text)) if text.startswith(wrong, i))
    return written.replace(text, next((way for way in ways if all(matches(way, name) for name in needed)), actual))


def _alike(one: str, other: str) -> int:
    """Return the number of characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
