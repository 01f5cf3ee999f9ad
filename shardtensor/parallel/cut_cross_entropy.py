"""The autograd Function of parallel cross entropy: what each rank sums up, and what is joined.

The logits are never gathered. Forward, the ranks join the maximum of each row in one all-reduce and, in another, all
their sums at once: of the exponentials, of the target's logit (from the one rank that has it), and of all logits where
labels are smoothed. Backward sends nothing: with the joined sums at hand, each rank's part of the softmax is its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import Function

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, RuleError
from shardtensor.ops.engine import HALF
from shardtensor.parallel.classes import Classes

_TURN = 1 << 23
"""Exponentials are made and added up so many elements at a time: 32 MiB, not another copy of the logits."""


class CutCrossEntropy(Function):
    """With ``d = x - max`` and ``s = sum(exp(d))`` the loss of a row is ``log(s) - d[target]``: large logits cost no
    digits. Its gradient is ``exp(d) * rate``, and at the target what is left of that: ``net``, taken in full precision
    before it is rounded to the dtype of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        classes: Classes,
        ignore_index: int,
        reduction: str,
        smoothing: float,
        z_loss: float,
    ) -> torch.Tensor:
        wide = torch.float32 if logits.dtype in HALF else logits.dtype
        w = None if weight is None else weight.to(wide)
        ids = target.reshape(-1).long()
        live = ids != ignore_index
        share = _shares(ids, live, w, wide, classes)
        total = share.sum() if reduction == "mean" else None
        if total is not None and classes.data is not None:
            joining = classes.data.all_reduce_async(total, "avg")

        x = _rows(logits, classes)
        top = _joined_top(x, wide, classes.fault_of(logits.shape[-1]), classes.team)
        columns = w.narrow(0, classes.start, x.shape[1]) if smoothing and w is not None else None
        own = _summed(x, top, columns, bool(smoothing))
        if x.shape[1]:
            here = (ids - classes.start).unsqueeze(1)
            at = here.clamp(0, x.shape[1] - 1)  # where the target is, if this rank has it
            mine = (here == at).squeeze(1).logical_and_(live)
            d_at = x.gather(1, at).squeeze(1) - top
            own.append(torch.where(mine, d_at, 0))
        else:
            own.append(torch.zeros_like(top))
        total_exp, *evens, d_target = classes.team.all_reduce(torch.stack(own)).unbind()

        base = total_exp.log()
        losses, rate = base - d_target, share  # of rows that are not live anything, until the end
        if w is not None:
            losses = losses * share
        if smoothing:
            each = smoothing / classes.count
            evenly = each * (classes.count if w is None else w.sum())
            losses = (1 - smoothing) * losses + (evenly * base - each * evens[0])
            alive = share if w is None else live.to(wide)
            rate = (1 - smoothing) * rate + evenly * alive
        if z_loss:
            lse = top + base
            losses = losses + z_loss * share * lse.square()
            rate = rate + 2 * z_loss * share * lse
        losses = torch.where(live, losses, 0)

        if ctx.needs_input_grad[0]:
            rate, net, even = rate / total_exp, None, -each * alive if smoothing else None
            if x.shape[1]:
                hit = torch.where(mine, share, 0)
                net = rate * d_at.exp() - (hit * (1 - smoothing) if smoothing else hit)
                if even is not None:
                    net = net + (even if columns is None else even * columns.gather(0, at.squeeze(1)))
            ctx.save_for_backward(logits, top, rate, net, at if x.shape[1] else None, even, columns, total)
            ctx.classes = classes
        if total is None:
            return losses.sum() if reduction == "sum" else losses.view(target.shape)
        if classes.data is not None:
            total = joining.wait()
        return losses.sum() / total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _gradient(saved, grad, ctx.classes), *[None] * 7
        with torch.no_grad():
            found = _gradient(saved, grad, ctx.classes)
        return _Once.apply(found, saved[0], grad), *[None] * 7


class _Once(Function):
    """The gradient, for those who want a graph of it: it hangs on sums over all ranks, which is not lost in silence."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, *depends_on: torch.Tensor) -> torch.Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        raise RuleError(
            "parallel cross entropy can be differentiated once",
            fix="for derivatives of the gradient call torch.nn.functional.cross_entropy with ShardedTensors",
        )


def _gradient(saved: tuple[Any, ...], grad: torch.Tensor, classes: Classes) -> torch.Tensor:
    logits, top, rate, net, at, even, columns, total = saved
    grad = grad.reshape(-1)
    if total is not None:
        grad = grad / total.clamp(min=1e-30)  # where nothing was live the loss is nan, the gradient 0
    x = _rows(logits, classes)
    out = logits.new_empty(x.shape[0], logits.shape[-1])
    part = out
    if out.shape != x.shape:
        part = out[:, : x.shape[1]]
        out[:, x.shape[1] :] = 0  # padding
    rate = (grad * rate).unsqueeze(1)
    if even is not None:
        even = (grad * even).unsqueeze(1)
        columns = rate.new_ones(1) if columns is None else columns
    for rows in _turns(x):
        p = (_of(x, rows) - _of(top, rows).unsqueeze(1)).exp_()
        into = None if torch.compiler.is_compiling() else _of(part, rows)  # rounds as it writes
        if even is None:
            p = torch.mul(p, _of(rate, rows), out=into)
        else:
            p = torch.addcmul(p.mul_(_of(rate, rows)), _of(even, rows), columns, out=into)
        if into is None:
            part.copy_(p)
    if net is not None:
        part.scatter_(1, at, (grad * net).unsqueeze(1).to(part.dtype))
    return out.view(logits.shape)


def _rows(logits: torch.Tensor, classes: Classes) -> torch.Tensor:
    """One row for each target, without the columns of padding."""
    width = logits.shape[-1]
    x = logits.reshape(math.prod(logits.shape[:-1]), width)
    return x[:, : classes.held] if width > classes.held else x


def _joined_top(x: torch.Tensor, wide: torch.dtype, fault: LayoutError | None, team: Group) -> torch.Tensor:
    """The largest logit of each row. On the CPU a fault that one rank has, as no finite maximum, is told to all."""
    is_told = x.is_cpu and x.shape[0] > 0 and not torch.compiler.is_compiling()
    if fault is not None and not is_told:
        raise fault
    if fault is not None or not x.shape[1]:
        top = x.new_full((x.shape[0],), math.inf if fault is not None else -math.inf, dtype=wide)
    else:
        top = x.amax(1).to(wide)
    top = team.all_reduce(top, "max")
    if is_told and not math.isfinite(top.amax()):
        agree(team, "parallel_cross_entropy", {}, fault)
    return top


def _shares(
    ids: torch.Tensor, live: torch.Tensor, w: torch.Tensor | None, wide: torch.dtype, classes: Classes
) -> torch.Tensor:
    """What each target weighs; 0 for those that are not live. Off the CPU `gather` asserts that they are in bounds."""
    if w is None:
        if ids.is_cpu and not torch.compiler.is_compiling():
            return live.to(wide)
        w = ids.new_ones(1, dtype=wide).expand(classes.count)
    return torch.where(live, w.gather(0, torch.where(live, ids, 0)), 0)


def _summed(x: torch.Tensor, top: torch.Tensor, columns: torch.Tensor | None, is_smoothed: bool) -> list[torch.Tensor]:
    """For each row this rank's sum of exponentials and, if asked, of logits, weighted by column; both less `top`."""
    turns = []
    for rows in _turns(x):
        d = _of(x, rows) - _of(top, rows).unsqueeze(1)
        evens = [(d if columns is None else d * columns).sum(1)] if is_smoothed else []
        turns.append([d.exp_().sum(1), *evens])
    return turns[0] if len(turns) == 1 else [torch.cat(parts) for parts in zip(*turns, strict=True)]


def _turns(x: torch.Tensor) -> list[slice | None]:
    """The rows, so many at a time that temporary copies stay small; None: all, as where a compiler fuses them."""
    step = max(1, _TURN // max(1, x.shape[1]))
    if torch.compiler.is_compiling() or x.shape[0] <= step:
        return [None]
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]


def _of(t: torch.Tensor, rows: slice | None) -> torch.Tensor:
    return t if rows is None else t[rows]
