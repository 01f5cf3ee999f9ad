"""Products that read one input and share its one collective, which in backward runs beside their weights' gradients.

A product of torch's own gives both of its gradients at once, so that the input's, summed over the products, is complete
only when all of the weights' are. Here a *stand-in* for each product goes out from where the input comes in, and the
product's gradient comes back through it: one node of the graph has them all, and does its work in the order that hides
the collective. Nothing is kept beside the graph, so that whatever autograd does with a graph it does with this one.

Not under torch.compile, which brings the work into an order of its own, whatever the order in which it was traced. It
hides the same collective, as it is traced without this, where it is told to: ``torch.compile(module, options=
{"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": ["sink_waits"]})``.

References:
    Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3: one *f* before the products of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shardtensor.comm import along_dim, collectives
from shardtensor.comm.along_dim import DimSizes
from shardtensor.comm.collectives import alias
from shardtensor.comm.function_call import caller
from shardtensor.comm.group import Group
from shardtensor.ops.fused_linear import as_rows, of_weight


class Shared(NamedTuple):
    """What an input that products share knows of them.

    Attributes:
        version: of the input, as it was shared: a product of what it was changed to is an ordinary one.
        stand_ins: of the products, beside their weights.
    """

    version: int
    stand_ins: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def share(
    x: torch.Tensor, weights: Sequence[torch.Tensor], group: Group, stream: DimSizes | None = None
) -> torch.Tensor:
    """What products of `x` read: the same or, of a stream, the stretches of all ranks; gradients are summed over them.

    `linear` of what is returned, and of one of the weights, shares the collective; whatever else is done with it has
    the right gradient, too. All ranks of the group call this, and run backward.

    Args:
        x: ``(..., k)``, equal on all ranks; with `stream`, this rank's stretch of it. It wants a gradient.
        weights: ``(n_local, k)`` each, leaves that want gradients, of the dtype of `x`.
        group: the ranks that split the products.
        stream: how `x` is cut.
    """
    shared, *stand_ins = _share(x, group, stream, *weights)
    shared.shared_by = Shared(shared._version, tuple(zip(weights, stand_ins, strict=True)))
    return shared


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear``; where `x` is shared by products with this very weight, one of them.

    An input that was changed or cast, or is another, and a weight that was, make an ordinary product.
    """
    shared: Shared | None = getattr(x, "shared_by", None)
    if shared is not None and not torch.compiler.is_compiling() and x._version == shared.version:
        for each, stand_in in shared.stand_ins:
            if each is weight:
                return _linear(stand_in, x, weight, bias)
    return F.linear(x, weight, bias)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, stream: DimSizes | None, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.stream = group, stream
        x = x.view_as(x) if stream is None else alias(along_dim.all_gather_no_grad(x, stream, group))
        ctx.save_for_backward(x, *weights)
        nothing = x.new_empty(())  # a stand-in has a shape, and no memory
        return x, *(nothing.expand(*x.shape[:-1], weight.shape[0]) for weight in weights)

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor | None, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        group, stream, none = ctx.group, ctx.stream, [None] * len(grads)
        if all(grad is None for grad in grads):  # no product took part, or gradients of gradients are wanted
            if grad_x is None:
                return None, None, None, *none
            if stream is None:
                return collectives.all_reduce(grad_x, group), None, None, *none
            return along_dim.reduce_scatter(grad_x, stream, group), None, None, *none
        x, *weights = ctx.saved_tensors
        total: Any = None  # this rank's addend, in memory of its own
        for grad, weight in zip(grads, weights, strict=True):
            if grad is not None:
                total = as_rows(grad) @ weight if total is None else total.addmm_(as_rows(grad), weight)
        total = total.view(x.shape)
        if grad_x is not None:  # of other uses
            total += grad_x
        started = (
            group.all_reduce_async(total) if stream is None else along_dim.PendingReduceScatter(total, stream, group)
        )
        of_weights = [None if grad is None else of_weight(grad, x) for grad in grads]  # beside the collective
        return started.wait(), None, None, *of_weights


class _Linear(torch.autograd.Function):
    """The product itself; in backward it hands its gradient on to where all of them meet."""

    @staticmethod
    def forward(
        ctx: Any, stand_in: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_bias = as_rows(grad).sum(0) if ctx.needs_input_grad[3] else None
        if not torch.is_grad_enabled():
            return grad, None, None, grad_bias
        x, weight = ctx.saved_tensors  # gradients of gradients are wanted: an ordinary product, which records its own
        return None, grad @ weight, of_weight(grad, x), grad_bias


_share, _linear = caller(_Share), caller(_Linear)
