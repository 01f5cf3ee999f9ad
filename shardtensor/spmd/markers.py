"""Operations that mark places in the graph of a train step: the gradients of a backward, and optimizer steps."""

from __future__ import annotations

from typing import Any

import torch

Node = Any
"""`torch.fx.Node`, whose annotations let each argument be one of 17 types."""


def number_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype of a value that is known to be a single number, in this rank's graph; else None."""
    if is_scaled(node):
        return number_dtype(node.args[0])
    found: torch.dtype | None = node.meta.get("number")
    return found


def summed_dtype(node: Node, group: str) -> torch.dtype | None:
    """Return the dtype of the single numbers that a node adds up over the ranks of a group; None for another node."""
    is_sum = node.target is torch.ops._c10d_functional.all_reduce.default and node.args[1:] == ("sum", group)
    return number_dtype(node.args[0]) if is_sum else None


def is_scaled(node: Node) -> bool:
    """Whether a value is another one, multiplied by a constant."""
    return node.target is torch.ops.aten.mul.Tensor and not isinstance(node.args[1], torch.fx.Node)


@torch.library.custom_op("shardtensor::gradient", mutates_args=())
def gradient(grad: torch.Tensor, parameter: int) -> torch.Tensor:
    """The gradient of a parameter, by number, when a backward has ended."""
    return grad.clone()


@torch.library.custom_op("shardtensor::stepped", mutates_args=())
def stepped(params: list[torch.Tensor], grads: list[torch.Tensor], optimizer: int) -> list[torch.Tensor]:
    """The parameters after the step of an optimizer, by number."""
    return [param.clone() for param in params]


@gradient.register_fake
def _(grad: torch.Tensor, parameter: int) -> torch.Tensor:
    return torch.empty_like(grad)


@stepped.register_fake
def _(params: list[torch.Tensor], grads: list[torch.Tensor], optimizer: int) -> list[torch.Tensor]:
    return [torch.empty_like(param) for param in params]


GRADIENT: Any = torch.ops.shardtensor.gradient.default
STEPPED: Any = torch.ops.shardtensor.stepped.default
CHECKS: Any = {torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default}
"""They raise if a tensor is false, and return nothing."""
