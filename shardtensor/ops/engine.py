"""Run an operation by its rule: bring every operand to the layout it needs, compute locally, wrap the result.

What an operation needs is decided in `shardtensor.rules`; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.errors import RuleError
from shardtensor.layout.layout import CutLayout, Layout
from shardtensor.rules.propagate import Need, propagate
from shardtensor.rules.rule import Rule
from shardtensor.tensor.dispatch import is_strict
from shardtensor.tensor.move import along, part
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, settled, wrap


def run(
    name: str,
    rule: Rule,
    operands: Sequence[torch.Tensor],
    compute: Callable[..., torch.Tensor],
    *,
    keep_partial: bool = False,
) -> torch.Tensor | None:
    """Return ``compute(*local operands)`` as the tensor it is a part of; None when the rule does not apply.

    Args:
        name: of the operation, for messages.
        rule: one letter for each dim of each operand.
        operands: plain tensors (copies on every rank) and sharded ones.
        compute: gets the local tensors, in order, and returns the local result.
        keep_partial: leave a result that is to be summed partial; the default sums it at once (one all-reduce).

    Returns:
        A ShardedTensor; a plain tensor when no rank holds only a part; None when no operand is cut over a grid.
    """
    operands = [settled(x) if isinstance(x, ShardedTensor) else x for x in operands]
    first = next(x for x in operands if isinstance(x, ShardedTensor))
    group = _one_group(name, operands)
    recipe = propagate(rule, tuple(x._layout if isinstance(x, ShardedTensor) else tuple(x.shape) for x in operands))
    if recipe is None:
        return None
    locals_ = [bring(name, x, need, group) for x, need in zip(operands, recipe.needs, strict=True)]
    return finish(compute(*locals_), recipe.output, group, first._spec, keep_partial=keep_partial)


def bring(name: str, x: torch.Tensor, need: Need, group: Group) -> torch.Tensor:
    """Return the local tensor of `x` in the layout it needs, with the backward that this asks for."""
    if need.moves:
        assert isinstance(x, ShardedTensor)
        if is_strict():
            raise RuleError(
                f"{name}: an operand must be laid out anew",
                {"operand": f"{tuple(x.shape)} {x.dtype}", "has": str(x.sharding_spec()), "needs": say(need.layout)},
                ["bring it there with a reshard first", "leave strict() to let it move"],
            )
    local = local_as(x, need.layout, group)
    if need.addend_axes:
        local = collectives.sum_gradient(local, along(group, need.layout, need.addend_axes))
    return local


def finish(
    local: torch.Tensor, layout: Layout, group: Group, spec: Any = None, *, keep_partial: bool = False
) -> torch.Tensor:
    """Wrap a local result; sum it when it is partial; hand out a plain tensor when every rank has the whole."""
    if layout.partial and not keep_partial:
        axes = [axis for axis, _ in layout.partial]
        local = collectives.all_reduce(local, along(group, layout, axes))
        layout = layout.reduced()
    if layout.is_replicated:
        return local
    return wrap(local, layout, None, group)


def say(layout: Layout) -> str:
    """A layout in brackets, for messages."""
    if not isinstance(layout, CutLayout):
        return str(layout)
    names = layout.names or tuple(f"axis{i}" for i in range(len(layout.grid)))
    return "[" + ", ".join("-" if cut is None else "*".join(names[a] for a in cut.axes) for cut in layout.dims) + "]"


def _one_group(name: str, operands: Sequence[torch.Tensor]) -> Group:
    groups = list({id(x._group): x._group for x in operands if isinstance(x, ShardedTensor)}.values())
    if len(groups) > 1:
        raise RuleError(
            f"{name}: the operands live on different process groups",
            {f"group {i}": f"{len(group.ranks)} ranks" for i, group in enumerate(groups)},
            "make them on one group, or call full_tensor() on one of them",
        )
    return groups[0]


__all__ = ["bring", "finish", "part", "run", "say"]
