"""`PostForwardMesh`: keep more of a module after forward than a rank's shard, so that backward gathers from few ranks.

With ``reshard_after_forward=n`` every n consecutive ranks hold a module together between its forward and its backward.
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
    """Return what ``reshard_after_forward`` means for a shard group: None, a bool, or a divisor of its size.

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
    """What this rank keeps of a module's parameters from forward to backward.

    Args:
        param_groups: of the module.
        shard: the ranks of one copy; all of them make this.
        ranks: how many consecutive ones hold the module together.
    """

    def __init__(self, param_groups: Sequence[ParamGroup], shard: Group, ranks: int) -> None:
        self._param_groups, self._ranks = param_groups, ranks
        first = shard.index // ranks * ranks
        self.group = shard.subgroup(list(shard.ranks)[first : first + ranks])
        self.forget()

    def over(self, param_groups: Sequence[ParamGroup]) -> PostForwardMesh:
        """Return the same for a copy of the module."""
        twin = copy.copy(self)
        twin._param_groups = param_groups
        twin.forget()
        return twin

    def forget(self) -> None:
        """Keep nothing."""
        self._kept: list[torch.Tensor] = []
        self._is_filled = False

    def gather(self, is_again: bool) -> list[Pending]:
        """Start to gather: for a forward from all ranks, and keep a part; for a backward from the parts of `group`."""
        wholes = [group.unsharded for group in self._param_groups if group.unsharded is not None]
        if is_again and self._is_filled:
            return [self.group.all_gather_into(*pair) for pair in zip(wholes, self._kept, strict=True)]
        for pending in [group.gather() for group in self._param_groups]:
            pending.wait()
        self._is_filled = torch.is_grad_enabled()
        if self._is_filled:
            if not self._kept:
                with torch.inference_mode(False):
                    self._kept = [whole.new_empty(whole.numel() // self._ranks) for whole in wholes]
            for whole, kept in zip(wholes, self._kept, strict=True):
                kept.copy_(whole.narrow(0, self.group.index * kept.numel(), kept.numel()))
        return []
