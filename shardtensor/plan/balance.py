"""Whether ranks share the work of a plan: axes that nobody uses, empty and unequal shards, large copies, padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import attrs

from shardtensor.layout.explain import say_bytes
from shardtensor.layout.layout import CutLayout, DimCut, FlatLayout, Layout, ListedLayout
from shardtensor.layout.pieces import Pieces
from shardtensor.plan.finding import Finding
from shardtensor.plan.misfit import shape_text
from shardtensor.plan.model import BYTES
from shardtensor.plan.origin import Origin
from shardtensor.plan.places import mesh_place
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Passing, Placed
from shardtensor.spec.nodes import Cut, Spec

IMBALANCE = 0.1
"""How much more bytes than the mean a rank may hold."""

LARGE = 0.01
"""Of the bytes of all tensors: what is large."""


def imbalances(plan: Plan, tensors: Mapping[str, Placed], modules: Mapping[str, Passing]) -> Iterator[Finding]:
    """W304, W305, W306 and N002 of tensors that were placed."""
    own = {name: placed for name, placed in tensors.items() if not placed.tied_to}
    yield from _idle_axes(plan, own, modules)
    for placed in own.values():
        yield from _empty_shards(placed)
    yield from _unequal(plan, own)
    yield from _large_copies(plan, own)
    for placed in own.values():
        yield from _padding(placed)


def _idle_axes(plan: Plan, own: Mapping[str, Placed], modules: Mapping[str, Passing]) -> Iterator[Finding]:
    axes, sizes = plan.axes, dict(plan.axes.mesh.axes)
    names = set(axes.data)
    specs = {placed.spec for placed in own.values() if isinstance(placed.spec, Spec)}
    if len(specs) < len({placed.spec for placed in own.values()}):
        return  # layouts that name devices use ranks, not axes
    for spec in specs:
        names |= spec.axis_names
    for placed in own.values():
        names |= set(placed.stored.axes if placed.stored is not None else ())
    for passing in modules.values():
        for flow, _ in (*passing.ins.values(), *passing.outs.values()):
            names |= flow.before.axis_names | flow.after.axis_names | set(flow.addends)
        for hook, _ in passing.uses:
            for arg in (*hook.args, *hook.kwargs.values()):
                names |= {each for each in (arg if isinstance(arg, tuple) else (arg,)) if each in axes.names}
        for spec, _ in passing.locals.values():
            names |= spec.axis_names if isinstance(spec, Spec) else set()
    used = axes.leaves(names)
    for name, size in sizes.items():
        if size > 1 and name not in used:
            yield Finding(
                "W304", f"no layout and no `data` uses the axis `{name}` of {size}", mesh_place(plan),
                f"the {size} ranks along {name} do the same work",
                f"cut something over {name}, write `data {name}`, or leave the axis out", (), "",
            )  # fmt: skip


def _empty_shards(placed: Placed) -> Iterator[Finding]:
    layout = placed.layout
    for dim, pieces in _cut_dims(layout):
        empty = _empty(pieces)
        if empty:
            info = placed.tensor
            axes = _axes_of(placed, dim)
            yield Finding(
                "W305", f"{empty} of the {pieces.count} pieces along {axes} are empty", _origin(placed),
                f"{info.name} is {shape_text(info.shape, info.dims)}: dim {dim} of {info.shape[dim]} has too few units",
                "cut over fewer ranks, or another dim", (), info.name,
            )  # fmt: skip


def _cut_dims(layout: Layout) -> list[tuple[int, Pieces]]:
    if isinstance(layout, FlatLayout):
        layout = layout.inner
    if not isinstance(layout, CutLayout):
        return []
    return [(dim, cut.pieces) for dim, cut in enumerate(layout.dims) if cut is not None]


def _empty(pieces: Pieces) -> int:
    """The number of empty pieces; of large cuts told by the last piece, as the smallest come last."""
    if pieces.length == 0 or (pieces.size(pieces.count - 1) and pieces.count > 4096):
        return 0
    return sum(pieces.size(i) == 0 for i in range(pieces.count))


def _unequal(plan: Plan, own: Mapping[str, Placed]) -> Iterator[Finding]:
    held = held_bytes(plan, own)
    if held.mean and held.most > held.mean * (1 + IMBALANCE):
        more = round((held.most / held.mean - 1) * 100)
        yield Finding(
            "W305", f"some ranks hold {more} % more than the mean", mesh_place(plan),
            f"a rank holds {say_bytes(held.least)} to {say_bytes(held.most)} of parameters and buffers, "
            f"{say_bytes(round(held.mean))} on average",
            "cut the large tensors evenly, or over other axes",
            tuple(f"{share} in {name}" for name, share in held.uneven[:3]),
        )  # fmt: skip


def _large_copies(plan: Plan, own: Mapping[str, Placed]) -> Iterator[Finding]:
    total = sum(placed.tensor.bytes for placed in own.values())
    if plan.axes.mesh.size < 2:
        return
    for placed in own.values():
        info = placed.tensor
        if placed.stored is None and placed.layout.is_replicated and info.bytes > LARGE * total:
            share = f"{100 * info.bytes / total:.1f} %"
            yield Finding(
                "W306", f"a large tensor is kept whole on every rank: {share} of all bytes", _origin(placed),
                f"{info.name} is {shape_text(info.shape, info.dims)}, {say_bytes(info.bytes)}",
                "cut it over an axis, or keep it flat with `store`", (), info.name,
            )  # fmt: skip


def _padding(placed: Placed) -> Iterator[Finding]:
    if not isinstance(placed.spec, Spec):
        return
    for dim, cut in enumerate(placed.spec.dims):
        if not isinstance(cut, Cut) or cut.pad is None:
            continue
        for at, pieces in _cut_dims(placed.layout):
            step = pieces.size(0)
            rows = step * pieces.count - pieces.length
            if at != dim or rows <= 0:
                continue
            info = placed.tensor
            each = info.numel // max(info.shape[dim], 1) * BYTES[info.dtype]
            yield Finding(
                "N002", f"{rows} rows of padding, {say_bytes(rows * each)}, for {pieces.count} equal pieces of {step}",
                _origin(placed),
                f"{info.name} is {shape_text(info.shape, info.dims)}; "
                f"dim {dim} is cut as if it were {step * pieces.count}",
                "", (), info.name,
            )  # fmt: skip


def _origin(placed: Placed) -> Origin | None:
    return placed.line.origin if placed.line is not None else None


def _axes_of(placed: Placed, dim: int) -> str:
    spec = placed.spec
    cut = spec.dims[dim] if isinstance(spec, Spec) and dim < len(spec.dims) else None
    return "*".join(cut.axes) if isinstance(cut, Cut) else f"dim {dim}"


@attrs.frozen(eq=False)
class Held:
    """Bytes that ranks hold while computing.

    Attributes:
        least, most: of the rank that holds least, and most.
        mean: over all ranks of the mesh.
        uneven: tensors that ranks hold unequal parts of, with what the fullest rank has of them more than the emptiest.
    """

    least: int
    most: int
    mean: float
    uneven: tuple[tuple[str, str], ...] = ()


def held_bytes(plan: Plan, own: Mapping[str, Placed]) -> Held:
    """Add up what the ranks hold, by the axes along which they differ and never rank by rank."""
    even = 0
    along: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    by_rank: dict[int, int] = {}
    uneven: list[tuple[int, str]] = []
    mesh = plan.axes.mesh
    for name, placed in own.items():
        size = BYTES[placed.tensor.dtype]
        layout = placed.layout
        if isinstance(layout, ListedLayout) or layout.grid != mesh.sizes or layout.ranks != mesh.ranks:
            for rank in layout.ranks:
                by_rank[rank] = by_rank.get(rank, 0) + layout.numel(rank) * size
            continue
        shares = _shares(layout)
        counts = set(shares[1].values())
        if len(counts) == 1:
            even += counts.pop() * size
            continue
        uneven.append(((max(counts) - min(counts)) * size, name))
        sums = along.setdefault(shares[0], dict.fromkeys(shares[1], 0))
        for place, count in shares[1].items():
            sums[place] += count * size
    uneven.sort(reverse=True)
    said = tuple((name, f"up to {say_bytes(more)} more") for more, name in uneven)
    if by_rank:
        totals = dict(by_rank)
        for rank in totals:
            coordinate = mesh.coordinate(rank) or ()
            totals[rank] += even + sum(sums[tuple(coordinate[a] for a in axes)] for axes, sums in along.items())
        rest = mesh.size - len(totals)
        others = even + sum(min(sums.values()) for sums in along.values())
        values = [*totals.values(), *([others] if rest else [])]
        return Held(min(values), max(values), (sum(totals.values()) + rest * others) / mesh.size, said)
    axes = tuple(sorted({axis for key in along for axis in key}))
    grid = [mesh.sizes[axis] for axis in axes]
    totals_: list[int] = []
    for place in product(*map(range, grid)):
        at = dict(zip(axes, place, strict=True))
        totals_.append(even + sum(sums[tuple(at[a] for a in key)] for key, sums in along.items()))
    return Held(min(totals_), max(totals_), sum(totals_) / len(totals_), said)


def _shares(layout: Layout) -> tuple[tuple[int, ...], dict[tuple[int, ...], int]]:
    """The axes along which shards may differ in size, and the number of elements at each place along them."""
    inner = layout.inner if isinstance(layout, FlatLayout) else layout
    assert isinstance(inner, CutLayout)
    cuts = [(cut, length) for cut, length in zip(inner.dims, inner.shape, strict=True)]
    even, uneven = 1, []
    for cut, length in cuts:
        if cut is None:
            even *= length
        elif _is_even(cut):
            even *= cut.pieces.size(0)
        else:
            uneven.append(cut)
    axes = tuple(sorted({axis for cut in uneven for axis in cut.axes}))
    found = {}
    for place in product(*(range(layout.grid[axis]) for axis in axes)):
        at = dict(zip(axes, place, strict=True))
        count = even
        for cut in uneven:
            index = 0
            for axis in cut.axes:
                index = index * layout.grid[axis] + at[axis]
            count *= cut.pieces.size(index)
        found[place] = count
    return axes, found


def _is_even(cut: DimCut) -> bool:
    return cut.pieces.size(0) * cut.pieces.count == cut.pieces.length
