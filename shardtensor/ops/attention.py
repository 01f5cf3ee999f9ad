"""``scaled_dot_product_attention``: ``b h !l !e, b h !s !e, b h !s !f, b h !l !s -> b h l f``.

Batches and heads may be cut; sequences and features are whole. Grouped queries keep cut heads where a rank's query
heads belong to its key heads. Dropout gathers, so that the mask is the dense one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.engine import finish, group_of, run
from shardtensor.rules.propagate import with_dims
from shardtensor.rules.rule import Letters, Rule
from shardtensor.rules.views import scaled
from shardtensor.tensor.dispatch import fall_back, implements
from shardtensor.tensor.sharded_tensor import ShardedTensor


@implements(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention of query ``(..., h, l, e)``, key ``(..., h, s, e)`` and value ``(..., h, s, f)``."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    everything = {"attn_mask": attn_mask, "dropout_p": dropout_p, **options}
    operands = [query, key, value] + ([] if attn_mask is None else [attn_mask])

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask[0] if mask else None, **options)

    if dropout_p or len({x.dim() for x in operands[:3]}) > 1 or query.dim() < 3:
        return fall_back(F.scaled_dot_product_attention, (query, key, value), everything)
    groups = query.shape[-3] // max(key.shape[-3], 1) if enable_gqa else 1
    if groups > 1 and attn_mask is None and _heads_fit(query, key, value, groups):
        q, k, v = query, key, value
        layout = q._layout  # type: ignore[attr-defined]
        given = with_dims(layout, (*q.shape[:-1], v.shape[-1]), layout.dims)
        group = group_of("scaled_dot_product_attention", operands)
        return finish(compute(q._local, k._local, v._local), given, group)  # type: ignore[attr-defined]
    rule = _rule(tuple(tuple(x.shape) for x in operands), groups > 1)
    out = run("scaled_dot_product_attention", rule, operands, compute)
    return fall_back(F.scaled_dot_product_attention, (query, key, value), everything) if out is None else out


def _rule(shapes: tuple[tuple[int, ...], ...], grouped: bool) -> Rule:
    """Letters of query, key, value and mask; with grouped queries the heads are whole."""
    batch = [f"b{i}" for i in range(len(shapes[0]) - 2)]
    sizes = {letter: max(shape[i] for shape in shapes[:3]) for i, letter in enumerate(batch)}
    sizes.update(l=shapes[0][-2], s=shapes[1][-2])
    heads = "g" if grouped else batch[-1]

    def side(shape: tuple[int, ...], *letters: str) -> Letters:
        names = letters[len(letters) - len(shape) :]
        return tuple(None if n == 1 and sizes.get(x, 1) != 1 else x for n, x in zip(shape, names, strict=True))

    inputs = [
        side(shapes[0], *batch, "l", "e"),
        side(shapes[1], *batch[:-1], heads, "s", "e"),
        side(shapes[2], *batch[:-1], heads, "s", "f"),
        *(side(shape, *batch, "l", "s") for shape in shapes[3:]),
    ]
    whole = frozenset({"l", "s", "e", "f"} | ({"g", batch[-1]} if grouped else set()))
    return Rule(tuple(inputs), (*batch, "l", "f"), whole)


def _heads_fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: int) -> bool:
    """Whether every rank's query heads are those of its key and value heads, and nothing else differs."""
    shells = [x for x in (query, key, value) if isinstance(x, ShardedTensor) and isinstance(x._layout, CutLayout)]
    if len(shells) < 3 or len({id(x._group) for x in shells}) > 1:
        return False
    q, k, v = (x._layout for x in shells)
    assert isinstance(q, CutLayout)
    assert isinstance(k, CutLayout)
    assert isinstance(v, CutLayout)
    if q.partial or k.partial or v.partial or not (q.grid == k.grid == v.grid and q.ranks == k.ranks == v.ranks):
        return False
    if k.dims != v.dims or any((*q.dims[-2:], *k.dims[-2:])) or q.dims[:-3] != k.dims[:-3]:
        return False
    heads, fewer = q.dims[-3], k.dims[-3]
    if heads is None or fewer is None:
        return heads is fewer
    return heads.axes == fewer.axes and heads.pieces == scaled(fewer.pieces, groups)
