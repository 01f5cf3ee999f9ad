"""Softmax and losses; sharded classes are never gathered.

softmax: the ranks all-reduce the maximum and the sum. cross_entropy, ``n !c, n -> n`` if c is not sharded: else they
all-reduce the maximum, and then the sums of exponentials and the target's logit: two all-reduces of the size of the
losses. Means divide by the global count (or weight) of targets that are not ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn._reduction import legacy_get_string

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import along
from shardtensor.ops.by_rule import LetterCut, by_rule, combines
from shardtensor.ops.engine import HALF
from shardtensor.ops.indices import check_ids, places
from shardtensor.ops.reductions import local_extreme
from shardtensor.tensor.dispatch import implements, implements_each
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """Return the reduction that torch's two older arguments mean, if they are given."""
    is_old = size_average is not None or reduce is not None
    return legacy_get_string(size_average, reduce, emit_warning=False) if is_old else reduction


# -- softmax -----------------------------------------------------------------------------------------------------------


def _shifted(local: torch.Tensor, dim: int, subgroup: Group) -> torch.Tensor:
    """Return `local` minus the maximum over `dim` of all ranks, which has no gradient: one all-reduce."""
    with torch.no_grad():
        top = subgroup.all_reduce(local_extreme(local, (dim,), True), "max")
    return local - top


@combines("exponentials")
def exponentials(cut: LetterCut, local: torch.Tensor) -> torch.Tensor:
    """Compute softmax, log_softmax or softmin over a sharded dim."""
    (d,) = cut.dims
    dtype = cut.options.get("dtype")
    if isinstance(cut.options["_stacklevel"], torch.dtype):  # Tensor.softmax(dim, dtype)
        dtype = cut.options["_stacklevel"]
    local = local if dtype is None else local.to(dtype)
    if not local.is_floating_point():
        torch.softmax(torch.empty(1, dtype=local.dtype), 0)  # torch's error
    wide = local.float() if local.dtype in HALF else local
    wide = _shifted(-wide if cut.name == "softmin" else wide, d, cut.subgroup)
    powers = wide.exp()
    total = collectives.all_reduce(powers.sum(d, keepdim=True), cut.subgroup)
    total = collectives.sum_gradient(total, cut.subgroup)  # each rank uses it for its shard
    return (wide - total.log() if cut.name == "log_softmax" else powers / total).to(local.dtype)


# -- cross entropy -----------------------------------------------------------------------------------------------------


@implements(F.cross_entropy)
def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute cross entropy of logits ``(n, c, ...)`` or ``(c,)`` with class indices ``(n, ...)`` or probabilities."""
    reduction = _reduction(size_average, reduce, reduction)
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
    """Return the negative log likelihood of class indices ``(n, ...)`` under log probabilities ``(n, c, ...)``."""
    return _indexed("nll_loss", input, target, weight, ignore_index, _reduction(size_average, reduce, reduction), 0.0)


def _indexed(
    name: str,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> torch.Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not (target.is_floating_point() or target.is_complex()) and x.dim():
        count = x.shape[min(x.dim() - 1, 1)]
        check_ids(target, 0, count, lambda found: IndexError(f"Target {found} is out of bounds."), ignore_index)
    options = {"ignore_index": ignore_index, "label_smoothing": smoothing, "with_weights": reduction == "mean"}
    found = _LOSSES[name](x, target, weight, **options)
    losses, shares = found if isinstance(found, tuple) else (found, found)
    return _reduced(losses, shares, reduction)


def _losses(func: Any) -> Any:
    def losses(
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int,
        label_smoothing: float,
        with_weights: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the losses, and with `with_weights` the weight of each in a mean."""
        options = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
        found = func(x, target, weight, ignore_index=ignore_index, reduction="none", **options)
        if not with_weights:
            return found
        valid = target != ignore_index
        return found, valid.to(found.dtype) if weight is None else weight[target.masked_fill(~valid, 0)] * valid

    losses.__name__ = func.__name__
    return by_rule(losses, func.__name__)


_LOSSES = {"cross_entropy": _losses(F.cross_entropy), "nll_loss": _losses(F.nll_loss)}


@combines("classes", blocks=True)
def classes(
    cut: LetterCut, local: torch.Tensor, labels: torch.Tensor, *rest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses over sharded classes, and the weight of each in a mean; both are replicated."""
    (dim,), (layout, *_), subgroup = cut.dims, cut.layouts, cut.subgroup
    ignore_index, smoothing = cut.options["ignore_index"], cut.options["label_smoothing"]
    is_logits = cut.name == "cross_entropy"
    dtype = local.dtype
    x = local.float() if dtype in HALF else local
    x = _shifted(x, dim, subgroup) if is_logits else x
    valid = labels != ignore_index
    count = layout.shape[dim]
    column = [-1 if d == dim else 1 for d in range(x.dim())]
    held = places(layout, cut.group.rank, dim, x.device)
    if x.shape[dim] and not layout.is_blocked(dim):
        at = labels - held[0]
        is_own = (at >= 0) & (at < x.shape[dim]) & valid
        at = at.masked_fill(~is_own, 0)
        picked = x.gather(dim, at.unsqueeze(dim)).squeeze(dim).masked_fill(~is_own, 0)
    else:
        hit = (held.view(column) == labels.unsqueeze(dim)) & valid.unsqueeze(dim)
        picked = x.masked_fill(~hit, 0).sum(dim)
    terms = [picked, x.exp().sum(dim) if is_logits else torch.zeros_like(picked)]
    w = rest[0].to(x.dtype) if rest else None
    if w is not None:
        terms.append(((held.view(column) == labels.unsqueeze(dim)) * w.view(column)).sum(dim))
    if smoothing:
        terms.append((x if w is None else x * w.view(column)).sum(dim))
        if w is not None:
            terms.append(w.sum().expand_as(picked))
    total = collectives.all_reduce(torch.stack(terms), subgroup)
    base = total[1].log() if is_logits else 0.0
    losses = base - total[0]
    shares = valid.to(x.dtype)
    if w is not None:
        losses, shares = losses * total[2], total[2] * valid
    if smoothing:
        even = (total[4] if w is not None else count) * base - total[3 if w is not None else 2]
        losses = (1 - smoothing) * losses + smoothing / count * even
    return losses.masked_fill(~valid, 0).to(dtype), shares


def _reduced(losses: torch.Tensor, shares: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the losses, their sum, or the mean weighted by their shares: one all-reduce."""
    if reduction == "none":
        return losses
    wide = torch.float32 if losses.dtype in HALF else losses.dtype
    sums = [local_of(losses).sum(dtype=wide)]
    sums += [local_of(shares).sum(dtype=wide)] if reduction == "mean" else []
    if isinstance(losses, ShardedTensor):
        layout, group = losses._layout, losses._group
        joined = collectives.all_reduce(torch.stack(sums), along(group, layout, layout.sharding_axes))
        sums = [joined.select(0, i).clone() for i in (0, 1)[: len(sums)]]  # torch forbids writes to views of unbind
    return (sums[0] / sums[1] if reduction == "mean" else sums[0]).to(losses.dtype)


# -- elementwise losses ------------------------------------------------------------------------------------------------


def _elementwise_loss(func: Callable[..., Any]) -> Callable[..., Any]:
    ruled = by_rule(func, func.__name__)

    def handler(*args: Any, **kwargs: Any) -> Any:
        reduction = _reduction(
            kwargs.pop("size_average", None), kwargs.pop("reduce", None), kwargs.pop("reduction", "mean")
        )
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if reduction not in ("none", "mean", "sum", "batchmean"):
            raise ValueError(f"{reduction} is not a valid value for reduction")
        if len(args) > 2 and not isinstance(args[2], torch.Tensor) and args[2] is not None:
            return fall_back(func, args, {**kwargs, "reduction": reduction})  # older positional arguments
        if "weight" in kwargs and func in _WEIGHTED_MEAN:
            return fall_back(func, args, {**kwargs, "reduction": reduction})
        losses = ruled(*args, **kwargs, reduction="none")
        if reduction == "none":
            return losses
        if reduction == "batchmean":
            return losses.sum() / args[0].shape[0]
        return losses.mean() if reduction == "mean" else losses.sum()

    return handler


_WEIGHTED_MEAN = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
implements_each(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy F.binary_cross_entropy_with_logits F.kl_div "
    "soft_margin_loss F.poisson_nll_loss F.hinge_embedding_loss",
    _elementwise_loss,
)
