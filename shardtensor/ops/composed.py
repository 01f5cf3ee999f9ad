"""Operations that are made of others, by what they mean: what those do to layouts is all there is to know of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.ops.out import write_out
from shardtensor.rules.dims import one_dim
from shardtensor.tensor.dispatch import HANDLERS, resolve
from shardtensor.tensor.fallback import fall_back


def composed(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how operations are made of others; NotImplemented gathers. ``out=`` is taken care of."""

    def register(compose: Callable[..., Any]) -> Callable[..., Any]:
        for func in (func for name in names for func in resolve(name)):
            HANDLERS[func] = _entry(func, compose)
        return compose

    return register


def _entry(func: Any, compose: Callable[..., Any]) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor):
            return write_out(lambda f, a, k: handler(*a, **k), func, args, kwargs)
        if out is not None:
            return fall_back(func, args, kwargs)
        kwargs.pop("out", None)
        result = compose(*args, **kwargs)
        return fall_back(func, args, kwargs) if result is NotImplemented else result

    return handler


# -- products ----------------------------------------------------------------------------------------------------------


@composed("vdot", "linalg.vecdot")
def vdot(input: torch.Tensor, other: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
    """The sum of the products of the conjugate of one with the other."""
    return torch.sum(input.conj() * other, dim)


@composed("inner")
def inner(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product over the last dims of both."""
    return torch.tensordot(input, other, dims=([-1], [-1])) if input.dim() and other.dim() else input * other


@composed("cross")
def cross(input: torch.Tensor, other: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """``linalg.cross`` over `dim`, or over the first dim of size 3."""
    if dim is None:
        dim = next((d for d, n in enumerate(input.shape) if n == 3), None)
        if dim is None:
            raise RuntimeError("no dimension of size 3 in input")
    return torch.linalg.cross(input, other, dim=dim)


@composed("linalg.multi_dot")
def multi_dot(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices multiplied from the left to the right."""
    product = tensors[0]
    for matrix in tensors[1:]:
        product = product @ matrix
    return product


@composed("chain_matmul")
def chain_matmul(*matrices: torch.Tensor) -> torch.Tensor:
    """Matrices multiplied from the left to the right."""
    return multi_dot(matrices)


# -- distances and statistics ------------------------------------------------------------------------------------------


@composed("dist")
def dist(input: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    """The p-norm of the difference."""
    return torch.linalg.vector_norm(input - other, p)


@composed("pairwise_distance")
def pairwise_distance(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> torch.Tensor:
    """The p-norm of the difference over the last dim."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@composed("aminmax")
def aminmax(input: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """The minimum and the maximum."""
    dims = () if dim is None else dim
    return torch.return_types.aminmax((torch.amin(input, dims, keepdim), torch.amax(input, dims, keepdim)))


@composed("trace")
def trace(input: torch.Tensor) -> torch.Tensor:
    """The sum of the diagonal of a matrix."""
    if input.dim() != 2:
        return NotImplemented
    return input.tril().triu().sum()


@composed("diff")
def diff(
    input: torch.Tensor, n: int = 1, dim: int = -1, prepend: torch.Tensor | None = None, append: Any = None
) -> torch.Tensor:
    """Differences of neighbours along a dim, `n` times over."""
    if input.dtype == torch.bool or not input.dim() or n < 1 or n >= input.shape[dim]:
        return NotImplemented
    ends = [x for x in (prepend, input, append) if x is not None]
    x = torch.cat(ends, dim) if len(ends) > 1 else input
    for _ in range(n):
        size = x.shape[dim]
        x = x.narrow(dim, 1, size - 1) - x.narrow(dim, 0, size - 1)
    return x


# -- dims laid out anew ------------------------------------------------------------------------------------------------


@composed("fliplr")
def fliplr(input: torch.Tensor) -> torch.Tensor:
    """The second dim from its end."""
    return input.flip(1)


@composed("flipud")
def flipud(input: torch.Tensor) -> torch.Tensor:
    """The first dim from its end."""
    return input.flip(0)


@composed("repeat_interleave")
def repeat_interleave(
    input: torch.Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor:
    """Repeat every index of a dim: by one number where it lies, by a vector as it is picked."""
    if dim is None:
        input, dim = input.reshape(-1), 0
    d = one_dim(input.dim(), dim)
    if isinstance(repeats, torch.Tensor):
        if not repeats.dim() or repeats.numel() == 1:
            repeats = int(repeats)
        else:
            repeats = repeats.full_tensor() if hasattr(repeats, "full_tensor") else repeats
            places = torch.arange(input.shape[d], device=repeats.device)
            return input.index_select(d, places.repeat_interleave(repeats, output_size=output_size))
    if not input.dim() or repeats < 0:
        return NotImplemented
    shape = list(input.shape)
    shape.insert(d + 1, repeats)
    # A copy, as torch's: what is made of one element, or of none, would be a view.
    repeated = input.unsqueeze(d + 1).expand(shape).clone(memory_format=torch.contiguous_format).flatten(d, d + 1)
    return repeated if repeats else input.narrow(d, 0, 0).clone()


@composed("atleast_1d")
def atleast_1d(*tensors: Any) -> Any:
    """Tensors of one dim or more."""
    return _each(tensors, lambda x: x if x.dim() else x.reshape(1))


@composed("atleast_2d")
def atleast_2d(*tensors: Any) -> Any:
    """Tensors of two dims or more."""
    return _each(tensors, lambda x: x if x.dim() > 1 else x.reshape(1, -1) if x.dim() else x.reshape(1, 1))


def _each(tensors: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
        return change(tensors[0])
    return tuple(map(change, tensors[0] if len(tensors) == 1 else tensors))


@composed("hstack")
def hstack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Laid end to end along the second dim, vectors along the first."""
    parts = atleast_1d(*tensors) if len(tensors) > 1 else (atleast_1d(tensors[0]),)
    return torch.cat(parts, 0 if parts[0].dim() == 1 else 1)


@composed("vstack", "row_stack")
def vstack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows laid below each other."""
    return torch.cat([atleast_2d(x) for x in tensors], 0)


@composed("column_stack")
def column_stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Columns laid beside each other."""
    return torch.cat([x if x.dim() > 1 else x.reshape(x.numel(), 1) for x in tensors], 1)


@composed("broadcast_tensors")
def broadcast_tensors(*tensors: Any) -> tuple[torch.Tensor, ...]:
    """All of one shape."""
    tensors = tuple(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor) else tensors
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


# -- copies with a part of another tensor ------------------------------------------------------------------------------


@composed("select_scatter")
def select_scatter(input: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """A copy with `src` at one index of a dim."""
    out = input * 1 if input.dtype != torch.bool else input | False  # reduced, where it is still to be
    out[(slice(None),) * one_dim(input.dim(), dim) + (index,)] = src
    return out


@composed("slice_scatter")
def slice_scatter(
    input: torch.Tensor, src: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> torch.Tensor:
    """A copy with `src` at a slice of a dim."""
    out = input * 1 if input.dtype != torch.bool else input | False  # reduced, where it is still to be
    out[(slice(None),) * one_dim(input.dim(), dim) + (slice(start, end, step),)] = src
    return out


# -- losses made of elementwise operations -----------------------------------------------------------------------------


def reduced(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    """Losses as they are, their mean or their sum."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


@composed("F.margin_ranking_loss")
def margin_ranking_loss(
    input1: torch.Tensor,
    input2: torch.Tensor,
    target: torch.Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """What lacks of `margin` between two scores, the right one (by the sign of `target`) above the other."""
    if size_average is not None or reduce is not None:
        return NotImplemented
    return reduced((margin - target * (input1 - input2)).clamp_min(0), reduction)


@composed("F.multilabel_soft_margin_loss")
def multilabel_soft_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The mean over the classes of the binary cross entropy of each."""
    if size_average is not None or reduce is not None:
        return NotImplemented
    losses = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    losses = losses if weight is None else losses * weight
    return reduced(losses.mean(-1), reduction)


@composed("F.gaussian_nll_loss")
def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """The negative log likelihood of normal variables of mean `input` and variance `var`, at least `eps`."""
    if not isinstance(var, torch.Tensor) or bool((var < 0).any()):
        return NotImplemented
    if var.dim() < input.dim():
        var = var.unsqueeze(-1)
    floor = var.detach().clamp_min(eps) - var.detach()  # its gradient goes past the floor, as torch's
    var = var + floor
    losses = 0.5 * (var.log() + (input - target) ** 2 / var)
    return reduced(losses + 0.5 * torch.log(torch.tensor(2 * torch.pi)).item() if full else losses, reduction)
