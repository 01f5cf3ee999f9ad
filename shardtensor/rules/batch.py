"""What a value of a train step is on a rank that computes one part of the batch.

The step is written for one device and the whole batch. On each rank a value is *replicated* (equal on all of them),
*sharded* along the dim that has the samples, or *partial*: the sum over ranks is the value of the whole batch.
`shardtensor.rules.batch_infer` computes this for one operation. Integers and text only.

Beside its kind, a value has two exponents:

* ``share``: the dense value is the local one times ``(n / N) ** share``, for n of N samples on this rank (and then
  summed over ranks, if it is partial). A mean over the batch has share 1: each rank divides by its own number.
* ``degree``: how the dense value grows with the batch: 1 for a sum over samples, 0 for a mean, None for their sum. Data
  parallelism averages the gradients of a loss of degree 1 over the ranks, if the mode says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import attrs

from shardtensor.layout.layout import Shape
from shardtensor.rules.rule import several_dims

REPLICATED, SHARDED, PARTIAL, FLAT = "replicated", "sharded", "partial", "flat shard"


@attrs.frozen
class BatchValue:
    """What a tensor of the step is on each rank.

    Attributes:
        kind: replicated, sharded or partial; or the flat shard of a gradient.
        dim: the dim that has the samples, if it is sharded.
        outer: that dim has so many blocks, each with all samples: more than 1 if a dim before was flattened into it.
        share, degree: the exponents above.
        of_batch: whether the batch determines it; so it is if it is sharded or partial.
        is_gradient: whether it is a derivative of the loss, by a tensor inside of the backward.
        is_zero: whether all elements are zero: then it is partial, too.
        is_iota: whether it counts the samples: 0, 1, 2, ... along its sharded dim.
        is_uniform: whether it is the same for each sample.
        power: of a partial value: the dense one is the root of the sum of powers, as of norms; infinity: the maximum.
    """

    kind: str = REPLICATED
    dim: int = -1
    outer: int = 1
    share: int = 0
    degree: int | None = 0
    of_batch: bool = False
    is_gradient: bool = False
    is_zero: bool = False
    is_iota: bool = False
    is_uniform: bool = False
    power: float = 1.0

    def __str__(self) -> str:
        words = [self.kind]
        if self.kind == SHARDED:
            words.append(f"dim {self.dim}" + (f" in {self.outer} blocks" if self.outer > 1 else ""))
        if self.kind == PARTIAL:
            words.append("mean" if self.share == 1 else "sum" if self.power == 1 else f"norm {self.power:g}")
        return " ".join(words)

    def at(self, dim: int) -> BatchValue:
        """Return the value with the samples in another dim; a replicated or partial one as it is."""
        return attrs.evolve(self, dim=dim, is_iota=False) if self.kind == SHARDED else self


@attrs.frozen
class BatchMode:
    """How a step is spread over ranks.

    Attributes:
        averages: gradients of a loss that is a sum over samples are divided by the number of ranks.
        samples: how many the whole batch has.
    """

    averages: bool = True
    samples: int = 1


@attrs.frozen
class Operand:
    """A tensor argument: what it is, and its shape for the whole batch."""

    value: BatchValue
    shape: Shape


@attrs.frozen
class ResultShape:
    """A tensor that an operation returns: its shape for the whole batch, and the dims that grow with the batch."""

    shape: Shape
    batch_dims: tuple[int, ...] = ()
    is_float: bool = True


class OperandFirst(Exception):
    """An operand must be changed before the operation: number `operand` of the list, with None counted."""

    def __init__(self, operand: int) -> None:
        super().__init__(operand)
        self.operand = operand


class ReduceFirst(OperandFirst):
    """A partial operand must be reduced."""


class ScaleFirst(OperandFirst):
    """An operand must be multiplied by its factor, so that its share is 0."""


class SplitFirst(OperandFirst):
    """A replicated operand must become a partial one of this share, to be added to one."""

    def __init__(self, operand: int, share: int) -> None:
        super().__init__(operand)
        self.share = share


class WeighFirst(OperandFirst):
    """A gradient that does not depend on the batch must be multiplied by what gradients of the batch are divided by."""


class Refused(Exception):
    """The operation does not keep its meaning on a part of the batch; the text says why."""


Exponents = tuple[int, int | None]


class BatchCall:
    """One operation: its name, tensors and other arguments, with the questions that rules ask.

    Attributes:
        operands: its tensor arguments in order; None for those not passed.
        tensors: those that are passed; `values`: what they are.
        options: its other arguments, by name, for the whole batch.
        is_pointwise: whether each element of the result needs one element of each operand.
    """

    def __init__(
        self,
        name: str,
        operands: Sequence[Operand | None],
        options: Mapping[str, Any],
        results: Sequence[ResultShape],
        mode: BatchMode,
        is_pointwise: bool = False,
    ) -> None:
        self.name, self.operands, self.options, self.results, self.mode = name, operands, options, results, mode
        self.is_pointwise = is_pointwise
        self.numbers = [i for i, operand in enumerate(operands) if operand is not None]
        self.tensors = [operand for operand in operands if operand is not None]
        self.values = [operand.value for operand in self.tensors]

    # -- operands -----------------------------------------------------------------------------------------------------

    def of_kind(self, kind: str) -> list[int]:
        """Return which tensors are of a kind."""
        return [i for i, value in enumerate(self.values) if value.kind == kind]

    def reduced(self, i: int) -> None:
        """Raise ReduceFirst if tensor `i` is partial."""
        if self.values[i].kind == PARTIAL:
            raise ReduceFirst(self.numbers[i])

    def unscaled(self, i: int) -> None:
        """Raise ScaleFirst if the share of tensor `i` is not 0."""
        if self.values[i].share:
            raise ScaleFirst(self.numbers[i])

    def plain(self, *skipped: int) -> None:
        """Raise unless all tensors, but for those skipped, have the dense values of what they hold."""
        for i in range(len(self.values)):
            if i not in skipped:
                self.reduced(i)
                self.unscaled(i)

    def place(self, *which: int) -> tuple[int, int, bool]:
        """Return the dim of the samples, counted from the front, the blocks, and whether the value is uniform, of these
        tensors or all; each that is sharded must have them in that dim.

        Raises:
            Refused: they have not.
        """
        return self._placed([(i, self.values[i].dim) for i in self._sharded(which)])

    def aligned(self, ndim: int, *which: int) -> tuple[int, int, bool]:
        """The same, in a result of `ndim` dims, for operands that are broadcast against each other."""
        return self._placed([(i, self.values[i].dim + ndim - len(self.tensors[i].shape)) for i in self._sharded(which)])

    def _sharded(self, which: Sequence[int]) -> list[int]:
        return [i for i in (which or range(len(self.values))) if self.values[i].kind == SHARDED]

    def _placed(self, places: list[tuple[int, int]]) -> tuple[int, int, bool]:
        dims = {dim for _, dim in places}
        # one that is the same for each sample has them in any blocks
        outers = {self.values[i].outer for i, _ in places if not self.values[i].is_uniform}
        if len(dims) > 1 or len(outers) > 1:
            raise Refused("its operands have the samples in different dims")
        return dims.pop(), outers.pop() if outers else 1, all(self.values[i].is_uniform for i, _ in places)

    # -- results ------------------------------------------------------------------------------------------------------

    def batch_dim(self, i: int = 0) -> int | None:
        """Return the dim of a result that grows with the batch."""
        dims = self.results[i].batch_dims
        if len(dims) > 1:
            raise Refused(f"a result of {sizes_text(self.results[i].shape)} pairs the samples with one another")
        return dims[0] if dims else None

    # -- options ------------------------------------------------------------------------------------------------------

    def dims(self, key: str = "dim") -> tuple[int, ...]:
        """Return the dims of tensor 0 that the call names: all if it names none."""
        given = self.options.get(key)
        return several_dims(len(self.tensors[0].shape), given if isinstance(given, int) or given else None)

    def dim(self, key: str = "dim", ndim: int | None = None) -> int:
        """Return the one dim that the call names."""
        found: int = self.options.get(key) or 0
        return found % max(len(self.tensors[0].shape) if ndim is None else ndim, 1)

    def number(self, *keys: str) -> float:
        """Return the first of these arguments that is a number; 0 if none is."""
        return next((x for x in map(self.options.get, keys) if isinstance(x, int | float | complex)), 0)  # type: ignore[return-value]


def sizes_text(shape: Shape) -> str:
    """Return a shape as text.

    Example:
        >>> sizes_text((2, 3)), sizes_text(())
        ('2 x 3', 'one number')
    """
    return " x ".join(map(str, shape)) or "one number"


def viewed(value: BatchValue, shape: Shape, result: ResultShape) -> BatchValue | None:
    """Return what a sharded value is under a view of the same elements; None if the view mixes the samples.

    Example:
        >>> str(viewed(BatchValue(SHARDED, 1), (3, 8, 2), ResultShape((24, 2), (0,))))
        'sharded dim 0 in 3 blocks'
        >>> viewed(BatchValue(SHARDED, 0), (8, 6), ResultShape((6, 8), (1,)))
    """
    (dim,) = result.batch_dims
    before, after = prod(shape[: value.dim]), prod(shape[value.dim + 1 :])
    if value.is_uniform:  # and the view only splits the dim with the samples
        ends = range(dim + 1, len(result.shape) + 1)
        starts = range(dim + 1)
        if any(prod(result.shape[:i]) == before for i in starts) and any(prod(result.shape[j:]) == after for j in ends):
            return attrs.evolve(value, dim=dim, outer=1, is_iota=False)
    outer, rest = divmod(before * value.outer, prod(result.shape[:dim]))
    if rest:
        return None
    counts = value.is_iota and prod(shape) == shape[value.dim]
    return attrs.evolve(value, dim=dim, outer=outer, is_iota=counts, is_uniform=False)
