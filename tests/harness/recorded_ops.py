"""A CUDA graph played on the CPU: operations written down while a function runs, and done again by `replay`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class RecordedOps(TorchDispatchMode):
    """As `CudaRecorder`: nothing that is captured runs before `replay`, which runs no Python of the function.

    What is captured has results with any values; writes are put off; reading a number is refused, as CUDA does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []
        self.runs = self.captures = self.replays = self.resets = 0

    def run(self, function: Any) -> Any:
        self.runs += 1
        return function()

    def capture(self, function: Any) -> Any:
        self.captures += 1
        self.ops = []
        with self:
            return function()

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.ops:
            result = func(*args, **kwargs)
            if not any(argument.alias_info for argument in func._schema.arguments):
                for old, new in zip(tree_leaves(out), tree_leaves(result), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)

    def reset(self) -> None:
        self.resets += 1
        self.ops = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        written = {
            argument.name
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        if written:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            out = [given[name] for name in given if name in written]
            out = None if not func._schema.returns else out[0] if len(out) == 1 else tuple(out)
        else:
            out = func(*args, **kwargs)
        self.ops.append((func, args, kwargs, tree_map(lambda x: x, out)))
        return out
