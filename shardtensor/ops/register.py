"""`register_op` registers an operation of the user's, or one of torch's without a row, by a one-line rule."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves

from shardtensor.errors import RuleError
from shardtensor.ops.by_rule import by_rule
from shardtensor.rules.table import ROWS, Row, row_of
from shardtensor.tensor.dispatch import implements, name_of
from shardtensor.tensor.sharded_tensor import ShardedTensor

Function = Callable[..., Any]


def register_op(func: Any, rule: str = "", /, combine: str = "", call: str = "") -> Any:
    """Give an operation a row in the rule table, so that it works on ShardedTensors, forward and backward.

    Called with a function, or used as a decorator. The operation then gets the local tensors of its operands,
    redistributed as the rule requires; autograd records it. All ranks call it together. An existing row is
    replaced.

    Args:
        func: of torch (``torch.special.ndtr``, a custom op ``torch.ops.my.fused``), or your own, on plain tensors.
        rule: a letter for each dim of each operand and of the output: ``... k, n k -> ... n``.
            `shardtensor.rules.pattern` documents the notation.
        combine: for letters that the output lacks, what reduces the ranks' results: ``k sum``.
        call: the parameters, if the function has others than the operands: ``input, weight, eps=``.

    Returns:
        The function to call: `func` itself if torch dispatches it to ShardedTensors, else a wrapper that does.

    Raises:
        SpecError: the rule cannot be read; the message points to the fault.
        RuleError: the rule has another number of operands than the function takes.

    Example:
        >>> import torch, shardtensor as st
        >>> @st.register_op("... k, n k -> ... n", combine="k sum")
        ... def scores(x, keys):
        ...     return x @ keys.t()
        >>> keys = st.distribute(torch.ones(5, 3), "[tp balanced, -]")
        >>> scores(torch.ones(2, 3), keys).full_tensor().shape
        torch.Size([2, 5])
    """
    if isinstance(func, str):
        return lambda function: register_op(function, func, combine=combine, call=call)
    name = name_of(func)
    is_own = inspect.isfunction(func) and not str(func.__module__).startswith("torch.")
    key = f"{func.__module__}.{func.__qualname__}" if is_own else name
    row = row_of(key, rule, combine, call, "registered here")
    if row.pattern is None:
        raise RuleError(f"{name}: a rule has letters", {"rule": rule}, "write `... k, n k -> ... n`")
    _check_operands(name, func, row)
    ROWS[key] = row
    handler = by_rule(func, key)
    if not is_own:
        implements(func)(handler)
        return func

    @functools.wraps(func)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, ShardedTensor) for x in tree_leaves((args, kwargs))):
            return handler(*args, **kwargs)
        return func(*args, **kwargs)

    return dispatched


def _check_operands(name: str, func: Function, row: Row) -> None:
    """Raise RuleError if the rule has more operands than the function has parameters, or another number than `call`."""
    assert row.pattern is not None
    count = len(row.pattern.sides)
    if len(row.call.operands) != count:
        raise RuleError(
            f"{name}: the rule has {count} operands, the call names {len(row.call.operands)}",
            {"rule": str(row.pattern), "call": str(row.call)},
            "name the operands in order; what is no operand has a `=`: `input, weight, eps=`",
        )
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # torch's C functions have none
        return
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters) or row.pattern.listed:
        return
    if len(positional) < count:
        raise RuleError(
            f"{name}: the rule has {count} operands, the function takes {len(positional)} arguments",
            {"rule": str(row.pattern), "function": f"{name}{inspect.signature(func)}"},
            "write one side for each tensor, apart by commas",
        )
