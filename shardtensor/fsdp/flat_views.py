"""`FlatViews`: the parameters of a group as views of one flat buffer, and of this rank's range of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from shardtensor.layout.ranges import Ranges
from shardtensor.layout.shard_placement import ShardPlacement

Shape = tuple[int, ...]


class FlatViews:
    """The geometry of a flat buffer. It holds no values.

    Args:
        placements, shapes: of the parameters, in the order in which they lie in the buffer.
        ranges: which elements each rank holds.
        index: this rank's place among the ranges.

    Attributes:
        total, chunk: elements of the buffer, and of a rank's range.
        starts: where this rank's shard of each parameter begins in its range.
    """

    def __init__(self, placements: Sequence[ShardPlacement], shapes: Sequence[Shape], ranges: Ranges, index: int):
        self.ranges, self.index = ranges, index
        self.total, self.chunk = ranges.total, ranges.chunk
        self._params = list(zip(placements, shapes, strict=True))
        self._sizes = ranges.all_cuts()
        self._gaps = [i for i, size in enumerate(self._sizes) if not i % 2 and size]
        self._reshaped: list[tuple[int, ShardPlacement, Shape]] = []
        own = ranges.cuts(index)
        *starts, _ = accumulate(own)
        self.starts = tuple(starts[::2])
        *gaps, last = own[::2]
        # A split makes a view for each size, in each step: gaps of nothing are left out where all but the last are.
        self._own_sizes = own if any(gaps) else own[1::2] + ([last] if last else [])
        self._own_params = slice(1, None, 2) if any(gaps) else slice(len(gaps))

    def views(self, whole: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the parameters in a whole buffer, and the padding between them."""
        cuts = whole.split_with_sizes(self._sizes)
        params = [form.as_param(cut, shape) for (form, shape), cut in zip(self._params, cuts[1::2], strict=True)]
        return params, [cuts[i] for i in self._gaps]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's range of a whole buffer."""
        return whole.narrow(0, self.index * self.chunk, self.chunk)

    def reshape(self, i: int, shape: Shape) -> None:
        """Let `shards` return parameter `i` in this shape: slices of a dim other than the first are no flat range."""
        self._reshaped.append((i, self._params[i][0], shape))

    def shards(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return this rank's shards of the parameters, as views of its range."""
        shards = self.flat_shards(own)
        if self._reshaped:
            shards = list(shards)
            for i, form, shape in self._reshaped:
                shards[i] = form.as_param(shards[i], shape)
        return shards

    def flat_shards(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the same as flat tensors."""
        return own.split_with_sizes(self._own_sizes)[self._own_params]
