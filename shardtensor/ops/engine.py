"""Run an operation by its rule: redistribute the operands to the layouts it needs, compute locally, wrap the result.

`shardtensor.rules` decides the layouts; this module decides nothing.

Many of torch's kernels refuse an empty operand, or treat it differently: in another dtype under autocast, outside the
graph, without the terms of a second derivative. Backward is collective, so a rank with an empty part must run the same
nodes as the others: it computes one element more along each dim that is empty on it alone, and drops the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs
import torch
import torch.nn.functional as F

from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import part, redistribute, whole
from shardtensor.errors import RuleError
from shardtensor.layout.explain import step_text
from shardtensor.layout.layout import Layout, MeshLayout
from shardtensor.layout.route import route
from shardtensor.rules.propagate import OpSharding, fault_in, propagate, ways_out
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS
from shardtensor.tensor.dispatch import is_strict, name_of
from shardtensor.tensor.placing import spec_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, reduced, wrap

# -- errors under `strict` ---------------------------------------------------------------------------------------------


def refuse(name: str, rule: Rule, operands: Sequence[torch.Tensor]) -> NoReturn:
    """Raise the RuleError of a call that would redistribute operands. Sends nothing; the same on every rank."""
    names = operand_names(name, len(operands))
    layouts = layouts_of(operands)
    facts: dict[str, object] = {"rule": str(rule)}
    columns = [_columns(x) for x in operands]
    widths = [max(len(row[i]) for row in columns) for i in range(2)]
    for operand, row in zip(names, columns, strict=True):
        facts[operand] = "   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    ways = ways_out(rule, layouts, tuple(x.element_size() for x in operands))
    calls = [[_call(names[i], operands[i], layout) for i, layout in way.moves] for way in ways]
    size_bytes = max(x.element_size() for x in operands)
    for way, lines in zip(ways, calls, strict=True):
        if way.output.partial:
            output = _named(way.output, next(x for x in operands if isinstance(x, ShardedTensor)))
            lines.append(("and of the result", _steps(output, output.reduced(), size_bytes)))
    width = max(len(call) for way in calls for call, _ in way)
    fixes = ["\n".join(f"{call:<{width}}   {steps}" for call, steps in lines) for lines in calls]
    raise RuleError(f"{name}: {fault_in(rule, layouts, names)}", facts, fixes)


def operand_names(name: str, count: int) -> list[str]:
    """Return the operands' names in messages: those of the operation's row."""
    row = ROWS.get(name.rpartition(".")[2].strip("_"))
    operands = row.call.operands if row is not None else ()
    if row is not None and row.pattern is not None and row.pattern.listed:
        return [f"{operands[0]}[{i}]" for i in range(count)]
    if len(operands) >= count:
        return list(operands[:count])
    return ["input", "other"][:count] if count <= 2 else [f"operand {i + 1}" for i in range(count)]


def _columns(x: torch.Tensor) -> tuple[str, str]:
    spec = str(x.sharding_spec()) if isinstance(x, ShardedTensor) else "plain"
    return spec, f"{' x '.join(map(str, x.shape)) or 'scalar'} {str(x.dtype).removeprefix('torch.')}"


def _call(name: str, x: torch.Tensor, layout: Layout) -> tuple[str, str]:
    """Return the call that redistributes an operand, and the steps it takes."""
    assert isinstance(x, ShardedTensor)
    layout = _named(layout, x)
    return f'reshard({name}, "{spec_of(layout, x.device)}")', _steps(x._layout, layout, x.element_size())


def _named(layout: Layout, x: ShardedTensor) -> Layout:
    """Return the layout with the axis names of `x`, if both are over the same grid."""
    same = x._layout.grid == layout.grid and x._layout.ranks == layout.ranks
    return attrs.evolve(layout, names=x._layout.names) if same else layout


def _steps(source: Layout, target: Layout, size_bytes: int) -> str:
    return "; ".join(", ".join(step_text(step, size_bytes).split("   ")) for step in route(source, target))


# -- ``out=`` ----------------------------------------------------------------------------------------------------------


def write_out(compute: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return ``out`` with the values of ``compute(func, args, kwargs)``, of its own layout.

    Raises:
        RuleError: `out` is sharded and has another shape; torch would resize it.
        RuntimeError: as torch: an operand requires a gradient, or the dtype of the result does not fit.
    """
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    values = [*args, *kwargs.values(), out]
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in values):
        raise RuntimeError(
            f"{name_of(func)}(): functions with out=... arguments don't support automatic differentiation, but one of "
            "the arguments requires grad."
        )
    result = (
        compute(func, args, kwargs) if any(isinstance(x, ShardedTensor) for x in values[:-1]) else func(*args, **kwargs)
    )
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.dtype}")
    if out.shape != result.shape:
        if isinstance(out, ShardedTensor) or out.numel():
            raise RuleError(
                f"{name_of(func)}: out has another shape than the result",
                {"out": tuple(out.shape), "result": tuple(result.shape)},
                "make out of the shape of the result",
            )
        out.resize_(result.shape)
    with torch.no_grad():
        return out.copy_(
            result.full_tensor() if isinstance(result, ShardedTensor) and not isinstance(out, ShardedTensor) else result
        )


# -- the engine --------------------------------------------------------------------------------------------------------


HALF = (torch.float16, torch.bfloat16)


def chosen_sharding(
    name: str, rule: Rule, operands: Sequence[torch.Tensor], *, for_every_dtype: bool = False
) -> tuple[OpSharding, Group] | None:
    """Return the layouts that a call needs and gives, and its group; None when the rule does not apply.

    Args:
        for_every_dtype: choose for all calls of operands in these layouts, if all ranks of the group hold them. Else
            for this call: the sizes of elements decide what is cheapest, and under `strict` a redistribution raises
            RuleError.
    """
    group = group_of(name, operands)
    layouts = layouts_of(operands)
    sharding = propagate(rule, layouts)
    if sharding is not None and not for_every_dtype and any(need.moves for need in sharding.needs):
        if is_strict():
            refuse(name, rule, operands)
        if len({x.dtype for x in operands}) > 1:
            sharding = propagate(rule, layouts, tuple(x.element_size() for x in operands))
    if sharding is None:
        return None
    if len(sharding.reduced.ranks) != group.size and (for_every_dtype or not _fits_a_part(sharding, operands)):
        return None
    return sharding, group


def layouts_of(operands: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return for each operand its layout once reduced, or the shape of a plain one, as `propagate` takes them."""
    return tuple(x._layout.reduced() if isinstance(x, ShardedTensor) else x.shape for x in operands)


def on_grid(name: str, x: ShardedTensor) -> ShardedTensor | None:
    """Redistribute `x` from boxes or ranges to shards of a dim; return None without such a dim.

    Each rank receives the elements that it lacks. All ranks of the group call it.
    """
    x = reduced(x)
    letters = tuple(f"d{k}" for k in range(x.dim()))
    sharding = propagate(Rule((letters,), letters), (x._layout,))
    if sharding is None or not sharding.reduced.cut_dims:
        return None
    refuse_to_move(name, x, sharding.reduced)
    return wrap(local_as(x, sharding.reduced, x._group), sharding.reduced, None, x._group)


def _fits_a_part(sharding: OpSharding, operands: Sequence[torch.Tensor]) -> bool:
    """Return whether ranks outside the grid can compute with empty tensors: an operand is sharded, none replicated."""
    is_cut = any(need.layout.cut_dims for need in sharding.needs)
    return is_cut and not any(isinstance(x, ShardedTensor) and x._layout.is_replicated for x in operands)


Move = tuple[Layout | None, Layout | None]
"""From one layout to another; the first is None for a plain tensor, the second None for the whole on every rank."""


def move_to(x: torch.Tensor, layout: MeshLayout, group: Group) -> Move | None:
    """Return how the local tensor of an operand is brought to a layout; None if it is in it."""
    if not isinstance(x, ShardedTensor):
        return (None, layout) if layout.cut_dims else None
    if x._layout is layout or x._layout == layout:
        return None
    is_on_all = layout.cut_dims or len(layout.ranks) == group.size  # else ranks outside compute with the whole, too
    return x._layout, layout if is_on_all else None


def arranged(local: torch.Tensor, source: Layout | None, target: Layout | None, group: Group) -> torch.Tensor:
    """Bring the local tensor of an operand from one layout to another; see `Move`."""
    if source is None:
        assert target is not None
        return part(local, target, group)
    return whole(local, source, group) if target is None else redistribute(local, source, target, group)


def refuse_to_move(name: str, x: ShardedTensor, layout: Layout) -> None:
    """Raise RuleError under `strict`, because operation `name` would redistribute `x`."""
    if is_strict():
        raise RuleError(
            f"{name}: an operand must be laid out anew",
            {"operand": f"{tuple(x.shape)} {x.dtype}", "has": str(x.sharding_spec()), "needs": str(layout)},
            ["make it of that layout: distribute(operand, spec)", "leave strict() to let it move"],
        )


def group_of(name: str, operands: Sequence[torch.Tensor]) -> Group:
    """Return the group of the sharded operands.

    Raises:
        RuleError: they have different groups.
    """
    group: Group | None = None
    for x in operands:
        if isinstance(x, ShardedTensor) and x._group is not group:
            if group is not None:
                raise RuleError(
                    f"{name}: All distributed tensors should use the same ProcessGroup if used together in an op.",
                    {"one": _group_text(group), "other": _group_text(x._group)},
                    "make them on one group, or call full_tensor() on one of them",
                )
            group = x._group
    assert group is not None, "a handler is called for at least one ShardedTensor"
    return group


def _group_text(group: Group) -> str:
    return f"ranks {list(group.ranks)}" + ("" if group.mesh is None else f" of the mesh {group.mesh}")


# -- empty parts -------------------------------------------------------------------------------------------------------


def computed(compute: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Any:
    """Return the local result, or results; attach empty ones to the graph of all operands."""
    local = compute(*operands)
    if isinstance(local, torch.Tensor):
        return local if local.numel() else in_graph(local, operands)
    if all(x.numel() for x in local):
        return local
    found = [x if x.numel() else in_graph(x, operands) for x in local]
    return type(local)(found) if isinstance(local, tuple) else found


def in_graph(local: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `local` attached to the graph of the operands, with unchanged values: backward is collective."""
    for x in operands:
        if x.requires_grad and (local.is_floating_point() or local.is_complex()):
            link = x.sum()
            link = link.real if link.is_complex() and not local.is_complex() else link
            local = local + (link.to(local.dtype) * 0).expand_as(local)  # else a dim of size 1 gets stride 0
    return local


def computed_alike(
    compute: Callable[..., Any], rule: Rule | None, layouts: Sequence[MeshLayout], operands: Sequence[torch.Tensor]
) -> Any:
    """Return the local result, or results, of operands of these layouts; an empty part gets one element more.

    Args:
        rule: of the call; None for one that torch computes on empty operands as on others.
    """
    if rule is None or all(x.numel() for x in operands):
        return computed(compute, operands)
    none = {
        letter
        for letters, layout, x in zip(rule.inputs, layouts, operands, strict=True)
        for letter, here, size in zip(letters, x.shape, layout.shape, strict=True)
        if size and not here
    }
    full = []
    for letters, x in zip(rule.inputs, operands, strict=True):
        dims = [d for d, letter in enumerate(letters) if letter in none]
        adds = any(letters[d] not in rule.output for d in dims)
        full.append(at_least_one(x, dims, 0.0 if adds else 1.0))  # an empty sum adds zero
    found = computed(compute, full)
    dims = [d for d, letter in enumerate(rule.output) if letter in none]

    def without(x: torch.Tensor) -> torch.Tensor:
        for d in dims:
            x = x.narrow(d, 0, 0)
        return x

    if isinstance(found, torch.Tensor):
        return without(found)
    parts = [without(x) for x in found]
    return type(found)(parts) if isinstance(found, tuple) else parts


def at_least_one(x: torch.Tensor, dims: list[int] | range, value: float = 1.0) -> torch.Tensor:
    """Return `x` with one element, `value` (0 in indices), along each of `dims` that is empty. Differentiable."""
    if x.numel():
        return x
    pads = [n for d in reversed(range(x.dim())) for n in (0, int(d in dims and x.shape[d] == 0))]
    return F.pad(x, pads, value=value if x.is_floating_point() or x.is_complex() else 0)
