"""Work along a dim that must be whole: cumsum, sort, topk, flip, roll, gather, index_select: ``d0 !d1 -> d0 !d1``.

Where that dim is cut, they gather by the safety net.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.engine import run
from shardtensor.rules.dims import one_dim, several_dims
from shardtensor.rules.propagate import with_dims
from shardtensor.rules.rule import Rule
from shardtensor.tensor.dispatch import HANDLERS, fall_back, implements, spellings
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled, wrap


def along_whole(func: Callable[..., Any], dims: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a function that works along dims; `dims` reads them from the arguments of the call."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        others = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.Tensor) and v is not x]
        if not isinstance(x, ShardedTensor) or others or not isinstance(x._layout, CutLayout):
            return fall_back(func, args, kwargs)
        along = several_dims(x.dim(), dims(*args, **kwargs)) if x.dim() else ()
        layout = x._layout
        if any(layout.dims[d] is not None for d in along) or (
            layout.is_replicated and len(layout.ranks) != x._group.size
        ):
            return fall_back(func, args, kwargs)
        x = settled(x)
        rest = {name: value for name, value in kwargs.items() if name != "input"}
        return _rewrapped(func(x._local, *args[1:], **rest), x, along)

    return handler


def _rewrapped(result: Any, x: ShardedTensor, along: tuple[int, ...]) -> Any:
    """A local result, or several, as the tensor it is a part of: laid out as `x` but along the dims worked on."""
    if not isinstance(result, torch.Tensor):
        found = tuple(_rewrapped(part, x, along) for part in result)
        return type(result)(found) if isinstance(result, tuple) else list(found)
    layout = x._layout
    assert isinstance(layout, CutLayout)
    if result.dim() == len(layout.shape):
        shape = tuple(result.shape[d] if d in along else n for d, n in enumerate(layout.shape))
        out = with_dims(layout, shape, layout.dims)
    else:
        kept = [d for d in range(len(layout.shape)) if d not in along]
        out = with_dims(layout, tuple(layout.shape[d] for d in kept), tuple(layout.dims[d] for d in kept))
    return result if out.is_replicated else wrap(result, out, None, x._group)


def _first(default: Any) -> Callable[..., Any]:
    """Reads the dims of ``f(input, dim)``."""
    return lambda input, dim=default, *args, **kwargs: kwargs.get("axis", dim)


def _second(default: Any) -> Callable[..., Any]:
    """Reads the dims of ``f(input, number, dim)``."""
    return lambda input, number=None, dim=default, *args, **kwargs: kwargs.get("axis", dim)


def _sorted_dim(input: torch.Tensor, dim: Any = -1, *args: Any, **kwargs: Any) -> int:
    return -1 if isinstance(dim, bool) else dim  # sort(descending)


def _flipped_dims(input: torch.Tensor, *dims: Any, **kwargs: Any) -> Any:
    return dims[0] if len(dims) == 1 else dims or kwargs["dims"]


READS_DIMS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys("cumsum cumprod logcumsumexp cummax cummin median nanmedian nansum nanmean".split(), _first(None)),
    **dict.fromkeys(("glu", "mode"), _first(-1)),
    **dict.fromkeys(("sort", "argsort"), _sorted_dim),
    **dict.fromkeys(("topk", "kthvalue"), _second(-1)),
    **dict.fromkeys(("tril", "triu"), lambda input, diagonal=0, **kwargs: (-2, -1)),
    "msort": lambda input: 0,
    "roll": _second(None),
    "flip": _flipped_dims,
}
"""How each function's dims are read from the arguments of a call; None means all of them."""

for _name, _dims in READS_DIMS.items():
    for _func in spellings(_name):
        HANDLERS[_func] = along_whole(_func, _dims)


@implements(torch.gather, torch.Tensor.gather, torch.take_along_dim, torch.Tensor.take_along_dim)
def gather(input: torch.Tensor, dim: Any = None, index: Any = None, *, sparse_grad: bool = False, **kwargs: Any) -> Any:
    """``input`` at `index` along a whole dim, both cut alike elsewhere: ``d0 !d1, d0 !i -> d0 i``."""
    func: Any = torch.gather
    if isinstance(dim, torch.Tensor) or "indices" in kwargs:  # take_along_dim(input, indices, dim)
        func = torch.take_along_dim
        indices = kwargs.pop("indices", dim)
        dim, index = (kwargs.pop("dim", index), indices) if isinstance(dim, torch.Tensor) else (dim, indices)
        if dim is None:
            return fall_back(torch.take_along_dim, (input, index), kwargs)
    fits = index.dim() == input.dim() and isinstance(dim, int) and not kwargs and input.dim()
    d = one_dim(input.dim(), dim) if fits else 0
    if not fits or any(m != n for k, (m, n) in enumerate(zip(input.shape, index.shape, strict=True)) if k != d):
        call = (input, dim, index) if func is torch.gather else (input, index, dim)
        return fall_back(func, call, kwargs)
    letters = tuple("from" if k == d else f"d{k}" for k in range(input.dim()))
    picked = tuple("at" if k == d else f"d{k}" for k in range(input.dim()))
    result = run(
        "gather", Rule((letters, picked), picked, frozenset({"from"})), (input, index), lambda x, i: x.gather(d, i)
    )
    return fall_back(torch.gather, (input, dim, index), {}) if result is None else result


@implements(torch.index_select, torch.Tensor.index_select)
def index_select(input: torch.Tensor, dim: int, index: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    """Rows of a whole dim: ``d0 !d1, i -> d0 i``."""
    if index.dim() != 1 or out is not None or not input.dim():
        return fall_back(torch.index_select, (input, dim, index), {} if out is None else {"out": out})
    d = one_dim(input.dim(), dim)
    letters = tuple("from" if k == d else f"d{k}" for k in range(input.dim()))
    output = tuple("at" if k == d else f"d{k}" for k in range(input.dim()))
    rule = Rule((letters, ("at",)), output, frozenset({"from"}))
    result = run("index_select", rule, (input, index), lambda x, i: x.index_select(d, i))
    return fall_back(torch.index_select, (input, dim, index), {}) if result is None else result
