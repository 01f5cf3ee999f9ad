"""Attributes that count what is cut: a module that splits by ``num_heads`` must count the heads that its rank has."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.tensor.placing import bind_named, mesh_of

_BEFORE = "_sharding_counts"
"""Where a module keeps what it counted before."""


@attrs.frozen(eq=False)
class Count:
    """An attribute that becomes this rank's share of it."""

    path: str
    module: nn.Module
    name: str
    value: int
    spec: ShardingSpec
    share: int

    def __str__(self) -> str:
        return f"{self.spec} of {self.value}"

    def apply(self) -> None:
        vars(self.module).setdefault(_BEFORE, {}).setdefault(self.name, self.value)
        setattr(self.module, self.name, self.share)


def count(path: str, module: nn.Module, name: str, spec: ShardingSpec, group: Group) -> Count:
    """Read an attribute as a dim of that length; the plan has been matched to what the module counts.

    Raises:
        LayoutError: it cannot be cut so.
    """
    found: int = getattr(module, name)
    try:
        (share,) = bind_named(spec, (found,), mesh_of(group)).local_shape(group.rank)
    except LayoutError as error:
        raise error.of(f"`{name}` of {path or 'the module'}") from None
    return Count(path, module, name, found, spec, share)


def count_as_before(module: nn.Module) -> None:
    """Give a module the numbers back that it had."""
    before: Mapping[str, int] = module.__dict__.pop(_BEFORE, {})
    for name, value in before.items():
        setattr(module, name, value)
