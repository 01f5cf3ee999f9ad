"""Where stacked experts lie: what the layouts of their two tensors say together."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from shardtensor.comm.group import Group, SingleRankGroup
from shardtensor.errors import RuleError
from shardtensor.layout.layout import CutLayout, Layout
from shardtensor.layout.pieces import Interval
from shardtensor.mesh import Ranks, coordinate
from shardtensor.tensor.move import along
from shardtensor.tensor.sharded_tensor import ShardedTensor

_alone = SingleRankGroup()


def place(gate_up: Any, down: Any) -> tuple[Group, tuple[int, ...], Group | None]:
    """The ranks over which experts are dealt, how many each holds, and the ranks that split every expert."""
    if not isinstance(gate_up, ShardedTensor) and not isinstance(down, ShardedTensor):
        return _alone, (len(gate_up),), None
    if not (isinstance(gate_up, ShardedTensor) and isinstance(down, ShardedTensor)):
        raise _refused("one of the two is sharded, the other is not", gate_up, down)
    fault, dealing, splitting = _read(gate_up._layout, down._layout)
    if fault:
        raise _refused(fault, gate_up, down)
    group, layout = gate_up._group, gate_up._layout
    team = along(group, layout, dealing)
    inner = along(group, layout, splitting) if splitting else None
    return team, _held(layout, team.ranks), inner if inner is not None and inner.size > 1 else None


def _refused(fault: str, gate_up: Any, down: Any) -> RuleError:
    specs = (str(p.sharding_spec()) if isinstance(p, ShardedTensor) else "not sharded" for p in (gate_up, down))
    return RuleError(
        f"GatedExperts: {fault}",
        dict(zip(("gate_up_proj", "down_proj"), specs, strict=True)),
        [
            "deal them whole: [ep, -, -] and [ep, -, -]",
            "split each of them, too: [ep, tp blocks(2), -] and [ep, -, tp]",
        ],
    )


@lru_cache(maxsize=256)
def _read(gate_up: Layout, down: Layout) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """What is wrong with two layouts, or the axes over which experts are dealt and those that split each of them."""
    if not (isinstance(gate_up, CutLayout) and isinstance(down, CutLayout)) or gate_up.partial or down.partial:
        return "experts are cut along their dims", (), ()
    (deal, inside, across), (deal_down, across_down, inside_down) = gate_up.dims, down.dims
    if (gate_up.ranks, gate_up.grid, deal) != (down.ranks, down.grid, deal_down):
        return "both must deal the experts alike", (), ()
    if across is not None or across_down is not None:
        return "the dim of the tokens must be whole", (), ()
    dealing = deal.axes if deal is not None else ()
    if inside is None and inside_down is None:
        return "", dealing, ()
    if inside is None or inside_down is None or inside.axes != inside_down.axes:
        return "both must be cut over the same axis inside of the experts", (), ()
    hidden = inside_down.pieces.length
    for i in range(inside_down.pieces.count):
        want = inside_down.pieces.intervals(i)
        want = (*want, *((hidden + a, hidden + b) for a, b in want))
        if _joined(inside.pieces.intervals(i)) != _joined(want):
            return "a rank must hold the rows of gate and up that meet its columns of down", (), ()
    return "", dealing, inside.axes


def _joined(intervals: tuple[Interval, ...]) -> list[Interval]:
    found: list[Interval] = []
    for a, b in intervals:
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        elif a < b:
            found.append((a, b))
    return found


@lru_cache(maxsize=256)
def _held(layout: Layout, ranks: Ranks) -> tuple[int, ...]:
    """How many experts each of the ranks holds."""
    assert isinstance(layout, CutLayout)
    cut = layout.dims[0]
    if cut is None:
        return (layout.shape[0],)
    places = [coordinate(layout.ranks, layout.grid, rank) for rank in ranks]
    intervals = [cut.pieces.intervals(layout.piece(cut, place)) for place in places if place is not None]
    held = [interval for (interval,) in intervals if interval[0] < interval[1]]
    if held != sorted(held):
        raise RuleError(
            "experts must be dealt to ranks in order",
            {"layout": str(layout)},
            "name the axes that deal them in the order of the mesh",
        )
    return tuple(b - a for ((a, b),) in intervals)
