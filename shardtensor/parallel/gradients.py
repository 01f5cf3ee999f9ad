"""The gradients that backward can bring to parameters, each with the ranks it is averaged with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, RuleError
from shardtensor.parallel.data_axes import DataAxes
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


@attrs.frozen(eq=False)
class Gradient:
    """The gradient of a parameter, and whom it is averaged with.

    Attributes:
        name: of the parameter.
        param: what people see, a ShardedTensor or a plain tensor.
        leaf: this rank's part of it, whose ``grad`` autograd fills.
        group: the ranks that hold copies of `leaf`.
        share: their share of all data ranks.
        dtype: in which it is sent.
    """

    name: str
    param: torch.Tensor
    leaf: torch.Tensor
    group: Group
    share: float
    dtype: torch.dtype

    @property
    def kind(self) -> tuple[Any, ...]:
        """Gradients of one kind can share a bucket."""
        return id(self.group), self.dtype, self.leaf.device


def gradients_of(module: nn.Module, axes: DataAxes) -> list[Gradient]:
    """What backward can bring to a module, each leaf once, in the order of its names."""
    return each_gradient(named_tensors(module), axes)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Parameters, and sharded leaves that are plain attributes, with the module that holds them."""
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, param in owner._parameters.items():
            if param is not None:
                yield prefix + name, owner, param
        for name, value in vars(owner).items():
            if isinstance(value, ShardedTensor) and value._local.requires_grad and value._local.is_leaf:
                yield prefix + name, owner, value


def each_gradient(named: Iterable[tuple[str, Any, torch.Tensor]], axes: DataAxes) -> list[Gradient]:
    found: dict[int, Gradient] = {}
    for name, owner, param in named:
        leaf = local_of(param)
        if id(leaf) in found or not (leaf.requires_grad and leaf.is_leaf):
            continue
        if getattr(owner, "sparse", False) is True:
            raise sparse_error(name)
        group, share = axes.copies(name, param)
        if share != 1.0 and owner is not None and type(owner).forward.__module__.startswith("torch.nn."):
            raise LayoutError(
                f"`{name}` is cut along a data axis, but {type(owner).__name__} takes its input as equal on all ranks",
                {"spec": str(param.sharding_spec()), "data axes": ", ".join(axes.names)},  # type: ignore[attr-defined]
                "shard it along other axes; a layer that sends its inputs to the ranks may cut along a data axis",
            )
        found[id(leaf)] = Gradient(name, param, leaf, group, share, _sent_as(leaf))
    return list(found.values())


def _sent_as(leaf: torch.Tensor) -> torch.dtype:
    """The dtype of a leaf's gradients, as autograd will make them."""
    dtype = getattr(leaf, "grad_dtype", leaf.dtype)
    return torch.promote_types(leaf.dtype, torch.float32) if dtype is None else dtype


def sparse_error(name: str) -> RuleError:
    """The refusal of gradients that have no buckets."""
    return RuleError(
        f"the gradient of `{name}` is sparse, and sparse gradients are not averaged",
        fix="make the embedding with sparse=False",
    )
