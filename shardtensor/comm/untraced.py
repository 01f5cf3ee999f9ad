"""Functions that `torch.compile` does not trace."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(reason: str) -> Callable[[Function], Function]:
    """Break the graph at a function and trace nothing that it calls: `torch.compiler.disable` without cost per call.
    `reason` is the error text under ``fullgraph=True``, with the fix."""

    def mark(function: Function) -> Function:
        marked = cast(Any, function)
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        code = cast(FunctionType, function).__code__
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
        return function

    return mark
