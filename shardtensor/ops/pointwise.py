"""Elementwise operations, with broadcasting: ``d0 d1, d1, d0 1 -> d0 d1``.

An operand that is whole along a dim that another one has cut is sliced there. Operands of one layout, whatever it is,
and Python numbers are worked on where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from shardtensor.comm import collectives
from shardtensor.layout.layout import CutLayout
from shardtensor.ops.by_rule import decided
from shardtensor.ops.engine import group_of, refuse_to_move, run
from shardtensor.ops.local_call import remembered
from shardtensor.ops.out import write_out
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS, rule_of
from shardtensor.tensor.dispatch import HANDLERS, fall_back, name_of, spellings
from shardtensor.tensor.move import part
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, settled, wrap
from shardtensor.tensor.teams import along

ELEMENTWISE = tuple(name for name, row in ROWS.items() if row.section.startswith("elementwise:"))
NUMBERS = frozenset((int, float, bool, complex))


def elementwise(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The handler of an elementwise function of any operands, by the row of `name`."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], ShardedTensor):
            x = args[0]
            layout = x._layout
            if not layout.partial and not layout.is_replicated:
                local = _fast(func, x, args, kwargs)
                if local is not None:
                    return wrap(local, layout, x._spec, x._group)
        return otherwise(*args, **kwargs)

    def general(*args: Any, **kwargs: Any) -> Any:
        return spread(func, args, kwargs, name)

    otherwise = remembered(func, lambda args, kwargs: decided(func, name, args, kwargs), general, name)
    return handler


def _fast(func: Any, x: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The local result where nothing has to be sliced or moved, in a few microseconds; None for all other calls."""
    if kwargs:
        if len(args) > 1 or kwargs.get("inplace") or any(isinstance(v, torch.Tensor) for v in kwargs.values()):
            return None
        return func(x._local, **kwargs)
    if len(args) == 1:
        return func(x._local)
    if len(args) > 2:
        return None
    y = args[1]
    if type(y) in NUMBERS:
        return func(x._local, y)
    if isinstance(y, ShardedTensor):
        if y._layout == x._layout and y._group is x._group:
            return func(x._local, y._local)
        return None
    if isinstance(y, torch.Tensor) and isinstance(x._layout, CutLayout):
        axes = _meets_whole(x._layout, y.shape)
        if axes is not None:
            return func(
                x._local, collectives.sum_gradient(y, along(x._group, x._layout, axes)) if y.requires_grad else y
            )
    return None


@lru_cache(maxsize=4096)
def _meets_whole(layout: CutLayout, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes along which a plain operand of `shape` is an addend when used as it is; None where it is sliced."""
    skip = len(layout.shape) - len(shape)
    if skip < 0:
        return None
    for n, full, cut in zip(shape, layout.shape[skip:], layout.dims[skip:], strict=True):
        if n != 1 and (cut is not None or n != full):
            return None
    return layout.parting_axes


def spread(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Compute an elementwise function of operands of any layouts and shapes, by the row of `name`."""
    if kwargs.get("out") is not None:
        return write_out(lambda f, a, k: spread(f, a, k, name), func, args, kwargs)
    if kwargs.get("inplace"):
        from shardtensor.ops.inplace import write

        return write(func, args, kwargs)
    places: list[Any] = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    operands = [args[i] for i in places] + [kwargs[name] for name in names]

    def compute(*locals_: torch.Tensor) -> Any:
        filled = list(args)
        for i, local in zip(places, locals_, strict=False):
            filled[i] = local
        return func(*filled, **{**kwargs, **dict(zip(names, locals_[len(places) :], strict=True))})

    if any(type(value).__module__ == "numpy" and getattr(value, "ndim", 0) for value in args):
        return fall_back(func, args, kwargs)
    out = broadcast(name_of(func), operands, compute, rule_for(name, tuple(x.shape for x in operands)))
    return fall_back(func, args, kwargs) if out is None else out


def broadcast(name: str, operands: list[torch.Tensor], compute: Callable[..., Any], rule: Rule) -> Any:
    """Return ``compute(*locals)`` of operands that broadcast, None when their layouts cannot be met."""
    listed = [x for x in operands if isinstance(x, ShardedTensor) and not isinstance(x._layout, CutLayout)]
    if not listed or any(
        isinstance(x, ShardedTensor) and isinstance(x._layout, CutLayout) and not x._layout.is_replicated
        for x in operands
    ):
        return run(name, rule, operands, compute)
    base = next((x for x in listed if len(x.shape) == len(rule.output) and _fills(x, operands)), None)
    if base is None or not base.shape:
        return None
    group = group_of(name, operands)
    base = settled(base)
    return wrap(compute(*(beside(name, x, base) for x in operands)), base._layout, base._spec, group)


def _fills(x: torch.Tensor, operands: list[torch.Tensor]) -> bool:
    """Whether the result has the shape of `x`; one element beside none gives none."""
    return x.shape == torch.broadcast_shapes(*(other.shape for other in operands))


def beside(name: str, x: torch.Tensor, base: ShardedTensor) -> torch.Tensor:
    """Return the local tensor of `x`, broadcast to `base`, where `base` has its boxes; scalars stay scalars."""
    layout, group = base._layout.reduced(), base._group
    if isinstance(x, ShardedTensor):
        if x._layout == layout:
            return x._local
        if not x._layout.is_replicated:
            refuse_to_move(name, x, layout)
        if tuple(x.shape) == layout.shape:
            return local_as(x, layout, group)
        x = x.full_tensor()
    if not x.dim():
        return collectives.sum_gradient(x, along(group, layout, layout.parting_axes))
    return part(x.expand(layout.shape), layout, group)


def rule_for(name: str, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    """The rule of operands of these shapes; where they do not broadcast, the error that torch gives."""
    rule = rule_of(name, shapes)
    if rule is None:
        total = torch.empty(()).expand(shapes[0])
        for other in shapes[1:]:
            total = total + torch.empty(()).expand(other)
        raise AssertionError(f"torch broadcasts {shapes}")
    return rule


for _name in ELEMENTWISE:
    for _func in spellings(_name):
        HANDLERS[_func] = elementwise(_func, _name)


def _where(func: Any) -> Any:
    """The handler of ``where``, which with one argument is ``nonzero``."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) == 1:
            return torch.nonzero(*args, *kwargs.values(), as_tuple=True)
        return spread(func, args, kwargs, "where")

    def decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if len(args) + len(kwargs) == 1 else decided(func, "where", args, kwargs)

    return remembered(func, decide, handler, "where")


for _func in spellings("where"):
    HANDLERS[_func] = _where(_func)
