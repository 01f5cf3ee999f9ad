"""``F.embedding``: ``i, v d -> i d``. A table cut on rows (v) looks up what it holds and the rows are summed at once.

A table cut on columns (d) gives an output cut on its last dim; ids that are cut give an output cut alike. Indices, and
`padding_idx`, are global.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm import collectives
from shardtensor.errors import RuleError
from shardtensor.ops.by_rule import Cut, by_rule, decided, joins
from shardtensor.ops.ids import check_ids
from shardtensor.ops.local_call import LocalCall, remembered
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of a table by global id.

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
    """How to look up in whole rows: ids that every rank has are checked by the kernel, on all ranks alike."""
    if len(args) != 2 or kwargs.get("max_norm") is not None or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse"):
        return None
    ids = args[0]
    if isinstance(ids, ShardedTensor) and not ids._layout.is_whole_on_all(ids._group.size):
        return None
    found = decided(F.embedding, "embedding", args, kwargs)
    pad, rows = kwargs.get("padding_idx"), args[1].shape[0]
    if found is None or not (pad is None or -rows <= pad < rows):
        return None
    pad = -1 if pad is None else pad % rows
    return found._replace(call=lambda ids, table, **_: torch.embedding(table, ids, pad))


implements(F.embedding)(remembered(F.embedding, _locally, embedding, "embedding"))


def look_up(ids: torch.Tensor, table: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """``F.embedding`` of plain tensors, also of an empty table or of no ids."""
    if not table.numel() or not ids.numel():  # torch's CUDA kernels read out of bounds here
        return table.sum(0).expand(*ids.shape, table.shape[1]).clone(memory_format=torch.contiguous_format)
    return F.embedding(ids, table, padding_idx)


_by_rule = by_rule(look_up, "embedding")


@joins("own_rows")
def own_rows(cut: Cut) -> torch.Tensor:
    """What this rank's rows give, summed over the ranks: an id that a rank does not hold gives it zeros."""
    ids, table = cut.locals
    start = cut.layouts[1].start(cut.group.rank, 0)
    return collectives.all_reduce(looked_up(ids, table, start, cut.options["padding_idx"]), cut.team)


def looked_up(ids: torch.Tensor, table: torch.Tensor, start: int, padding_idx: int | None) -> torch.Tensor:
    """This rank's rows, and zeros for ids that it does not hold."""
    count = table.shape[0]
    here = ids - start
    elsewhere = (here < 0) | (here >= count)
    here = here.masked_fill(elsewhere, 0)
    pad = None if padding_idx is None or not start <= padding_idx < start + count else padding_idx - start
    return look_up(here, table, pad).masked_fill(elsewhere.unsqueeze(-1), 0)


def _renormalize(ids: torch.Tensor, weight: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows that are looked up to at most `max_norm`, whole rows whatever the layout."""
    with torch.no_grad():
        if isinstance(ids, ShardedTensor):
            ids = ids.full_tensor()
        wanted = torch.zeros(weight.shape[0], dtype=torch.bool, device=ids.device)
        wanted[ids.reshape(-1)] = True
        norms = torch.linalg.vector_norm(weight, norm_type, 1)
        scale = torch.where((norms > max_norm) & wanted, max_norm / (norms + 1e-7), 1.0)
        weight.mul_(scale.to(weight.dtype).unsqueeze(1))
