"""What a training step computes and keeps on one rank of a plan: FLOPs, and the bytes of activations. Estimates.

Products count, and the two of attention where the config tells its size; what treats elements alone does not. Tokens
are dealt evenly to the data ranks, and those of a mixture to its experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs

from shardtensor.plan.flows.flow import cuts
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.resolved import Placed, Resolved

_PASSES = 3  # a forward, and a backward of twice as much


@attrs.frozen
class Batch:
    """What one step is of.

    Attributes:
        samples: of all ranks together.
        seq: tokens of a sample.
        dtype: that modules compute in.
    """

    samples: int
    seq: int
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Of all ranks together."""
        return self.samples * self.seq


def data_ranks(resolved: Resolved) -> int:
    """How many parts a batch is dealt in."""
    axes = resolved.plan.axes
    return math.prod(axes.size(name) for name in axes.data)


def step_flops(resolved: Resolved, batch: Batch) -> float:
    """Estimate the FLOPs of one rank in a step, forward and backward: of the first rank, whose pieces are the largest.

    A product counts two for each element of a rank's part of the weight and each token that it meets.
    """
    tokens = batch.tokens / data_ranks(resolved)
    products = attention = whole = held = 0.0
    rank = resolved.plan.axes.mesh.ranks[0]
    for placed in _weights(resolved):
        size = placed.layout.numel(rank)
        products += 2 * size * tokens * _share_of_tokens(resolved, placed)
        if not _is_expert(placed):
            whole, held = whole + placed.tensor.numel, held + size
    config = resolved.model.config or resolved.plan.config
    layers, heads = _count(config, "num_hidden_layers", "n_layer"), _count(config, "num_attention_heads", "n_head")
    if layers and heads and whole:
        width = _count(config, "head_dim") * heads or _count(config, "hidden_size", "n_embd")
        attention = 2 * layers * batch.seq * width * tokens * held / whole  # half of all pairs are ahead of a token
    return _PASSES * (products + attention)


def kept_bytes(resolved: Resolved, batch: Batch) -> int:
    """Estimate the bytes of activations that the first rank keeps from forward to backward, with nothing recomputed.

    Each linear layer keeps what goes in and what comes out, by the layouts of its weight and of its `out`. Of the
    layers beside each other in a module all but the last are taken to share what goes in, as q, k and v do. The logits
    count twice, with their gradient.
    """
    rank, axes = resolved.plan.axes.mesh.ranks[0], resolved.plan.axes
    tokens = batch.tokens / data_ranks(resolved)
    total = 0.0
    shared: set[tuple[str, int]] = set()
    names = [placed.tensor.name for placed in _weights(resolved)]
    last = {_parent(name): name for name in names}
    for placed in _weights(resolved):
        path = placed.tensor.name.rpartition(".")[0]
        shape = placed.layout.local_shape(rank)
        if len(shape) != 2 or not placed.layout.numel(rank):
            continue
        out, into = shape if (placed.tensor.dims or ("out",))[0] == "out" else shape[::-1]
        passing = resolved.modules.get(path)
        apart = 1
        if passing is not None and "" in passing.outs:
            after = cuts(passing.outs[""][0].after)
            apart = math.prod(axes.size(axis) for dim, cut in after.items() if dim != -1 for axis in cut.axes)
        met = tokens * _share_of_tokens(resolved, placed)
        total += met * out / apart * (2 if placed.tensor.name == names[-1] else 1)
        beside = (_parent(placed.tensor.name), into)
        if beside not in shared or last[beside[0]] == placed.tensor.name:
            total += met * into
        shared.add(beside)
    return int(total) * BYTES[batch.dtype]


def _parent(name: str) -> str:
    """The module that holds the layer of a weight."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _weights(resolved: Resolved) -> Iterator[Placed]:
    """The tensors that are a factor of a product, tied ones under each name."""
    for name, placed in resolved.tensors.items():
        kind = resolved.model.kind(name.rpartition(".")[0])
        if placed.tensor.is_buffer or len(placed.tensor.shape) < 2 or (kind is not None and kind.name != "linear"):
            continue
        if kind is None and "embed" in (placed.tensor.dims or (name,))[-1]:
            continue  # a table
        yield placed


def _is_expert(placed: Placed) -> bool:
    return "experts" in placed.tensor.name.split(".")


def _share_of_tokens(resolved: Resolved, placed: Placed) -> float:
    """How many of its data rank's tokens a weight meets: all, but for experts."""
    config = resolved.model.config or resolved.plan.config
    experts = _count(config, "num_local_experts", "num_experts", "n_routed_experts")
    if not _is_expert(placed) or not experts:
        return 1.0
    axes, grid = resolved.plan.axes, placed.layout.grid
    data = {axes.mesh.names.index(leaf) for leaf in axes.leaves(axes.data)}
    joined = 1
    for axis in data if len(grid) == len(axes.mesh.sizes) else ():
        if axis in placed.layout.parting_axes or grid[axis] != axes.mesh.sizes[axis]:
            joined *= axes.mesh.sizes[axis]
    return joined * max(_count(config, "num_experts_per_tok"), 1) / experts


def _count(config: object, *keys: str) -> int:
    assert hasattr(config, "get"), "a config is a mapping"
    return next((value for key in keys if isinstance(value := config.get(key), int)), 0)
