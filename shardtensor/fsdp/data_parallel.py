"""Data parallelism: ranks compute the gradients of different parts of a batch and average them during backward.

The loss of a step is the mean of the data ranks' losses. So a rank's gradient is divided by their number and summed
over the ranks that hold replicas of the parameter: an average, if all do. The gradient of a parameter that is sharded
along a data axis, like experts, already comes from that whole axis, so there it is only divided.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from shardtensor.comm.agree import agree
from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.fsdp.backward_reducer import BackwardReducer, if_alive, reduced_already
from shardtensor.fsdp.gradient_buckets import (
    DataAxes,
    finish,
    gradients_of,
    make_buckets,
    named_tensors,
)
from shardtensor.tensor.sharded_tensor import local_of
from shardtensor.tensor.trees import with_hook


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
    batch, if all parts have the same size. Parameters may be plain, or sharded over the other axes of the mesh. The
    gradient of one that is sharded along a data axis (experts, to which tokens are sent) is divided by the size of that
    axis and not summed over it.

    Ranks send gradients in buckets, each as soon as backward has filled it. A parameter without a gradient on some
    ranks counts as zero there; one without a gradient on all ranks keeps None; only a rank whose backward reaches no
    parameter at all makes the others wait. Hooks in backward get gradients that are not averaged, and
    ``torch.autograd.grad`` returns such; averages have no graph (``create_graph=True``). Buffers are not averaged. The
    next forward of `module`, if it is not compiled, detects replaced parameters (``to_empty``,
    ``load_state_dict(assign=True)``, sharding after this call). A copy of the module (``deepcopy``, pickle) is not data
    parallel.

    Args:
        module: its names, shapes, dtypes and layouts are equal on all ranks.
        axes: one axis, or several (``"rep*dp"`` or a sequence).
        process_group: a DeviceMesh that has these axes, or a process group, which is one axis; None for the default
            group. All its ranks call this.
        bucket_mib: the size at which a bucket is full and sent; the first one is full at 1 MiB.
        init_sync: copy parameters and buffers from the first data rank now, so that they are equal; also parameters
            that are set later.

    Raises:
        LayoutError: (a ValueError) no such axis; a parameter of a torch layer is sharded along a data axis; a
            parameter's gradients are averaged already.
        DisagreementError: (a ValueError) ranks pass different parameters. Nothing was sent.
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
        module.register_forward_hook(reducer),
    ]
    return module


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Make backward accumulate gradients without averaging them; the next backward outside averages their sum.

    Args:
        module: as `data_parallel` returned it.

    Raises:
        RuleError: `data_parallel` was not called on this module, perhaps on a submodule or a wrapper of it.

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
    """Average gradients over the data axes of a mesh now, without hooks. Call it once a step, before clipping.

    All ranks of the mesh call it, with the same parameters in the same order. A gradient that some ranks lack counts as
    zero there; one that all lack stays None.

    Args:
        parameters: a module, or parameters, sharded and plain.
        axes, process_group, bucket_mib: as in `data_parallel`.

    Example:
        >>> p = nn.Parameter(torch.zeros(1))
        >>> p.grad = torch.ones(1)
        >>> reduce_gradients([p])
        >>> p.grad
        tensor([1.])
    """
    if isinstance(parameters, nn.Module):
        named: Iterable[Any] = named_tensors(parameters)
    else:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        named = ((f"parameter {i}", None, param) for i, param in enumerate(listed))
    gradients = gradients_of(named, DataAxes.of(axes, process_group))
    buckets = make_buckets(gradients, bucket_mib * 2**20)
    for gradient in gradients:
        if gradient.share != 1.0 and gradient.leaf.grad is not None:
            gradient.leaf.grad.mul_(gradient.share)
    for bucket in buckets:
        bucket.start()
    finish(buckets)


class Reducer(BackwardReducer):
    """Averages the gradients of a module, which owns it; the module's hook around forward."""

    def __init__(self, axes: str | Sequence[str], process_group: Any, bucket_bytes: float, init_sync: bool) -> None:
        super().__init__(finish)
        self.axes = DataAxes.of(axes, process_group)
        self.bucket_bytes, self.init_sync = bucket_bytes, init_sync
        self.handles: list[Any] = []
        self._structure: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._leaves: list[tuple[Any, str, torch.Tensor, torch.Tensor, Any]] = []

    def __reduce__(self) -> Any:
        return NoReducer, ()  # a copy of the module has leaves of its own, and perhaps no process group

    # -- what there is to reduce ------------------------------------------------------------------------------------

    def build(self, module: nn.Module, instead_of: Reducer | None = None) -> None:
        """Find the gradients, agree on them with the other ranks, and hook their leaves. Collective."""
        named, gradients = list(named_tensors(module)), []
        fault: ShardTensorError | None = None
        try:
            gradients = gradients_of(named, self.axes)
            leaves = [(gradient.name, gradient.leaf) for gradient in gradients]
            fault = reduced_already(leaves, "call data_parallel once, on the whole model", self, instead_of)
        except ShardTensorError as error:
            fault = error
        call = f"data_parallel({type(module).__name__})"
        layouts = [(g.name, g.param, getattr(g.param, "_layout", "plain")) for g in gradients]
        found = [f"{name} {tuple(param.shape)} {param.dtype} {layout}" for name, param, layout in layouts]
        facts = {"axes": ", ".join(self.axes.names), "parameters": "\n".join(found) or "(none)"}
        agree(self.axes.whole, call, facts, fault)
        parts = [f"{g.name} {tuple(g.leaf.shape)} on each rank" for g in gradients if g.share == 1.0]
        agree(self.axes.data, call, {"parts": "\n".join(parts) or "(none)"})
        seen = {id(leaf) for *_, leaf, _ in self._leaves}
        self.set_buckets(gradients, make_buckets(gradients, self.bucket_bytes))
        owners = list(module.modules())
        self._structure = [(x, tuple(x.values())) for owner in owners for x in (owner._parameters, owner._modules)]
        self._leaves = []
        for name, owner, tensor in named:
            last, leaf = name.rpartition(".")[2], local_of(tensor)
            place = owner._parameters if last in owner._parameters else vars(owner)
            self._leaves.append((place, last, tensor, leaf, _state(leaf)))
        if self.init_sync:
            self._broadcast_replicas([*((name, t) for name, _, t in named), *module.named_buffers()], seen)

    @torch.no_grad()
    def _broadcast_replicas(self, named: Iterable[tuple[str, torch.Tensor]], seen: set[int]) -> None:
        """Overwrite new tensors with the values of the first data rank that holds a replica."""
        for name, tensor in named:
            local = local_of(tensor)
            group, _ = self.axes.copies(name, tensor)
            if group.size > 1 and local.numel() and not local.is_meta and id(local) not in seen:
                seen.add(id(local))
                group.broadcast(local.detach())

    def remove(self) -> None:
        """Remove all hooks from the module and its leaves."""
        self.remove_leaf_hooks()
        for handle in self.handles:
            handle.remove()

    # -- around forward ---------------------------------------------------------------------------------------------

    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        """Before the module's forward: hook its leaves again if they changed. After it: hook its outputs.

        Backward may reach leaves first in the nested backward of a reentrant checkpoint, which ends before the outer.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if output:
            with_hook(output if self.buckets else (), partial(if_alive, weakref.ref(self), Reducer.begin))
        elif torch._C._current_graph_task_id() < 0:
            self.start_over()
            if not self._is_current():
                self.build(module)

    def _is_current(self) -> bool:
        """Return whether the module still holds the leaves that are hooked; half a microsecond a parameter."""
        return all(
            len(place) == len(held) and all(map(is_, place.values(), held)) for place, held in self._structure
        ) and all(
            place.get(name) is tensor and local_of(tensor) is leaf and _state(leaf) == state
            for place, name, tensor, leaf, state in self._leaves
        )


class NoReducer:
    """The hook of a copy of a data-parallel module, which is not data parallel."""

    def __call__(self, *args: Any) -> None:
        """Do nothing."""


def reducer_of(module: nn.Module) -> Reducer | None:
    """Return the reducer of a data-parallel module, else None."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Reducer)), None)


def _state(leaf: torch.Tensor) -> tuple[Any, ...]:
    return leaf.requires_grad, leaf.dtype, getattr(leaf, "grad_dtype", None)
