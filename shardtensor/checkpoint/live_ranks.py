"""The old and the new ranks of a module that moves: each rank learns of groups that it is not in from their members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import attrs
import torch

from shardtensor.comm.agree import name_ranks, ranks_by_value
from shardtensor.comm.group import Group, NonMemberGroup
from shardtensor.comm.process_group import as_group, mesh_state
from shardtensor.errors import DisagreementError, LayoutError
from shardtensor.layout.layout import DimCut, FlatLayout, Layout, MeshLayout
from shardtensor.mesh import Mesh, as_ranks
from shardtensor.tensor.sharded_tensor import ShardedTensor

Subset = tuple[int, ...]


@attrs.frozen(eq=False)
class RankChange:
    """The ranks before and after.

    Attributes:
        old: the ranks that hold the module's tensors; the new ones if all tensors are plain.
        new: the ranks of the plan.
        subsets: for tensors that each lie on a part of the old ranks, such as the data ranks of a fully sharded module:
            from this rank's part to all parts that hold the same.
    """

    old: Group
    new: Group
    subsets: Mapping[Subset, tuple[Subset, ...]]

    @property
    def both(self) -> Group:
        """The larger group, which contains the other."""
        return self.old if set(self.new.ranks) <= set(self.old.ranks) else self.new

    @property
    def joins(self) -> bool:
        """Whether this rank has nothing yet."""
        return self.old.index < 0

    @property
    def is_same(self) -> bool:
        """Whether old and new ranks are the same."""
        return len(self.old.ranks) == len(self.new.ranks)

    def layout_of(self, tensor: ShardedTensor) -> Layout:
        """Return the layout of a tensor on the old ranks.

        Raises:
            LayoutError: it is on some of them only, and the others hold no copy.
        """
        ranks = tuple(tensor._group.ranks)
        if set(ranks) == set(self.old.ranks):
            return tensor._layout
        parts = self.subsets.get(ranks, ())
        if sorted(chain(*parts)) != sorted(self.old.ranks) or not isinstance(tensor._layout, MeshLayout | FlatLayout):
            raise LayoutError(
                "a tensor of the module is on some of its ranks only",
                {"on": name_ranks(ranks), "others on": name_ranks(self.old.ranks)},
                "shard it on the process group of the others",
            )
        order = [[part[ranks.index(rank)] for rank in tensor._layout.ranks] for part in parts]
        return _repeated(tensor._layout, tuple(chain(*order)), len(parts))


def rank_change(tensors: Mapping[str, torch.Tensor], process_group: Any) -> RankChange:
    """Return the old ranks of some tensors, and the new ones. Collective in each of the two groups.

    Raises:
        DisagreementError: ranks pass different groups.
        LayoutError: neither group contains the other.
    """
    new = as_group(process_group)
    groups = [x._group for x in tensors.values() if isinstance(x, ShardedTensor) and x._group.index >= 0]
    old = max(groups, key=lambda group: group.size, default=None)
    own = tuple(dict.fromkeys(tuple(group.ranks) for group in groups if old is not None and group.size < old.size))
    olds, news, parts = dict[int, Any](), dict[int, Any](), dict[int, Sequence[Subset]]()
    for group in dict.fromkeys((old, new)):
        if group is not None and group.index >= 0:
            for rank, report in zip(group.ranks, group.exchange_objects((_place(old), _place(new), own)), strict=True):
                for found, value in zip((olds, news, parts), report, strict=True):
                    if value is not None:
                        found[rank] = value
    for which, found in (("old", olds), ("new", news), ("number of", {rank: len(x) for rank, x in parts.items() if x})):
        by_text = ranks_by_value({rank: str(place) for rank, place in found.items()})
        if len(by_text) > 1:
            raise DisagreementError(
                f"reshard_module: {which} groups differ between ranks; nothing was moved",
                {name_ranks(ranks): text for text, ranks in by_text.items()},
                "shard the module, and pass the same process group, alike on every rank",
            )
    rank = new.rank
    new = _outside(next(iter(news.values())), rank) if new.index < 0 and news else new
    old = _outside(next(iter(olds.values())), rank) if old is None and olds else old or new
    if not (set(old.ranks) <= set(new.ranks) or set(new.ranks) <= set(old.ranks)):
        raise LayoutError(
            "neither of the two groups contains the other",
            {"old ranks": list(old.ranks), "new ranks": list(new.ranks)},
            "call reshard_module for a process group that contains both first",
        )
    subsets = {part: tuple(dict.fromkeys(x[i] for x in parts.values() if x)) for i, part in enumerate(own)}
    return RankChange(old, new, subsets)


def _place(group: Group | None) -> tuple[Any, ...] | None:
    return None if group is None or group.index < 0 else (tuple(group.ranks), mesh_state(group))


def _outside(place: tuple[Any, ...], rank: int) -> Group:
    """Return the group of a place, for a rank that is not in it."""
    ranks, mesh = place
    group = NonMemberGroup(rank, ranks)
    return group if mesh is None else group.on_mesh(Mesh(*mesh), {})


def _repeated(layout: Any, ranks: Subset, count: int) -> Layout:
    """Return the layout of a tensor that has this layout on `count` sets of ranks, one after the other in `ranks`."""
    changes: dict[str, Any] = {"ranks": as_ranks(ranks), "grid": (count, *layout.grid), "names": ()}
    if isinstance(layout, FlatLayout):
        inner: Any = _repeated(layout.inner, ranks, count)
        return attrs.evolve(layout, **changes, inner=inner, axes=tuple(axis + 1 for axis in layout.axes))
    dims = (cut and DimCut(tuple(axis + 1 for axis in cut.axes), cut.pieces) for cut in layout.dims)
    return attrs.evolve(layout, **changes, dims=tuple(dims))
