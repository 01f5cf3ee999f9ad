"""One parameter of a group, and the parameters of a group as views of one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch

from shardtensor.fsdp.data_mesh import TPSpec
from shardtensor.layout.ranges import ANYWHERE, Ranges, ShardPlacement, lay_out, lay_out_alone, lay_out_owned
from shardtensor.parallel.layers import Flowing
from shardtensor.parallel.memory import Home
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.dtensor import parameter_of
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.define(eq=False)
class ParamInfo:
    """One parameter: its name in the unit, the object, the modules that own it under some name, and how it is sharded.

    `tp_spec` says how it was sharded before, over other axes; what is gathered then is this rank's part. `dtensor` is
    what the modules held where that was a DTensor, whose object cannot become another's: they get `param` in its place.
    """

    name: str
    param: torch.Tensor
    homes: list[Home]
    placement: ShardPlacement = ANYWHERE
    tp_spec: TPSpec | None = None
    dtensor: Any = None

    @classmethod
    def of(cls, name: str, param: torch.Tensor) -> ParamInfo:
        """An entry that no module is known of yet."""
        return cls(name, parameter_of(param), [], dtensor=param) if is_dtensor(param) else cls(name, param, [])

    @property
    def values(self) -> torch.Tensor:
        """What the data ranks hold copies of."""
        return (self.param._local if isinstance(self.param, ShardedTensor) else self.param).detach()

    @property
    def grain(self) -> int:
        """So many elements stay together."""
        return self.placement.grain(tuple(self.values.shape))

    def may_be_summed(self, has_neighbours: bool) -> bool:
        """Whether ranks other than the data ranks compute with copies of it, whose gradients are then summed.

        Args:
            has_neighbours: whether parameters that are gathered with it are sharded over other axes.
        """
        if self.tp_spec is not None:
            return self.tp_spec.has_copies
        flows = [owner.flow for owner, _ in self.homes if isinstance(owner, Flowing)]
        return has_neighbours or any(flow.sums is not None or flow.sums_bias is not None for flow in flows)

    @property
    def is_alone(self) -> bool:
        """Whether it is gathered by itself: ranks compute with parts of different sizes."""
        return self.tp_spec is not None and not self.tp_spec.has_equal_parts

    def sizes(self, ranges: Ranges, index: int) -> tuple[int, ...] | None:
        """How many elements of it each data rank holds, as its spec says them; None where that need not say it.

        A spec is the same on all ranks, those of other parts among them.
        """
        if not self.is_alone:
            return ranges.sizes(index)
        if self.placement.dim is None:
            return None
        rows = lay_out_alone(self.values.shape[self.placement.dim], ranges.ranks).sizes(0)
        return tuple(count * self.grain for count in rows)


def ranges_of(params_info: Sequence[ParamInfo], ranks: int) -> Ranges:
    """How parameters that are gathered together lie in one tensor."""
    lengths = [info.values.numel() for info in params_info]
    owners = [info.placement.owner for info in params_info if info.placement.owner is not None]
    if owners:
        assert len(owners) == len(params_info), "parameters with owners have a group of their own"
        return lay_out_owned(lengths, ranks, owners)
    if params_info[0].is_alone:
        return lay_out_alone(lengths[0], ranks, params_info[0].grain)
    return lay_out(lengths, ranks, [info.grain for info in params_info])


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
        views = whole.split_with_sizes(self._sizes)
        params = [
            placement.as_param(view, shape) for (placement, shape), view in zip(self._params, views[1::2], strict=True)
        ]
        return params, [views[i] for i in self._gaps]

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
            for i, placement, shape in self._reshaped:
                shards[i] = placement.as_param(shards[i], shape)
        return shards

    def flat_shards(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the same as flat tensors."""
        return own.split_with_sizes(self._own_sizes)[self._own_params]
