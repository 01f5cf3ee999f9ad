"""Work along one dim that must be whole: cat, stack, cumsum, sort, topk, flip, gather, repeat: ``d0 !d1 -> d0 !d1``.

Where that dim is cut, `cat` and `stack` bring it whole; the others gather by the safety net.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.engine import run
from shardtensor.ops.out import write_out
from shardtensor.ops.reducing import dims_of, one_dim
from shardtensor.rules.propagate import with_dims
from shardtensor.rules.rule import Rule
from shardtensor.tensor.dispatch import HANDLERS, fall_back, implements, spellings
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled, wrap


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[torch.Tensor], dim: Any = 0, *, out: Any = None, axis: Any = None) -> torch.Tensor:
    """Lay tensors end to end along a dim: ``!a d, !b d -> c d``."""
    dim = dim if axis is None else axis
    if out is not None:
        return write_out(lambda f, a, k: cat(*a, **k), torch.cat, (list(tensors), dim), {"out": out})
    ndim = tensors[0].dim()
    if any(t.dim() != ndim for t in tensors) or not isinstance(dim, int):  # torch skips empty tensors of one dim
        return fall_back(torch.cat, (list(tensors), dim), {})
    size = torch.cat([torch.empty(t.shape, device="meta") for t in tensors], dim).shape[dim]
    d = one_dim(ndim, dim)
    inputs = tuple(tuple(f"part{i}" if k == d else f"d{k}" for k in range(ndim)) for i in range(len(tensors)))
    output = tuple("joined" if k == d else f"d{k}" for k in range(ndim))
    whole = frozenset(f"part{i}" for i in range(len(tensors)))
    result = run("cat", Rule(inputs, output, whole, (("joined", size),)), tensors, lambda *xs: torch.cat(xs, d))
    return fall_back(torch.cat, (list(tensors), dim), {}) if result is None else result


@implements(torch.stack)
def stack(tensors: Sequence[torch.Tensor], dim: int = 0, *, out: Any = None) -> torch.Tensor:
    """Lay tensors of one shape side by side along a new dim: ``d, d -> n d``."""
    if out is not None:
        return write_out(lambda f, a, k: stack(*a, **k), torch.stack, (list(tensors), dim), {"out": out})
    torch.stack([torch.empty(t.shape, device="meta") for t in tensors], dim)  # torch's errors
    ndim = tensors[0].dim()
    letters = tuple(f"d{k}" for k in range(ndim))
    d = one_dim(ndim + 1, dim)
    rule = Rule((letters,) * len(tensors), (*letters[:d], "n", *letters[d:]), made=(("n", len(tensors)),))
    result = run("stack", rule, tensors, lambda *xs: torch.stack(xs, d))
    return fall_back(torch.stack, (list(tensors), dim), {}) if result is None else result


def along_whole(func: Callable[..., Any], dims: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a function that works along dims; `dims` reads them from the arguments of the call."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        others = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.Tensor) and v is not x]
        if not isinstance(x, ShardedTensor) or others or not isinstance(x._layout, CutLayout):
            return fall_back(func, args, kwargs)
        along = dims_of(x._layout, dims(*args, **kwargs)) if x.dim() else ()
        layout = x._layout
        if any(layout.dims[d] is not None for d in along) or (
            layout.is_replicated and len(layout.ranks) != x._group.size
        ):
            return fall_back(func, args, kwargs)
        x = settled(x)
        rest = {name: value for name, value in kwargs.items() if name != "input"}
        return _given(func(x._local, *args[1:], **rest), x, along)

    return handler


def _given(result: Any, x: ShardedTensor, along: tuple[int, ...]) -> Any:
    if not isinstance(result, torch.Tensor):
        found = tuple(_given(part, x, along) for part in result)
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


def _dim(default: Any) -> Callable[..., Any]:
    return lambda input, dim=default, *args, **kwargs: kwargs.get("axis", dim)


def _second(default: Any) -> Callable[..., Any]:
    return lambda input, first=None, dim=default, *args, **kwargs: kwargs.get("axis", dim)


_ALONG: dict[str, Callable[..., Any]] = {
    **dict.fromkeys("cumsum cumprod logcumsumexp cummax cummin flip softmin".split(), _dim(None)),
    **dict.fromkeys("sort argsort msort glu".split(), _dim(-1)),
    **dict.fromkeys("topk kthvalue".split(), _second(-1)),
    **dict.fromkeys("renorm roll".split(), _second(None)),
    **dict.fromkeys("tril triu".split(), lambda input, diagonal=0, **kwargs: (-2, -1)),
    **dict.fromkeys("median nanmedian mode nansum nanmean".split(), _dim(None)),
}
_ALONG["sort"] = lambda input, dim=-1, *args, **kwargs: -1 if isinstance(dim, bool) else dim
_ALONG["argsort"] = _ALONG["sort"]
_ALONG["msort"] = lambda input: 0
_ALONG["mode"] = _dim(-1)
del _ALONG["renorm"], _ALONG["softmin"]

for _name, _dims in _ALONG.items():
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


@implements(torch.Tensor.repeat, torch.tile, torch.Tensor.tile)
def repeat(input: torch.Tensor, *times: Any, **kwargs: Any) -> torch.Tensor:
    """Repeat whole dims; a cut dim may be repeated once only, else it gathers."""
    counts = tuple(times[0]) if len(times) == 1 and not isinstance(times[0], int) else times
    counts = tuple(next(iter(kwargs.values()))) if kwargs else counts
    if not isinstance(input, ShardedTensor) or not isinstance(input._layout, CutLayout) or len(counts) < input.dim():
        return fall_back(torch.tile, (input, counts), {})
    x = settled(input)
    new = len(counts) - x.dim()
    assert isinstance(x._layout, CutLayout)
    if x._layout.is_replicated or any(
        c != 1 and cut is not None for c, cut in zip(counts[new:], x._layout.dims, strict=True)
    ):
        return fall_back(torch.Tensor.repeat, (input, *counts), {})
    shape = (*counts[:new], *(c * n for c, n in zip(counts[new:], x.shape, strict=True)))
    layout = with_dims(x._layout, shape, (*(None,) * new, *x._layout.dims))
    return wrap(x._local.repeat(counts), layout, None, x._group)
