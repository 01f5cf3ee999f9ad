"""Cross entropy of plain local logits whose classes are sharded over ranks, as a column-parallel head returns them.

The logits are never gathered. Forward all-reduces the maximum of each row and then, in one all-reduce, all sums: of the
exponentials, of the target's logit (on the one rank that holds it), and of all logits if labels are smoothed. Backward
sends nothing: each rank computes its part of the softmax from these sums.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import nn
from torch.autograd import Function

from shardtensor.comm.agree import agree
from shardtensor.comm.checked import CheckedGroup
from shardtensor.comm.group import Group, group_along
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError, RuleError, SpecError
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import MeshLayout
from shardtensor.layout.pieces import Stepped
from shardtensor.mesh import Mesh
from shardtensor.ops.engine import HALF
from shardtensor.ops.indices import out_of_range, widest
from shardtensor.spec.nodes import Cut, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.frozen
class Classes:
    """This rank's part of the classes; the ranks of `group` hold them all.

    Attributes:
        count: of all classes.
        start, held: the first class that this rank has, and how many.
        padded: how many columns its logits have if they include the padding of the shard.
        group: the ranks that the classes are sharded over.
        data: the ranks that have other targets, whose count a mean divides by; None if there are none.
        text: the spec, for messages.
    """

    count: int
    start: int
    held: int
    padded: int
    group: Group
    data: Group | None
    text: str

    def fault_of(self, width: int) -> LayoutError | None:
        """Return the fault of logits with so many columns on this rank."""
        if width in (self.held, self.padded):
            return None
        span = f"{self.start} to {self.start + self.held - 1}" if self.held else "none"
        facts = {"spec": self.text, "classes here": span}
        facts |= {"with padding": f"{self.padded} columns"} if self.padded != self.held else {}
        return LayoutError(
            f"the logits have {width} columns where {self.held} of the {self.count} classes are",
            facts,
            "give num_classes and the spec in which the head leaves its logits",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Classes:
        return self  # groups are not copied


def classes_of(
    num_classes: int, spec: ShardingSpec | str, group: Group, data_axes: str | tuple[str, ...] = ()
) -> Classes:
    """Bind the last dim of `spec`. Sends nothing (the first use of some axes together makes their group)."""
    cut = _last_cut(as_spec(spec))
    mesh = mesh_of(group)
    start, held, padded = _columns(cut, num_classes, mesh, group.rank)
    names = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    mesh.refuse_unknown(names)
    if any(name in cut.axes for name in names):
        raise LayoutError(
            "targets do not differ along an axis that cuts the classes",
            {"data_axes": ", ".join(names), "classes": f"cut over {'*'.join(cut.axes)}"},
            "name the other axes of the mesh as data_axes",
        )
    data = group_along(group, names) if names else None
    return Classes(num_classes, start, held, padded, group_along(group, cut.axes), data, str(Spec(..., cut)))


def _last_cut(spec: ShardingSpec) -> Cut:
    """Return how a spec shards the last dim; it must shard no other."""
    if not isinstance(spec, Spec):
        raise SpecError(
            "the classes are cut along axes of the mesh", {"spec": str(spec)}, 'write the spec as "[..., tp]"'
        )
    *others, last = spec.dims or (None,)
    shards_more = spec.named or spec.flat_part or spec.only_part or spec.partial_parts
    if shards_more or any(c not in (None, ...) for c in others):
        raise RuleError(
            "parallel cross entropy takes logits that are cut along their last dim and no other",
            {"spec": str(spec)},
            'write it as "[..., tp]"'
            + (", and name the axes along which targets differ as data_axes" if set(others) - {None, ...} else ""),
        )
    if not isinstance(last, Cut):
        raise RuleError("no class is cut by this spec", {"spec": str(spec)}, "use torch's cross_entropy: it is local")
    if last.blocks != 1:
        raise RuleError(
            "the classes are cut in blocks, so that a rank has several ranges of them",
            {"spec": str(spec)},
            "reshard the head, so that each rank has one range",
        )
    return last


@lru_cache(maxsize=1024)
def _columns(cut: Cut, num_classes: int, mesh: Mesh, rank: int) -> tuple[int, int, int]:
    """Return the first class of a rank, how many it has, and how many columns with the padding of the shard."""
    if num_classes < 1:
        raise LayoutError(f"num_classes={num_classes}: there is at least one class")
    layout = bind(Spec(cut), (num_classes,), mesh)
    assert isinstance(layout, MeshLayout) and layout.dims[0] is not None
    held = layout.local_shape(rank)[0]
    pieces = layout.dims[0].pieces
    padded = pieces.step if cut.pad is not None and isinstance(pieces, Stepped) else held
    return layout.start(rank, 0), held, padded


_TURN = 1 << 23
"""Exponentials are computed and summed in chunks of so many elements: 32 MiB, not another copy of the logits."""


class RowSums(Function):
    """Returns for each row ``x`` of the logits ``top``, its maximum over all ranks, ``log(sum(exp(x - top)))``, the
    target's ``x - top`` and, if labels are smoothed, the sum of all ``x - top``, weighted by column. It saves no other
    tensor of the size of the logits; autograd computes losses from these four, so that large logits lose no digits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, columns: torch.Tensor | None, classes: Classes, evenly: bool
    ) -> tuple[torch.Tensor, ...]:
        x = _rows(logits, classes)
        wide = torch.float32 if logits.dtype in HALF else logits.dtype
        top = _joined_top(x, wide, classes.fault_of(logits.shape[-1]), classes.group)
        own = _summed(x, top, columns, evenly)
        here = (ids - classes.start).unsqueeze(1)
        at = here.clamp(0, max(x.shape[1] - 1, 0))  # where the target is, if this rank has it
        mask = (here == at).squeeze(1) if x.shape[1] else torch.zeros_like(ids, dtype=torch.bool)
        d_at = x.gather(1, at).squeeze(1) - top if x.shape[1] else torch.zeros_like(top)
        total_exp, *evens, d_target = classes.group.all_reduce(torch.stack([*own, torch.where(mask, d_at, 0)])).unbind()
        ctx.save_for_backward(logits, top, total_exp, d_at, at, mask, columns)
        ctx.classes = classes
        ctx.mark_non_differentiable(top)
        return top, total_exp.log(), d_target.clone(), *(each.clone() for each in evens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _gradient(saved, grads[1:], ctx.classes), *[None] * 4
        with torch.no_grad():
            found = _gradient(saved, grads[1:], ctx.classes)
        return _Once.apply(found, saved[0], *grads[1:]), *[None] * 4


class _Once(Function):
    """The gradient under ``create_graph=True``: its own backward would need sums over all ranks, so it raises."""

    @staticmethod
    def forward(_: Any, found: torch.Tensor, *depends_on: torch.Tensor) -> torch.Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> None:
        raise RuleError(
            "parallel cross entropy can be differentiated once",
            fix="for derivatives of the gradient call torch.nn.functional.cross_entropy with ShardedTensors",
        )


def _gradient(saved: tuple[Any, ...], grads: tuple[torch.Tensor, ...], classes: Classes) -> torch.Tensor:
    """Return ``exp(x - top) * rate`` plus `even`; at the target all terms are summed before they are rounded."""
    logits, top, total_exp, d_at, at, mask, columns = saved
    rate, even = grads[0] / total_exp, grads[2] if len(grads) > 2 else None
    x = _rows(logits, classes)
    out = logits.new_empty(x.shape[0], logits.shape[-1])
    part = out
    if out.shape != x.shape:
        part = out[:, : x.shape[1]]
        out[:, x.shape[1] :] = 0  # padding
    net = rate * d_at.exp() + torch.where(mask, grads[1], 0)
    if even is not None:
        columns = rate.new_ones(x.shape[1]) if columns is None else columns
        net = net + even * columns.gather(0, at.squeeze(1)) if x.shape[1] else net
        even = even.unsqueeze(1)
    rate = rate.unsqueeze(1)
    for rows in _turns(x):
        p = (x[rows] - top[rows].unsqueeze(1)).exp_().mul_(rate[rows])
        if even is not None:
            p = p.addcmul_(even[rows], columns)
        part[rows].copy_(p)
    if x.shape[1]:
        part.scatter_(1, at, net.unsqueeze(1).to(part.dtype))
    return out.view(logits.shape)


def _rows(logits: torch.Tensor, classes: Classes) -> torch.Tensor:
    """Return one row for each target, without the columns of padding."""
    width = logits.shape[-1]
    x = logits.reshape(math.prod(logits.shape[:-1]), width)
    return x[:, : classes.held] if width > classes.held else x


def _joined_top(x: torch.Tensor, wide: torch.dtype, fault: LayoutError | None, subgroup: Group) -> torch.Tensor:
    """Return each row's largest logit. On the CPU all ranks raise a fault of one, which sends an infinite maximum."""
    is_checked = x.is_cpu and x.shape[0] > 0 and not torch.compiler.is_compiling()
    if fault is not None and not is_checked:
        raise fault
    if fault is not None or not x.shape[1]:
        top = x.new_full((x.shape[0],), math.inf if fault is not None else -math.inf, dtype=wide)
    else:
        top = x.amax(1).to(wide)
    top = subgroup.all_reduce(top, "max")
    if is_checked and not math.isfinite(top.amax()):
        agree(subgroup, "ParallelCrossEntropy", {}, fault)
    return top


def _summed(x: torch.Tensor, top: torch.Tensor, columns: torch.Tensor | None, is_smoothed: bool) -> list[torch.Tensor]:
    """Return each row's sum of exponentials and, if smoothed, of logits, weighted by column; both minus `top`."""
    turns = []
    for rows in _turns(x):
        d = x[rows] - top[rows].unsqueeze(1)
        evens = [(d if columns is None else d * columns).sum(1)] if is_smoothed else []
        turns.append([d.exp_().sum(1), *evens])
    return turns[0] if len(turns) == 1 else [torch.cat(parts) for parts in zip(*turns, strict=True)]


def _turns(x: torch.Tensor) -> list[slice]:
    """Return chunks of rows, so that temporary copies stay small; all rows if a compiler fuses them."""
    step = max(1, _TURN // max(1, x.shape[1]))
    if torch.compiler.is_compiling() or x.shape[0] <= step:
        return [slice(None)]
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]


class ParallelCrossEntropy(nn.Module):
    """The cross entropy of the whole logits, behind a column-parallel head: two all-reduces of the size of the losses.

    All ranks of the group create it. All ranks that the classes are sharded over call it, with the same targets; each
    with its columns of the logits. Value and gradient are those of ``F.cross_entropy`` of the whole logits, the classes
    last. On CUDA the host does not wait, so a CUDA graph can contain the call. It can be differentiated once.
    Compiled, with ``fullgraph=True`` too, it is one graph.

    Args:
        num_classes: the true number of classes, without padding.
        spec: how the logits are sharded, as in the ``out`` of the head: ``"[..., tp]"``, ``"[..., tp pad(64)]"``,
            ``"[..., tp balanced]"``; some ranks may have none.
        weight: the weights of the classes, ``(num_classes,)``, equal on all ranks.
        process_group: a process group, a DeviceMesh that has the axes, or None for the default group.
        data_axes: axes of that mesh along which targets differ. A mean then divides by the mean number (or weight) of
            valid targets over these axes, with one more all-reduce of a number. So the mean of all ranks' losses is
            the mean over all targets, however many each rank has, and averaged gradients are those of this mean.
            All ranks along these axes must call it, too.
        ignore_index: targets of this value are ignored.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``; a mean over no valid target is nan, as in torch.
        label_smoothing: from 0 to 1; this share of each target is distributed over all classes.
        z_loss: adds ``z_loss * logsumexp(logits)**2`` to the loss of each valid target, weighted like the target.

    Called with:
        logits: floats; global shape ``(..., num_classes)``, local ``(..., columns)``. The local tensor may or may not
            have the columns that ``pad(n)`` adds: they are ignored and their gradient is 0.
        target: class indices of all classes, ``(...)``, equal on all ranks.

    Returns:
        the loss, equal on all ranks that the classes are sharded over: a number, or ``(...)`` for ``"none"``. Sums and
        the loss are float32, or float64 for such logits; the gradient has the dtype of the logits.

    Raises:
        IndexError: a target is out of bounds; on all ranks. On CUDA it is a device-side assert, as in torch, unless
            ``SHARDTENSOR_CHECK=collectives`` is set.
        LayoutError: (a ValueError) the logits, targets or weights do not fit the classes. If only some ranks have such
            logits, all raise it on the CPU; elsewhere, and compiled, only those ranks.
        RuleError: (a RuntimeError) ShardedTensors, probabilities as targets, weights that require a gradient.

    Example:
        >>> loss = ParallelCrossEntropy(50257, "[..., tp pad(64)]", label_smoothing=0.1, z_loss=1e-4)
        >>> loss
        ParallelCrossEntropy(50257, '[..., tp pad(64)]', label_smoothing=0.1, z_loss=0.0001)
        >>> loss(torch.zeros(2, 5, 50257), torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([])

    References:
        Megatron-LM (arXiv:1909.08053), section 3; for ``z_loss`` PaLM (arXiv:2204.02311), section 5.
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
        self._refuse_out_of_range(target)
        wide = torch.float32 if logits.dtype in HALF else logits.dtype
        w = None if weight is None else weight.to(wide)
        ids = target.reshape(-1).long()
        valid = ids != self.ignore_index
        share = valid.to(wide) if w is None else w[torch.where(valid, ids, 0)] * valid
        columns = w[classes.start : classes.start + classes.held] if smoothing and w is not None else None
        top, base, d_target, *evens = RowSums.apply(logits, ids, columns, classes, bool(smoothing))
        losses = base - d_target  # rows that are not valid have any value, until the end
        if w is not None:
            losses = losses * share
        if smoothing:
            each = smoothing / classes.count
            evenly = each * (classes.count if w is None else w.sum())
            losses = (1 - smoothing) * losses + (evenly * base - each * evens[0])
        if self.z_loss:
            losses = losses + self.z_loss * share * (top + base).square()
        losses = torch.where(valid, losses, 0)
        if self.reduction != "mean":
            return losses.sum() if self.reduction == "sum" else losses.view(target.shape)
        total = share.sum()
        return losses.sum() / (total if classes.data is None else classes.data.all_reduce(total, "avg"))

    def _refuse_out_of_range(self, target: torch.Tensor) -> None:
        """Raise IndexError on all ranks if a target is out of bounds; off the CPU assert on the device."""
        classes, ignored = self.classes, self.ignore_index
        if torch.compiler.is_compiling():
            is_valid = (target >= 0) & (target < classes.count) | (target == ignored)
            torch._assert_async(is_valid.all(), "Target is out of bounds.")
            return
        waits = isinstance(classes.group, CheckedGroup)
        outside = out_of_range(target, 0, classes.count, ignored, waits=waits)  # the same on all ranks that have these
        if classes.data is not None and self.reduction == "mean" and (target.is_cpu or waits):
            outside = widest(outside, classes.data)  # others would wait for this rank's count
        if outside:
            raise IndexError(f"Target {outside[0]} is out of bounds.")

    def extra_repr(self) -> str:
        defaults = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0}
        others = [f"{name}={vars(self)[name]!r}" for name, value in defaults.items() if vars(self)[name] != value]
        return ", ".join([str(self.classes.count), repr(self.classes.text), *others])


def _check(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, classes: Classes) -> None:
    """Raise for arguments that do not fit and are equal on all ranks, so that all of them raise."""
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
