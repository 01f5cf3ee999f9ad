"""``F.embedding_bag``: rows of a table, and of each bag their sum, mean or maximum; and ``F.one_hot``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.ops.by_rule import by_rule
from shardtensor.ops.ids import check_ids
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor


@implements(F.embedding_bag)
def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Reduce each bag of rows: ``(bags, n)`` ids, or one dim of ids with the `offsets` where bags begin.

    Args:
        input: integer ids, plain or sharded.
        weight: the table ``(v, d)``, plain or sharded.
        padding_idx: rows of this id do not count.
        per_sample_weights: with mode "sum": of the shape of `input`.
    """
    options: dict[str, Any] = {
        "max_norm": max_norm,
        "norm_type": norm_type,
        "scale_grad_by_freq": scale_grad_by_freq,
        "mode": mode,
        "sparse": sparse,
        "per_sample_weights": per_sample_weights,
        "include_last_offset": include_last_offset,
        "padding_idx": padding_idx,
    }
    wrong = (input.dim() == 2) == (offsets is not None) or input.dim() not in (1, 2)
    if wrong or scale_grad_by_freq or mode not in ("sum", "mean", "max"):
        return fall_back(F.embedding_bag, (input, weight, offsets), options)
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        return fall_back(F.embedding_bag, (input, weight, offsets), options)
    rows = F.embedding(input, weight, None, max_norm, norm_type, sparse=sparse)
    counts = torch.ones_like(input, dtype=weight.dtype)
    if padding_idx is not None:
        counts = (input != padding_idx % weight.shape[0]).to(weight.dtype)
    if mode == "max":
        return _largest(
            *(rows, counts) if offsets is None else _side_by_side(rows, counts, offsets, include_last_offset)
        )
    if padding_idx is not None:
        rows = rows * counts.unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        total, many = rows.sum(1), counts.sum(1)
    else:
        total, many = _by_offsets(rows, counts, offsets, include_last_offset)
    return total if mode == "sum" else total / many.clamp_min(1).unsqueeze(-1)


def _largest(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The maximum of each bag of ``(bags, n, d)``, 0 where none of its rows counts."""
    if not rows.shape[1]:
        return rows.sum(1)
    empty = (counts.sum(1) == 0).unsqueeze(-1)
    found = rows.masked_fill((counts == 0).unsqueeze(-1), float("-inf")).max(1)[0]
    return found.masked_fill(empty, 0)


def _side_by_side(
    rows: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, include_last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bags as rows of one length, ``(bags, longest, d)``; what is past the end of a bag does not count."""
    starts, bag = _bags(rows.shape[0], offsets, include_last)
    sizes = torch.bincount(bag, minlength=starts.numel())
    within = torch.arange(int(sizes.max()) if sizes.numel() else 0, device=bag.device)
    held = within < sizes.unsqueeze(1)
    place = (starts.unsqueeze(1) + within).masked_fill(~held, 0)
    return rows[place], counts[place] * held


def _by_offsets(
    rows: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, include_last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of ``(n, d)`` rows, and of their counts, over bags that begin at `offsets`."""
    starts, bag = _bags(rows.shape[0], offsets, include_last)
    nothing = torch.zeros(starts.numel(), rows.shape[1], dtype=rows.dtype, device=rows.device)
    return nothing.index_add(0, bag, rows), nothing.new_zeros(starts.numel()).index_add(0, bag, counts)


def _bags(n: int, offsets: torch.Tensor, include_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Where bags begin among `n` ids, and the bag of each id."""
    offsets = offsets.full_tensor() if isinstance(offsets, ShardedTensor) else offsets
    first, last = (int(offsets[0]), int(offsets.max())) if offsets.numel() else (0, 0)
    if first:
        raise ValueError(f"offsets[0] has to be 0: the first bag begins with the first id. However, got {first}")
    if last > n:
        raise ValueError(f"offsets[-1] can not be greater than input's length({n}), but got offsets[-1] of {last}")
    starts = offsets[: offsets.numel() - include_last].contiguous()
    each = torch.arange(n, device=offsets.device, dtype=offsets.dtype)
    return starts, torch.searchsorted(starts, each, right=True) - 1


def _one_hot(input: torch.Tensor, num_classes: int) -> torch.Tensor:
    if input.numel():
        return F.one_hot(input, num_classes)
    return input.new_zeros((*input.shape, num_classes))


_one_hot_by_rule = by_rule(_one_hot, "one_hot")


@implements(F.one_hot)
def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Integers as vectors with a 1 where they point: ``... -> ... c``."""
    if num_classes == -1 and tensor.numel() and tensor.dtype == torch.int64:
        num_classes = int(tensor.max()) + 1
    if num_classes < 1 or tensor.dtype != torch.int64:
        return fall_back(F.one_hot, (tensor, num_classes), {})
    check_ids(tensor, 0, num_classes, _no_class)
    return _one_hot_by_rule(tensor, num_classes)


def _no_class(value: int) -> Exception:
    return RuntimeError(f"Class values must be {'non-negative' if value < 0 else 'smaller than num_classes'}.")
