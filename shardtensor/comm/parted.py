"""What every group does alike: it keeps the groups of some of its members, and those along the axes of its mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from shardtensor.comm.group import Done, Group, Pending, overwrite
from shardtensor.mesh import Mesh, Ranks


class Parted(ABC):
    """The base of groups of two or more ranks: `subgroup` and `axis` of `Group`, each group made once."""

    rank: int
    ranks: Ranks
    mesh: Mesh | None

    def __init__(self) -> None:
        self._axes: dict[tuple[str, ...], Group] = {}
        self._subgroups: dict[tuple[int, ...], Group] = {}

    @abstractmethod
    def _make_subgroup(self, ranks: tuple[int, ...]) -> Group:
        """The group of these members, ascending."""

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """As of `Group`."""

    def reduce_scatter_async(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        """Done at once, where nothing is gained by starting early."""
        return Done(self.reduce_scatter(flat, counts))

    @abstractmethod
    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """As of `Group`."""

    def all_gather_into(self, out: torch.Tensor, part: torch.Tensor) -> Pending:
        """Done at once, where there is no call that writes in place."""
        return Done(overwrite(out, self.all_gather(part)))

    def reduce_scatter_into(self, out: torch.Tensor, flat: torch.Tensor) -> Pending:
        """Done at once, where there is no call that writes in place."""
        return Done(overwrite(out, self.reduce_scatter(flat)))

    def subgroup(self, ranks: Sequence[int]) -> Group:
        key = tuple(sorted(ranks))  # torch orders a new group by rank
        assert set(key) <= set(self.ranks), "a subgroup is made of members"
        if key not in self._subgroups:
            made = self._make_subgroup(key)
            is_self = made.mesh is not None  # all of the ranks: in a row, though they may be a grid here
            self._subgroups[key] = made.on_mesh(None, {}) if is_self else made  # type: ignore[arg-type]
        return self._subgroups[key]

    def _seen(self, other: Parted, mesh: Mesh, axes: dict[tuple[str, ...], Group]) -> None:
        """Be `other` on a grid; groups of some of the ranks are the same ones, whatever the grid."""
        self.mesh, self._axes, self._subgroups = mesh, axes, other._subgroups
        for group in axes.values():
            self._subgroups.setdefault(tuple(sorted(group.ranks)), group)

    def twin(self) -> Group:
        """This group itself, where ranks are only pretended."""
        return self  # type: ignore[return-value]

    def axis(self, *names: str) -> Group:
        if names not in self._axes:
            assert self.mesh is not None, "this group has no named axes"
            axes = [self.mesh.names.index(name) for name in names]
            self._axes[names] = self.subgroup(self.mesh.ranks_along(self.rank, axes))
        return self._axes[names]
