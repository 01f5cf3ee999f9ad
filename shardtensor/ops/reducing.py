"""How every reduction is bound: which dims, over which ranks, and what joins the ranks' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.layout.layout import CutLayout, Layout
from shardtensor.ops.binding import argument
from shardtensor.ops.by_rule import decided, joins_itself
from shardtensor.ops.engine import on_grid
from shardtensor.ops.local_call import LocalCall, remembered
from shardtensor.ops.out import write_out
from shardtensor.rules.dims import several_dims
from shardtensor.rules.table import ROWS
from shardtensor.rules.views import Reduction, reduction
from shardtensor.tensor.dispatch import HANDLERS, fall_back, spellings
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled, wrap
from shardtensor.tensor.teams import along


def reduces(*names: str, also: tuple[Any, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a reduction under all of torch's spellings of `names`; it returns None to fall back."""

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        for func in [*also, *(func for name in names for func in spellings(name))]:
            HANDLERS[func] = _entry(func, compute, names[0] if names else "norm")
        return compute

    return register


def _entry(func: Any, compute: Callable[..., Any], name: str) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
            if kwargs.get("out") is not None:
                if isinstance(kwargs["out"], torch.Tensor):
                    return write_out(lambda _, a, k: handler(*a, **k), func, args, kwargs)
                return fall_back(func, args, kwargs)
            kwargs.pop("out", None)
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, ShardedTensor):
            return fall_back(func, args, kwargs)
        if x._layout.partial:
            x = settled(x)
            if not args:
                kwargs["input"] = x
            args = (x, *args[1:]) if args else args
        result = compute(*args, **kwargs)
        if result is None and not isinstance(x._layout, CutLayout) and x.dim():
            dim = argument(ROWS[name].call, "dim", args, kwargs)
            dims = several_dims(x.dim(), None if isinstance(dim, bool) else dim)
            there = on_grid(name, x, dims) if len(dims) < x.dim() else None
            there = on_grid(name, x) if there is None else there
            if there is not None:
                result = compute(there, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        return fall_back(func, args, kwargs) if result is None else result

    def decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
        found = decided(func, name, args, kwargs)
        return None if found is not None and name in _WARNS_OF_NOTHING and not args[0]._local.numel() else found

    return remembered(func, decide, handler, name)


_WARNS_OF_NOTHING = ("var", "std", "var_mean", "std_mean")
"""They send nothing where they are local, so that a rank with an empty part may do them in another way."""

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "self": "input", "a": "input", "x": "input"}


class Bound(NamedTuple):
    """A reduction of one tensor: the local tensor, the plan, the group that joins (None: nothing to join), and how."""

    local: torch.Tensor
    plan: Reduction
    team: Group | None
    group: Group
    how: str

    @property
    def dims(self) -> tuple[int, ...]:
        return self.plan.dims

    def joined(self, local: torch.Tensor) -> torch.Tensor:
        """The ranks' local results (for ``avg`` their sums) joined as the row of the table says; itself if not cut."""
        return local if self.team is None else JOINED[self.how](local, self)

    def give(self, joined: torch.Tensor) -> torch.Tensor:
        """The joined result, its reduced dims dropped or kept, as the tensor it is a part of."""
        layout = self.plan.layout
        if layout.is_replicated:
            return joined.reshape(layout.shape) if tuple(joined.shape) != layout.shape else joined
        local = layout.local_shape(self.group.rank)
        return wrap(joined.reshape(local) if tuple(joined.shape) != local else joined, layout, None, self.group)


def bound(name: str, x: ShardedTensor, dim: Any, keepdim: bool = False) -> Bound | None:
    """Bind the reduction `name` of `x` over `dim` (None or empty: all). None: the layout has to be gathered first.

    Raises:
        IndexError: as torch: a dim is out of range.
    """
    layout, group = x._layout, x._group
    if not layout.shape:
        return None  # dim 0 of a number is one that it does not have
    plan = reduction(layout, several_dims(len(layout.shape), dim), keepdim)
    if plan is None or (
        len(layout.ranks) != group.size and plan.layout.is_replicated and _has_copies(layout, plan.axes)
    ):
        return None  # ranks outside the tensor have nothing to tell
    return Bound(x._local, plan, along(group, layout, plan.axes) if plan.axes else None, group, how(name))


def how(name: str) -> str:
    """What joins the ranks' results of a reduction, by its row."""
    pattern = ROWS[name].pattern
    assert pattern is not None and pattern.reduces
    return pattern.joins[0][1]


def _has_copies(layout: Layout, axes: tuple[int, ...]) -> bool:
    """Whether some axis of the grid, other than `axes`, has more than one rank."""
    return any(size > 1 for axis, size in enumerate(layout.grid) if axis not in axes) or not axes


def _truth(local: torch.Tensor, r: Bound, of_bools: str, of_bytes: str) -> torch.Tensor:
    assert r.team is not None
    return r.team.all_reduce(local.clone(), of_bools if local.dtype == torch.bool else of_bytes)


JOINED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "sum": lambda local, r: collectives.all_reduce(local, r.team),
    "avg": lambda local, r: collectives.all_reduce(local, r.team) / r.plan.count,
    "prod": lambda local, r: gathered(local, r.team).prod(0, dtype=local.dtype),  # right at zeros, backward too
    "max": lambda local, r: gathered(local, r.team).amax(0),
    "min": lambda local, r: gathered(local, r.team).amin(0),
    "any": lambda local, r: _truth(local, r, "sum", "max"),  # bools add up as any and multiply as all
    "all": lambda local, r: _truth(local, r, "prod", "min"),
}
"""What each join does with the ranks' local results."""


@joins_itself("itself_again")
def gathered(t: torch.Tensor, team: Group) -> torch.Tensor:
    """The equally shaped tensors of all members, stacked: ``(members, *t.shape)``. Differentiable."""
    return collectives.all_gather(t.contiguous(), [t.numel()] * team.size, team).view(team.size, *t.shape)


def lowest(dtype: torch.dtype, largest: bool) -> Any:
    """What leaves a maximum (or a minimum) as it is."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def local_extreme(t: torch.Tensor, dims: tuple[int, ...], largest: bool) -> torch.Tensor:
    """The maximum (minimum) over `dims`, which stay with size 1, also of a part that is empty there."""
    if any(t.shape[d] == 0 for d in dims):
        shape = [1 if d in dims else n for d, n in enumerate(t.shape)]
        return t.new_full(shape, lowest(t.dtype, largest))
    return t.amax(dims, keepdim=True) if largest else t.amin(dims, keepdim=True)


def places(layout: CutLayout, rank: int, dim: int, device: torch.device) -> torch.Tensor:
    """The global indices along `dim` of the elements that `rank` holds, in local order."""
    boxes = layout.boxes(rank)
    if not boxes:
        return torch.arange(0, device=device)
    spans = dict.fromkeys((box.offsets[dim], box.sizes[dim]) for box in boxes)
    pieces = [torch.arange(start, start + size, device=device) for start, size in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
