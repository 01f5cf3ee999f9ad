"""What makes a module data parallel: hooks that send its gradients while backward makes them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardtensor.comm.agree import agree
from shardtensor.errors import LayoutError, RuleError, ShardTensorError
from shardtensor.parallel.data_axes import DataAxes, take_first_copies
from shardtensor.parallel.gradient_buckets import Bucket, Gradient, finish, gradients_of, make_buckets, named_tensors
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


class Reducer:
    """Starts buckets while backward fills them, and finishes them when it ends. Is the forward pre-hook of its module.

    The module owns it; hooks on leaves refer to it weakly, for Python's collector does not see through them.
    """

    def __init__(self, axes: str | Sequence[str], process_group: Any, bucket_bytes: float, init_sync: bool) -> None:
        self.axes = DataAxes.of(axes, process_group)
        self.bucket_bytes, self.init_sync = bucket_bytes, init_sync
        self.is_on = True
        self.handles: list[Any] = []
        self.gradients: list[Gradient] = []
        self.buckets: list[Bucket] = []
        self._bucket_of: list[Bucket | None] = []
        self._leaf_handles: list[Any] = []
        self._nodes: list[Any] = []
        self._structure: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._leaves: list[tuple[Any, torch.Tensor, Any]] = []
        self._attributes: list[tuple[dict[str, Any], str, Any]] = []
        self._start_round()

    def __reduce__(self) -> Any:
        return Nobody, ()  # a copy of the module has leaves of its own, and perhaps no process group

    # -- what there is to reduce ------------------------------------------------------------------------------------

    def build(self, module: nn.Module, instead_of: Reducer | None = None) -> None:
        """Find the gradients, agree on them with the other ranks, and hook their leaves. Collective."""
        whole, data = self.axes.whole, self.axes.data
        gradients: list[Gradient] = []
        fault: ShardTensorError | None = None
        try:
            gradients = gradients_of(module, self.axes)
            self._refuse_second(gradients, instead_of)
        except ShardTensorError as error:
            fault = error
        call = f"data_parallel({type(module).__name__})"
        facts = {"axes": ", ".join(self.axes.names), "parameters": _lines(_text(g) for g in gradients)}
        agree(whole, call, facts, fault)
        parts = (f"{g.name} {tuple(g.leaf.shape)} on each rank" for g in gradients if g.share == 1.0)
        agree(data, call, {"parts": _lines(parts)})
        known = {id(leaf) for _, leaf, _ in self._leaves}
        self._take_off_leaves()
        self.gradients, self.buckets = gradients, make_buckets(gradients, self.bucket_bytes)
        places = {id(gradient): bucket for bucket in self.buckets for gradient in bucket.gradients}
        self._bucket_of = [places.get(id(gradient)) for gradient in gradients]
        for i, gradient in enumerate(gradients):
            self._hook(i, gradient)
        self._start_round()
        self._remember(module)
        if self.init_sync:
            fresh = [(name, tensor) for name, tensor in _values(module) if id(local_of(tensor)) not in known]
            take_first_copies(fresh, self.axes)

    def _refuse_second(self, gradients: list[Gradient], instead_of: Reducer | None) -> None:
        for gradient in gradients:
            for hook in (getattr(gradient.leaf, "_post_accumulate_grad_hooks", None) or {}).values():
                if isinstance(hook, _Arrival) and hook.reducer() not in (None, self, instead_of):
                    raise LayoutError(
                        f"the gradient of `{gradient.name}` is averaged by another data_parallel already",
                        fix="call data_parallel once, on the whole model",
                    )

    def _hook(self, index: int, gradient: Gradient) -> None:
        leaf = gradient.leaf
        if self.buckets:
            self._leaf_handles.append(leaf.register_post_accumulate_grad_hook(_Arrival(self, index)))
        if gradient.share != 1.0:  # before it is added to what is there: that has been divided
            with torch.enable_grad():
                node = torch.autograd.graph.get_gradient_edge(leaf).node
            self._nodes.append(node)
            self._leaf_handles.append(node.register_prehook(partial(_scaled, gradient.share)))

    def _take_off_leaves(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles, self._nodes = [], []

    def remove(self) -> None:
        """Leave the module as it was before."""
        self._take_off_leaves()
        for handle in self.handles:
            handle.remove()

    # -- whether it is still so -------------------------------------------------------------------------------------

    def _remember(self, module: nn.Module) -> None:
        owners = list(module.modules())
        self._structure = [(x, tuple(x.values())) for owner in owners for x in (owner._parameters, owner._modules)]
        named = list(named_tensors(module))
        self._leaves = [(tensor, local_of(tensor), _state(local_of(tensor))) for _, _, tensor in named]
        ends = ((vars(owner), name.rpartition(".")[2], tensor) for name, owner, tensor in named)
        self._attributes = [(place, name, tensor) for place, name, tensor in ends if name in place]

    def _is_current(self) -> bool:
        """Whether the module still holds the leaves that are hooked; half a microsecond a parameter."""
        return (
            all(len(place) == len(held) and all(map(is_, place.values(), held)) for place, held in self._structure)
            and all(place.get(name) is tensor for place, name, tensor in self._attributes)
            and all(local_of(tensor) is leaf and _state(leaf) == state for tensor, leaf, state in self._leaves)
        )

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before the module's forward: see that its leaves are the ones that are hooked."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            return
        if self._tasks:  # the last backward was broken off by an error
            self._start_round()
        if not self._is_current():
            self.build(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the module's forward: let the whole of backward be known when it begins.

        Leaves may be met first inside of a smaller backward, of a reentrant checkpoint, and that one ends too early.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self.buckets:
            return
        for value in tree_leaves(output):
            value = local_of(value)
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.register_hook(partial(_begin, weakref.ref(self)))

    # -- backward ---------------------------------------------------------------------------------------------------

    def _start_round(self) -> None:
        self._tasks: set[int] = set()
        self._next = 0
        self._is_here = [False] * len(self.gradients)
        for bucket in self.buckets:
            bucket.reset()

    def begin(self) -> None:
        """Be told of the end of the backward that runs."""
        task = torch._C._current_graph_task_id()
        if self.is_on and task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))

    def arrived(self, index: int) -> None:
        """Take note of a gradient that has been accumulated, and start the buckets that are full, in order."""
        if not self.is_on:
            return
        self.begin()
        bucket = self._bucket_of[index]
        if bucket is None or self._is_here[index]:
            self._is_here[index] = True
            if bucket is not None and bucket.is_started:
                raise RuleError(
                    f"a gradient came to `{self.gradients[index].name}` after its bucket had been sent",
                    {"because": "the parameter is used in several checkpoints whose backward runs apart"},
                    "checkpoint(..., use_reentrant=False)",
                )
            return
        self._is_here[index] = True
        bucket.waiting -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._start_next()

    def _start_next(self) -> None:
        self.buckets[self._next].start()
        self._next += 1

    def _end(self, task: int) -> None:
        self._tasks.discard(task)
        if self._tasks or not any(self._is_here):  # a backward around this one; or no gradient was accumulated
            return
        try:
            while self._next < len(self.buckets):
                self._start_next()
            finish(self.buckets)
        finally:
            self._start_round()


class _Arrival:
    """The hook on a leaf."""

    __slots__ = ("index", "reducer")

    def __init__(self, reducer: Reducer, index: int) -> None:
        self.reducer, self.index = weakref.ref(reducer), index

    def __call__(self, leaf: torch.Tensor) -> None:
        reducer = self.reducer()
        if reducer is not None:
            reducer.arrived(self.index)


def _begin(find: weakref.ref[Reducer], grad: torch.Tensor) -> None:
    reducer = find()
    if reducer is not None:
        reducer.begin()


def _scaled(share: float, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(None if grad is None else grad * share for grad in grads)


class Nobody:
    """What a copy of a data-parallel module has in the place of its `Reducer`."""

    buckets = ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Do nothing."""

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Do nothing."""


def reducer_of(module: nn.Module) -> Reducer | None:
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Reducer)), None)


def _state(leaf: torch.Tensor) -> tuple[Any, ...]:
    return leaf.requires_grad, leaf.dtype, getattr(leaf, "grad_dtype", None)


def _values(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, _, tensor in named_tensors(module):
        yield name, tensor
    yield from module.named_buffers()


def _text(gradient: Gradient) -> str:
    param = gradient.param
    layout = str(param._layout) if isinstance(param, ShardedTensor) else "plain"
    return f"{gradient.name} {tuple(param.shape)} {param.dtype} {layout}"


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(texts) or "(none)"
