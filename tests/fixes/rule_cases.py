"""Errors of rules of operations, and of calls that no rule covers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import shardtensor as st
from fixes.case import Case, weight


def scores(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return x @ keys.t()


def ruled(rule: str, combine: str = "k sum", call: str = "") -> torch.Tensor:
    """The function, registered by that rule, gives what it gives of plain tensors."""
    x, keys = torch.ones(2, 6), torch.arange(24.0).view(4, 6)
    out = st.register_op(scores, rule, combine=combine, call=call)(x, weight())
    assert torch.equal(out.full_tensor() if isinstance(out, st.ShardedTensor) else out, scores(x, keys))
    return out


RULE = "... k, n k -> ... n"

CASES: dict[str, Case] = {
    "a rule without letters": Case(
        lambda: ruled("@pointwise.pointwise"), {"write `... k, n k -> ... n`": lambda: ruled("... k, n k -> ... n")}
    ),
    "a call of other operands": Case(
        lambda: ruled(RULE, call="x"),
        {"name the operands in order; what is no operand has a `=`": lambda: ruled(RULE, call="x, keys")},
    ),
    "a rule of more operands": Case(
        lambda: ruled("... k, n k, n -> ... n"),
        {"write one side for each tensor, apart by commas": lambda: ruled(RULE)},
    ),
    "an argument that cannot be read": Case(
        lambda: ruled(RULE, call="x, keys, 3"), {"write `dim=-1`": lambda: ruled(RULE, call="x, keys, dim=-1")}
    ),
    "a join that cannot be read": Case(lambda: ruled(RULE, "k"), {"write `k sum`": lambda: ruled(RULE, "k sum")}),
    "a misspelt join": Case(lambda: ruled(RULE, "k summ"), {"did you mean `sum`?": lambda: ruled(RULE, "k sum")}),
    "a dim of the output alone": Case(
        lambda: ruled("... k, n k -> ... m"),
        {"write `m'` for a dim that the operation makes": lambda: ruled("... k, !n k -> ... m'")},
    ),
    "a letter that nothing combines": Case(
        lambda: ruled(RULE, ""),
        {
            "say how: `k sum`": lambda: [ruled(RULE, "k sum"), ruled("... !k, n !k -> ... n", "")],
        },
    ),
    "a join of a letter that is not there": Case(
        lambda: ruled(RULE, "k sum, kk sum"), {"did you mean `k`?": lambda: ruled(RULE, "k sum")}
    ),
    "sparse gradients of a table": Case(
        lambda: F.embedding(torch.arange(4), weight(), sparse=True),
        {"use sparse=False": lambda: F.embedding(torch.arange(4), weight(), sparse=False)},
    ),
}
