"""Attributes that count what is cut: a module that splits by ``num_heads`` must count the heads that its rank has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, PlanError
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.tensor.binding import bind_named
from shardtensor.tensor.placing import mesh_of

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
    """Read an attribute as a dim of that length.

    Raises:
        PlanError: there is no such attribute, or it does not count anything; LayoutError: it cannot be cut so.
    """
    where = f"{path or 'the module'}, a {type(module).__name__},"
    found: Any = getattr(module, name, None)
    if type(found) is not int or isinstance(getattr(type(module), name, None), property):
        counted = ", ".join(key for key, value in vars(module).items() if type(value) is int)
        raise PlanError(
            f"{where} has no attribute `{name}`"
            if not hasattr(module, name)
            else f"{where} does not count by `{name}`",
            {"line": f"local {name}: {spec}", "found": type(found).__name__, "what counts": counted or "nothing"},
            "name a whole number that forward reads from self",
        )
    try:
        (share,) = bind_named(spec, (found,), mesh_of(group)).local_shape(group.rank)
    except LayoutError as error:
        fault, *facts = str(error).splitlines()
        raise LayoutError("\n".join([f"`{name}` of {path or 'the module'}: {fault}", *facts])) from None
    return Count(path, module, name, found, spec, share)


def count_as_before(module: nn.Module) -> None:
    """Give a module the numbers back that it had."""
    before: Mapping[str, int] = module.__dict__.pop(_BEFORE, {})
    for name, value in before.items():
        setattr(module, name, value)
