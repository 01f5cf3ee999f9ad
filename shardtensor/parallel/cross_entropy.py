"""Cross entropy of plain local logits whose classes are cut over ranks, as a column-parallel head leaves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardtensor.comm.checked import CheckedGroup
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError, RuleError
from shardtensor.ops.engine import HALF
from shardtensor.ops.indices import strays_of, widest
from shardtensor.parallel.cut_cross_entropy import Classes, RowSums, classes_of
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.tensor.sharded_tensor import ShardedTensor


class ParallelCrossEntropy(nn.Module):
    """The cross entropy of the whole logits, behind a column-parallel head: two all-reduces of the size of the losses.

    All ranks of the group make it. All ranks that the classes are cut over call it, with the same targets; each with
    its columns of the logits. Value and gradient are those of ``F.cross_entropy`` of the whole logits, the classes
    last. Nothing is waited for on CUDA, so the call can be part of a CUDA graph. It can be differentiated once.
    Compiled, with ``fullgraph=True`` too, it is one graph.

    Args:
        num_classes: the true number of classes, without padding.
        spec: how the logits are cut, as in the ``out`` of the head: ``"[..., tp]"``, ``"[..., tp pad(64)]"``,
            ``"[..., tp balanced]"``; some ranks may have none.
        weight: of each class, ``(num_classes,)``, equal on all ranks.
        process_group: a process group, a DeviceMesh that has the axes, or None for the default group.
        data_axes: axes of that mesh along which targets differ. A mean then divides by the mean number (or weight) of
            live targets over these axes, for one more all-reduce of a number: the mean of all ranks' losses, which is
            what averaging their gradients belongs to, is the mean over all targets, however many each rank has. All
            ranks along them call it then, too.
        ignore_index: targets of this value count for nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``; a mean over no live target is nan, as in torch.
        label_smoothing: from 0 to 1; that share of each target is spread over all classes.
        z_loss: adds ``z_loss * logsumexp(logits)**2`` to the loss of each live target, weighed as the target is.

    Called with:
        logits: floats; global shape ``(..., num_classes)``, local ``(..., columns)``. The local tensor may or may not
            have the columns that a cut with ``pad(n)`` adds: they count for nothing and their gradient is 0.
        target: class indices of all classes, ``(...)``, equal on all ranks.

    Returns:
        the loss, equal on all ranks that the classes are cut over: a number, or ``(...)`` for ``"none"``. Sums are made
        in float32, or float64 for such logits, and so is the loss; the gradient has the dtype of the logits.

    Raises:
        IndexError: a target is out of bounds; on all ranks. On CUDA it is an assert on the device, as torch's, but with
            ``SHARDTENSOR_CHECK=collectives``, which waits for the card and tells.
        LayoutError: (a ValueError) the logits, targets or weights do not fit the classes. Where only some ranks have
            such logits all raise it on the CPU; elsewhere, and compiled, those ranks alone.
        RuleError: (a RuntimeError) ShardedTensors, probabilities as targets, weights that want a gradient.

    Example:
        >>> loss = ParallelCrossEntropy(50257, "[..., tp pad(64)]", label_smoothing=0.1, z_loss=1e-4)
        >>> loss
        ParallelCrossEntropy(50257, '[..., tp pad(64)]', label_smoothing=0.1, z_loss=0.0001)
        >>> loss(torch.zeros(2, 5, 50257), torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([])

    References:
        Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; the z-loss of Chowdhery et al., PaLM
        (arXiv:2204.02311), section 5; label smoothing as torch defines it.
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
        self.classes = classes_of(num_classes, spec, as_group(process_group), data_axes)
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"{reduction} is not a valid value for reduction")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        classes, weight, smoothing = self.classes, self.weight, self.label_smoothing
        _check(logits, target, weight, classes)
        self._refuse_strays(target)
        wide = torch.float32 if logits.dtype in HALF else logits.dtype
        w = None if weight is None else weight.to(wide)
        ids = target.reshape(-1).long()
        live = ids != self.ignore_index
        share = live.to(wide) if w is None else w[torch.where(live, ids, 0)] * live
        columns = w[classes.start : classes.start + classes.held] if smoothing and w is not None else None
        top, base, d_target, *evens = RowSums.apply(logits, ids, columns, classes, bool(smoothing))
        losses = base - d_target  # of rows that are not live anything, until the end
        if w is not None:
            losses = losses * share
        if smoothing:
            each = smoothing / classes.count
            evenly = each * (classes.count if w is None else w.sum())
            losses = (1 - smoothing) * losses + (evenly * base - each * evens[0])
        if self.z_loss:
            losses = losses + self.z_loss * share * (top + base).square()
        losses = torch.where(live, losses, 0)
        if self.reduction != "mean":
            return losses.sum() if self.reduction == "sum" else losses.view(target.shape)
        total = share.sum()
        return losses.sum() / (total if classes.data is None else classes.data.all_reduce(total, "avg"))

    def _refuse_strays(self, target: torch.Tensor) -> None:
        """Raise where a target is out of bounds, on all ranks; off the CPU it is an assert on the device."""
        classes, ignored = self.classes, self.ignore_index
        if torch.compiler.is_compiling():
            is_live = (target >= 0) & (target < classes.count) | (target == ignored)
            torch._assert_async(is_live.all(), "Target is out of bounds.")
            return
        waits = isinstance(classes.team, CheckedGroup)
        strays = strays_of(target, 0, classes.count, ignored, waits=waits)  # the same on all ranks that have these
        if classes.data is not None and self.reduction == "mean" and (target.is_cpu or waits):
            strays = widest(strays, classes.data)  # others would wait for this rank's count
        if strays:
            raise IndexError(f"Target {strays[0]} is out of bounds.")

    def extra_repr(self) -> str:
        usual = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0}
        said = [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        return ", ".join([str(self.classes.count), repr(self.classes.text), *said])


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
