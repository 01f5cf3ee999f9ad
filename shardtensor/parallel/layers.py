"""torch's layers on plain local values: the classes that `shard_module` gives to modules whose flows a plan states.

Each is a subclass of the layer it replaces, so names, `state_dict` and `isinstance` stay as they were; only the forward
differs. It reads the local tensors of its parameters on each call, and calls torch's own functions and the one
collective that it needs; `shard_module` decided what to call and stored it in ``flow``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import Move, run_moves
from shardtensor.errors import RuleError
from shardtensor.ops.embedding import look_up, looked_up
from shardtensor.ops.indices import out_of_range, widest
from shardtensor.ops.linear import cast, column_linear, gathered_linear, is_large, shared_linear
from shardtensor.plan.models.model import kind_named
from shardtensor.tensor.sharded_tensor import ShardedTensor

Moves = tuple[Move, ...]

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""Of input, weight and bias: a product fused with its collective, or None if single steps cost the host less."""


def _column_product(
    subgroup: Group, start: int | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Multiply; backward sums the input's gradient beside the weight's. `start` as in `LayerFlow`."""
    if x.requires_grad or start is not None:  # else there is nothing to sum in backward
        return column_linear(x, weight, bias, subgroup, start)
    return None


def _stream_product(
    move: Move, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Gather the slices of the input and multiply; backward reduce-scatters beside the weight's gradient."""
    if is_large(x) and x.requires_grad and not torch.compiler.is_compiling():
        return gathered_linear(x, weight, bias, move)
    return None


@attrs.frozen(eq=False)
class LayerFlow:
    """How a layer computes with local values.

    Attributes:
        enter: redistributes the input to the layout that the weight needs.
        leave: redistributes the product to the layout of the flow.
        sums: ranks over which the gradient of the weight is summed, because each computes a part of it.
        sums_bias: the same for the bias.
        start: the start of this rank's slice of a replicated bias; None if the bias is sharded as the product is.
        adds_bias_last: the product is partial, so the bias is added once, to the result.
        adds_bias: this rank adds it; one of the ranks does if the result is partial, too.
        is_transposed: the weight is ``(in, out)``.
        product: a linear layer's product fused with its collective, if there is one.
    """

    enter: Moves
    leave: Moves
    sums: Group | None = None
    sums_bias: Group | None = None
    start: int | None = None
    adds_bias_last: bool = False
    adds_bias: bool = True
    is_transposed: bool = False
    product: Product | None = None

    @property
    def shares(self) -> bool:
        """Whether the product may share its input's sum: it needs no redistribution and has a partial gradient.

        Not if its weight's gradient is summed, too: that sum would come before the input's.
        """
        return not (self.enter or self.adds_bias_last or self.sums is not None or self.is_transposed)

    def __deepcopy__(self, memo: Any) -> LayerFlow:
        return self


def fused(flow: LayerFlow) -> LayerFlow:
    """Return the flow with a product that is fused with its collective, if there is one."""
    if flow.adds_bias_last or flow.leave or len(flow.enter) != 1:
        return flow
    (move,) = flow.enter
    if move.step.kind == "sum_gradient":
        return attrs.evolve(flow, product=partial(_column_product, move.subgroup, flow.start))
    if move.step.sums and flow.start is None:
        return attrs.evolve(flow, product=partial(_stream_product, move))
    return flow


def local(module: Any, name: str) -> torch.Tensor | None:
    """Return the current local tensor of a parameter; None if the module's parameter is None."""
    param = module._parameters[name]
    if param is None:
        return None
    if type(param) is ShardedTensor:
        return param._local
    if name in module.flow_cut:
        raise RuleError(
            f"{type(module).__name__}: its `{name}` is sharded, and was called with a plain tensor in its place",
            {"found": f"{type(param).__name__} of {tuple(param.shape)}"},
            f"lay it out alike: torch.empty_like(module.{name}).copy_(tensor)",
        )
    return param


def refuse_sharded(module: object, x: Any) -> None:
    """Raise RuleError for a ShardedTensor where a layer takes plain local values: autograd would not record its use."""
    if isinstance(x, ShardedTensor):
        raise RuleError(
            f"{type(module).__name__}: a ShardedTensor came where the plan says that plain local values pass",
            {"found": f"{tuple(x.shape)} as {x._layout}"},
            [
                "give the module that it comes from an `out` in the plan",
                "leave `in` and `out` of this layer out of the plan: then ShardedTensors pass",
            ],
        )


class ParallelLayer:
    """The base of the layers below.

    Attributes:
        flow: how the layer computes.
        flow_cut: names of the parameters that were sharded.
        flow_of: the class that the module had.
    """

    flow: LayerFlow
    flow_cut: frozenset[str]
    flow_of: type[nn.Module]

    @property
    def sums_gradients(self) -> bool:
        """Whether it sums gradients of its parameters over ranks that hold replicas; `fully_shard` reads this."""
        return self.flow.sums is not None or self.flow.sums_bias is not None


class LinearFlow(ParallelLayer):
    """The forward of a linear layer sharded along rows or columns: local values in, local values out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            refuse_sharded(self, x)
        flow, weight, bias = self.flow, local(self, "weight"), local(self, "bias")
        assert weight is not None
        if flow.sums is not None:
            weight = collectives.sum_gradient(weight, flow.sums)
        if flow.is_transposed:
            weight = weight.t()
        if flow.sums_bias is not None and bias is not None:
            bias = collectives.sum_gradient(bias, flow.sums_bias)
        x, weight, bias = cast(x, weight, bias)
        if flow.product is not None and (y := flow.product(x, weight, bias)) is not None:
            return y
        x = run_moves(x, flow.enter)
        if bias is not None and flow.start is not None:
            bias = bias[flow.start : flow.start + weight.shape[0]]
        y = run_moves(shared_linear(x, weight, None if flow.adds_bias_last else bias), flow.leave)
        if not flow.adds_bias_last or bias is None:
            return y
        if not flow.adds_bias:  # zeros in the graph of the bias: all ranks sum its gradient
            bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool), 0)
        return y + bias


class ParallelLinear(LinearFlow, nn.Linear):
    """`nn.Linear` whose weight is sharded along its rows (column-parallel) or its columns (row-parallel)."""


class ParallelEmbedding(ParallelLayer, nn.Embedding):
    """`nn.Embedding` whose weight is sharded along its rows (vocabulary) or columns."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        refuse_sharded(self, input)
        flow = self.flow
        if isinstance(self, _OwnForward):
            self.is_base_called = True
        table = _summed(self, "weight")
        assert table is not None
        ids = run_moves(input, flow.enter)
        if flow.start is None:
            return run_moves(look_up(ids, table, self.padding_idx), flow.leave)
        _refuse_out_of_range(ids, self.num_embeddings, flow.sums)
        return run_moves(looked_up(ids, table, flow.start, self.padding_idx), flow.leave)


class _OwnForward:
    """The own forward of an embedding's subclass: it must call the forward of its base, which is parallel."""

    is_base_called: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        module.is_base_called = False
        y = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not module.__dict__.pop("is_base_called"):
            raise RuleError(
                f"{module.flow_of.__name__}: its forward does not call that of nn.Embedding, which looks the rows up",
                {"weight": f"cut over ranks: {tuple(module.weight.shape)}"},
                "let it call super().forward(input); or keep this embedding whole in the plan",
            )
        return y


class ParallelLayerNorm(ParallelLayer, nn.LayerNorm):
    """`nn.LayerNorm` of a stream that is sharded along tokens: replicated parameters, whose gradients are summed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normed(self, input, F.layer_norm, _summed(self, "weight"), _summed(self, "bias"))


class ParallelRMSNorm(ParallelLayer, nn.RMSNorm):
    """`nn.RMSNorm` of a stream that is sharded along tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normed(self, x, F.rms_norm, _summed(self, "weight"))


def _normed(module: Any, x: torch.Tensor, norm: Callable[..., torch.Tensor], *params: Any) -> torch.Tensor:
    refuse_sharded(module, x)
    flow = module.flow
    return run_moves(norm(run_moves(x, flow.enter), module.normalized_shape, *params, module.eps), flow.leave)


class ParallelNorm(ParallelLayer):
    """A norm of a class that is not torch's: its own forward, with parameters whose gradients are summed."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        refuse_sharded(self, x)
        module: Any = self
        x, summed = run_moves(x, self.flow.enter), {name: _summed(module, name) for name in module._parameters}
        if _ONE_MORE_OBJECT and torch.compiler.is_compiling():  # in a checkpoint no graph may change the module
            one: Any = object.__new__(module.flow_of)
            vars(one).update(vars(module), _parameters=summed)
            return run_moves(module.flow_of.forward(one, x, *args, **kwargs), self.flow.leave)
        place, held = module._parameters, dict(module._parameters)
        try:
            place.update(summed)
            y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        finally:
            place.update(held)
        return run_moves(y, self.flow.leave)


_ONE_MORE_OBJECT = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""Whether a graph can hold another object with a module's attributes; before torch 2.13 it cannot."""


def _refuse_out_of_range(ids: torch.Tensor, count: int, subgroup: Group | None) -> None:
    """Raise IndexError for ids outside the vocabulary; `subgroup` has the ranks with different ids."""
    if torch.compiler.is_compiling():
        torch._assert_async(((ids >= 0) & (ids < count)).all(), "index out of range in self")
        return
    outside = out_of_range(ids, 0, count)
    if subgroup is not None and ids.is_cpu:
        outside = widest(outside, subgroup)
    if outside:
        raise IndexError("index out of range in self")


def _summed(module: Any, name: str) -> torch.Tensor | None:
    param = local(module, name)
    if param is None or module.flow.sums is None:
        return param
    return collectives.sum_gradient(param, module.flow.sums)


_LAYERS: dict[type[nn.Module], type[ParallelLayer]] = {
    nn.Linear: ParallelLinear,
    nn.Embedding: ParallelEmbedding,
    nn.LayerNorm: ParallelLayerNorm,
    nn.RMSNorm: ParallelRMSNorm,
}


def layer_class(cls: type[nn.Module]) -> type[ParallelLayer] | None:
    """Return the parallel layer for a class of torch's, for GPT-2's `Conv1D`, or a norm; None for any other.

    A subclass may override forward, so the class must match exactly; norms and embeddings of other classes keep their
    own forward, and that of an embedding (one that scales, for example) calls the parallel one in place of torch's.
    """
    if cls not in _LAYERS and not issubclass(cls, ParallelLayer):
        kind = kind_named(cls.__name__)
        base = LinearFlow if cls.__name__ == "Conv1D" else ParallelNorm if kind and kind.name == "norm" else None
        if base is not None:
            _LAYERS[cls] = type(f"Parallel{cls.__name__}", (base, cls), {"__reduce_ex__": _reduced})
        elif issubclass(cls, nn.Embedding):
            bases = (_OwnForward, cls, ParallelEmbedding)
            _LAYERS[cls] = type(f"Parallel{cls.__name__}", bases, {"__reduce_ex__": _reduced})
    return _LAYERS.get(cls)


def _reduced(layer: Any, protocol: int) -> tuple[Any, ...]:
    """Return what pickle and copy use for a layer whose class cannot be imported by name."""
    return _new_layer, (layer.flow_of,), layer.__dict__


def _new_layer(cls: type[nn.Module]) -> Any:
    made: Any = layer_class(cls)
    return made.__new__(made)
