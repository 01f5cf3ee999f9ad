"""`PostForwardMesh`: keep more of a unit after forward than a rank's own, so that backward gathers from few ranks only.

With ``reshard_after_forward=n`` every n consecutive ranks hold a unit together between its forward and its backward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.errors import LayoutError
from shardtensor.fsdp.param_group import ParamGroup

Reshard = bool | int | None


def read_reshard(given: Reshard, group: Group) -> Reshard:
    """What ``reshard_after_forward`` means for a shard group: None, a bool, or a divisor between 1 and its size.

    Raises:
        LayoutError: it does not divide the size.
    """
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, int) or given < 1 or group.size % given:
        raise LayoutError(
            f"reshard_after_forward={given!r} does not divide the ranks that hold a copy",
            {"ranks": group.size},
            [
                "give a divisor of their number: so many consecutive ranks hold the unit after forward",
                "give True (all of them) or False (each rank)",
            ],
        )
    return False if given == 1 else True if given == group.size else given


class PostForwardMesh:
    """The parts of a unit's groups that this rank keeps from forward to backward.

    Args:
        param_groups: the unit's.
        shard: the ranks of one copy; all of them make this.
        ranks: how many consecutive ones hold the unit together.
    """

    def __init__(self, param_groups: Sequence[ParamGroup], shard: Group, ranks: int) -> None:
        self.param_groups, self.ranks = param_groups, ranks
        first = shard.index // ranks * ranks
        self.group = shard.subgroup(list(shard.ranks)[first : first + ranks])
        self._kept: list[torch.Tensor] = []
        self._is_filled = False

    def over(self, param_groups: Sequence[ParamGroup]) -> PostForwardMesh:
        """The same of a copy of the unit."""
        twin = copy.copy(self)
        twin.param_groups = param_groups
        twin.forget()
        return twin

    def forget(self) -> None:
        """Keep nothing."""
        self._kept, self._is_filled = [], False

    def gather(self, is_again: bool) -> list[Pending]:
        """Start to gather: for a forward from all ranks, and keep a part; for a backward from the near ones' parts."""
        if is_again and self._is_filled:
            return [self.group.all_gather_into(whole, kept) for whole, kept in self._pairs()]
        for pending in [group.gather() for group in self.param_groups]:
            pending.wait()
        self._is_filled = torch.is_grad_enabled()
        if self._is_filled:
            self._fill()
        return []

    def _fill(self) -> None:
        if not self._kept:
            with torch.inference_mode(False):
                self._kept = [whole.new_empty(whole.numel() // self.ranks) for whole in self._wholes()]
        for whole, kept in self._pairs():
            kept.copy_(whole.narrow(0, self.group.index * kept.numel(), kept.numel()))

    def _wholes(self) -> list[torch.Tensor]:
        return [group.whole for group in self.param_groups if group.whole is not None]

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self._wholes(), self._kept, strict=True))
