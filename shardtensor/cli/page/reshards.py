"""A reshard as steps: what each rank of a team holds before and after, and who sends which box to whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardtensor.cli.moves import Message, Team, team_of
from shardtensor.cli.page.colours import HUES, fill
from shardtensor.cli.page.drawing import Frame, frame_of
from shardtensor.cli.page.figures import broken
from shardtensor.cli.page.markup import Markup, el, join, px
from shardtensor.cli.plane import Plane, plane_of
from shardtensor.cli.scene import Reshard, size_text
from shardtensor.layout.box import Box
from shardtensor.layout.explain import say_bytes, say_step
from shardtensor.layout.layout import Layout
from shardtensor.layout.route import Step

ROWS = 8
"""Ranks of a team that are drawn."""

_WIDE, _TALL = 150, 78
_GUTTER = 190
_NAME = 64
_GAP = 14
_LISTED = 56
_DRAWN = 256  # messages


def reshards(found: Sequence[Reshard]) -> Markup | str:
    """All reshards of a scene."""
    if not found:
        return ""
    body = [_reshard(each) for each in found]
    intro = (
        "Each row is a rank: on the left what it holds, on the right what it holds after the step, in the colours "
        "of the ranks that it comes from. A line is a message."
    )
    return el("section", el("h2", "Resharding"), el("p", intro, class_="note"), *body, id="reshards")


def _reshard(reshard: Reshard) -> Markup:
    steps = [step for steps in reshard.routes for step in steps]
    path = join(
        *(join(el("code", text), " → " if i + 1 < len(reshard.texts) else "") for i, text in enumerate(reshard.texts))
    )
    name = el("p", el("code", broken(reshard.name)), el("span", size_text(reshard.shape)), class_="facts")
    body = [_step(step, i + 1, reshard.item) for i, step in enumerate(steps)]
    if not steps:
        body = [el("p", "Nothing moves: both say the same.", class_="note")]
    return el(
        "article", el("h3", path), name if reshard.name else "", el("div", *body, class_="steps"), class_="reshard"
    )


def _step(step: Step, number: int, item: int) -> Markup:
    team = team_of(step, limit=_DRAWN)
    head = el("h4", el("span", str(number), class_="step"), *_said(step, item))
    notes = []
    if team.teams > 1:
        notes.append(f"the team of rank {team.members[0]}; {team.teams:,} such teams do the same")
    if len(team.members) > ROWS:
        notes.append(f"the first {ROWS} of {len(team.members):,} ranks; grey comes from the others")
    if step.op:
        notes.append("an addend comes from every rank of the team")
    svg = _step_drawing(step)
    drawn = el("p", "Its boxes cannot be drawn on one plane.", class_="note")
    if svg is not None:
        drawn = el("div", svg, class_="scroll")
    listed = _listed(team, item)
    return el("div", head, el("p", *(el("span", note) for note in notes), class_="facts"), drawn, listed, class_="move")


def _said(step: Step, item: int) -> list[Markup]:
    kind, _, rest = say_step(step, item).partition(" ")
    return [el("code", kind), *(el("span", word) for word in rest.strip().split("   ") if word)]


def _step_drawing(step: Step) -> Markup | None:
    """What the ranks of a team hold before and after a step, with a line for every message between them."""
    team = team_of(step, limit=_DRAWN)
    shown = team.members[:ROWS]
    boxes = [box for layout in (step.source, step.target) for rank in shown for box in layout.boxes(rank)]
    boxes += [message.box for message in team.messages]
    plane = plane_of(step.source.shape, boxes)
    if plane is None or len(plane.titles) > 1:
        return None
    frame = frame_of(plane, _WIDE, _TALL, 34, 34)
    if plane.down is None:
        frame = frame_of(plane, _WIDE, 22)
    tall = frame.height + _GAP
    right = _NAME + frame.width + _GUTTER
    row_of = {rank: i for i, rank in enumerate(shown)}
    found: list[Markup] = []
    for rank, row in row_of.items():
        y = row * tall
        found.append(
            el("text", f"rank {rank}", x=_NAME - 10, y=px(y + frame.height / 2), class_="who", text_anchor="end")
        )
        found.append(
            el("text", f"rank {rank}", x=px(right + frame.width + 10), y=px(y + frame.height / 2), class_="who")
        )
        found.append(
            _map(frame, plane, _NAME, y, [(box, rank) for box in step.source.boxes(rank)], row_of, "", ("g", rank))
        )
        found.append(
            _map(frame, plane, right, y, _after(step, team, rank, shown), row_of, "Σ" if step.op else "", ("t", rank))
        )
    found += _lines(team, frame, plane, row_of, right, tall)
    width, height = right + frame.width + _NAME, len(shown) * tall
    return el(
        "svg",
        *found,
        class_="moves",
        viewBox=f"0 -2 {px(width)} {px(height)}",
        width=px(width),
        height=px(height),
        role="img",
        aria_label=f"{len(team.messages)} messages between {len(team.members)} ranks; listed below",
    )


def _after(step: Step, team: Team, rank: int, shown: Sequence[int]) -> list[tuple[Box, int | None]]:
    """The boxes that a rank holds after a step, with the rank that each comes from."""
    if step.op:
        return [(box, None) for box in step.target.boxes(rank)]
    kept = [(box, rank) for box in _kept(step.source, step.target, rank)]
    came = [(m.box, m.giver) for m in team.messages if m.taker == rank and m.giver in shown]
    everything = [] if set(team.members) <= set(shown) else [(box, None) for box in step.target.boxes(rank)]
    return [*everything, *kept, *came]


def _kept(source: Layout, target: Layout, rank: int) -> list[Box]:
    pairs = ((box, goal) for goal in target.boxes(rank) for box in source.boxes(rank))
    return [both for box, goal in pairs if (both := box.overlap(goal)) is not None]


def _map(
    frame: Frame,
    plane: Plane,
    left: float,
    top: float,
    held: Sequence[tuple[Box, int | None]],
    row_of: dict[int, int],
    word: str,
    end: tuple[str, int],
) -> Markup:
    found = [el("rect", width=px(frame.width), height=px(frame.height), class_="paper")]
    for box, rank in held:
        kind = fill(row_of[rank]) if rank in row_of else "whole"
        for rect in plane.rects([box]):
            x, y, w, h = frame.place(rect)
            found.append(el("rect", x=px(x), y=px(y), width=px(max(w, 0.5)), height=px(max(h, 0.5)), class_=kind))
            if word and w > 14 and h > 12:
                found.append(el("text", word, x=px(x + w / 2), y=px(y + h / 2), class_="word"))
    return el(
        "g",
        *found,
        transform=f"translate({px(left)},{px(top)})",
        class_="held",
        data_side=end[0],
        data_rank=end[1],
    )


def _lines(
    team: Team, frame: Frame, plane: Plane, row_of: dict[int, int], right: float, tall: float
) -> Iterator[Markup]:
    for message in team.messages:
        if message.giver not in row_of or message.taker not in row_of:
            continue
        y1 = row_of[message.giver] * tall + _middle(message, frame, plane)
        y2 = row_of[message.taker] * tall + _middle(message, frame, plane)
        x1, x2 = _NAME + frame.width + 3, right - 4
        bend = (x2 - x1) * 0.45
        path = f"M{px(x1)},{px(y1)} C{px(x1 + bend)},{px(y1)} {px(x2 - bend)},{px(y2)} {px(x2)},{px(y2)}"
        said = f"rank {message.giver} to rank {message.taker}: {message.box}"
        key = row_of[message.giver] % HUES
        yield el("path", el("title", said), d=path, class_=f"line s{key}", data_g=message.giver, data_t=message.taker)


def _middle(message: Message, frame: Frame, plane: Plane) -> float:
    rects = [frame.place(rect) for rect in plane.rects([message.box])]
    return sum(y + h / 2 for _, y, _, h in rects) / len(rects) if rects else frame.height / 2


def _listed(team: Team, item: int) -> Markup | str:
    if not team.messages:
        return ""
    rows = [
        el(
            "tr",
            el("td", f"{m.giver} → {m.taker}"),
            el("td", el("code", str(m.box))),
            el("td", say_bytes(m.box.numel * item), class_="n"),
        )
        for m in team.messages[:_LISTED]
    ]
    rest = "" if len(rows) == len(team.messages) and team.is_all else el("p", "… and so on", class_="note")
    count = f"{len(team.messages):,} messages" if team.is_all else f"{len(team.messages):,} of the messages"
    return el("details", el("summary", count), el("table", el("tbody", *rows), class_="list"), rest, class_="messages")
