"""Operations as smaller ones: what a kernel cannot compute from a part of the batch, sums and maxima of ranks can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

from shardtensor.rules.batch import Refused
from shardtensor.rules.rule import several_dims

aten: Any = torch.ops.aten


def var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Variance and mean in two passes."""
    dims = list(several_dims(x.dim(), dim))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(dims, keepdim=True)
    count = prod(x.shape[d] for d in dims)
    squares = (wide - mean).square().sum(dims, keepdim=keepdim)
    var = squares / (count - (1 if correction is None else correction))
    return var.to(x.dtype), (mean if keepdim else mean.sum(dims)).to(x.dtype)


def var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """Variance in two passes."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """Standard deviation in two passes."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0].sqrt()


def trilinear(
    x: Tensor, y: Tensor, z: Tensor, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1
) -> Tensor:
    """The product of three operands with dims of size 1 inserted, summed over some dims."""
    for d in expand1:
        x = x.unsqueeze(d)
    for d in expand2:
        y = y.unsqueeze(d)
    for d in expand3:
        z = z.unsqueeze(d)
    return (x * y * z).sum(list(sumdim))


_OWN: dict[Any, Callable[..., Any]] = {
    aten.var.correction: var,
    aten.std.correction: std,
    aten.var_mean.correction: var_mean,
    aten._trilinear.default: trilinear,
}


def decomposition(target: Any) -> Callable[..., Any] | None:
    """Return a function that computes an operation by others; None if there is none."""
    return _OWN.get(target) or decomposition_table.get(target)


def traced(function: Callable[..., Any], node: fx.Node) -> tuple[fx.Graph, list[fx.Node]]:
    """Trace `function` in place of the operation of a node; return its graph and the nodes that its inputs are."""
    inputs: list[fx.Node] = list(node.all_input_nodes)

    def run(*tensors: Tensor) -> Any:
        by_node: dict[Any, Any] = dict(zip(inputs, tensors, strict=True))
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda x: by_node.get(x, x))
        return function(*args, **kwargs)

    vals: Sequence[Tensor] = [x.meta["val"] for x in inputs]
    mode: Any = vals[0].fake_mode  # type: ignore[attr-defined]
    try:
        with mode, torch.no_grad():
            made = make_fx(torch.func.functionalize(run, remove="mutations"))(*vals)
    except Exception as error:  # not all of torch's decompositions can be traced
        raise Refused(str(error)) from error
    made.graph.eliminate_dead_code()
    return made.graph, inputs
