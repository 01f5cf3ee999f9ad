"""Losses. cross_entropy over classes that are cut never gathers the logits: ``n !c, n -> n`` where c is whole, and
where it is cut each rank brings the sum of its exponentials and the logit of the target, if it holds it: two
all-reduces of the size of the losses. Means divide by the global count (or weight) of live targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.ops.engine import Prepared, finish, prepare
from shardtensor.ops.pointwise import spread
from shardtensor.ops.reducing import HALF, places
from shardtensor.ops.softmax import shifted
from shardtensor.rules.reduction import reduction as reduction_of
from shardtensor.rules.rule import Rule
from shardtensor.tensor.dispatch import HANDLERS, fall_back, implements
from shardtensor.tensor.move import along


@implements(F.cross_entropy)
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross entropy of logits ``(n, c, ...)`` (or ``(c,)``) with class indices ``(n, ...)`` or probabilities."""
    reduction = _legacy(size_average, reduce, reduction)
    dim = 0 if input.dim() == 1 else 1
    if target.is_floating_point():
        probabilities = (
            target * (1 - label_smoothing) + label_smoothing / input.shape[dim] if label_smoothing else target
        )
        terms = input.log_softmax(dim) * probabilities
        if weight is not None:
            terms = terms * weight.reshape(-1, *[1] * (input.dim() - 1 - dim))
        losses = -terms.sum(dim)
        if reduction == "mean":
            return losses.sum() / max(losses.numel(), 1)
        return losses.sum() if reduction == "sum" else losses
    return _indexed("cross_entropy", input, target, weight, ignore_index, reduction, label_smoothing)


@implements(F.nll_loss)
def nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The negative log likelihood of class indices ``(n, ...)`` under log probabilities ``(n, c, ...)``."""
    return _indexed("nll_loss", input, target, weight, ignore_index, _legacy(size_average, reduce, reduction), 0.0)


def _indexed(
    name: str,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> torch.Tensor:
    spatial = tuple(f"s{i}" for i in range(x.dim() - 2))
    batch = ("n",) if x.dim() > 1 else ()
    operands = [x, target] + ([] if weight is None else [weight])
    kwargs: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    kwargs |= {"label_smoothing": smoothing} if name == "cross_entropy" else {}
    func = getattr(F, name)
    if tuple(target.shape) != (*x.shape[: len(batch)], *x.shape[2:]) or reduction not in ("none", "mean", "sum"):
        return fall_back(func, (x, target), kwargs)
    rule = Rule(((*batch, "c", *spatial), (*batch, *spatial), *((("c",),) * (weight is not None))), (*batch, *spatial))
    ready = prepare(name, rule, operands)
    if ready is None:
        return fall_back(func, (x, target), kwargs)
    cut = ready.recipe.needs[0].layout.dims[len(batch)]
    if cut is None:
        local, labels, *rest = ready.locals
        w = rest[0] if rest else None
        losses = func(local, labels, **{**kwargs, "weight": w, "reduction": "none"})
        live = labels != ignore_index
        shares = live.to(losses.dtype) if w is None else w[labels.masked_fill(~live, 0)] * live
    else:
        team = along(ready.group, ready.recipe.output, cut.axes)
        losses, shares = _over_cut_classes(ready, len(batch), team, ignore_index, smoothing, name == "cross_entropy")
    return _reduced(losses, shares, ready, reduction)


def _over_cut_classes(
    ready: Prepared, dim: int, team: Group, ignore_index: int, smoothing: float, is_logits: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses, and what each weighs in a mean; both equal on all ranks of the team."""
    local, labels, *rest = ready.locals
    layout = ready.recipe.needs[0].layout
    dtype = local.dtype
    x = local.float() if dtype in HALF else local
    x = shifted(x, dim, team) if is_logits else x
    live = labels != ignore_index
    classes = layout.shape[dim]
    if labels.is_cpu and bool((live & ((labels < 0) | (labels >= classes))).any()):
        raise IndexError(f"Target out of bounds: the classes are 0 to {classes - 1}")
    column = [-1 if d == dim else 1 for d in range(x.dim())]
    held = places(layout, ready.group.rank, dim, x.device)
    if x.shape[dim] and not layout.is_blocked(dim):
        at = labels - held[0]
        mine = (at >= 0) & (at < x.shape[dim]) & live
        at = at.masked_fill(~mine, 0)
        picked = x.gather(dim, at.unsqueeze(dim)).squeeze(dim).masked_fill(~mine, 0)
    else:
        hit = (held.view(column) == labels.unsqueeze(dim)) & live.unsqueeze(dim)
        picked = x.masked_fill(~hit, 0).sum(dim)
    terms = [picked, x.exp().sum(dim) if is_logits else torch.zeros_like(picked)]
    w = rest[0].to(x.dtype) if rest else None
    if w is not None:
        terms.append(((held.view(column) == labels.unsqueeze(dim)) * w.view(column)).sum(dim))
    if smoothing:
        terms.append((x if w is None else x * w.view(column)).sum(dim))
        if w is not None:
            terms.append(w.sum().expand_as(picked))
    total = collectives.all_reduce(torch.stack(terms), team)
    base = total[1].log() if is_logits else 0.0
    losses = base - total[0]
    shares = live.to(x.dtype)
    if w is not None:
        losses, shares = losses * total[2], total[2] * live
    if smoothing:
        even = (total[4] if w is not None else classes) * base - total[3 if w is not None else 2]
        losses = (1 - smoothing) * losses + smoothing / classes * even
    return losses.masked_fill(~live, 0).to(dtype), shares


def _reduced(losses: torch.Tensor, shares: torch.Tensor, ready: Prepared, reduction: str) -> torch.Tensor:
    settled, group = ready.recipe.settled, ready.group
    if reduction == "none":
        return finish(losses, settled, group)
    plan = reduction_of(settled, tuple(range(len(settled.shape))), False)
    assert plan is not None
    dtype = losses.dtype
    wide = torch.float32 if dtype in HALF else dtype
    sums = [losses.sum(dtype=wide)] + ([shares.sum(dtype=wide)] if reduction == "mean" else [])
    if plan.axes:
        sums = list(collectives.all_reduce(torch.stack(sums), along(group, settled, plan.axes)))
    return (sums[0] / sums[1] if reduction == "mean" else sums[0]).to(dtype)


# -- elementwise losses ------------------------------------------------------------------------------------------------


def _legacy(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The reduction that torch's two older arguments mean."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _elementwise_loss(func: Callable[..., Any], batch_mean: bool = False) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        reduction = _legacy(
            kwargs.pop("size_average", None), kwargs.pop("reduce", None), kwargs.pop("reduction", "mean")
        )
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if reduction not in ("none", "mean", "sum", "batchmean"):
            raise ValueError(f"{reduction} is not a valid value for reduction")
        if len(args) > 2 and not isinstance(args[2], torch.Tensor) and args[2] is not None:
            return fall_back(func, args, {**kwargs, "reduction": reduction})  # older positional arguments
        weighted = kwargs.pop("weight", None) if func in _WEIGHTED_MEAN else None
        losses = spread(func, args, {**kwargs, "reduction": "none"})
        if weighted is not None:
            losses = losses * weighted
            if reduction == "mean":
                return losses.sum() / (weighted.expand(losses.shape)).sum()
        if reduction == "none":
            return losses
        if reduction == "batchmean":
            return losses.sum() / args[0].shape[0]
        return losses.mean() if reduction == "mean" else losses.sum()

    return handler


_WEIGHTED_MEAN = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
for _func in (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.kl_div, F.soft_margin_loss, F.poisson_nll_loss, F.hinge_embedding_loss),
):
    HANDLERS[_func] = _elementwise_loss(_func)
