"""What one value sends from one side of a flow to the other, and its gradient on the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardtensor.layout.pieces import balanced
from shardtensor.plan.flows.flow import Change, Flow, cuts
from shardtensor.plan.flows.modules import Modules, Names
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.traffic.collective import Collective, Phase, all_gather, all_reduce, reduce_scatter
from shardtensor.spec.nodes import Spec
from shardtensor.spec.parts import Cut

_LENGTH = 8  # bytes; of a length that a rank tells the others


class Moves:
    """The moves of values of one dtype, as one rank sees them."""

    def __init__(self, modules: Modules, dtype: str, rank: int) -> None:
        self._modules, self._dtype = modules, dtype
        place = modules.axes.mesh.coordinate(rank)
        assert place is not None, "a rank of the mesh"
        self._place = dict(zip(modules.axes.mesh.names, place, strict=True))
        self._sizes = dict(modules.axes.mesh.axes)

    def of_value(
        self,
        path: str,
        flow: Flow,
        steps: Sequence[Change],
        whole: tuple[int, ...],
        ends: dict[Names, tuple[int, ...]],
        asks: bool,
        what: str,
    ) -> tuple[list[Collective], list[Collective]]:
        """What a value of a global shape sends from one side of a flow to the other, and its gradient back.

        Args:
            ends: by axes, the true pieces of the last dim where a weight tells them.
            asks: it asks for a gradient.
        """
        shape = [self._own(n, flow.before, dim, len(whole), ends) for dim, n in enumerate(whole)]
        forward: list[Collective] = []
        backward: list[Collective] = []
        said = {"dtype": self._dtype, "where": path}
        item = BYTES[self._dtype]
        its = "its" if what == "it" else f"{what}'s"
        for step in steps:
            size, axes = self.size(step.axes), self._shown(step.axes)
            numel = math.prod(shape)
            if step.kind == "sum_gradient":
                if asks:
                    backward.append(
                        self.sum("backward", step.axes, numel, self._dtype, path, f"{its} gradient is summed")
                    )
                continue
            if step.kind == "sum":
                forward.append(self.sum("forward", step.axes, numel, self._dtype, path, f"{its} addends are summed"))
                continue
            cut, dim = step.cut, _index(step.dim, len(whole))
            assert cut is not None
            if step.kind == "gather":
                known = ends.get(step.axes) if step.dim == -1 else cut.sizes
                if known is None and cut.balanced:
                    sent = _LENGTH * (size - 1)
                    forward.append(
                        Collective(
                            "exchange", "forward", axes, size, _LENGTH, sent, sent, "uint8", path, "uneven lengths"
                        )
                    )
                shape[dim] = whole[dim]
                total = math.prod(shape)
                forward.append(all_gather("forward", axes, size, numel, total, item, **said, why=f"{what} is gathered"))
                if asks and step.sums:
                    backward.append(
                        reduce_scatter(
                            "backward", axes, size, numel, total, item, **said, why=f"{its} gradient is summed"
                        )
                    )
                continue
            shape[dim] = self._piece(whole[dim], cut, step.axes, ends if step.dim == -1 else {})
            own = math.prod(shape)
            if step.kind == "sum_scatter":
                forward.append(
                    reduce_scatter("forward", axes, size, own, numel, item, **said, why=f"{its} addends are summed")
                )
            if asks:
                backward.append(
                    all_gather("backward", axes, size, own, numel, item, **said, why=f"{its} gradient is gathered")
                )
        return forward, backward[::-1]

    def sum(self, phase: Phase, axes: Names, numel: int, dtype: str, where: str, why: str) -> Collective:
        size = self.size(axes)
        return all_reduce(phase, self._shown(axes), size, numel, BYTES[dtype], dtype=dtype, where=where, why=why)

    def _own(self, length: int, spec: Spec, dim: int, ndim: int, ends: dict[Names, tuple[int, ...]]) -> int:
        """This rank's elements of a dim of a value."""
        for key, cut in cuts(spec).items():
            if _index(key, ndim) == dim:
                return self._piece(length, cut, cut.axes, ends if dim == ndim - 1 else {})
        return length

    def _piece(self, length: int, cut: Cut, axes: Names, ends: dict[Names, tuple[int, ...]]) -> int:
        index, count = self.place(axes), self.size(axes)
        known = ends.get(axes, cut.sizes)
        if known is not None:
            return known[index]
        return balanced(length, count, 1).size(index) if cut.balanced else length // count

    def place(self, axes: Names) -> int:
        """This rank's place among those along some axes, major first."""
        index = 0
        for axis in axes:
            index = index * self._sizes[axis] + self._place[axis]
        return index

    def size(self, axes: Names) -> int:
        return math.prod(self._sizes[axis] for axis in axes)

    def _shown(self, axes: Names) -> Names:
        return tuple(self._modules.named(axes).split("*"))


def _index(dim: int, ndim: int) -> int:
    return min(dim, ndim - 1) if dim >= 0 else dim + ndim
