"""What `shard_module` can be told: torch's `ShardingPlan`, and the two classes people derive from beside it."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import attrs
from torch import nn

from shardtensor.spec.devices import with_dataclass_fields
from shardtensor.spec.nodes import ShardingSpec


class Sharder(abc.ABC):
    """Shards a module in a way of its own: a plan names it where it else names a spec."""

    @abc.abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return what takes the place of `module` in its parent: a module, perhaps the same one.

        One that cannot be called, where `module` can, is no replacement: then `module` stays, as `shard` has left it.
        """


@with_dataclass_fields()
@attrs.define
class ShardingPlan:
    """How to shard a module, as ``torch.distributed._shard.sharding_plan`` says it.

    Attributes:
        plan: pattern of parameter names -> spec or its text; or pattern of submodules -> `Sharder`.
        output_plan: pattern of submodules -> the layout in which they shall give their result.
        return_local_tensor: patterns of submodules that shall give this rank's part of their result, as plain tensors;
            after what `output_plan` says. ``""`` is the module itself, here and in `output_plan`.
    """

    plan: Mapping[str, ShardingSpec | str | Sharder]
    output_plan: Mapping[str, ShardingSpec | str] | None = None
    return_local_tensor: Sequence[str] | None = None


class ShardingPlanner(abc.ABC):
    """Makes plans for modules."""

    @abc.abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return a plan for `module`."""
