"""Products: ``m k, k n -> m n`` and its batched, vector and Einstein forms; triangles and linear algebra.

Where the contracted letter is cut, the local products are addends and are summed at once (one all-reduce). Linear
algebra works on batches, which may be cut; a single matrix is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from shardtensor.ops.by_rule import Cut, as_cast, by_rule, joins, leaves_addends
from shardtensor.ops.empty_parts import takes_empty
from shardtensor.ops.engine import run, write_out
from shardtensor.ops.ids import places
from shardtensor.ops.local_call import LocalCall, layouts_of, local_by, remembered
from shardtensor.rules.einsum import einsum_rule, tensordot_rule
from shardtensor.rules.propagate import propagate
from shardtensor.rules.table import rows
from shardtensor.tensor.dispatch import HANDLERS, implements, resolve
from shardtensor.tensor.fallback import fall_back

# -- products ----------------------------------------------------------------------------------------------------------


@implements(torch.Tensor.__rmatmul__)
def rmatmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``other @ input``."""
    return torch.matmul(other, input)


def _plus(func: Any, inner: Any) -> None:
    """``beta * input + alpha * inner(a, b)``; the sum over ranks comes before `input` is added, once."""
    name = func.__name__
    together = by_rule(func, name)

    @implements(func, getattr(torch.Tensor, name))
    def added(
        input: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, out: Any = None
    ) -> torch.Tensor:
        if out is not None:
            return write_out(lambda _, x, k: added(*x, **k), func, (input, a, b), dict(beta=beta, alpha=alpha, out=out))
        if not leaves_addends(name, (input, a, b)):
            return together(input, a, b, beta=beta, alpha=alpha)
        product = inner(a, b)
        if alpha != 1:
            product = product * alpha
        if beta == 0:  # what `input` holds, nan too, does not count; it is in the graph all the same
            gone = input.masked_fill(torch.ones((), dtype=torch.bool, device=input.device), 0)
            return product + as_cast(gone, product) if input.requires_grad else product
        input = as_cast(input, product)
        return product + (input if beta == 1 else input * beta)


_plus(torch.addmm, torch.mm)
_plus(torch.baddbmm, torch.bmm)
_plus(torch.addmv, torch.mv)
_plus(torch.addbmm, lambda a, b: torch.einsum("bmk,bkn->mn", a, b))
_plus(torch.addr, torch.outer)


def einsum(*args: Any) -> torch.Tensor:
    """``torch.einsum(equation, *operands)``: its letters are the rule. The form without an equation gathers."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    rule = einsum_rule(equation, tuple(tuple(x.shape) for x in operands)) if isinstance(equation, str) else None
    result = None if rule is None else run("einsum", rule, operands, _summing(equation, operands))
    return fall_back(torch.einsum, args, {}) if result is None else result


def _einsum_locally(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    equation, *operands = args
    if not isinstance(equation, str) or not all(isinstance(x, torch.Tensor) for x in operands):
        return None
    rule = einsum_rule(equation, tuple(tuple(x.shape) for x in operands))
    recipe = None if rule is None else propagate(rule, layouts_of(operands))
    if rule is None or recipe is None:
        return None
    compute = _summing(equation, operands)
    return local_by(lambda _, *xs: compute(*xs), recipe, operands, range(1, len(args)))


def _summing(equation: str, operands: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The local equation. Under autocast its dtype is that of the whole one: torch chooses it by the sizes of dims."""
    kinds = tuple((tuple(min(n, 2) for n in x.shape), x.dtype) for x in operands)
    device = operands[0].device.type

    def compute(*xs: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled(device):
            return torch.einsum(equation, *xs)
        dtype = _dtype_under_autocast(equation, kinds, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return torch.einsum(equation, *(x.to(dtype) if x.is_floating_point() else x for x in xs))

    return compute


@cache
def _dtype_under_autocast(equation: str, kinds: tuple[tuple[Any, torch.dtype], ...], low: torch.dtype) -> torch.dtype:
    """The dtype of an equation of operands of these sizes and dtypes: torch's own answer for zeros."""
    with torch.no_grad(), torch.autocast("cpu", low):
        zeros = (torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in kinds)
        return torch.einsum(equation, *zeros).dtype


implements(torch.einsum)(remembered(torch.einsum, _einsum_locally, einsum))


@implements(torch.tensordot)
def tensordot(a: torch.Tensor, b: torch.Tensor, dims: Any = 2, out: torch.Tensor | None = None) -> torch.Tensor:
    """Contract dims of `a` with dims of `b`: as many last and first ones, or two lists."""
    if isinstance(dims, torch.Tensor):
        return fall_back(torch.tensordot, (a, b), {"dims": dims, "out": out})
    pairs = (range(a.dim() - dims, a.dim()), range(dims)) if isinstance(dims, int) else dims
    left, right = (((pair,) if isinstance(pair, int) else tuple(pair)) for pair in pairs)
    rule = tensordot_rule(tuple(a.shape), tuple(b.shape), left, right)
    if rule is None:
        return fall_back(torch.tensordot, (a, b), {"dims": dims, "out": out})
    if out is not None:
        return write_out(lambda f, x, k: tensordot(*x, **k), torch.tensordot, (a, b), {"dims": dims, "out": out})
    result = run("tensordot", rule, (a, b), lambda x, y: torch.tensordot(x, y, dims=(left, right)))
    return fall_back(torch.tensordot, (a, b), {"dims": dims}) if result is None else result


@implements(torch.cross, torch.Tensor.cross)
def cross(input: torch.Tensor, other: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """``linalg.cross`` over `dim`, or over the first dim of size 3."""
    if dim is None:
        dim = next((d for d, n in enumerate(input.shape) if n == 3), None)
        if dim is None:
            raise RuntimeError("no dimension of size 3 in input")
    return torch.linalg.cross(input, other, dim=dim)


# -- matrices in batches -----------------------------------------------------------------------------------------------


@joins("band", blocks=True)
def band(cut: Cut) -> torch.Tensor:
    """``tril`` and ``triu``: each rank keeps what lies on the right side of the diagonal. Sends nothing."""
    local, layout, rank = cut.locals[0], cut.layouts[0], cut.group.rank
    down, across = (
        torch.arange(layout.shape[d], device=local.device)  # on ranks outside, too
        if layout.dims[d] is None
        else places(layout, rank, d, local.device)
        for d in (local.dim() - 2, local.dim() - 1)
    )
    down = down[:, None]
    k = cut.options["diagonal"]
    kept = across - down <= k if cut.name == "tril" else across - down >= k
    return local.masked_fill(~kept, 0)


def _of_batches(func: Any, name: str) -> Callable[..., Any]:
    of_batch = by_rule(func, name)

    def handler(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(first, torch.Tensor) or first.dim() < 3:
            return fall_back(func, args, kwargs)
        return of_batch(*args, **kwargs)

    return handler


for _row in rows():
    if _row.section.startswith("linear algebra") and _row.pattern is not None:
        for _name in _row.names:
            for _func in resolve(_name):
                HANDLERS[_func] = _of_batches(_func, _name.rpartition(".")[2])

HANDLERS[torch.nn.functional.bilinear] = by_rule(takes_empty(torch.nn.functional.bilinear, "bilinear"), "bilinear")
