"""What lies below the figures: bytes of a rank, gather units, findings."""

from __future__ import annotations

from shardtensor.cli.page.colours import fill
from shardtensor.cli.page.figures import broken
from shardtensor.cli.page.markup import Markup, el, join, px
from shardtensor.layout.explain import say_bytes
from shardtensor.plan.findings.brief import brief_names, skeleton
from shardtensor.plan.match.units import Flat, GatherUnit, gather_units
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.outlook.memory import PlanBytes, RankBytes, rank_bytes
from shardtensor.plan.resolved import Resolved

KINDS = ("parameters", "gradients", "optimizer", "buffers", "gathered")
_ABOUT_UNITS = (
    "Parameters that lie end to end while nobody computes with them. Each rank keeps one range; together they are "
    "gathered in one message."
)
_FEW = 16
_UNITS = 24
_WIDE = 880
_LANE = 20
_RANGES = 64


def memory(resolved: Resolved, found: PlanBytes) -> Markup:
    """Bars of what a rank holds: of each where they are few and differ, else of the least and the most."""
    world = resolved.plan.axes.mesh.size
    rows: list[tuple[str, RankBytes]]
    if say_bytes(found.least.total) == say_bytes(found.most.total):
        rows = [(f"each of {world:,} ranks" if world > 1 else "the one rank", found.most)]
    elif world <= _FEW:
        rows = [(f"rank {rank}", rank_bytes(resolved, rank)) for rank in resolved.plan.axes.mesh.ranks]
    else:
        rows = [
            (f"the least, rank {found.least_rank}", found.least),
            (f"the most, rank {found.most_rank}", found.most),
        ]
    most = max(found.most.total, 1)
    bars = []
    for title, held in rows:
        pieces = [
            el("i", class_=f"b{i}", style=f"width:{100 * getattr(held, kind) / most:.2f}%", title=_kind(kind, held))
            for i, kind in enumerate(KINDS)
            if getattr(held, kind)
        ]
        bars.append(
            el(
                "tr",
                el("th", title, scope="row"),
                el("td", el("span", *pieces, class_="stack")),
                el("td", say_bytes(held.total), class_="n"),
            )
        )
    keys = [
        el("li", el("i", class_=f"b{i}"), _kind(kind, found.most))
        for i, kind in enumerate(KINDS)
        if getattr(found.most, kind)
    ]
    return _section(
        "memory", "Bytes of a rank", el("table", el("tbody", *bars), class_="bars"), el("ul", *keys, class_="keys")
    )


def _kind(kind: str, held: RankBytes) -> str:
    name = {"optimizer": "optimizer state (adamw)", "gathered": "room for gathered units"}.get(kind, kind)
    return f"{name} {say_bytes(getattr(held, kind))}"


def units(resolved: Resolved) -> Markup | str:
    """The gather units: parameters end to end, and the range of each rank below them."""
    alike: dict[object, list[GatherUnit]] = {}
    for unit in gather_units(resolved):
        alike.setdefault((skeleton(unit.path), unit.flats), []).append(unit)
    if not alike:
        return ""
    shown = [_unit(resolved, group) for group in list(alike.values())[:_UNITS]]
    rest = len(alike) - len(shown)
    return _section(
        "units",
        "Gather units",
        el("p", _ABOUT_UNITS, class_="note"),
        *shown,
        el("p", f"and {rest} more", class_="note") if rest else "",
    )


def _unit(resolved: Resolved, group: list[GatherUnit]) -> Markup:
    first = group[0]
    paths = list(brief_names(unit.path for unit in group)) if first.path else ["the model itself"]
    count = el("span", f" × {len(group)}", class_="count") if len(group) > 1 else ""
    return el(
        "div",
        el("h3", el("code", broken(", ".join(paths))), count),
        *(_flat(resolved, first, i) for i in range(len(first.flats))),
        class_="unit",
    )


def _flat(resolved: Resolved, unit: GatherUnit, index: int) -> Markup:
    flat, names = unit.flats[index], unit.names[index]
    mesh = resolved.plan.axes.mesh
    ranges = flat.ranges(mesh.ranks[0])
    item, total = BYTES[flat.dtype], ranges.total
    scale = _WIDE / total
    found: list[Markup] = []
    for i, (name, start, length) in enumerate(zip(names, ranges.starts, ranges.lengths, strict=True)):
        short = name.removeprefix(f"{unit.path}.") if unit.path else name
        found.append(
            _segment(
                start * scale,
                length * scale,
                0,
                f"p{i % 2}",
                short.removesuffix(".weight"),
                f"{name}: {length:,} elements from {start:,}",
            )
        )
    step = -(-ranges.ranks // _RANGES)
    for first in range(0, ranges.ranks, step):
        last = min(first + step, ranges.ranks) - 1
        word = f"{first}" if first == last else f"{first}–{last}"
        wide = ranges.chunk * (last - first + 1) * scale
        begin, end = first * ranges.chunk, (last + 1) * ranges.chunk
        said = f"place {word} along {_along(flat, resolved)}: elements {begin:,} to {end:,}"
        found.append(_segment(first * ranges.chunk * scale, wide, _LANE + 3, fill(first // step), word, said))
    height = 2 * _LANE + 3
    drawn = el(
        "svg",
        *found,
        class_="ranges",
        viewBox=f"0 0 {_WIDE} {height}",
        width=_WIDE,
        height=height,
        role="img",
        aria_label=f"{len(names)} parameters, {ranges.ranks} ranges",
    )
    facts = [
        f"{len(names)} parameter{'s' * (len(names) != 1)}, {total:,} elements, {say_bytes(total * item)} {flat.dtype}",
        f"{ranges.ranks:,} ranges along {_along(flat, resolved)}, {say_bytes(ranges.chunk * item)} each",
        f"of them {say_bytes(ranges.waste * item)} padding" if ranges.waste else "no padding",
        f"one colour stands for {step} ranges" if step > 1 else "",
    ]
    return join(
        el("div", drawn, class_="scroll"), el("p", *(el("span", fact) for fact in facts if fact), class_="facts")
    )


def _along(flat: Flat, resolved: Resolved) -> str:
    return "*".join(resolved.plan.axes.mesh.names[axis] for axis in flat.axes)


def _segment(left: float, width: float, top: float, kind: str, word: str, said: str) -> Markup:
    rect = el("rect", x=px(left), y=px(top), width=px(max(width, 0.5)), height=_LANE, class_=kind)
    fits = width >= 6.4 * len(word) + 6
    text = el("text", word, x=px(left + width / 2), y=px(top + _LANE / 2), class_="word") if fits else ""
    return el("g", el("title", said), rect, text)


def findings(resolved: Resolved) -> Markup | str:
    """What a check found; errors first."""
    if not resolved.findings:
        return ""
    from shardtensor.plan.findings.folding import folded

    rows = []
    for finding in folded(resolved.findings):
        said = [el("p", el("b", f"{finding.severity} {finding.code}"), " ", finding.fault)]
        if finding.origin is not None:
            said.append(
                el("pre", f"{finding.origin}\n" + "\n".join(finding.origin.source.excerpt(finding.origin.span)))
            )
        more = [("why", finding.why), ("fix", finding.fix), *(("note", note) for note in finding.notes)]
        said += [el("p", f"{key}: {text}", class_="note") for key, text in more if text]
        rows.append(el("li", *said, class_=finding.severity))
    return _section("findings", "Findings", el("ul", *rows, class_="findings"))


def _section(identifier: str, title: str, *children: Markup | str) -> Markup:
    return el("section", el("h2", title), *children, id=identifier)
