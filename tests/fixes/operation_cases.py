"""Errors of operations on sharded tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardtensor as st
from fixes.case import Case, grid, strictly, weight

CASES: dict[str, Case] = {
    "strict, and an operand must move": Case(
        lambda: strictly(lambda: weight() + weight("[-, tp]")),
        {
            'reshard(other, "[tp, -]")': lambda: strictly(lambda: weight() + st.reshard(weight("[-, tp]"), "[tp, -]")),
            'reshard(input, "[-, tp]")': lambda: strictly(lambda: st.reshard(weight(), "[-, tp]") + weight("[-, tp]")),
        },
    ),
    "strict, without a rule": Case(
        lambda: strictly(lambda: torch.special.airy_ai(weight())),
        {
            "call full_tensor() on its operands": lambda: strictly(
                lambda: torch.special.airy_ai(weight().full_tensor())
            ),
            "leave strict() to let it gather": lambda: torch.special.airy_ai(weight()),
        },
    ),
    "strict, and flat operands": Case(
        lambda: strictly(lambda: torch.softmax(weight("flat(tp)"), 0)),
        {
            f'reshard(input, "{spec}")': lambda spec=spec: strictly(
                lambda: torch.softmax(st.reshard(weight("flat(tp)"), spec), 0)
            )
            for spec in ("[tp, -]", "[-, tp]", "replicate")
        },
    ),
    "strict, and a write": Case(
        lambda: strictly(lambda: weight().add_(weight("[-, tp]"))),
        {
            "make it of that layout: distribute(operand, spec)": lambda: strictly(
                lambda: weight().add_(st.distribute(weight("[-, tp]"), "[tp, -]"))
            ),
            "leave strict() to let it move": lambda: weight().add_(weight("[-, tp]")),
        },
    ),
    "two groups": Case(
        lambda: weight() + elsewhere(),
        {
            "make them on one group, or call full_tensor() on one of them": lambda: [
                (group := grid(("dp", 2))),
                elsewhere(group) + elsewhere(group),
                weight() + elsewhere().full_tensor(),
            ]
        },
    ),
    "state of another shape": Case(
        lambda: fused(8),
        {"load a state dict of this model; whole tensors have the global shape": lambda: fused(4)},
    ),
    "forward mode": Case(
        lambda: jvp(weight("[-, tp]")),
        {
            "full_tensor(), and differentiate the function of plain tensors": lambda: jvp(
                weight("[-, tp]").full_tensor()
            ),
            "torch.autograd.functional.jvp": lambda: torch.autograd.functional.jvp(
                lambda x: (x @ weight("[-, tp]").t()).sum(), torch.ones(2, 6), torch.ones(2, 6)
            ),
        },
    ),
    "an average of whole numbers": Case(
        lambda: st.init_from_local_tensor(torch.ones(4, dtype=torch.int64), "[-] partial(tp, avg)", 4).full_tensor(),
        {
            "sum them, or convert to a float dtype": lambda: [
                st.init_from_local_tensor(torch.ones(4, dtype=torch.int64), "[-] partial(tp)", 4).full_tensor(),
                st.init_from_local_tensor(torch.ones(4), "[-] partial(tp, avg)", 4).full_tensor(),
            ]
        },
    ),
    "out of another shape": Case(
        lambda: torch.mul(weight(), 2, out=torch.zeros(6, 4)),
        {"make out of the shape of the result": lambda: torch.mul(weight(), 2, out=weight())},
    ),
}


def jvp(keys: torch.Tensor) -> Any:
    return torch.func.jvp(lambda x: (x @ keys.t()).sum(), (torch.ones(2, 6),), (torch.ones(2, 6),))


def elsewhere(group: Any = None) -> st.ShardedTensor:
    return st.zeros("[dp, -]", 4, 6, process_group=group or grid(("dp", 2)))


def fused(rows: int) -> None:
    """A step with the state of a table of so many rows."""
    optimizers = []
    for count in (4, rows):
        param = nn.Parameter(weight(rows=count))
        optimizers.append(torch.optim.Adam([param], fused=True))
        param.sum().backward()
        optimizers[-1].step()
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    optimizers[0].step()
