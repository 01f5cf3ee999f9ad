"""Inputs of `shard_module`: torch's `ShardingPlan`, and the two classes that users derive from."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import attrs
from torch import nn

from shardtensor.spec.devices import with_dataclass_fields
from shardtensor.spec.nodes import ShardingSpec


class Sharder(abc.ABC):
    """Shards a module in a user-defined way. Use it in a plan in place of a spec."""

    @abc.abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the module that replaces `module` in its parent, perhaps the same one.

        If the result is not callable and `module` is, `module` is not replaced; it keeps the changes that `shard` made.
        """


@with_dataclass_fields()
@attrs.define
class ShardingPlan:
    """How to shard a module, in the form of ``torch.distributed._shard.sharding_plan``.

    Attributes:
        plan: pattern of parameter names -> spec or its text; or pattern of submodules -> `Sharder`.
        output_plan: pattern of submodules -> the layout of their result.
        return_local_tensor: patterns of submodules that return this rank's part of their result, as plain tensors;
            after `output_plan`. ``""`` is the module itself, here and in `output_plan`.
    """

    plan: Mapping[str, ShardingSpec | str | Sharder]
    output_plan: Mapping[str, ShardingSpec | str] | None = None
    return_local_tensor: Sequence[str] | None = None


class ShardingPlanner(abc.ABC):
    """Makes plans for modules."""

    @abc.abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return a plan for `module`."""
