"""The base class of groups of two or more ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from shardtensor.comm.group import Done, Group, Pending, overwrite
from shardtensor.mesh import Mesh, Ranks


class BaseGroup(ABC):
    """Caches subgroups and the groups along mesh axes, and gives collectives that have a plainer one a default."""

    rank: int
    ranks: Ranks
    mesh: Mesh | None

    def __init__(self) -> None:
        self._axes: dict[tuple[str, ...], Group] = {}
        self._subgroups: dict[tuple[int, ...], Group] = {}

    @abstractmethod
    def _make_subgroup(self, ranks: tuple[int, ...]) -> Group:
        """Make the group of these members, in ascending order."""

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor: ...

    @abstractmethod
    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor: ...

    def reduce_scatter_async(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        return Done(self.reduce_scatter(flat, counts))

    def all_gather_into(self, out: torch.Tensor, part: torch.Tensor) -> Pending:
        return Done(overwrite(out, self.all_gather(part)))

    def reduce_scatter_into(self, out: torch.Tensor, flat: torch.Tensor) -> Pending:
        return Done(overwrite(out, self.reduce_scatter(flat)))

    def subgroup(self, ranks: Sequence[int]) -> Group:
        key = tuple(sorted(ranks))  # torch orders a new group by rank
        assert set(key) <= set(self.ranks), "a subgroup is made of members"
        if key not in self._subgroups:
            made = self._make_subgroup(key)
            # A group of all ranks may be this one; a subgroup has no mesh.
            self._subgroups[key] = made if made.mesh is None else made.on_mesh(None, {})  # type: ignore[arg-type]
        return self._subgroups[key]

    def _share_subgroups(self, other: BaseGroup, mesh: Mesh, axes: dict[tuple[str, ...], Group]) -> None:
        """Set the mesh of this view of `other`; both use the same subgroups."""
        self.mesh, self._axes, self._subgroups = mesh, axes, other._subgroups
        for group in axes.values():
            self._subgroups.setdefault(tuple(sorted(group.ranks)), group)

    def twin(self) -> Group:
        return self  # type: ignore[return-value]  # in one process there is no communicator to separate

    def axis(self, *names: str) -> Group:
        if names not in self._axes:
            assert self.mesh is not None, "this group has no named axes"
            axes = [self.mesh.names.index(name) for name in names]
            self._axes[names] = self.subgroup(self.mesh.ranks_along(self.rank, axes))
        return self._axes[names]
