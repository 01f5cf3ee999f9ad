"""What a tensor-parallel MLP costs the host: a column-parallel and a row-parallel Linear, forward and backward.

One process on torch's fake process group of four ranks, whose collectives return at once; one thread. Beside
`shard_module` with flows and with specs alone: the local computation with no communication (the floor), a pair of
autograd functions around it written by hand, spmd-types where it is installed, and DTensor. All ways take turns in
every round; told are medians, at a size where the host's work is nearly all there is and at a larger one.

    python benchmarks/tensor_parallel.py [--rounds 60]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Copied, Summed, spmd_types
from pretended import WORLD, medians_us, start
from report import write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardtensor as st

SIZES = ((4, 16, 32), (32, 128, 512))  # tokens, width, hidden size


class FusedColumns(torch.autograd.Function):
    """The local product; the input's gradient is summed beside the weight's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        work = dist.all_reduce(grad_x, async_op=True)
        grad_weight = grad.t() @ x
        work.wait()
        return grad_x, grad_weight


class FusedRows(torch.autograd.Function):
    """The local product, summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        y = F.linear(x, weight)
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class MLP(nn.Module):
    """Two linear layers; what is called around them and in their place is given."""

    def __init__(self, width: int, hidden: int, enter: Any = None, leave: Any = None, products: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.enter, self.leave, self.products = enter, leave, products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.products is not None:
            columns, rows = self.products
            return rows(F.gelu(columns(x, self.up.weight)), self.down.weight)
        if self.enter is None:
            return self.down(F.gelu(self.up(x)))
        return self.leave(self.down(F.gelu(self.up(self.enter(x)))))


def ways_of(width: int, hidden: int) -> dict[str, nn.Module]:
    part = hidden // WORLD
    typed = spmd_types(is_stream=False)
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return {
        "no communication": MLP(width, part),
        "by hand": MLP(width, part, Copied.apply, Summed.apply),
        "by hand, fused": MLP(width, part, products=(FusedColumns.apply, FusedRows.apply)),
        **({} if typed is None else {"spmd-types": MLP(width, part, *typed)}),
        "shardtensor": st.shard_module(MLP(width, hidden), {"up": st.colwise("tp"), "down": st.rowwise("tp")}),
        "shardtensor, specs alone": st.shard_module(
            MLP(width, hidden), {"up.weight": "[tp, -]", "down.weight": "[-, tp]"}
        ),
        "DTensor": parallelize_module(MLP(width, hidden), init_device_mesh("cpu", (WORLD,)), styles),
    }


def step_of(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    params = list(module.parameters())

    def step() -> None:
        module(x).sum().backward()
        for param in params:
            param.grad = None

    return step


def main() -> None:
    args = start(__doc__)
    rows = []
    for tokens, width, hidden in SIZES:
        ways = ways_of(width, hidden)
        x = torch.randn(tokens, width, requires_grad=True)
        medians = medians_us({name: step_of(module, x) for name, module in ways.items()}, args)
        for name, us in medians.items():
            rows.append(
                {
                    "MLP": f"{tokens} tokens, {width}-{hidden}-{width}",
                    "way": name,
                    "us a step": round(us, 1),
                    "to the floor": round(us / medians["no communication"], 2),
                    "to hand": round(us / medians["by hand"], 2),
                }
            )
    write("tensor_parallel", rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
