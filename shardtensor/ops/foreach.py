"""Operations on lists of tensors: torch's ``_foreach_*`` and ``_fused_*``, with which optimizers step.

A list may mix sharded and plain tensors. The elementwise ones work on the local tensors in the same one call; norms
take one reduction for the whole list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as _optim_types
from torch.utils._foreach_utils import _foreach_supported_types as _list_types

from shardtensor.comm.group import Group
from shardtensor.errors import RuleError
from shardtensor.layout.layout import Layout, replicated
from shardtensor.tensor.dispatch import HANDLERS, implements, refuse_partial_write
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.move import part
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, local_of, settled, wrap

Tensors = Sequence[torch.Tensor]
_LISTS = (list, tuple)

for _types in (_optim_types, _list_types):
    if ShardedTensor not in _types:  # torch's optimizers and clipping then choose foreach and fused as for plain ones
        _types.append(ShardedTensor)


# -- elementwise -----------------------------------------------------------------------------------------------------


def on_lists(func: Any) -> Callable[..., Any]:
    """The handler of an elementwise function over lists of tensors, in place or not."""
    in_place = func.__name__.endswith("_")
    is_step = func.__name__.startswith("_fused_")

    def handler(*args: Any, **kwargs: Any) -> Any:
        operands = [*args, *kwargs.values()]
        places = [i for i, x in enumerate(operands) if isinstance(x, _LISTS) and x and isinstance(x[0], torch.Tensor)]
        align = _step_column if is_step else _column
        locals_, columns = _aligned(func.__name__, [operands[i] for i in places], in_place, align)
        if locals_ is None:
            return fall_back(func, args, kwargs)
        for i, tensors in zip(places, locals_, strict=True):
            operands[i] = tensors
        operands = [x.full_tensor() if isinstance(x, ShardedTensor) else x for x in operands]  # one number for all
        count = len(args)
        out = func(*operands[:count], **dict(zip(kwargs, operands[count:], strict=True)))
        if in_place:
            if is_step:  # these kernels count no version, which autograd and fully sharded modules go by
                torch._C._increment_version(locals_[0])
                for i, tensors in zip(places, locals_, strict=True) if columns else ():
                    _write_back((*args, *kwargs.values())[i], tensors, args[0])
            return args[0] if out is not None and args else out
        return [x if like is None else wrap(x, like[0], None, like[1]) for x, like in zip(out, columns, strict=True)]

    return handler


Column = tuple[Layout, Group] | None


def _aligned(
    name: str, lists: list[Tensors], in_place: bool, align: Callable[..., tuple[list[torch.Tensor], Column] | None]
) -> tuple[list[list[torch.Tensor]] | None, list[Column]]:
    """Local tensors that belong together at every place of the lists, and what the results there are part of."""
    layouts = list(map(_layouts_of, lists))
    first = layouts[0]
    if all(
        other == first or all([y is None and not x.dim() for x, y in zip(tensors, other, strict=True)])
        for tensors, other in zip(lists, layouts, strict=True)
    ) and not any([layout is not None and layout.partial for layout in first]):
        locals_ = list(map(_locals_of, lists))
        if in_place:
            return locals_, []
        return locals_, [(x._layout, x._group) if isinstance(x, ShardedTensor) else None for x in lists[0]]
    locals_, columns = [[] for _ in lists], []
    for column in zip(*lists, strict=True):
        found = align(name, column, in_place)
        if found is None:
            return None, []
        columns.append(found[1])
        for tensors, x in zip(locals_, found[0], strict=True):
            tensors.append(x)
    return locals_, columns


def _layouts_of(tensors: Any) -> list[Layout | None]:
    if isinstance(tensors[0], ShardedTensor):
        try:
            return [x._layout for x in tensors]  # as they mostly are, when each need not be asked
        except AttributeError:
            pass
    return [x._layout if isinstance(x, ShardedTensor) else None for x in tensors]


def _locals_of(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors[0], ShardedTensor):
        try:
            return [x._local for x in tensors]
        except AttributeError:
            pass
    return list(map(local_of, tensors))


def _column(name: str, column: tuple[torch.Tensor, ...], in_place: bool) -> tuple[list[torch.Tensor], Column] | None:
    """Bring the tensors at one place of the lists to one layout; None when the result has none of their layouts."""
    base = next((x for x in column if isinstance(x, ShardedTensor)), None)
    if base is None:
        return list(column), None
    if in_place and not isinstance(column[0], ShardedTensor):  # a plain tensor is written: every rank needs the whole
        return [x.full_tensor() if isinstance(x, ShardedTensor) else x for x in column], None
    if base._layout.partial:
        if in_place:
            refuse_partial_write(base, name)
        base = settled(base)
    shape, layout, group = base.shape, base._layout, base._group
    if torch.broadcast_shapes(*(x.shape for x in column)) != shape:
        return None
    locals_ = []
    for x in column:
        if isinstance(x, ShardedTensor) and x.shape == shape:
            locals_.append(local_as(x, layout, group))
        else:
            x = x.full_tensor() if isinstance(x, ShardedTensor) else x
            locals_.append(x if x.dim() == 0 else part(x.expand(shape), layout, group))
    return locals_, (layout, group)


def _step_column(
    name: str, column: tuple[torch.Tensor, ...], in_place: bool
) -> tuple[list[torch.Tensor], Column] | None:
    """Move what a fused step reads and writes for one parameter to the parameter's layout.

    State that has another layout, as after a load, is laid out as the parameter from then on: the kernel writes into
    it. A plain tensor stays plain, and is written by `_write_back`.
    """
    param, group = column[0], next((x._group for x in column if isinstance(x, ShardedTensor)), None)
    if group is None:
        return list(column), None
    if isinstance(param, ShardedTensor):
        if param._layout.partial:
            refuse_partial_write(param, name)
        layout: Layout = param._layout
        group = param._group
    else:
        layout = replicated(tuple(param.shape), group.ranks)
    locals_ = []
    for x in column:
        if not x.dim() and param.dim():
            locals_.append(x.full_tensor() if isinstance(x, ShardedTensor) else x)  # a count of steps
        elif x.shape != param.shape:
            raise RuleError(
                f"{name}: a parameter and its state or gradient differ in shape",
                {"parameter": tuple(param.shape), "other": tuple(x.shape)},
                "load a state dict of this model; whole tensors have the global shape",
            )
        elif not isinstance(x, ShardedTensor):
            local = part(x, layout, group)
            locals_.append(x if layout.is_whole_on_all(group.size) else local.clone())
        else:
            if x._layout != layout:
                local = local_as(x, layout, group).detach()
                x._local = local.clone(memory_format=torch.contiguous_format)
                x._layout, x._group, x._spec, x._placements = layout, group, None, None
            locals_.append(x._local)
    return locals_, None


def _write_back(tensors: Tensors, locals_: list[torch.Tensor], params: Tensors) -> None:
    """Copy what a fused step wrote into parts of plain tensors to the tensors themselves, on every rank."""
    for x, local, param in zip(tensors, locals_, params, strict=True):
        if local is not x and not isinstance(x, ShardedTensor):
            assert isinstance(param, ShardedTensor)
            x.copy_(wrap(local, param._layout, None, param._group))


_REDUCE = frozenset({"_foreach_norm", "_foreach_powsum", "_foreach_max", "_foreach_mm"})

for _name in dir(torch):
    _is_fused_step = _name in ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")
    if (_name.startswith("_foreach_") and _name not in _REDUCE) or _is_fused_step:
        HANDLERS[getattr(torch, _name)] = on_lists(getattr(torch, _name))


# -- reductions ------------------------------------------------------------------------------------------------------


def global_norms(tensors: Tensors, ord: float = 2.0, *, foreach: bool = True) -> torch.Tensor:
    """Return the norm of every tensor, each element counted once: one reduction for each group of ranks.

    No gradient. All ranks of the groups call it. The number of kernels does not depend on the number of tensors
    (for each dtype and device).

    Args:
        tensors: sharded and plain ones (copies on every rank), of any dtypes and devices, at least one.
        ord: of the norm; ``inf``, ``-inf`` and 0 too.
        foreach: take the local norms in one call for the list.

    Returns:
        float64, one number for each tensor, equal on every rank, on the device of the first.
    """
    ord = float(ord)
    sums = _power_sums(tensors, ord, foreach)
    return sums if abs(ord) == torch.inf or ord == 0 else sums.pow_(1 / ord)


def global_norm(tensors: Tensors, ord: float, dtype: torch.dtype, *, foreach: bool = True) -> torch.Tensor:
    """Return the norm of all tensors seen as one vector: `global_norms` and their norm, in fewer small kernels.

    Args:
        tensors, ord, foreach: as of `global_norms`.
        dtype: of the result.

    Returns:
        a number, equal on every rank, on the device of the first tensor.
    """
    ord = float(ord)
    if abs(ord) == torch.inf or ord == 0:
        return torch.linalg.vector_norm(global_norms(tensors, ord, foreach=foreach), ord).to(dtype)
    total = _power_sums(tensors, ord, foreach, together=True).sum()
    if ord == 2:
        return torch.sqrt(total, out=torch.empty((), dtype=dtype, device=total.device))  # the root and the cast in one
    return total.pow_(1 / ord).to(dtype)


def _power_sums(tensors: Tensors, ord: float, foreach: bool, *, together: bool = False) -> torch.Tensor:
    """Of every tensor the sum of powers (largest or smallest magnitude) over the ranks, in float64.

    Args:
        together: give numbers that add up to the same, for which the ranks send one for each group.
    """
    tensors = [settled(x) if isinstance(x, ShardedTensor) else x for x in tensors]
    sums = _local_power_sums(tensors, ord, tensors[0].device, foreach)
    groups: dict[int, tuple[Group, list[int]]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor) and not x._layout.is_whole_on_all(x._group.size):
            groups.setdefault(id(x._group), (x._group, []))[1].append(i)
    if len(groups) > 1:  # those of the same ranks are one
        same: dict[tuple[int, ...], tuple[Group, list[int]]] = {}
        for group, places in groups.values():
            same.setdefault(tuple(group.ranks), (group, []))[1].extend(places)
        groups = dict(enumerate(same.values()))
    alone = next(iter(groups.values())) if len(groups) == 1 else None
    if alone is not None and len(alone[1]) == len(tensors):
        sums = _reduce(sums.sum(0, keepdim=True) if together else sums, ord, alone[0])
    elif groups:  # places are picked on the host: an index would be a copy to the device, and a wait for it
        each = list(sums.unbind())
        for group, places in groups.values():
            given = torch.stack([each[i] for i in places])
            reduced = _reduce(given.sum(0, keepdim=True) if together else given, ord, group).unbind()
            if together:
                each[places[0]] = reduced[0]
                for i in places[1:]:
                    each[i] = torch.zeros_like(reduced[0])
                continue
            for i, x in zip(places, reduced, strict=True):
                each[i] = x
        sums = torch.stack(each)
    return sums


def _local_power_sums(tensors: Tensors, ord: float, device: torch.device, foreach: bool) -> torch.Tensor:
    """What this rank adds: sums of powers (largest or smallest magnitudes), nothing for elements others count."""
    nothing = torch.inf if ord < 0 else 0.0  # to the power of ord: what adds nothing
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor):
            if x.numel() and not _counts(x):
                continue
            x = x._local
        kinds.setdefault((x.device, x.dtype), []).append(i)
    stacks: list[tuple[torch.Tensor, list[int]]] = []
    for (_, kind), places in kinds.items():
        locals_ = [local_of(tensors[i]).detach() for i in places]
        wide = torch.promote_types(kind, torch.float32)  # a bfloat16 norm would be rounded before it is summed
        if foreach:
            norms = list(torch._foreach_norm(locals_, ord, dtype=wide))
        else:
            norms = [torch.linalg.vector_norm(x, ord, dtype=wide) for x in locals_]
        stacks.append((torch.stack(norms).to(device, torch.float64), places))
    if len(stacks) == 1 and len(stacks[0][1]) == len(tensors):
        sums = stacks[0][0]
    else:
        each = [torch.full((), nothing, dtype=torch.float64, device=device)] * len(tensors)
        for stacked, places in stacks:
            for i, norm in zip(places, stacked.unbind(), strict=True):
                each[i] = norm
        sums = torch.stack(each)
    return sums if abs(ord) == torch.inf or ord == 0 else sums.pow_(ord)


def _counts(x: ShardedTensor) -> bool:
    """Whether this rank counts the elements it holds of `x`: as a plain tensor's, or as the first that holds them."""
    layout, group = x._layout, x._group
    if layout.is_whole_on_all(group.size):
        return True
    return x._local.numel() > 0 and layout.holds_first_copy(group.rank)


def _reduce(sums: torch.Tensor, ord: float, group: Group) -> torch.Tensor:
    if abs(ord) != torch.inf:
        return group.all_reduce(sums)
    # Backends may lose a nan among larger numbers: it travels as a second number. The smallest is -largest of -x.
    sign = 1 if ord > 0 else -1
    is_nan = sums.isnan()
    both = torch.cat([sums.masked_fill(is_nan, 0.0) * sign, is_nan.to(sums.dtype)])
    largest, has_nan = group.all_reduce(both, "max").chunk(2)
    return sums.copy_(torch.where(has_nan > 0, torch.nan, largest * sign))


@implements(torch._foreach_norm)
def foreach_norm(self: Tensors, ord: float = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the norm of every tensor as a plain one, equal on every rank; one reduction for the list."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in self):
        return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in self]
    kinds = [dtype or x.dtype.to_real() for x in self]
    norms = global_norms(self, ord)
    if len(set(kinds)) == 1 and all(x.device == norms.device for x in self):
        return list(norms.to(kinds[0]).unbind())
    return [norm.to(x.device, kind) for norm, x, kind in zip(norms.unbind(), self, kinds, strict=True)]


@implements(torch._amp_foreach_non_finite_check_and_unscale_)
def unscale(self: Tensors, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Divide gradients by the scale; `found_inf` is 1 on every rank when any rank found an inf or a nan."""
    locals_ = list(map(local_of, self))
    torch._amp_foreach_non_finite_check_and_unscale_(locals_, found_inf, inv_scale)
    for group in groups_of(self):
        group.all_reduce(found_inf, "max")


def groups_of(tensors: Iterable[torch.Tensor]) -> list[Group]:
    """The groups of ranks that tensors live on, in the order they are first met."""
    return list({id(x._group): x._group for x in tensors if isinstance(x, ShardedTensor)}.values())
