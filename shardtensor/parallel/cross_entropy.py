"""Cross entropy of plain local logits whose classes are cut over ranks, as a column-parallel head leaves them.

The logits are never gathered. Forward, the ranks join the maximum of each row in one all-reduce and, in another, all
their sums at once: of the exponentials, of the target's logit (from the one rank that has it), and of all logits where
labels are smoothed. Backward sends nothing: with the joined sums at hand, each rank's part of the softmax is its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError, RuleError
from shardtensor.ops.ids import strays_of
from shardtensor.ops.reducing import HALF
from shardtensor.parallel.classes import Classes, classes_of
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.tensor.sharded_tensor import ShardedTensor

_TURN = 1 << 23
"""Exponentials are made and added up so many elements at a time: 32 MiB, not another copy of the logits."""


def parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    num_classes: int,
    spec: ShardingSpec | str = "[..., tp]",
    process_group: Any = None,
    data_axes: str | tuple[str, ...] = (),
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Return the cross entropy of the whole logits, at the cost of two all-reduces of the size of the losses.

    All ranks that the classes are cut over call it, with the same targets; each has its columns of the logits. Value
    and gradient are those of ``F.cross_entropy`` of the whole logits, the classes last. Nothing is waited for on CUDA,
    so the call can be part of a CUDA graph. It can be differentiated once. Compile `ParallelCrossEntropy`, which has
    found its ranks before.

    Args:
        logits: floats; global shape ``(..., num_classes)``, local ``(..., columns)``. The local tensor may or may not
            have the columns that a cut with ``pad(n)`` adds: they count for nothing and their gradient is 0.
        target: class indices of all classes, ``(...)``, equal on all ranks.
        weight: of each class, ``(num_classes,)``, equal on all ranks.
        num_classes: the true number of classes, without padding.
        spec: how the logits are cut, as in the ``out`` of the head: ``"[..., tp]"``, ``"[..., tp pad(64)]"``,
            ``"[..., tp balanced]"``; some ranks may have none.
        process_group: a process group, a DeviceMesh that has the axes, or None for the default group.
        data_axes: axes of that mesh along which targets differ. A mean then divides by the mean number (or weight) of
            live targets over these axes, for one more all-reduce of a number: the mean of all ranks' losses, which is
            what averaging their gradients belongs to, is the mean over all targets, however many each rank has.
        ignore_index: targets of this value count for nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``; a mean over no live target is nan, as in torch.
        label_smoothing: from 0 to 1; that share of each target is spread over all classes.
        z_loss: adds ``z_loss * logsumexp(logits)**2`` to the loss of each live target, weighed as the target is.

    Returns:
        the loss, equal on all ranks that the classes are cut over: a number, or ``(...)`` for ``"none"``. Sums are made
        in float32, or float64 for such logits, and so is the loss; the gradient has the dtype of the logits.

    Raises:
        IndexError: a target is out of bounds; on all ranks. On CUDA it is an assert on the device, as torch's.
        LayoutError: (a ValueError) the logits, targets or weights do not fit the classes. Where only some ranks have
            such logits all raise it on the CPU; elsewhere, and compiled, those ranks alone.
        RuleError: (a RuntimeError) ShardedTensors, probabilities as targets, weights that want a gradient.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], requires_grad=True)
        >>> loss = parallel_cross_entropy(logits, torch.tensor([0, 1]), num_classes=3)
        >>> torch.allclose(loss, nn.functional.cross_entropy(logits, torch.tensor([0, 1])))
        True

    References:
        Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; the z-loss of Chowdhery et al., PaLM
        (arXiv:2204.02311), section 5; label smoothing as torch defines it.
    """
    group = as_group(process_group)
    classes = classes_of(num_classes, spec, group, data_axes)
    _check_options(reduction, label_smoothing)
    return _loss(logits, target, weight, classes, ignore_index, reduction, label_smoothing, z_loss)


class ParallelCrossEntropy(nn.Module):
    """The loss behind a column-parallel head: `parallel_cross_entropy`, everything but the tensors settled when made.

    Arguments as there. All ranks of the group make it, and call it with their columns of the logits and the same
    targets. Compiled, with ``fullgraph=True`` too, it is one graph.

    Example:
        >>> loss = ParallelCrossEntropy(50257, "[..., tp pad(64)]", label_smoothing=0.1, z_loss=1e-4)
        >>> loss
        ParallelCrossEntropy(50257, '[..., tp pad(64)]', label_smoothing=0.1, z_loss=0.0001)
        >>> loss(torch.zeros(2, 5, 50257), torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([])
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        num_classes: int,
        spec: ShardingSpec | str = "[..., tp]",
        *,
        weight: torch.Tensor | None = None,
        process_group: Any = None,
        data_axes: str | tuple[str, ...] = (),
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        _check_options(reduction, label_smoothing)
        self.classes = classes_of(num_classes, spec, as_group(process_group), data_axes)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        options = (self.ignore_index, self.reduction, self.label_smoothing, self.z_loss)
        return _loss(logits, target, self.weight, self.classes, *options)

    def extra_repr(self) -> str:
        usual = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0}
        said = [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        return ", ".join([str(self.classes.count), repr(self.classes.text), *said])


def _check_options(reduction: str, label_smoothing: float) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")


def _loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    classes: Classes,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    _check(logits, target, weight, classes)
    if logits.is_cpu and not torch.compiler.is_compiling():  # elsewhere `gather` asserts that targets are in bounds
        strays = strays_of(target, 0, classes.count, ignore_index)
        if strays:  # all ranks have the same targets, and so the same strays
            raise IndexError(f"Target {strays[0]} is out of bounds.")
    return _CrossEntropy.apply(
        logits, target, weight, classes, ignore_index, reduction, float(label_smoothing), float(z_loss)
    )


def _check(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, classes: Classes) -> None:
    """Refuse what does not fit and is equal on all ranks, so that all of them raise."""
    if isinstance(logits, ShardedTensor) or isinstance(target, ShardedTensor):
        raise RuleError(
            "parallel cross entropy takes plain local tensors",
            fix="call torch.nn.functional.cross_entropy, which takes ShardedTensors",
        )
    if not logits.is_floating_point():
        raise RuleError(f"logits are floats, these are {logits.dtype}")
    if target.is_floating_point():
        raise RuleError(
            "class probabilities are no targets of parallel cross entropy",
            {"target": f"{tuple(target.shape)} {target.dtype}"},
            ["give class indices", "call torch.nn.functional.cross_entropy with ShardedTensors"],
        )
    if not logits.dim() or logits.shape[:-1] != target.shape:
        raise LayoutError(
            "there is one target for each row of the logits, whose last dim is the classes",
            {"logits": tuple(logits.shape), "target": tuple(target.shape)},
            "flatten or permute them to (..., classes) and (...)",
        )
    if weight is not None and (weight.shape != (classes.count,) or weight.requires_grad):
        raise LayoutError(
            "class weights are one number for each of all classes, without a gradient",
            {"weight": f"{tuple(weight.shape)}, requires_grad={weight.requires_grad}", "classes": classes.count},
            "give the whole vector, detached, on every rank",
        )


class _CrossEntropy(Function):
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
        ids = target.reshape(-1)
        live = ids != ignore_index
        ids = torch.where(live, ids, 0).long()
        w = None if weight is None else weight.to(wide)
        # Ones for weights where there are none: on any device `gather` looks whether the targets are in bounds.
        each = logits.new_ones(1, dtype=wide).expand(classes.count) if w is None else w
        share = torch.where(live, each.gather(0, ids), 0)
        total = share.sum() if reduction == "mean" else None
        if total is not None and classes.data is not None:
            joining = classes.data.all_reduce_async(total, "avg")

        x = _rows(logits, classes)
        top = _joined_top(x, wide, classes.fault_of(logits.shape[-1]), classes.team)
        here = (ids - classes.start).unsqueeze(1)
        at = here.clamp(0, max(x.shape[1] - 1, 0))  # where the target is, if this rank has it
        mine = (live & (here == at).squeeze(1)) if x.shape[1] else None
        columns = w.narrow(0, classes.start, x.shape[1]) if smoothing and w is not None else None
        sums = x.new_empty((3 if smoothing else 2, x.shape[0]), dtype=wide)
        for rows in _turns(x):
            d = x[rows] - top[rows].unsqueeze(1)
            if smoothing:
                sums[2, rows] = (d if columns is None else d * columns).sum(1)
            sums[0, rows] = d.exp_().sum(1)
        if mine is None:
            sums[1] = 0
        else:
            d_at = x.gather(1, at).squeeze(1) - top
            sums[1] = torch.where(mine, d_at, 0)
        sums = classes.team.all_reduce(sums)

        base = sums[0].log()
        losses, rate = share * (base - sums[1]), share
        if smoothing:
            alive = live.to(wide)
            evenly = alive * ((classes.count if w is None else w.sum()) * (smoothing / classes.count))
            losses = (1 - smoothing) * losses + evenly * base - alive * sums[2] * (smoothing / classes.count)
            rate = (1 - smoothing) * rate + evenly
        if z_loss:
            lse = top + base
            losses = losses + z_loss * share * lse.square()
            rate = rate + 2 * z_loss * share * lse
        losses = torch.where(live, losses, 0)
        if total is not None and classes.data is not None:
            total = joining.wait()

        if ctx.needs_input_grad[0]:
            rate, net = rate / sums[0], None
            even = alive * (-smoothing / classes.count) if smoothing else None
            if mine is not None:
                net = rate * d_at.exp() - torch.where(mine, share, 0) * (1 - smoothing)
                if even is not None:
                    net = net + (even if columns is None else even * columns.gather(0, at.squeeze(1)))
            ctx.save_for_backward(logits, top, rate, at, net, even, columns, total)
            ctx.classes = classes
        if reduction == "none":
            return losses.view(target.shape)
        return losses.sum() if total is None else losses.sum() / total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, top, rate, at, net, even, columns, total = ctx.saved_tensors
        grad = grad.reshape(-1)
        if total is not None:
            grad = (grad / total).masked_fill(total == 0, 0)  # nothing was live: a loss of nan, a gradient of 0
        x = _rows(logits, ctx.classes)
        out = logits.new_empty(x.shape[0], logits.shape[-1])
        out[:, x.shape[1] :] = 0  # padding
        part = out[:, : x.shape[1]]
        rate = (grad * rate).unsqueeze(1)
        if even is not None:
            even = (grad * even).unsqueeze(1)
            columns = rate.new_ones(1) if columns is None else columns
        for rows in _turns(x):
            p = (x[rows] - top[rows].unsqueeze(1)).exp_()
            if even is None:
                torch.mul(p, rate[rows], out=part[rows])
            else:
                torch.addcmul(p.mul_(rate[rows]), even[rows], columns, out=part[rows])
        if net is not None:
            part.scatter_(1, at, (grad * net).unsqueeze(1).to(part.dtype))
        return out.view(logits.shape), *[None] * 7


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


def _turns(x: torch.Tensor) -> list[slice]:
    """The rows, so many at a time that temporary copies of them stay small; all at once where a compiler fuses them."""
    step = max(1, _TURN // max(1, x.shape[1]))
    if torch.compiler.is_compiling() or x.shape[0] <= step:
        return [slice(None)]
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]
