"""Data parallelism: ranks compute the gradients of other parts of a batch and average them, during backward.

The loss of a step is the mean over the data ranks of what each computes. So what a rank's backward brings is divided
by their number and summed over those that hold copies of the parameter: an average, where all do. A parameter that is
cut along a data axis, as experts are, has its gradient from all of that axis already, so there it is divided only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardtensor.errors import RuleError
from shardtensor.parallel.data_axes import DataAxes
from shardtensor.parallel.gradient_buckets import each_gradient, finish, gradients_of, make_buckets
from shardtensor.parallel.reducer import Reducer, reducer_of


def data_parallel(
    module: nn.Module,
    axes: str | Sequence[str] = "dp",
    process_group: Any = None,
    *,
    bucket_mib: float = 25.0,
    init_sync: bool = True,
) -> nn.Module:
    """Average the gradients of a module over the data axes of a mesh, during each backward, and return the module.

    Each rank calls the module on its own part of the batch, and backward from the mean loss of that part. When
    backward returns, every gradient is the one of the mean over all data ranks: what the dense module has for the whole
    batch, where the parts are of one size. Parameters may be plain, or sharded over the other axes of the mesh. One
    that is cut along a data axis (experts, to which tokens are sent) has its gradient divided by the size of that axis,
    and summed over none of it.

    Gradients travel in buckets, each as soon as backward has filled it. A parameter without a gradient on some ranks
    counts as zero there; one without a gradient on all ranks keeps None; only a rank whose backward reaches no
    parameter at all lets the others wait. Gradients that hooks of ``backward`` see are
    not averaged yet, nor are those of ``torch.autograd.grad``; averages have no graph (``create_graph=True``).
    Buffers are not averaged. Parameters that are replaced (``to_empty``, ``load_state_dict(assign=True)``, sharding
    after this call) are noticed in the next forward of `module`, if it is not compiled. A copy of the module
    (``deepcopy``, pickle) is not data parallel.

    Args:
        module: its names, shapes, dtypes and layouts are equal on all ranks.
        axes: one axis, or several (``"rep*dp"`` or a sequence).
        process_group: a DeviceMesh that has these axes, or a process group, which is one axis; None for the default
            group. All its ranks call this.
        bucket_mib: what a bucket holds at least.
        init_sync: take parameters and buffers from the first data rank now, so that they are equal; parameters that
            are put in place later, too.

    Raises:
        LayoutError: (a ValueError) no such axis; a parameter of a torch layer is cut along a data axis; a
            parameter's gradients are averaged already.
        DisagreementError: (a ValueError) ranks brought other parameters. Nothing has moved.
        RuleError: (a RuntimeError) a layer makes sparse gradients.

    References:
        Li et al., PyTorch Distributed (arXiv:2006.15704), for buckets that overlap with backward.

    Example:
        >>> import shardtensor as st
        >>> from shardtensor.comm.process_group import as_group
        >>> def gradient():
        ...     model = data_parallel(nn.Linear(1, 1, bias=False), "dp")
        ...     model(torch.full((1, 1), float(as_group().rank))).sum().backward()
        ...     return model.weight.grad.item()
        >>> st.simulate("dp=2, tp=2", gradient)
        [1.0, 2.0, 1.0, 2.0]
    """
    old = reducer_of(module)
    reducer = Reducer(axes, process_group, bucket_mib * 2**20, init_sync)
    reducer.build(module, instead_of=old)
    if old is not None:
        old.remove()
    reducer.handles = [
        module.register_forward_pre_hook(reducer, prepend=True),
        module.register_forward_hook(reducer.after),
    ]
    return module


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Let backward add up gradients without averaging them; the next backward outside averages their sum.

    Args:
        module: as `data_parallel` returned it.

    Raises:
        RuleError: it is not data parallel itself; a part or a wrapper of it is, perhaps.

    Example:
        >>> model = data_parallel(nn.Linear(1, 1))
        >>> with no_sync(model):
        ...     model(torch.ones(1, 1)).sum().backward()
    """
    reducer = reducer_of(module)
    if reducer is None:
        raise RuleError(
            "this module is not data parallel", fix="call no_sync on the module that data_parallel returned"
        )
    before, reducer.is_on = reducer.is_on, False
    try:
        yield
    finally:
        reducer.is_on = before


def reduce_gradients(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    axes: str | Sequence[str] = "dp",
    process_group: Any = None,
    *,
    bucket_mib: float = 25.0,
) -> None:
    """Average gradients over the data axes of a mesh now: `data_parallel` without hooks. Once a step, before clipping.

    All ranks of the mesh call it, with the same parameters in the same order. A gradient that some ranks lack counts as
    zero there; one that all lack stays None.

    Args:
        parameters: a module, or parameters, sharded and plain.
        axes, process_group, bucket_mib: as of `data_parallel`.

    Example:
        >>> p = nn.Parameter(torch.zeros(1))
        >>> p.grad = torch.ones(1)
        >>> reduce_gradients([p])
        >>> p.grad
        tensor([1.])
    """
    if isinstance(parameters, nn.Module):
        gradients = gradients_of(parameters, DataAxes.of(axes, process_group))
    else:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        named = ((f"parameter {i}", None, param) for i, param in enumerate(listed))
        gradients = each_gradient(named, DataAxes.of(axes, process_group))
    buckets = make_buckets(gradients, bucket_mib * 2**20)
    for gradient in gradients:
        if gradient.share != 1.0 and gradient.leaf.grad is not None:
            gradient.leaf.grad.mul_(gradient.share)
    for bucket in buckets:
        bucket.start()
    finish(buckets)
