"""``F.embedding``: ``i, v d -> i d``, ``F.embedding_bag``, and ``F.one_hot``.

If the table is sharded by rows (v), each rank looks up its rows and the results are summed at once. A table sharded by
columns (d) gives an output sharded on its last dim; sharded ids shard it alike. Indices and `padding_idx` are global.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm import collectives
from shardtensor.errors import RuleError
from shardtensor.layout.layout import MeshLayout
from shardtensor.ops.by_rule import LetterCut, by_rule, combines, local_call_by_rule
from shardtensor.ops.indices import check_ids
from shardtensor.ops.local_call import LocalCall, cached_call
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor

# -- rows --------------------------------------------------------------------------------------------------------------


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Look up rows of a table by global id.

    Args:
        input: integer ids of any shape, plain or sharded.
        weight: the table ``(v, d)``, plain or sharded.
        padding_idx: a row, counted from either end, that gets no gradient.
        max_norm: rows that are looked up are first scaled to at most this norm, in the table itself.

    Raises:
        RuleError: `sparse` gradients of a sharded table.
        IndexError: an id is outside the table (on CUDA an assert on the device, as torch).
    """
    if sparse:
        raise RuleError(
            "embedding: a sharded table has no sparse gradients",
            {"table": f"{tuple(weight.shape)}"},
            "use sparse=False",
        )
    rows = weight.shape[0]
    if padding_idx is not None:
        if not -rows <= padding_idx < rows:
            raise AssertionError("Padding_idx must be within num_embeddings")
        padding_idx %= rows
    check_ids(input, 0, rows, lambda _: IndexError("index out of range in self"))
    if max_norm is not None:
        _renormalize(input, weight, max_norm, norm_type)
    if scale_grad_by_freq:
        options = {"padding_idx": padding_idx, "scale_grad_by_freq": scale_grad_by_freq}
        return fall_back(F.embedding, (input, weight), options)
    return _by_rule(input, weight, padding_idx)


def _locally(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """Return the `LocalCall` for whole rows; the kernel checks ids that every rank has, on all ranks alike."""
    if len(args) != 2 or kwargs.get("max_norm") is not None or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse"):
        return None
    ids = args[0]
    if isinstance(ids, ShardedTensor) and not ids._layout.is_whole_on_all(ids._group.size):
        return None
    found = local_call_by_rule(F.embedding, "embedding", args, kwargs)
    pad, rows = kwargs.get("padding_idx"), args[1].shape[0]
    layout = args[1]._layout if isinstance(args[1], ShardedTensor) else None
    is_cut = isinstance(layout, MeshLayout) and 0 in layout.cut_dims
    if found is None or found.moves or is_cut or not (pad is None or -rows <= pad < rows):
        return None
    pad = -1 if pad is None else pad % rows
    return found._replace(call=lambda ids, table, **_: torch.embedding(table, ids, pad))


implements(F.embedding)(cached_call(F.embedding, _locally, embedding, "embedding"))


def look_up(ids: torch.Tensor, table: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Run ``F.embedding`` on plain tensors, also for an empty table or no ids."""
    if not table.numel() or not ids.numel():  # torch's CUDA kernels read out of bounds here
        return table.sum(0).expand(*ids.shape, table.shape[1]).clone(memory_format=torch.contiguous_format)
    return F.embedding(ids, table, padding_idx)


_by_rule = by_rule(look_up, "embedding")


@combines("own_rows")
def own_rows(cut: LetterCut, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up this rank's rows and sum over the ranks: an id that a rank does not hold gives zeros there."""
    start = cut.layouts[1].start(cut.group.rank, 0)
    return collectives.all_reduce(looked_up(ids, table, start, cut.options["padding_idx"]), cut.subgroup)


def looked_up(ids: torch.Tensor, table: torch.Tensor, start: int, padding_idx: int | None) -> torch.Tensor:
    """Look up this rank's rows, with zeros for ids that it does not hold."""
    count = table.shape[0]
    here = ids - start
    elsewhere = (here < 0) | (here >= count)
    here = here.masked_fill(elsewhere, 0)
    pad = None if padding_idx is None or not start <= padding_idx < start + count else padding_idx - start
    return look_up(here, table, pad).masked_fill(elsewhere.unsqueeze(-1), 0)


def _renormalize(ids: torch.Tensor, weight: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows that are looked up to at most `max_norm`; the norm is that of whole rows in any layout."""
    with torch.no_grad():
        if isinstance(ids, ShardedTensor):
            ids = ids.full_tensor()
        is_used = torch.zeros(weight.shape[0], dtype=torch.bool, device=ids.device)
        is_used[ids.reshape(-1)] = True
        norms = torch.linalg.vector_norm(weight, norm_type, 1)
        scale = torch.where((norms > max_norm) & is_used, max_norm / (norms + 1e-7), 1.0)
        weight.mul_(scale.to(weight.dtype).unsqueeze(1))


# -- bags of rows ------------------------------------------------------------------------------------------------------


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
    if wrong or scale_grad_by_freq or mode not in ("sum", "mean"):
        return fall_back(F.embedding_bag, (input, weight, offsets), options)
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        return fall_back(F.embedding_bag, (input, weight, offsets), options)
    rows = F.embedding(input, weight, None, max_norm, norm_type, sparse=sparse)
    counts = torch.ones_like(input, dtype=weight.dtype)
    if padding_idx is not None:
        counts = (input != padding_idx % weight.shape[0]).to(weight.dtype)
    if padding_idx is not None:
        rows = rows * counts.unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        total, many = rows.sum(1), counts.sum(1)
    else:
        total, many = _by_offsets(rows, counts, offsets, include_last_offset)
    return total if mode == "sum" else total / many.clamp_min(1).unsqueeze(-1)


def _by_offsets(
    rows: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, include_last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of ``(n, d)`` rows, and of their counts, over bags that begin at `offsets`."""
    starts, bag = _bags(rows.shape[0], offsets, include_last)
    nothing = torch.zeros(starts.numel(), rows.shape[1], dtype=rows.dtype, device=rows.device)
    return nothing.index_add(0, bag, rows), nothing.new_zeros(starts.numel()).index_add(0, bag, counts)


def _bags(n: int, offsets: torch.Tensor, include_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where bags begin among `n` ids, and the bag of each id."""
    offsets = offsets.full_tensor() if isinstance(offsets, ShardedTensor) else offsets
    first, last = (int(offsets[0]), int(offsets.max())) if offsets.numel() else (0, 0)
    if first:
        raise ValueError(f"offsets[0] has to be 0: the first bag begins with the first id. However, got {first}")
    if last > n:
        raise ValueError(f"offsets[-1] can not be greater than input's length({n}), but got offsets[-1] of {last}")
    starts = offsets[: offsets.numel() - include_last].contiguous()
    each = torch.arange(n, device=offsets.device, dtype=offsets.dtype)
    return starts, torch.searchsorted(starts, each, right=True) - 1


_one_hot_by_rule = by_rule(F.one_hot, "one_hot")


@implements(F.one_hot)
def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return integers as vectors with a 1 at their index: ``... -> ... c``."""
    if num_classes == -1 and tensor.numel() and tensor.dtype == torch.int64:
        num_classes = int(tensor.max()) + 1
    if num_classes < 1 or tensor.dtype != torch.int64:
        return fall_back(F.one_hot, (tensor, num_classes), {})
    faults = ("smaller than num_classes", "non-negative")
    check_ids(tensor, 0, num_classes, lambda value: RuntimeError(f"Class values must be {faults[value < 0]}."))
    return _one_hot_by_rule(tensor, num_classes)
