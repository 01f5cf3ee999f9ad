"""Matrices in batches: triangles, and linear algebra. Batches may be cut; a single matrix is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.ops.by_rule import Cut, by_rule, joins
from shardtensor.ops.empty_parts import takes_empty
from shardtensor.ops.ids import places
from shardtensor.rules.table import rows
from shardtensor.tensor.dispatch import HANDLERS, resolve
from shardtensor.tensor.fallback import fall_back


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
