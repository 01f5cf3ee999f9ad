"""Python values of sharded tensors: always the global value, equal on every rank; all ranks must call these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.tensor.dispatch import implements, implements_each, own_body
from shardtensor.tensor.sharded_tensor import ShardedTensor


def _of_whole(func: Callable[..., Any]) -> Callable[..., Any]:
    def handler(input: ShardedTensor, *args: Any) -> Any:
        if input.numel() != 1:
            raise RuntimeError(f"a Tensor with {input.numel()} elements cannot be converted to Scalar")
        return func(input.full_tensor(), *args)

    return handler


implements_each("item __float__ __int__ __index__ __complex__", _of_whole)


@implements(torch.Tensor.__bool__, torch.Tensor.__nonzero__, torch.Tensor.is_nonzero, torch.is_nonzero)
def bool_value(input: ShardedTensor) -> bool:
    """Return the one element as a bool."""
    if input.numel() != 1:
        kind = "more than one value" if input.numel() else "no values"
        raise RuntimeError(f"Boolean value of Tensor with {kind} is ambiguous")
    return bool(input.full_tensor().item())


@implements(torch.Tensor.tolist)
def tolist(input: ShardedTensor) -> Any:
    """Return the whole tensor as nested lists, on every rank."""
    return input.full_tensor().tolist()


implements_each([torch.Tensor.__iter__, torch.Tensor.__contains__], own_body)


@implements(torch.Tensor.__format__)
def format_(input: ShardedTensor, format_spec: str) -> str:
    """Format the one value of a tensor without dims; else return its ``repr``, which sends nothing."""
    if not input.dim():
        return format(input.full_tensor().item(), format_spec)
    return object.__format__(input, format_spec) if format_spec else repr(input)


@implements(torch.equal, torch.Tensor.equal)
def equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and elements, in any layouts; the same result on every rank.

    Ranks outside the group of both take no part and get True.
    """
    if input.shape != other.shape:
        return False
    if _are_elsewhere(input, other):
        return True
    if input.dtype != other.dtype:  # some versions of torch refuse these
        torch.equal(torch.empty(0, dtype=input.dtype), torch.empty(0, dtype=other.dtype))
    return bool((input == other).all())


@implements(torch.allclose, torch.Tensor.allclose)
def allclose(
    input: torch.Tensor, other: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Return whether all elements are close; the same result on every rank, and True on ranks outside (see `equal`)."""
    if _are_elsewhere(input, other):
        return True
    return bool(torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())


def _are_elsewhere(input: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both are sharded over groups that this rank is not a member of."""
    return all(isinstance(x, ShardedTensor) and x._group.index < 0 for x in (input, other))
