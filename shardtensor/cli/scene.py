"""The data that ``shardtensor show`` draws: the mesh, and the tensors of a plan by their distinct layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from shardtensor.layout.explain import bytes_text
from shardtensor.layout.picture import Picture, picture_of
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.brief import brief_names
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.models.model import BYTES, TensorInfo
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.nodes import ShardingSpec, Spec


@attrs.frozen(eq=False)
class Shown:
    """Tensors of one layout, drawn once.

    Attributes:
        folded: patterns of the tensors' names, each with its names.
        spec: of the plan, in its axes.
        stored: the text of its `store` in the plan; empty if it is stored as in the computation.
        storing: the number of ranks over which the store is sharded.
        tied: for each pattern of tied names, the name of the tensor.
    """

    folded: Mapping[str, tuple[str, ...]]
    tensor: TensorInfo
    spec: ShardingSpec
    picture: Picture
    stored: str
    storing: int
    tied: Mapping[str, str]

    @property
    def count(self) -> int:
        """The number of tensors."""
        return sum(map(len, self.folded.values()))

    @property
    def item(self) -> int:
        """The bytes of an element."""
        return BYTES[self.tensor.dtype]

    @property
    def size(self) -> str:
        """The shape, with the names of its dims, and the dtype."""
        return f"{size_text(self.tensor.shape, self.tensor.dims)} {self.tensor.dtype}"

    def rank_bytes(self, count: int) -> int:
        """Return the bytes of `count` of the stored tensors on the rank that holds most."""
        return count * -(-max(part.most for part in self.picture.parts) // self.storing) * self.item

    def held(self) -> str:
        """Return as text the shard of one tensor on a rank, the axes of its copies, and its partial axes."""
        picture, layout = self.picture, self.picture.layout
        ends = sorted({min(part.least for part in picture.parts), max(part.most for part in picture.parts)})
        sizes = " to ".join(bytes_text(n * self.item) for n in ends)
        if picture.axes:
            shape = " × ".join(map(str, layout.local_shape(picture.parts[0].rank))) if len(ends) == 1 else ""
            facts = [f"a rank holds {', '.join(filter(None, (shape, sizes)))}"]
            others = [axis for axis in range(len(layout.grid)) if axis not in picture.axes]
            if copies := [name for name, _ in picture.named_axes(others)]:
                facts.append(f"{picture.copies:,} copies, along {', '.join(copies)}")
        else:
            facts = [f"whole on {_ranks('each of ', len(layout.ranks))}, {sizes}"]
        if layout.partial:
            facts.append(f"partial along {', '.join(f'{picture.names[axis]} ({op})' for axis, op in layout.partial)}")
        return "; ".join(facts)


@attrs.frozen(eq=False)
class Scene:
    """All data that is shown.

    Attributes:
        title: the name of the plan.
        subject: its model.
        costs: its costs, as `shardtensor plan` prints them; None if they are not shown.
    """

    title: str
    subject: str
    resolved: Resolved
    shown: tuple[Shown, ...]
    costs: dict[str, Any] | None = None

    @property
    def axes(self) -> Axes:
        """The axes of the mesh."""
        return self.resolved.plan.axes

    @property
    def mesh_text(self) -> str:
        """``8 ranks = dp 2 × tp 4 (kvg 2 × kvr 2)``, and the axes along which samples differ."""
        mesh, words = self.axes.mesh, []
        rest = list(mesh.axes)
        while rest:
            whole = next((name for name, factors in self.axes.made_of.items() if factors[0] == rest[0][0]), None)
            count = 1 if whole is None else len(self.axes.made_of[whole])
            parts = " × ".join(f"{factor} {n}" for factor, n in rest[:count])
            words.append(parts if whole is None else f"{whole} {self.axes.size(whole)} ({parts})")
            rest = rest[count:]
        text = f"{_ranks('', mesh.size)} = {' × '.join(words)}"
        return text + (f"   samples differ along {', '.join(self.axes.data)}" if self.axes.data else "")


def scene_of_plan(resolved: Resolved, title: str, subject: str = "", *, pattern: str = "") -> Scene:
    """Return the scene of a plan.

    Args:
        pattern: only tensors that it matches, or below modules that it matches.
    """
    alike: dict[object, list[Placed]] = {}
    for name in NameTree(resolved.tensors, ()).tensors(pattern or "**"):
        each = resolved.tensors[name]
        alike.setdefault((str(each.spec), each.layout, each.tensor.dtype, str(each.stored or "")), []).append(each)
    shown = tuple(_shown(group, resolved.plan.axes) for group in alike.values())
    return Scene(title, subject, resolved, shown)


def size_text(shape: Sequence[int], names: Sequence[str] | None = None) -> str:
    """Return a shape as text, with the names of its dims if they are known.

    Example:
        >>> size_text((4096, 14336), ("out", "in")), size_text(())
        ('out 4096 × in 14336', 'scalar')
    """
    words = map(str, shape) if names is None else (f"{n} {size}" for n, size in zip(names, shape, strict=True))
    return " × ".join(words) or "scalar"


def _ranks(before: str, count: int) -> str:
    return f"{before * (count > 1)}{count:,} rank{'s' * (count != 1)}"


def _shown(group: Sequence[Placed], axes: Axes) -> Shown:
    first = group[0]
    by_name = {each.tensor.name: each for each in group}
    folded = brief_names(by_name)
    tied = {pattern: by_name[names[0]].tied_to for pattern, names in folded.items() if by_name[names[0]].tied_to}
    names = axes.mesh.names if isinstance(first.spec, Spec) else ()
    picture = picture_of(first.layout, names=names, made_of=axes.made_of)
    storing = 1 if first.stored is None else math.prod(map(axes.size, first.stored.axes))
    return Shown(folded, first.tensor, first.spec, picture, str(first.stored or ""), storing, tied)


ACROSS, DOWN = 16, 8


@attrs.frozen
class MeshRows:
    """Some of the ranks of a mesh, the last axes across, the others down; the middle of long ones is left out.

    Attributes:
        columns: the label above each column; empty where ranks are left out.
        rows: the label before each row, and its ranks; None where ranks are left out.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[int | None, ...]], ...]


def mesh_rows(axes: Axes, across: int = ACROSS, down: int = DOWN) -> MeshRows:
    """Choose the ranks of a mesh that are shown.

    Example:
        >>> from shardtensor.mesh import read_mesh
        >>> found = mesh_rows(Axes(read_mesh("dp=100, tp=2")), down=3)
        >>> found.columns, found.rows
        (('tp 0', '1'), (('dp 0', (0, 1)), ('', (None, None)), ('99', (198, 199))))
    """
    mesh, sizes = axes.mesh, axes.mesh.sizes
    split = len(sizes) - 1
    while split > 1 and math.prod(sizes[split - 1 :]) <= across:
        split -= 1
    width, height = math.prod(sizes[split:]), math.prod(sizes[:split])
    columns = tuple("" if i is None else _label(axes, range(split, len(sizes)), i) for i in _picked(width, across))
    rows = []
    for row in _picked(height, down):
        cells = (None if row is None or i is None else mesh.ranks[row * width + i] for i in _picked(width, across))
        rows.append(("" if row is None else _label(axes, range(split), row), tuple(cells)))
    return MeshRows(columns, tuple(rows))


def _picked(count: int, limit: int) -> list[int | None]:
    """Return the first numbers below `count` and the last, with None for those between."""
    return list(range(count)) if count <= limit else [*range(max(limit - 2, 1)), None, count - 1]


def _label(axes: Axes, along: Sequence[int], index: int) -> str:
    """Return the coordinates of a row or column along some axes as text, with names of axes only for the first one."""
    found: list[tuple[str, int]] = []
    for axis in reversed(along):
        name, size = axes.mesh.axes[axis]
        index, i = divmod(index, size)
        if size > 1 or len(along) == 1:
            alone = (whole for whole, factors in axes.made_of.items() if name in factors and axes.size(whole) == size)
            found.insert(0, (next(alone, name), i))
    if any(i for _, i in found):
        return ",".join(str(i) for _, i in found)
    return ", ".join(f"{name} {i}" for name, i in found)
