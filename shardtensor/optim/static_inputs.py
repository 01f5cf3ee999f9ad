"""Inputs of a captured step: buffers with fixed addresses, into which each call copies its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardtensor.errors import CaptureError
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


class StaticInputs:
    """Copies of the arguments of one call.

    Args:
        args, kwargs: tensors in nested lists, tuples and dicts, and other values.
        device: of the copies of CPU tensors.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> None:
        leaves, self._structure = _flatten(args, kwargs)
        self._buffers = [_buffer(x, device) for x in leaves]
        self._memory = [local_of(x).detach() if isinstance(x, torch.Tensor) else None for x in self._buffers]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the buffers in the structure of the arguments."""
        return _unflatten(self._buffers, self._structure)

    def fill(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy the arguments of another call into the buffers.

        Raises:
            CaptureError: the structure, a shape, a dtype, a layout or a value that is not a tensor has changed.
        """
        leaves, structure = _flatten(args, kwargs)
        if structure != self._structure:
            raise _unlike("arguments", self._structure, structure)
        for i, (buffer, x) in enumerate(zip(self._buffers, leaves, strict=True)):
            if not _is_alike(buffer, x):
                raise _unlike(f"input {i}", _describe(buffer), _describe(x))
        for memory, x in zip(self._memory, leaves, strict=True):
            if memory is not None:
                x = local_of(x)
                memory.copy_(x.detach() if x.requires_grad else x, non_blocking=True)


def on_device(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with CPU tensors copied to the device."""
    leaves, structure = _flatten(args, kwargs)
    return _unflatten([x.to(device) if _is_elsewhere(x, device) else x for x in leaves], structure)


def _is_elsewhere(x: Any, device: torch.device) -> bool:
    return isinstance(x, torch.Tensor) and x.is_cpu and device.type != "cpu" and not isinstance(x, ShardedTensor)


def _flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
        return args, len(args)  # the usual call, at a tenth of the cost
    return tree_flatten((args, dict(kwargs)))


def _unflatten(leaves: list[Any], structure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tuple(leaves), {}) if isinstance(structure, int) else tree_unflatten(leaves, structure)


def _buffer(x: Any, device: torch.device) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    copy = x.detach().to(device) if _is_elsewhere(x, device) else x.detach().clone()
    return copy.requires_grad_(x.requires_grad)


def _is_alike(buffer: Any, x: Any) -> bool:
    if not isinstance(buffer, torch.Tensor):
        return x is buffer or (type(x) is type(buffer) and bool(x == buffer))
    if not isinstance(x, torch.Tensor):
        return False
    if buffer.shape != x.shape or buffer.dtype != x.dtype or buffer.requires_grad != x.requires_grad:
        return False
    if isinstance(buffer, ShardedTensor) and isinstance(x, ShardedTensor):
        return buffer._layout == x._layout and buffer._group is x._group
    return isinstance(buffer, ShardedTensor) == isinstance(x, ShardedTensor)


def _describe(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    layout = f" {x.sharding_spec()}" if isinstance(x, ShardedTensor) else ""
    grad = " requires_grad" if x.requires_grad else ""
    return f"{' x '.join(map(str, x.shape)) or 'number'} {x.dtype}{layout}{grad}"


def _unlike(what: str, captured: Any, found: Any) -> CaptureError:
    if not isinstance(captured, str):
        captured, found = (f"{x} tensors" if isinstance(x, int) else x for x in (captured, found))
    return CaptureError(
        f"{what} of a graphed step: not as in the capture; nothing has run",
        {"captured": captured, "found": found},
        [
            "call the step itself, without a graph, for a batch of another shape",
            "make another graphed_step of it; what changes from call to call has to be in tensors",
        ],
    )
