"""What ``shardtensor show`` draws: the tensors of a plan by their distinct layouts, their boxes on a plane."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product

import attrs

from shardtensor.cli.picture import Picture, picture_of
from shardtensor.layout.bind import bind
from shardtensor.layout.box import Box
from shardtensor.layout.explain import say_bytes
from shardtensor.layout.layout import Layout
from shardtensor.layout.route import Step, route
from shardtensor.mesh import Mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.brief import brief_names
from shardtensor.plan.match.patterns import is_below, matches
from shardtensor.plan.models.model import BYTES, TensorInfo
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parse import parse_spec

_Stretch = tuple[int, int, int, int, int]
"""Of a strip, which is a plane with both ends of one side: those, and the ends of the other side."""

MAX_RUNS = 2000
"""Of a tensor drawn as one line; with more there is nothing to see."""


@attrs.frozen
class Rect:
    """Elements ``top`` to ``bottom`` down, ``left`` to ``right`` across, of one of the planes."""

    plane: int
    top: int
    bottom: int
    left: int
    right: int


@attrs.frozen
class Plane:
    """How a tensor is drawn.

    Attributes:
        down, across: the dims that are drawn; None for one of length 1. `across` is -1 where all elements lie in one
            line, row-major.
        apart: further dims that are cut, each drawn as planes beside one another.
        height, width: in elements.
        titles: for each plane, the intervals of the dims apart.
    """

    shape: tuple[int, ...]
    down: int | None
    across: int | None
    apart: tuple[int, ...] = ()
    height: int = 1
    width: int = 1
    titles: tuple[tuple[tuple[int, int], ...], ...] = ((),)

    def rects(self, boxes: Sequence[Box]) -> tuple[Rect, ...]:
        """Where boxes lie; empty ones nowhere, and those that lie side by side in one."""
        found = [rect for box in boxes if box.numel for rect in self._rects(box)]
        return _joined(found)

    def _rects(self, box: Box) -> list[Rect]:
        if self.across == -1:
            return [Rect(0, 0, 1, start, stop) for start, stop in line_runs(box, self.shape)]
        key = tuple((box.offsets[dim], box.ends[dim]) for dim in self.apart)
        plane = self.titles.index(key)
        top, bottom = (0, 1) if self.down is None else (box.offsets[self.down], box.ends[self.down])
        left, right = (0, 1) if self.across is None else (box.offsets[self.across], box.ends[self.across])
        return [Rect(plane, top, bottom, left, right)]


def plane_of(shape: tuple[int, ...], boxes: Sequence[Box]) -> Plane | None:
    """Choose what of a tensor is drawn, so that all its boxes are seen; None where they are too fine for any picture.

    Example:
        >>> plane = plane_of((4, 8, 6), [Box((0, 0, 0), (4, 8, 3)), Box((0, 0, 3), (4, 8, 3))])
        >>> plane.down, plane.across, plane.height, plane.width
        (1, 2, 8, 6)
    """
    full = [box for box in boxes if box.numel]
    cut = [d for d, size in enumerate(shape) if any(box.sizes[d] != size for box in full)]
    if len(shape) < 2:
        return Plane(shape, None, 0 if shape else None, width=shape[0] if shape else 1)
    if len(shape) == 2:
        return Plane(shape, 0, 1, (), *shape)
    others = sorted((d for d in range(len(shape)) if d not in cut), key=lambda dim: (shape[dim], dim))
    drawn = sorted([*cut[-2:], *others[len(others) - max(0, 2 - len(cut)) :]])
    apart = tuple(cut[:-2])
    sides = [sorted({(box.offsets[dim], box.ends[dim]) for box in full}) for dim in apart]
    if all(one[1] <= other[0] for side in sides for one, other in pairwise(side)):
        titles = tuple(product(*sides))
        return Plane(shape, drawn[0], drawn[1], apart, shape[drawn[0]], shape[drawn[1]], titles)
    if sum(_count_runs(box, shape) for box in full) > MAX_RUNS:
        return None
    return Plane(shape, None, -1, width=math.prod(shape))


def line_runs(box: Box, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The stretches of the row-major elements of a tensor that a box is made of.

    Example:
        >>> line_runs(Box((0, 1), (2, 2)), (2, 4))
        [(1, 3), (5, 7)]
    """
    last = _last_cut(box, shape)
    run = math.prod(box.sizes[last:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = []
    for index in product(*(range(o, o + n) for o, n in zip(box.offsets[:last], box.sizes[:last], strict=True))):
        start = sum(i * s for i, s in zip((*index, *box.offsets[last:]), strides, strict=True))
        found.append((start, start + run))
    return found


def _last_cut(box: Box, shape: tuple[int, ...]) -> int:
    return max((dim for dim, size in enumerate(shape) if box.sizes[dim] != size), default=0)


def _count_runs(box: Box, shape: tuple[int, ...]) -> int:
    return math.prod(box.sizes[: _last_cut(box, shape)])


def _joined(rects: Sequence[Rect]) -> tuple[Rect, ...]:
    """Rectangles with those in one that lie below or beside one another and fit."""
    down = _in_runs((r.plane, r.left, r.right, r.top, r.bottom) for r in rects)
    across = _in_runs((plane, top, bottom, left, right) for plane, left, right, top, bottom in down)
    return tuple(Rect(*each) for each in across)


def _in_runs(stretches: Iterable[_Stretch]) -> list[_Stretch]:
    """Stretches of one strip that follow one another as one."""
    found: list[_Stretch] = []
    for stretch in sorted(stretches):
        last = found[-1] if found else None
        if last and (*last[:3], last[4]) == stretch[:4]:
            found[-1] = (*last[:4], stretch[4])
        else:
            found.append(stretch)
    return found


MAX_PARTS = 4000
"""Of all pictures together: what a page and a reader can bear."""
_PARTS = 64
"""Of one picture."""


@attrs.frozen(eq=False)
class Shown:
    """Tensors that lie alike, drawn once.

    Attributes:
        names: of the tensors; `folded` the same in few words, each pattern with the names it stands for.
        spec: what the plan says, in its axes.
        stored: what `store` keeps of it on a rank, as the plan says it; empty where it is kept as it computes.
        storing: over how many ranks that is cut.
        lines: for each pattern, where the plan says it and the text there; empty for rules made in Python.
        tied: for each pattern, the name whose tensor it is.
        picture, plane: None for a layout of which there is nothing to see.
    """

    names: tuple[str, ...]
    folded: Mapping[str, tuple[str, ...]]
    tensor: TensorInfo
    spec: ShardingSpec
    layout: Layout
    picture: Picture
    plane: Plane | None
    stored: str = ""
    storing: int = 1
    lines: Mapping[str, tuple[str, str]] = attrs.field(factory=dict)
    tied: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return BYTES[self.tensor.dtype]

    @property
    def most(self) -> int:
        """Elements of one of the tensors on the rank that holds most, while computing."""
        return max(part.most for part in self.picture.parts)

    def rank_bytes(self, count: int) -> int:
        """What `count` of the tensors take on the rank that holds most, as they are stored."""
        return count * -(-self.most // self.storing) * self.item

    def held(self) -> list[str]:
        """What one rank holds of one of the tensors, where the copies are, and along which axes it is partial."""
        picture, layout = self.picture, self.layout
        least = min(part.least for part in picture.parts)
        sizes = " to ".join(say_bytes(n * self.item) for n in sorted({least, self.most}))
        if picture.axes:
            local = f"{' × '.join(map(str, layout.local_shape(picture.parts[0].rank)))}, " if least == self.most else ""
            facts = [f"a rank holds {local.lstrip(', ')}{sizes}"]
            others = [axis for axis in range(len(layout.grid)) if axis not in picture.axes]
            if copies := [name for name, _ in picture.named_axes(others)]:
                facts.append(f"{picture.copies:,} copies, along {', '.join(copies)}")
        else:
            ranks = len(layout.ranks)
            facts = [f"whole on {'each of ' * (ranks > 1)}{ranks:,} rank{'s' * (ranks != 1)}, {sizes}"]
        if layout.partial:
            facts.append(f"partial along {', '.join(f'{picture.names[axis]} ({op})' for axis, op in layout.partial)}")
        return facts


@attrs.frozen(eq=False)
class Reshard:
    """One tensor redistributed to other layouts, one after the other."""

    name: str
    shape: tuple[int, ...]
    item: int
    texts: tuple[str, ...]
    layouts: tuple[Layout, ...]
    routes: tuple[tuple[Step, ...], ...]


@attrs.frozen(eq=False)
class Scene:
    """Everything that is shown.

    Attributes:
        title: the name of the plan, or the spec.
        subject: of what: the model, or the shape.
        axes: of the mesh.
        resolved: None where one spec is shown.
    """

    title: str
    subject: str
    axes: Axes
    shown: tuple[Shown, ...]
    reshards: tuple[Reshard, ...] = ()
    resolved: Resolved | None = None


def scene_of_plan(resolved: Resolved, title: str, *, pattern: str = "", to: Sequence[str] = ()) -> Scene:
    """The scene of a plan.

    Args:
        pattern: only tensors of these names, or below modules of these names.
        to: specs to which each distinct layout is redistributed, one after the other.
    """
    placed = [
        p for name, p in resolved.tensors.items() if not pattern or matches(pattern, name) or is_below(pattern, name)
    ]
    alike: dict[object, list[Placed]] = {}
    for each in placed:
        alike.setdefault((str(each.spec), each.layout, each.tensor.dtype, _stored(each)), []).append(each)
    room = max(8, min(_PARTS, MAX_PARTS // max(len(alike), 1)))
    shown = tuple(_shown(resolved, group, room) for group in alike.values())
    reshards = tuple(
        _reshard(each.names[0], each.spec, each.layout, each.item, to, resolved.plan.axes) for each in shown
    )
    return Scene(title, resolved.model.source, resolved.plan.axes, shown, reshards if to else (), resolved)


def scene_of_spec(
    text: str, shape: tuple[int, ...], mesh: Mesh, *, dtype: str = "float32", to: Sequence[str] = ()
) -> Scene:
    """The scene of one tensor.

    Raises:
        SpecError, LayoutError: the text is no spec, or does not fit.

    Example:
        >>> from shardtensor.mesh import read_mesh
        >>> scene = scene_of_spec("[tp, -]", (8, 8), read_mesh("tp=4"), to=["[-, tp]"])
        >>> [step.kind for step in scene.reshards[0].routes[0]]
        ['all_to_all']
    """
    spec = parse_spec(text)
    layout = bind(spec, shape, mesh)
    tensor = TensorInfo(str(spec), shape, None, dtype)
    axes = Axes(mesh)
    shown = _drawn((str(spec),), {str(spec): (str(spec),)}, tensor, spec, layout, axes, _PARTS)
    reshards = (_reshard("", spec, layout, shown.item, to, axes),) if to else ()
    return Scene(str(spec), size_text(shape), axes, (shown,), reshards)


def size_text(shape: Sequence[int], names: Sequence[str] | None = None) -> str:
    """A shape as people read it, with the names of its dims where they are known.

    Example:
        >>> size_text((4096, 14336), ("out", "in")), size_text(())
        ('out 4096 × in 14336', 'scalar')
    """
    words = map(str, shape) if names is None else (f"{n} {size}" for n, size in zip(names, shape, strict=True))
    return " × ".join(words) or "scalar"


def device_of(spec: ShardingSpec) -> Callable[[int], str]:
    """What a spec says of the device of a rank; empty where every rank uses its own."""
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        places = spec.placements

        def device(rank: int) -> str:
            index = places.index_of(rank)
            return "" if index is None else str(places[index]).rpartition("/")[2]

        return device
    if isinstance(spec, EnumerableShardingSpec):
        held = {box.placement.rank(): box.placement for box in spec.boxes if box.placement is not None}
        return lambda rank: str(held[rank]).rpartition("/")[2] if rank in held else ""
    return lambda rank: ""


def _shown(resolved: Resolved, group: Sequence[Placed], limit: int) -> Shown:
    first = group[0]
    by_name = {each.tensor.name: each for each in group}
    folded = brief_names(by_name)
    lines = {}
    for pattern, names in folded.items():
        line = by_name[names[0]].line
        if line is not None and line.origin is not None:
            lines[pattern] = (str(line.origin), line.origin.text)
    tied = {pattern: by_name[names[0]].tied_to for pattern, names in folded.items() if by_name[names[0]].tied_to}
    storing = 1
    if first.stored is not None:
        sizes = [resolved.plan.axes.size(axis) for axis in first.stored.axes]
        for size in sizes:
            storing *= size
    shown = _drawn(tuple(by_name), folded, first.tensor, first.spec, first.layout, resolved.plan.axes, limit)
    return attrs.evolve(shown, stored=_stored(first), storing=storing, lines=lines, tied=tied)


def _drawn(
    names: tuple[str, ...],
    folded: Mapping[str, tuple[str, ...]],
    tensor: TensorInfo,
    spec: ShardingSpec,
    layout: Layout,
    axes: Axes,
    limit: int,
) -> Shown:
    picture = picture_of(layout, limit, axes.mesh.names if isinstance(spec, Spec) else (), axes.made_of)
    plane = plane_of(layout.shape, [box for part in picture.parts for box in part.boxes])
    return Shown(names, folded, tensor, spec, layout, picture, plane)


def _stored(placed: Placed) -> str:
    return "" if placed.stored is None else str(placed.stored)


def _reshard(name: str, spec: ShardingSpec, layout: Layout, item: int, to: Sequence[str], axes: Axes) -> Reshard:
    texts, layouts, routes = [str(spec)], [layout], []
    for text in to:
        target = parse_spec(text)
        spelled = axes.spelled(target) if isinstance(target, Spec) else target
        layouts.append(bind(spelled, layout.shape, axes.mesh))
        texts.append(str(target))
        routes.append(route(layouts[-2], layouts[-1]))
    return Reshard(name, layout.shape, item, tuple(texts), tuple(layouts), tuple(routes))
