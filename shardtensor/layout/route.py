"""The steps from one layout to another, computed once for each pair and cached.

First partial axes are reduced: by a reduce-scatter if the target shards a dim over them, else by an all-reduce. Then
one step sends each rank the elements that it lacks: a slice if it holds them all, an all-gather if even shards become
replicas, else one all-to-all among the ranks along the axes that change. Last, the value is split along new partial
axes.

==================  ==============================================================  =============================
step                what it does                                                    each of n ranks receives
==================  ==============================================================  =============================
``slice``           every rank keeps a part of its elements                         nothing
``all_gather``      every rank gets the even shards of all                          the shards of the others
``all_to_all``      every rank gets the elements that it lacks                      the elements that it lacks
``send_recv``       the same between two sets of ranks                              the elements that it lacks
``reduce_scatter``  partial values are reduced, every rank keeps its shard          n - 1 times its shard
``all_reduce``      partial values are reduced on every rank                        2 (n - 1) / n of the tensor
``split``           the value becomes partial: one rank holds it, the others zeros  nothing
``sum_gradient``    the value is used for work that is split: backward all-reduces  nothing
==================  ==============================================================  =============================

A flow of a plan redistributes a plain local value whose sizes are not known until the call: its steps are `DimStep`s.
"""

from __future__ import annotations

import math
from functools import lru_cache

import attrs

from shardtensor.errors import LayoutError
from shardtensor.layout.box import Box
from shardtensor.layout.layout import FlatLayout, Layout, MeshLayout, Shape, same_boxes
from shardtensor.mesh import Mesh, Ranks, as_ranks, coordinate
from shardtensor.spec.nodes import Cut


@attrs.frozen(eq=False)
class Region:
    """The place of a box in a rank's local tensor: take its slices `held`, view them in `shape`, take slices `within`.
    In a packed local tensor `held` is the range of the box that contains this one; else `shape` is None."""

    held: tuple[slice, ...]
    shape: Shape | None
    within: tuple[slice, ...]
    numel: int


@attrs.frozen(eq=False)
class Transfer:
    """What one rank keeps, as pairs of regions of its old and new local tensor, and the regions that it sends to and
    receives from each member of the group, in its order; those of one peer in the order of the receiver's boxes.
    """

    keeps: tuple[tuple[Region, Region], ...]
    sends: tuple[tuple[Region, ...], ...]
    receives: tuple[tuple[Region, ...], ...]


@lru_cache(maxsize=1024)
def transfer(source: Layout, target: Layout, rank: int, members: Ranks) -> Transfer:
    """Return what `rank` keeps, sends and receives when `members` change the layout; neither layout is partial."""
    keeps: list[tuple[Region, Region]] = []
    sends: list[tuple[Region, ...]] = []
    receives: list[tuple[Region, ...]] = []
    for peer in members:
        sent = _overlaps(source, rank, target, peer) if _is_sender(source, rank, peer) else []
        came = _overlaps(source, peer, target, rank) if _is_sender(source, peer, rank) else []
        keeps += sent if peer == rank else []
        sends.append(tuple(here for here, _ in sent) if peer != rank else ())
        receives.append(tuple(there for _, there in came) if peer != rank else ())
    return Transfer(tuple(keeps), tuple(sends), tuple(receives))


def lacking(source: Layout, target: Layout, rank: int) -> int:
    """Return how many of the elements that `rank` holds in `target` it does not hold in `source`."""
    held = source.boxes(rank)
    overlaps = (box.overlap(goal) for goal in target.boxes(rank) for box in held)
    return target.numel(rank) - sum(both.numel for both in overlaps if both is not None)


def _is_sender(source: Layout, holder: int, receiver: int) -> bool:
    """Whether `holder` is the replica that sends to `receiver`: the one with its coordinates along the replica axes."""
    place = coordinate(source.ranks, source.grid, holder)
    if place is None:
        return False
    sharding = source.sharding_axes
    own = coordinate(source.ranks, source.grid, receiver)
    if own is None:  # receivers outside of the grid are distributed round-robin over the replicas
        copies, index = 1, 0
        for axis, size in enumerate(source.grid):
            if axis not in sharding:
                copies, index = copies * size, index * size + place[axis]
        return receiver % copies == index
    return all(place[axis] == own[axis] for axis in range(len(source.grid)) if axis not in sharding)


def _overlaps(source: Layout, sender: int, target: Layout, receiver: int) -> list[tuple[Region, Region]]:
    """Return the regions of each box that `sender` holds and `receiver` needs, in both local tensors."""
    found = []
    here = list(zip(source.boxes(sender), source.local_boxes(sender), strict=True))
    for goal, goal_local in zip(target.boxes(receiver), target.local_boxes(receiver), strict=True):
        for box, local in here:
            both = box.overlap(goal)
            if both is not None:
                found.append((_region(both, box, local, source.packed), _region(both, goal, goal_local, target.packed)))
    return found


def _region(part: Box, box: Box, local: Box, packed: bool) -> Region:
    """Return the region of `part` of `box` in a local tensor that has the box at `local`."""
    within = part.seen_from(box)
    if packed:
        return Region(local.slices, box.sizes, within.slices, part.numel)
    offsets = tuple(a + b for a, b in zip(within.offsets, local.offsets, strict=True))
    return Region(Box(offsets, part.sizes).slices, None, (), part.numel)


@attrs.frozen(cache_hash=True)
class Step:
    """One step of a reshard: its kind, a name in the table of this module, and the layouts before and after. `axes`
    are those of the common grid along which ranks communicate, None for all ranks; `op` reduces, or is empty."""

    kind: str
    source: Layout
    target: Layout
    axes: tuple[int, ...] | None = None
    op: str = ""

    def members(self, rank: int) -> Ranks:
        """Return the group of `rank` in this step: its ranks, in group order."""
        if self.axes is None:
            return as_ranks(sorted({*self.source.ranks, *self.target.ranks}))
        mesh = Mesh(tuple((f"axis{i}", n) for i, n in enumerate(self.source.grid)), self.source.ranks)
        return as_ranks(sorted(mesh.ranks_along(rank, self.axes)))

    @property
    def group_size(self) -> int:
        """The number of ranks of each group."""
        if self.axes is None:
            return len({*self.source.ranks, *self.target.ranks})
        return math.prod(self.source.grid[axis] for axis in self.axes)

    def received(self, rank: int) -> int:
        """Return the number of elements that `rank` receives, with ring algorithms."""
        if self.kind in ("slice", "split"):
            return 0
        if self.kind == "reduce_scatter":
            return (self.group_size - 1) * self.target.numel(rank)
        if self.kind == "all_reduce":
            return -(-2 * (self.group_size - 1) * self.source.numel(rank) // self.group_size)
        return lacking(self.source, self.target, rank)

    @property
    def where(self) -> str:
        """The axes with their sizes, or the number of ranks, for messages."""
        if self.axes is None:
            return f"{self.group_size} ranks"
        return " * ".join(f"{self.source.axis_name(axis)}={self.source.grid[axis]}" for axis in self.axes)


@attrs.frozen
class DimStep:
    """One step of a local value along one dim; the sizes of all dims are those of the value, at each call.

    Attributes:
        kind: ``sum_gradient``, ``all_reduce``, ``all_gather``, ``slice`` or ``reduce_scatter``.
        axes: names of the mesh axes along which ranks communicate.
        dim: counted from the front, or from the end if negative.
        cut: how the dim is sharded; None for even slices.
        sums: backward sums the gradient over the ranks, because they share the work: ``sum_gradient``, and an
            all-gather whose result has a partial gradient.
    """

    kind: str
    axes: tuple[str, ...] = ()
    dim: int = 0
    cut: Cut | None = None
    sums: bool = False
    sizes: tuple[int, ...] | None = attrs.field(init=False)
    balanced: bool = attrs.field(init=False)

    @sizes.default
    def _sizes(self) -> tuple[int, ...] | None:
        return self.cut.sizes if self.cut is not None else None

    @balanced.default
    def _balanced(self) -> bool:
        return self.cut is not None and self.cut.balanced

    def sizes_of(self, shape: Shape, count: int) -> tuple[int, ...] | None:
        """Return the sizes of the slices of a value of this shape for `count` ranks; None if all are equal."""
        if self.sizes is not None:
            return self.sizes
        left = shape[self.dim] % count
        if not left:
            return None
        if not self.balanced:
            raise LayoutError(
                f"{shape[self.dim]} elements of dim {self.dim} cannot be cut evenly over {count} ranks",
                {"value": " x ".join(map(str, shape))},
                ["write `balanced` after the axis in the flow", f"pad the value to a multiple of {count}"],
            )
        return tuple(shape[self.dim] // count + (i < left) for i in range(count))


Partial = tuple[tuple[int, str], ...]


def route(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the steps between two layouts of one shape, of any kinds, on any ranks; none if they are the same."""
    return _route(source, target, source.names, target.names)


@lru_cache(maxsize=4096)
def _route(source: Layout, target: Layout, *names: tuple[str, ...]) -> tuple[Step, ...]:
    """Return `route`. `names` is for the cache key: equal layouts may have other axis names, which messages show."""
    if source.shape != target.shape:
        raise LayoutError(
            "a reshard keeps the shape of a tensor",
            {"from": " x ".join(map(str, source.shape)), "to": " x ".join(map(str, target.shape))},
            "reshape the tensor first",
        )
    shared = source.grid == target.grid and source.ranks == target.ranks
    kept: Partial = tuple(p for p in source.partial if shared and p in target.partial)
    steps: list[Step] = []
    here = source
    if len(kept) < len(source.partial):
        steps += _reductions(source, target, kept, shared)
        here = steps[-1].target
    goal = target if target.partial == kept else attrs.evolve(target, partial=kept)
    if not same_boxes(here, goal):
        steps.append(_move(here, goal, shared))
    if goal is not target:
        steps.append(Step("split", goal, target))
    return tuple(steps)


def _reductions(source: Layout, target: Layout, kept: Partial, shared: bool) -> list[Step]:
    """Return the steps that reduce all partial axes but those of `kept`."""
    steps: list[Step] = []
    here = source
    reduced = [p for p in source.partial if p not in kept]
    if shared and isinstance(source, MeshLayout) and isinstance(target, MeshLayout):
        for dim, cut in enumerate(target.dims):
            if cut is None or source.dims[dim] is not None:
                continue
            if all((axis, "sum") in reduced for axis in cut.axes):
                dims = tuple(cut if d == dim else old for d, old in enumerate(here.dims))  # type: ignore[attr-defined]
                left = tuple(p for p in here.partial if p[0] not in cut.axes)
                there = attrs.evolve(here, dims=dims, partial=left)  # type: ignore[call-arg]
                steps.append(Step("reduce_scatter", here, there, tuple(sorted(cut.axes)), "sum"))
                here = there
        reduced = [p for p in here.partial if p not in kept]
    for op in dict.fromkeys(op for _, op in reduced):
        axes = tuple(sorted(axis for axis, other in reduced if other == op))
        there = attrs.evolve(here, partial=tuple(p for p in here.partial if p[0] not in axes))
        steps.append(Step("all_reduce", here, there, axes, op))
        here = there
    return steps


def _move(source: Layout, target: Layout, shared: bool) -> Step:
    """Return the step between two layouts with the same partial axes."""
    if not shared:
        if source.is_replicated and set(target.ranks) <= set(source.ranks):
            return Step("slice", source, target)
        kind = "all_to_all" if set(source.ranks) == set(target.ranks) else "send_recv"
        return Step(kind, source, target)
    axes = _changed_axes(source, target)
    if _is_slice(source, target):
        return Step("slice", source, target, axes)
    if axes is None:
        return Step("all_to_all", source, target)
    cuts = source.dims if isinstance(source, MeshLayout) else ()
    pieces = [cut.pieces for cut in cuts if cut is not None and not set(axes).isdisjoint(cut.axes)]
    if isinstance(source, MeshLayout) and _is_slice(target, source) and all(each.is_even for each in pieces):
        return Step("all_gather", source, target, axes)
    return Step("all_to_all", source, target, axes)


def _changed_axes(source: Layout, target: Layout) -> tuple[int, ...] | None:
    """Return the axes along which ranks must exchange elements; None for all ranks."""
    cuts, flats = zip(_parts(source), _parts(target), strict=True)
    if cuts is None or None in cuts:
        return None
    axes: set[int] = set()
    for one, other in zip(*cuts, strict=True):
        if one != other:
            axes.update(*(cut.axes for cut in (one, other) if cut is not None))
    if flats[0] != flats[1]:
        axes.update(flats[0][0], flats[1][0])
    if axes and any(flat[0] for flat in flats) and cuts[0] != cuts[1]:  # the flattened local tensors differ
        axes.update(source.sharding_axes, target.sharding_axes)
    return tuple(sorted(axes))


def _parts(layout: Layout) -> tuple:
    """Return the cuts of the dims, and the arguments of the flat cut; None as cuts for listed boxes."""
    if isinstance(layout, MeshLayout):
        return layout.dims, ((),)
    if isinstance(layout, FlatLayout):
        return layout.inner.dims, (layout.axes, layout.unit, layout.sizes)
    return None, ((),)


def _is_slice(source: Layout, target: Layout) -> bool:
    """Whether every rank holds under `source` all elements that it holds under `target`, on the same grid."""
    if isinstance(source, MeshLayout) and isinstance(target, FlatLayout):
        return _is_slice(source, target.inner)
    if not isinstance(source, MeshLayout):
        return False
    if not isinstance(target, MeshLayout):
        return not source.cut_dims
    return all(old is None or old == new for old, new in zip(source.dims, target.dims, strict=True))
