"""Which classes the columns of a rank's logits are, when the last dim of the logits is cut over the ranks."""

from __future__ import annotations

from functools import lru_cache

import attrs

from shardtensor.comm.group import Group, group_along
from shardtensor.errors import LayoutError, RuleError, SpecError
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import CutLayout
from shardtensor.layout.pieces import Stepped
from shardtensor.mesh import Mesh
from shardtensor.spec.nodes import Cut, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.placing import mesh_of


@attrs.frozen
class Classes:
    """This rank's part of the classes; the ranks of `team` hold them all.

    Attributes:
        count: of all classes.
        start, held: the first class that this rank has, and how many.
        padded: how many columns its logits have where the padding of the cut is in them.
        team: the ranks that the classes are cut over.
        data: the ranks that have other targets, whose count a mean divides by; None where there are none.
        text: the cut, for messages.
    """

    count: int
    start: int
    held: int
    padded: int
    team: Group
    data: Group | None
    text: str

    def fault_of(self, width: int) -> LayoutError | None:
        """What is wrong with logits of so many columns on this rank."""
        if width in (self.held, self.padded):
            return None
        span = f"{self.start} to {self.start + self.held - 1}" if self.held else "none"
        facts = {"spec": self.text, "classes here": span}
        if self.padded != self.held:
            facts["with padding"] = f"{self.padded} columns"
        return LayoutError(
            f"the logits have {width} columns where {self.held} of the {self.count} classes are",
            facts,
            "give num_classes and the spec in which the head leaves its logits",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Classes:
        return self  # groups are not copied


def classes_of(
    num_classes: int, spec: ShardingSpec | str, group: Group, data_axes: str | tuple[str, ...] = ()
) -> Classes:
    """Bind the cut of the last dim of `spec`. Sends nothing (the first use of some axes together makes their group).

    Raises:
        SpecError, LayoutError: the spec does not fit the classes or the ranks.
        RuleError: nothing of the last dim is cut, or other dims are, or the cut is one in blocks.
    """
    cut = _last_cut(as_spec(spec))
    mesh = mesh_of(group)
    start, held, padded = _columns(cut, num_classes, mesh, group.rank)
    names = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    mesh.refuse_unknown(names)
    if any(name in cut.axes for name in names):
        raise LayoutError(
            "targets do not differ along an axis that cuts the classes",
            {"data_axes": ", ".join(names), "classes": f"cut over {'*'.join(cut.axes)}"},
            "name the other axes of the mesh as data_axes",
        )
    team = group_along(group, cut.axes)
    data = group_along(group, names) if names else None
    return Classes(num_classes, start, held, padded, team, data, str(Spec(..., cut)))


def _last_cut(spec: ShardingSpec) -> Cut:
    """How a spec cuts the last dim, which must be all that it says."""
    if not isinstance(spec, Spec):
        raise SpecError(
            "the classes are cut along axes of the mesh", {"spec": str(spec)}, 'write the spec as "[..., tp]"'
        )
    *others, last = spec.dims or (None,)
    if (
        spec.named
        or spec.flat_part
        or spec.only_part
        or spec.partial_parts
        or any(c not in (None, ...) for c in others)
    ):
        raise RuleError(
            "parallel cross entropy takes logits that are cut along their last dim and no other",
            {"spec": str(spec)},
            'write it as "[..., tp]"'
            + (", and name the axes along which targets differ as data_axes" if set(others) - {None, ...} else ""),
        )
    if not isinstance(last, Cut):
        raise RuleError("no class is cut by this spec", {"spec": str(spec)}, "use torch's cross_entropy: it is local")
    if last.blocks != 1:
        raise RuleError(
            "the classes are cut in blocks, so that a rank has several stretches of them",
            {"spec": str(spec)},
            "reshard the head, so that each rank has one stretch",
        )
    return last


@lru_cache(maxsize=1024)
def _columns(cut: Cut, num_classes: int, mesh: Mesh, rank: int) -> tuple[int, int, int]:
    """The first class of a rank, how many it has, and how many columns with the padding of the cut."""
    if num_classes < 1:
        raise LayoutError(f"num_classes={num_classes}: there is at least one class")
    layout = bind(Spec(cut), (num_classes,), mesh)
    assert isinstance(layout, CutLayout) and layout.dims[0] is not None
    held = layout.local_shape(rank)[0]
    pieces = layout.dims[0].pieces
    padded = pieces.step if cut.pad is not None and isinstance(pieces, Stepped) else held
    return layout.start(rank, 0), held, padded
