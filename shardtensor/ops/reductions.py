"""Reductions over sharded dims: the ``@name`` functions of their rows, which reduce over ranks.

Whole dims need only the row. Half-precision partial sums are summed in float32 and rounded once. The ranks' extremes
are gathered (one value for each element of the result and rank), because backends' max and min drop NaN. Gradients are
torch's: amax and the full max divide the gradient among all ties, max over a dim gives it to the first.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import all_gather
from shardtensor.layout.route import DimStep
from shardtensor.ops.by_rule import LetterCut, by_rule, combines
from shardtensor.ops.engine import HALF
from shardtensor.ops.indices import places
from shardtensor.tensor.dispatch import implements_each
from shardtensor.tensor.fallback import fall_back

# -- sums and products -------------------------------------------------------------------------------------------------


@combines("total", blocks=True)
def total(cut: LetterCut, local: torch.Tensor) -> torch.Tensor:
    """Compute ``sum`` and ``nansum``: one all-reduce of the result."""
    dtype = cut.options.get("dtype")
    out_dtype = dtype or local.dtype
    add = torch.nansum if cut.name == "nansum" else torch.sum
    found = add(local, cut.dims, cut.keepdim, dtype=torch.float32 if out_dtype in HALF else dtype)
    found = collectives.all_reduce(found, cut.subgroup)
    return found.to(out_dtype) if out_dtype in HALF else found


@combines("mean", blocks=True)
def mean(cut: LetterCut, local: torch.Tensor) -> torch.Tensor:
    """Return the mean of all elements, not of the ranks' means: one all-reduce of the result."""
    dtype = cut.options.get("dtype")
    out_dtype = dtype or local.dtype
    if not (out_dtype.is_floating_point or out_dtype.is_complex):
        return cut.compute(local)  # torch's error
    found = torch.sum(local, cut.dims, cut.keepdim, dtype=torch.float32 if out_dtype in HALF else dtype)
    return (collectives.all_reduce(found, cut.subgroup) / cut.count).to(out_dtype)


@combines("truth", blocks=True)
def truth(cut: LetterCut, local: torch.Tensor) -> torch.Tensor:
    """Compute ``any`` and ``all``: the sum and the product of bools, the maximum and the minimum of bytes."""
    found = cut.func(local, cut.dims, cut.keepdim)
    of_bools, of_bytes = ("sum", "max") if cut.name == "any" else ("prod", "min")
    return cut.subgroup.all_reduce(found.clone(), of_bools if found.dtype == torch.bool else of_bytes)


@combines("exponents", blocks=True)
def exponents(cut: LetterCut, local: torch.Tensor) -> torch.Tensor:
    """Compute ``logsumexp``: the ranks reduce the maximum and the sum, as in softmax."""
    if local.is_complex():
        return NotImplemented
    local = local if local.is_floating_point() else local.to(torch.get_default_dtype())
    dtype, local = local.dtype, local.float() if local.dtype in HALF else local
    with torch.no_grad():
        top = cut.subgroup.all_reduce(local_extreme(local, cut.dims, True), "max")
        top = top.masked_fill(~top.isfinite(), 0)
    found = collectives.all_reduce((local - top).exp().sum(cut.dims, keepdim=True), cut.subgroup).log() + top
    return _shaped(found, cut).to(dtype)


def _shaped(found: torch.Tensor, cut: LetterCut) -> torch.Tensor:
    """Drop the reduced dims of a result, unless the call keeps them."""
    return found if cut.keepdim else found.squeeze(cut.dims)


# -- variance ----------------------------------------------------------------------------------------------------------


@combines("two_passes", blocks=True)
def two_passes(cut: LetterCut, local: torch.Tensor) -> Any:
    """Compute variance or standard deviation, perhaps with the mean: two all-reduces of the result."""
    if not (local.is_floating_point() or local.is_complex()):
        return cut.compute(local)  # torch's error
    dim, correction = cut.options.get("dim"), cut.options.get("correction")
    correction = dim if isinstance(dim, bool) else cut.options.get("unbiased") if correction is None else correction
    wide = local.float() if local.dtype in HALF else local
    average = collectives.all_reduce(wide.sum(cut.dims, keepdim=True), cut.subgroup) / max(cut.count, 1)
    away = wide - collectives.sum_gradient(average, cut.subgroup)
    squares = collectives.all_reduce(away.abs().square().sum(cut.dims, keepdim=True), cut.subgroup)
    variance = _shaped(squares / max(cut.count - (1 if correction is None else correction), 0), cut)
    if cut.name.startswith("std"):  # its gradient is 0 where it is 0, as torch's
        zero = variance == 0
        variance = variance.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
    variance = variance.to(local.dtype.to_real() if local.is_complex() else local.dtype)
    return (variance, _shaped(average, cut).to(local.dtype)) if cut.name.endswith("mean") else variance


# -- extremes and their places -----------------------------------------------------------------------------------------


class Extreme(torch.autograd.Function):
    """The maximum (minimum) over `dims`, which stay with size 1; all ties in all ranks share its gradient."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, dims: tuple[int, ...], largest: bool, subgroup: Group) -> torch.Tensor:
        found = gathered(local_extreme(local, dims, largest), subgroup)
        out = found.amax(0) if largest else found.amin(0)
        ctx.save_for_backward(local, out)
        ctx.dims, ctx.subgroup = dims, subgroup
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        local, out = ctx.saved_tensors
        reached = (local == out) | (local.isnan() & out.isnan())
        ties = ctx.subgroup.all_reduce(reached.sum(ctx.dims, keepdim=True, dtype=grad.dtype))
        return reached * (grad / ties), None, None, None


@combines("extreme", blocks=True)
def extreme(cut: LetterCut, local: torch.Tensor) -> torch.Tensor:
    """Compute ``amax`` and ``amin``, and ``max`` and ``min`` of all elements."""
    if not cut.count:
        torch.amax(torch.empty(cut.layouts[0].shape, device="meta"), cut.dims)  # torch's error
        return NotImplemented
    return _shaped(Extreme.apply(local, cut.dims, cut.name in ("amax", "max"), cut.subgroup), cut)


@combines("first_of_all", blocks=True)
def first_of_all(cut: LetterCut, local: torch.Tensor) -> Any:
    """Compute ``max`` and ``min`` along a dim with the first global index, and the ``arg`` forms."""
    largest, returns_index = cut.name.endswith("max"), cut.name.startswith("arg")
    if cut.options.get("dim") is None:
        return NotImplemented if returns_index else extreme(cut, local)
    if cut.layouts[0].is_replicated:
        return NotImplemented  # boxes and ranges: the global indices are not known here
    (d,), layout = cut.dims, cut.layouts[0]
    local = local.detach() if returns_index else local
    if not cut.count:
        cut.func(torch.empty(layout.shape, dtype=local.dtype), d)  # torch's error; on meta it has none
    here = places(layout, cut.group.rank, d, local.device)
    if local.shape[d]:
        values, indices = (torch.max if largest else torch.min)(local, d, keepdim=True)
        indices = here[indices]
    else:  # an empty part loses to every other; the empty sum keeps it in the graph
        values = local.sum(d, keepdim=True, dtype=local.dtype) + lowest(local.dtype, largest)
        values = values.to(local.dtype)
        indices = torch.full(values.shape, torch.iinfo(torch.int64).max, device=values.device)
    all_values, all_indices = gathered(values, cut.subgroup), gathered(indices, cut.subgroup)
    with torch.no_grad():
        pick = _first_best(all_values, all_indices, largest).argmin(0, keepdim=True)
    indices = _shaped(all_indices.gather(0, pick).squeeze(0), cut)
    if returns_index:
        return indices
    kind: Any = torch.return_types.max if largest else torch.return_types.min
    return kind((_shaped(all_values.gather(0, pick).squeeze(0), cut), indices))


def _first_best(values: torch.Tensor, indices: torch.Tensor, largest: bool) -> torch.Tensor:
    """Return the indices of the ranks' best `values`, and the largest integer for the others."""
    best = values.amax(0) if largest else values.amin(0)
    is_best = (values == best) | (values.isnan() & best.isnan())
    return torch.where(is_best, indices, torch.iinfo(torch.int64).max)


# -- norms -------------------------------------------------------------------------------------------------------------


@combines("norms", blocks=True)
def norms(cut: LetterCut, local: torch.Tensor) -> torch.Tensor:
    """Compute vector norms: the norm of the ranks' norms, which keeps torch's gradient at 0."""
    ord = cut.options.get("ord", cut.options.get("p", 2))
    ord = 2 if ord is None or ord == "fro" else ord
    if (ord < 0 or math.isinf(ord)) and not cut.count:
        return cut.compute(local)  # torch's error for the extreme of an empty tensor
    local = local if cut.options.get("dtype") is None else local.to(cut.options["dtype"])
    if math.isinf(ord):
        return _shaped(Extreme.apply(local.abs(), cut.dims, ord > 0, cut.subgroup), cut)
    if ord == 0:  # in the graph, as the norm of order 0 of each element
        ones = torch.linalg.vector_norm(local.unsqueeze(-1), 0, -1)
        return collectives.all_reduce(ones.sum(cut.dims, cut.keepdim), cut.subgroup)
    wide = torch.float32 if local.dtype in HALF else None
    if ord < 0 and any(local.shape[d] == 0 for d in cut.dims):  # torch refuses these; infinity adds zero
        found = local.abs().sum(cut.dims, cut.keepdim, dtype=wide) + math.inf
    else:
        found = torch.linalg.vector_norm(local, ord, cut.dims, cut.keepdim, dtype=wide)
    if ord == 1:
        found = collectives.all_reduce(found, cut.subgroup)
    else:
        found = torch.linalg.vector_norm(gathered(found, cut.subgroup), ord, 0)
    return found.to(local.dtype) if wide else found


# -- what they share ---------------------------------------------------------------------------------------------------


def gathered(t: torch.Tensor, subgroup: Group) -> torch.Tensor:
    """Return the equally shaped tensors of all members, stacked: ``(members, *t.shape)``. Differentiable."""
    return all_gather(t[None], _STACK, subgroup)


_STACK = DimStep("all_gather")


def lowest(dtype: torch.dtype, largest: bool) -> Any:
    """Return the neutral element of a maximum (or a minimum)."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def local_extreme(t: torch.Tensor, dims: tuple[int, ...], largest: bool) -> torch.Tensor:
    """Return the maximum (minimum) over `dims`, which stay with size 1, also of an empty part."""
    if any(t.shape[d] == 0 for d in dims):
        shape = [1 if d in dims else n for d, n in enumerate(t.shape)]
        return t.new_full(shape, lowest(t.dtype, largest))
    return t.amax(dims, keepdim=True) if largest else t.amin(dims, keepdim=True)


# -- registered --------------------------------------------------------------------------------------------------------


def _either(func: Any) -> Any:
    """Return the handler of ``max`` and ``min``, which are elementwise when given a second tensor."""
    reduce, choose = by_rule(func, func.__name__), by_rule(func, f"{func.__name__}imum")

    def handler(*args: Any, **kwargs: Any) -> Any:
        if (len(args) > 1 and isinstance(args[1], torch.Tensor)) or "other" in kwargs:
            return choose(*args, **kwargs)
        return reduce(*args, **kwargs)

    return handler


def _vector(func: Any) -> Any:
    """Return the handler of ``norm`` for vector norms and the Frobenius norm; other norms of matrices gather."""
    by_row = by_rule(func, "norm")

    def handler(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ord = args[0] if args else kwargs.get("ord", kwargs.get("p"))
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        count = input.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)
        is_of_matrix = (
            func is torch.linalg.norm and ord is not None and count != 1 and not (ord == "fro" and count == 2)
        )
        if ord == "nuc" or is_of_matrix:
            return fall_back(func, (input, *args), kwargs)
        return by_row(input, *args, **kwargs)

    return handler


implements_each("norm linalg.norm", _vector)
implements_each("max min", _either)
