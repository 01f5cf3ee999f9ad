"""`choose_overlap`: in how many chunks row-parallel layers multiply and sum, by a timed trial on the ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from shardtensor.parallel.layers import ChunkedProduct, LayerFlow, ParallelLinear
from shardtensor.parallel.moves import Sum


def choose_overlap(
    module: nn.Module, tokens: int, chunks: Sequence[int] = (1, 2, 4), rounds: int = 5, shows: bool = True
) -> dict[str, int]:
    """Time row-parallel layers in chunks, and let each use the number that is fastest for inputs of that size or more.

    While one chunk is summed over the ranks the next is multiplied. Whether that wins hangs on sizes, links and the
    card; so it is tried, once for each shape of weight. What is chosen is the same on all ranks: the slowest rank's
    time counts. Nothing but speed changes; layers that scatter their sums, and compiled ones, are left alone.

    Args:
        module: sharded with flows; on CUDA. All ranks of its groups call this.
        tokens: rows of the input, such as batch times sequence.
        chunks: numbers to try; 1 is one product and one sum.
        rounds: trials of each, in turns; medians count.
        shows: print the table on the first rank.

    Returns:
        the number of chunks of each row-parallel layer, by its path.

    Example:
        >>> import shardtensor as st
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        >>> mlp = st.shard_module(mlp, {"0": st.colwise(), "1": st.rowwise()})
        >>> choose_overlap(mlp, tokens=16)  # of one rank: nothing to sum
        {}
    """
    known: dict[Any, dict[int, float]] = {}
    chosen: dict[str, int] = {}
    table = Table("layer", "weight", *(f"{n} chunks, ms" for n in chunks), "chosen", box=None)
    for path, layer in module.named_modules():
        if not isinstance(layer, ParallelLinear) or not layer.flow.adds_bias_last:
            continue
        if layer.flow.enter or len(layer.flow.leave) != 1 or not isinstance(layer.flow.leave[0], Sum):
            continue
        local: torch.Tensor = layer.weight._local  # type: ignore[attr-defined]
        key = tuple(local.shape), local.dtype, layer.flow.leave[0].team
        if key not in known:
            known[key] = _timed(layer, local, tokens, chunks, rounds)
        times = known[key]
        chosen[path] = min(times, key=times.__getitem__)
        layer.flow = _in_chunks(layer.flow, chosen[path], tokens * local.shape[1])
        shape = " x ".join(map(str, local.shape))
        table.add_row(path, shape, *(f"{times[n]:.3f}" for n in chunks), str(chosen[path]))
    if shows and chosen and next(iter(known))[2].index == 0:
        Console().print(table)
    return chosen


def _in_chunks(flow: LayerFlow, chunks: int, least: int) -> LayerFlow:
    return attrs.evolve(flow, product=ChunkedProduct(flow.leave[0].team, chunks, least) if chunks > 1 else None)


def _timed(layer: Any, local: torch.Tensor, tokens: int, chunks: Sequence[int], rounds: int) -> dict[int, float]:
    """The slowest rank's median time of a forward in so many chunks, ms."""
    x = local.new_zeros(tokens, local.shape[1])
    team, before = layer.flow.leave[0].team, layer.flow
    times: dict[int, list[float]] = {n: [] for n in chunks}
    try:
        for trial in range(rounds + 1):
            for n in chunks:
                layer.flow = _in_chunks(before, n, 0)
                team.barrier()
                _wait(local)
                start = time.perf_counter()
                with torch.no_grad():
                    layer(x)
                _wait(local)
                if trial:
                    times[n].append((time.perf_counter() - start) * 1e3)
    finally:
        layer.flow = before
    medians = torch.tensor([statistics.median(found) for found in times.values()], device=local.device)
    return dict(zip(chunks, team.all_reduce(medians, "max").tolist(), strict=True))


def _wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
