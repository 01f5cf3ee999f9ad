"""Operations on lists of tensors: torch's ``_foreach_*`` and ``_fused_*``, which optimizers call.

A list may mix sharded and plain tensors. Elementwise operations run on all local tensors in one call; norms need one
reduction for the whole list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as _optim_types
from torch.utils._foreach_utils import _foreach_supported_types as _list_types

from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import part
from shardtensor.errors import RuleError
from shardtensor.layout.layout import Layout, replicated
from shardtensor.tensor.dispatch import implements, implements_each, refuse_partial_write
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, local_of, reduced, wrap

Tensors = Sequence[torch.Tensor]
_LISTS = (list, tuple)

for _types in (_optim_types, _list_types):
    if ShardedTensor not in _types:  # torch's optimizers and clipping then choose foreach and fused as for plain ones
        _types.append(ShardedTensor)


# -- elementwise -----------------------------------------------------------------------------------------------------


def on_lists(func: Any) -> Callable[..., Any]:
    """Return the handler of an elementwise function over lists of tensors, in place or not."""
    in_place = func.__name__.endswith("_")
    is_step = func.__name__.startswith("_fused_")

    def handler(*args: Any, **kwargs: Any) -> Any:
        operands = [*args, *kwargs.values()]
        places = [i for i, x in enumerate(operands) if isinstance(x, _LISTS) and x and isinstance(x[0], torch.Tensor)]
        lists = [operands[i] for i in places]
        aligned = _aligned(func.__name__, lists, in_place, is_step)
        if aligned is None:
            return fall_back(func, args, kwargs)
        locals_, columns, is_moved = aligned
        for i, tensors in zip(places, locals_, strict=True):
            operands[i] = tensors
        operands = [x.full_tensor() if isinstance(x, ShardedTensor) else x for x in operands]  # one number for all
        count = len(args)
        out = func(*operands[:count], **dict(zip(kwargs, operands[count:], strict=True)))
        if in_place:
            if is_step:  # these kernels count no version, which autograd and fully sharded modules read
                torch._C._increment_version(locals_[0])
                for tensors, given in zip(locals_, lists, strict=True) if is_moved else ():
                    _write_back(given, tensors, columns)
            return args[0] if out is not None and args else out
        return [x if like is None else wrap(x, like[0], None, like[1]) for x, like in zip(out, columns, strict=True)]

    return handler


Column = tuple[Layout, Group] | None
"""The layout and the group of the tensors at one position of the lists; None for plain tensors."""


def _aligned(
    name: str, lists: list[Tensors], in_place: bool, is_step: bool
) -> tuple[list[list[torch.Tensor]], list[Column], bool] | None:
    """Return local tensors, of one layout at each position of the lists; the columns; whether any was redistributed."""
    layouts = [_of_each(tensors, _LAYOUT, lambda _: None) for tensors in lists]
    first = layouts[0]
    if all(
        other == first or all([y is None and not x.dim() for x, y in zip(tensors, other, strict=True)])
        for tensors, other in zip(lists, layouts, strict=True)
    ) and not any([layout is not None and layout.partial for layout in first]):
        locals_ = [_of_each(tensors, _LOCAL, lambda x: x) for tensors in lists]
        if in_place:
            return locals_, [], False
        return locals_, [(x._layout, x._group) if isinstance(x, ShardedTensor) else None for x in lists[0]], False
    locals_, columns = [[] for _ in lists], []
    for column in zip(*lists, strict=True):
        found = _column(name, column, in_place, is_step)
        if found is None:
            return None
        columns.append(found[1])
        for tensors, x in zip(locals_, found[0], strict=True):
            tensors.append(x)
    return locals_, columns, True


_LAYOUT, _LOCAL = attrgetter("_layout"), attrgetter("_local")


def _of_each(tensors: Any, read: Callable[[Any], Any], plain: Callable[[torch.Tensor], Any]) -> list[Any]:
    """Return `read` of each sharded tensor, and `plain` of each other."""
    if isinstance(tensors[0], ShardedTensor):
        try:
            return list(map(read, tensors))  # the usual case: all are sharded
        except AttributeError:
            pass
    return [read(x) if isinstance(x, ShardedTensor) else plain(x) for x in tensors]


def _column(
    name: str, column: tuple[torch.Tensor, ...], in_place: bool, is_step: bool
) -> tuple[list[torch.Tensor], Column] | None:
    """Redistribute the tensors at one position of the lists to one layout; None if the result has none of theirs.

    It is that of the tensor that is written. Other tensors that a fused step writes, such as state in another layout
    after a load, are copies here; `_write_back` copies them to the tensors themselves.
    """
    base = next((x for x in column if isinstance(x, ShardedTensor)), None)
    if base is None:
        return list(column), None
    if base._layout.partial:
        if in_place:
            refuse_partial_write(base, name)
        base = reduced(base)
    shape, layout, group = base.shape, base._layout, base._group
    if in_place and not isinstance(column[0], ShardedTensor):  # a plain tensor is written: every rank needs the whole
        shape, layout = column[0].shape, replicated(tuple(column[0].shape), group.ranks)
    if is_step and any(x.dim() and x.shape != shape for x in column):
        raise RuleError(
            f"{name}: a parameter and its state or gradient differ in shape",
            {"parameter": tuple(shape), "other": next(tuple(x.shape) for x in column if x.shape != shape and x.dim())},
            "load a state dict of this model; whole tensors have the global shape",
        )
    if torch.broadcast_shapes(*(x.shape for x in column)) != shape:
        return None
    locals_ = []
    for x in column:
        if isinstance(x, ShardedTensor) and x.shape == shape:
            locals_.append(local_as(x, layout, group))
        else:
            x = x.full_tensor() if isinstance(x, ShardedTensor) else x
            locals_.append(x if x.dim() == 0 else part(x.expand(shape), layout, group))
        if is_step and x is not column[0] and locals_[-1] is not local_of(x):
            locals_[-1] = locals_[-1].detach().clone(memory_format=torch.contiguous_format)
    return locals_, (layout, group)


def _write_back(tensors: Tensors, locals_: list[torch.Tensor], columns: list[Column]) -> None:
    """Copy the values that a fused step wrote to copies into the tensors themselves, on every rank.

    A sharded tensor gets the layout of the parameter, so that it is redistributed only once.
    """
    for x, local, column in zip(tensors, locals_, columns, strict=True):
        if column is None or local is x:
            continue
        if not isinstance(x, ShardedTensor):
            x.copy_(wrap(local, column[0], None, column[1]))
        elif x._layout != column[0]:
            x._local, x._layout, x._group, x._spec, x._placements = local, *column, None, None


_REDUCE = frozenset({"_foreach_norm", "_foreach_powsum", "_foreach_max", "_foreach_mm"})

implements_each("_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_", on_lists)
implements_each(" ".join(name for name in dir(torch) if name.startswith("_foreach_") and name not in _REDUCE), on_lists)


# -- reductions ------------------------------------------------------------------------------------------------------


def global_norms(tensors: Tensors, ord: float = 2.0, *, foreach: bool = True) -> torch.Tensor:
    """Return the norm of every tensor, each element counted once: one reduction for each group of ranks.

    No gradient. All ranks of the groups call it. The number of kernels does not depend on the number of tensors
    (for each dtype and device).

    Args:
        tensors: sharded and plain ones (replicated), of any dtypes and devices, at least one.
        ord: of the norm; ``inf``, ``-inf`` and 0 too.
        foreach: take the local norms in one call for the list.

    Returns:
        float64, one number for each tensor, equal on every rank, on the device of the first.
    """
    ord = float(ord)
    sums = _power_sums(tensors, ord, foreach)
    return sums if abs(ord) == torch.inf or ord == 0 else sums.pow_(1 / ord)


def global_norm(tensors: Tensors, ord: float, dtype: torch.dtype, *, foreach: bool = True) -> torch.Tensor:
    """Return the norm of all tensors as one vector: `global_norms` and their norm, in fewer small kernels.

    Args:
        tensors, ord, foreach: as in `global_norms`.
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
    """Return each tensor's sum of powers (largest or smallest magnitude) over the ranks, in float64.

    Args:
        together: return numbers with the same total, for which the ranks send one number for each group.
    """
    tensors = [reduced(x) if isinstance(x, ShardedTensor) else x for x in tensors]
    sums = _local_power_sums(tensors, ord, tensors[0].device, foreach)
    groups: dict[int, tuple[Group, list[int]]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor) and not x._layout.is_whole_on_all(x._group.size):
            groups.setdefault(id(x._group), (x._group, []))[1].append(i)
    if len(groups) > 1:  # groups of the same ranks are one
        same: dict[tuple[int, ...], tuple[Group, list[int]]] = {}
        for group, places in groups.values():
            same.setdefault(tuple(group.ranks), (group, []))[1].extend(places)
        groups = dict(enumerate(same.values()))
    each: list[torch.Tensor | None] = list(sums.unbind())
    for group, places in groups.values():
        # Selected on the host: an index would be copied to the device, and the host would wait.
        given = sums if len(places) == len(each) else torch.stack([each[i] for i in places])  # type: ignore[misc]
        found = _reduce(given.sum(0, keepdim=True) if together else given, ord, group)
        if given is sums:
            return found
        for i in places:
            each[i] = None
        for i, x in zip(places, found.unbind(), strict=False):
            each[i] = x
    return torch.stack([x for x in each if x is not None]) if groups else sums


def _local_power_sums(tensors: Tensors, ord: float, device: torch.device, foreach: bool) -> torch.Tensor:
    """Return this rank's sums of powers (largest or smallest magnitudes), without elements that other ranks count."""
    nothing = torch.inf if ord < 0 else 0.0  # its power of ord adds zero
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
    """Return whether this rank counts its elements of `x`: they are as a plain tensor's, or it is the first holder."""
    layout, group = x._layout, x._group
    if layout.is_whole_on_all(group.size):
        return True
    return x._local.numel() > 0 and layout.holds_first_copy(group.rank)


def _reduce(sums: torch.Tensor, ord: float, group: Group) -> torch.Tensor:
    if abs(ord) != torch.inf:
        return group.all_reduce(sums)
    # Backends may lose a nan among larger numbers: a second number carries it. The smallest is -largest of -x.
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
    """Return the groups of the sharded tensors, in the order of their first occurrence."""
    return list({id(x._group): x._group for x in tensors if isinstance(x, ShardedTensor)}.values())
