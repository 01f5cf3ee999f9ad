"""Run an operation by its rule: bring every operand to the layout it needs, compute locally, wrap the result.

What an operation needs is decided in `shardtensor.rules`; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.errors import RuleError
from shardtensor.layout.layout import Layout
from shardtensor.ops.refusing import refuse
from shardtensor.rules.propagate import Need, Recipe, propagate
from shardtensor.rules.rule import Rule
from shardtensor.tensor.dispatch import is_strict
from shardtensor.tensor.move import part, settle
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, settled, wrap
from shardtensor.tensor.teams import along

HALF = (torch.float16, torch.bfloat16)


def run(
    name: str,
    rule: Rule,
    operands: Sequence[torch.Tensor],
    compute: Callable[..., torch.Tensor],
) -> torch.Tensor | None:
    """Return ``compute(*local operands)`` as the tensor it is a part of; None when the rule does not apply.

    Addends are summed at once (one all-reduce). All ranks of the operands' group call it.

    Args:
        name: of the operation, for messages.
        rule: one letter for each dim of each operand.
        operands: plain tensors (copies on every rank) and sharded ones.
        compute: gets the local tensors, in order, and returns the local result.

    Returns:
        A ShardedTensor; a plain tensor when no rank holds only a part; None when no operand is cut over a grid.
    """
    ready = prepare(name, rule, operands)
    if ready is None:
        return None
    return finish(computed(compute, ready.locals), ready.recipe.output, ready.group)


def computed(compute: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Any:
    """The local result, or results; one that is empty is in the graph of all its operands.

    Some of torch's functions leave operands out of the graph when they have nothing to compute. Backward is collective:
    a rank with an empty part must go through the same nodes as the others.
    """
    local = compute(*operands)
    if isinstance(local, torch.Tensor):
        return local if local.numel() else _in_graph(local, operands)
    if all(x.numel() for x in local):
        return local
    found = [x if x.numel() else _in_graph(x, operands) for x in local]
    return type(local)(found) if isinstance(local, tuple) else found


def _in_graph(local: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    for x in operands:
        if x.requires_grad and (local.is_floating_point() or local.is_complex()):
            link = x.sum()
            link = link.real if link.is_complex() and not local.is_complex() else link
            local = local + link.to(local.dtype) * 0
    return local


class Prepared(NamedTuple):
    """The local operands of one call, where they lie, and who takes part."""

    locals: list[torch.Tensor]
    recipe: Recipe
    group: Group


def prepare(name: str, rule: Rule, operands: Sequence[torch.Tensor]) -> Prepared | None:
    """Bring the operands to the layouts that the rule gives them; None when the rule does not apply."""
    operands = [settled(x) if isinstance(x, ShardedTensor) else x for x in operands]
    group = group_of(name, operands)
    layouts = tuple(x._layout if isinstance(x, ShardedTensor) else x.shape for x in operands)
    recipe = propagate(rule, layouts)
    if recipe is not None and any(need.moves for need in recipe.needs):
        if is_strict():
            refuse(name, rule, operands)
        if len({x.dtype for x in operands}) > 1:
            recipe = propagate(rule, layouts, tuple(x.element_size() for x in operands))
    if recipe is None or (len(recipe.settled.ranks) != group.size and not _fits_a_part(recipe, operands)):
        return None
    locals_ = [bring(name, x, need, group) for x, need in zip(operands, recipe.needs, strict=True)]
    return Prepared(locals_, recipe, group)


def on_grid(name: str, x: ShardedTensor, whole: Sequence[int] = ()) -> ShardedTensor | None:
    """`x`, which lies in boxes or ranges, cut over a dim that is not among `whole`; None where there is none.

    Each rank receives what it lacks of its part. All ranks of the group call it.
    """
    x = settled(x)
    letters = tuple(f"d{k}" for k in range(x.dim()))
    recipe = propagate(Rule((letters,), letters, frozenset(letters[k] for k in whole)), (x._layout,))
    if recipe is None or not recipe.settled.cut_dims:
        return None
    refuse_to_move(name, x, recipe.settled)
    return wrap(local_as(x, recipe.settled, x._group), recipe.settled, None, x._group)


def _fits_a_part(recipe: Recipe, operands: Sequence[torch.Tensor]) -> bool:
    """Whether ranks outside the grid can compute with empty tensors: something is cut, and no shell is a copy."""
    is_cut = any(need.layout.cut_dims for need in recipe.needs)
    return is_cut and not any(isinstance(x, ShardedTensor) and x._layout.is_replicated for x in operands)


def bring(name: str, x: torch.Tensor, need: Need, group: Group) -> torch.Tensor:
    """Return the local tensor of `x` in the layout it needs, with the backward that this asks for."""
    layout = need.layout
    if isinstance(x, ShardedTensor):
        if need.moves:
            refuse_to_move(name, x, layout)
        if x._layout is layout or x._layout == layout:
            local = x._local
        elif layout.cut_dims or len(layout.ranks) == group.size:
            local = local_as(x, layout, group)
        else:  # ranks outside the layout compute with the whole, too
            local = x.full_tensor()
    else:
        local = part(x, layout, group) if layout.cut_dims else x
    if need.addend_axes and local.requires_grad:
        local = collectives.sum_gradient(local, along(group, layout, need.addend_axes))
    return local


def refuse_to_move(name: str, x: ShardedTensor, layout: Layout) -> None:
    """Raise RuleError under `strict`, where `x` would be laid out anew for operation `name`."""
    if is_strict():
        raise RuleError(
            f"{name}: an operand must be laid out anew",
            {"operand": f"{tuple(x.shape)} {x.dtype}", "has": str(x.sharding_spec()), "needs": str(layout)},
            ["make it of that layout: distribute(operand, spec)", "leave strict() to let it move"],
        )


def finish(local: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Wrap a local result; join it when it is partial; hand out a plain tensor when every rank has the whole."""
    if layout.partial:
        local, layout = settle(local, layout, group), layout.reduced()
    if layout.is_replicated:
        return local
    return wrap(local, layout, None, group)


def group_of(name: str, operands: Sequence[torch.Tensor]) -> Group:
    """The one group that the sharded operands live on.

    Raises:
        RuleError: they live on several.
    """
    group: Group | None = None
    for x in operands:
        if isinstance(x, ShardedTensor) and x._group is not group:
            if group is not None:
                raise RuleError(
                    f"{name}: All distributed tensors should use the same ProcessGroup if used together in an op.",
                    {"one": _say_group(group), "other": _say_group(x._group)},
                    "make them on one group, or call full_tensor() on one of them",
                )
            group = x._group
    assert group is not None, "a handler is called for at least one ShardedTensor"
    return group


def _say_group(group: Group) -> str:
    return f"ranks {list(group.ranks)}" + ("" if group.mesh is None else f" of the mesh {group.mesh}")
