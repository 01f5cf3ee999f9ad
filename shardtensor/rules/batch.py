"""What each value of a train step is on a rank that computes one part of the batch: the rules of data parallelism.

The step is written for one device and the whole batch. A value is *replicated* (equal on all ranks), *sharded* along
the dim that has the samples, or *partial*: its sum over ranks is the value of the whole batch. `infer` computes this
for one operation, from the rows of `shardtensor.rules.table` and from `KERNELS`, which has the kernels that autograd
calls. Integers and text only.

Beside the layout, a value has two exponents:

* ``share``: the dense value is the local one times ``(n / N) ** share``, for n of N samples on this rank, summed over
  ranks if it is partial. A mean over the batch has share 1: each rank divides by its own number of samples.
* ``degree``: how the dense value grows with the batch: 1 for a sum over samples, 0 for a mean. The gradient of a loss
  of degree 1 is averaged over ranks if the mode says so, as data parallelism does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import attrs

from shardtensor.layout.layout import Shape
from shardtensor.rules.rule import several_dims
from shardtensor.rules.table import ROWS

REPLICATED, SHARDED, PARTIAL, FLAT = "replicated", "sharded", "partial", "flat shard"


@attrs.frozen
class BatchValue:
    """What a tensor of the step is on each rank.

    Attributes:
        kind: replicated, sharded or partial; or the flat shard of a gradient.
        dim: the dim that has the samples, if it is sharded.
        outer: the samples are the same positions in each of `outer` equal parts of that dim: more than 1 if a dim
            before them was flattened into it.
        share, degree: the exponents above.
        is_gradient: whether a backward computed it, or an operation on such a value.
        is_zero: whether all its elements are zero: then it is also partial.
        is_iota: whether it counts the samples: 0, 1, 2, ... along its sharded dim.
        power: if it is partial: the dense value is the root of the sum of powers, as of norms of shards; 1: the sum.
    """

    kind: str = REPLICATED
    dim: int = -1
    outer: int = 1
    share: int = 0
    degree: int = 0
    is_gradient: bool = False
    is_zero: bool = False
    is_iota: bool = False
    power: float = 1.0

    def __str__(self) -> str:
        words = [self.kind]
        if self.kind == SHARDED:
            words.append(f"dim {self.dim}" + (f" in {self.outer} parts" if self.outer > 1 else ""))
        if self.kind == PARTIAL:
            words.append("mean" if self.share == 1 else "sum" if self.power == 1 else f"norm {self.power:g}")
        return " ".join(words)


@attrs.frozen
class BatchMode:
    """How gradients of a loss that is a sum over samples are reduced, and whether all ranks have as many samples."""

    averages: bool = True
    is_even: bool = True

    def alike(self, a: BatchValue, b: BatchValue) -> bool:
        """Whether two values have the same factor, so that their local values can be added."""
        if (a.is_gradient or b.is_gradient) and self.averages:
            if self.is_even:
                return a.share + a.degree == b.share + b.degree
            return (a.share, a.degree) == (b.share, b.degree)
        return a.share == b.share

    def adds_replicated(self, partial: BatchValue) -> bool:
        """Whether the factors of all ranks add up to 1: a replicated value can then be added on each rank."""
        return (partial.share, partial.degree) in (((1, 0), (0, 1)) if self.divides(partial) else ((1, partial.degree),))

    def divides(self, value: BatchValue) -> bool:
        """Whether the reduction of this value divides sums over samples by the number of ranks."""
        return value.is_gradient and self.averages


@attrs.frozen
class Operand:
    """A tensor argument: its value, its shape for the whole batch, and the dims that grow with the batch."""

    value: BatchValue
    shape: Shape
    batch_dims: tuple[int, ...] = ()


@attrs.frozen
class Result:
    """A tensor that an operation returns: its shape for the whole batch, and the dims that grow with the batch."""

    shape: Shape
    batch_dims: tuple[int, ...] = ()


class ReduceFirst(Exception):
    """Operand number `args[0]` is partial and must be reduced before this operation."""


class ScaleFirst(Exception):
    """Operand number `args[0]` must be multiplied by its factor before this operation."""


class Refused(Exception):
    """The operation does not keep its meaning on a part of the batch; the text says why, and what may be done."""


KERNELS = """
# name: which dim may have the samples: any, the first, all but those that the call names, all before the last n
_softmax _log_softmax _softmax_backward_data
  _log_softmax_backward_data                       | named
cumsum cumprod sort topk argsort flip roll
  cumsum_backward logcumsumexp cummax cummin median
  kthvalue mode glu glu_backward _weight_norm_interface | named
argmax argmin max min all any var var_mean std prod amax amin
  logsumexp                                        | named
native_layer_norm _fused_rms_norm                  | normalized
native_layer_norm_backward
  _fused_rms_norm_backward                         | normalized
native_group_norm native_group_norm_backward       | first
convolution convolution_backward
  _convolution mkldnn_convolution                  | first
max_pool2d_with_indices
  max_pool2d_with_indices_backward avg_pool2d
  avg_pool2d_backward _adaptive_avg_pool2d
  _adaptive_avg_pool2d_backward avg_pool1d
  adaptive_max_pool2d adaptive_max_pool2d_backward
  max_pool3d_with_indices
  max_pool3d_with_indices_backward avg_pool3d
  avg_pool3d_backward _adaptive_avg_pool3d
  _adaptive_avg_pool3d_backward
  reflection_pad1d reflection_pad2d
  reflection_pad1d_backward
  reflection_pad2d_backward replication_pad2d
  replication_pad2d_backward
  upsample_nearest2d upsample_nearest2d_backward
  upsample_bilinear2d upsample_bilinear2d_backward
  upsample_bicubic2d upsample_bicubic2d_backward
  _upsample_bicubic2d_aa _upsample_bilinear2d_aa
  pixel_shuffle pixel_unshuffle im2col col2im      | first
_scaled_dot_product_flash_attention
  _scaled_dot_product_flash_attention_backward
  _scaled_dot_product_flash_attention_for_cpu
  _scaled_dot_product_flash_attention_for_cpu_backward
  _scaled_dot_product_efficient_attention
  _scaled_dot_product_efficient_attention_backward
  _scaled_dot_product_cudnn_attention
  _scaled_dot_product_cudnn_attention_backward
  _scaled_dot_product_fused_attention_overrideable
  _scaled_dot_product_fused_attention_overrideable_backward
  _scaled_dot_product_attention_math               | first
embedding embedding_dense_backward                 | any
native_dropout native_dropout_backward             | any
constant_pad_nd tril triu                          | last
nll_loss_forward nll_loss_backward
  nll_loss2d_forward nll_loss2d_backward           | first
mse_loss mse_loss_backward l1_loss
  smooth_l1_loss smooth_l1_loss_backward
  huber_loss huber_loss_backward
  binary_cross_entropy
  binary_cross_entropy_backward                    | any
"""


def _read_kernels() -> dict[str, str]:
    lines = [line for line in KERNELS.strip().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\n ", " ")
    found = {}
    for line in text.splitlines():
        names, _, where = line.rpartition("|")
        found.update(dict.fromkeys(names.split(), where.strip()))
    return found


_WHERE = _read_kernels()
_LOSSES = frozenset(name for name in _WHERE if "loss" in name or name.startswith("binary_cross_entropy"))
_VIEWS = frozenset(
    "view _unsafe_view reshape flatten squeeze unsqueeze expand clone detach alias contiguous lift_fresh _to_copy "
    "lift_fresh_copy view_of as_strided_copy _conj_physical".split()
)
_LINEAR = frozenset("neg mul div _to_copy clone detach alias expand positive conj sum mean slice select".split())
"""Pointwise operations that are linear in each tensor operand (`div`: in the first)."""
_ADDS = frozenset("add sub rsub cat stack where".split())
_PRODUCTS = frozenset("mm bmm mv dot addmm baddbmm addmv convolution einsum outer".split())
"""Linear in each operand."""
_FILLS = frozenset("full zeros ones empty scalar_tensor empty_strided new_full new_zeros new_ones new_empty".split())
_LIKES = frozenset("zeros_like ones_like full_like empty_like".split()) | {"new_empty_strided"}
_DRAWS = frozenset("bernoulli rand randn randint normal rand_like randn_like uniform randperm exponential".split())
_EXTREMES = {"amax": "max", "amin": "min", "max": "max", "min": "min", "any": "max", "all": "min"}


def infer(
    name: str,
    operands: Sequence[Operand | None],
    options: Mapping[str, Any],
    results: Sequence[Result],
    mode: BatchMode,
    *,
    is_pointwise: bool = False,
    in_backward: bool = False,
) -> list[BatchValue]:
    """Return what the results of one operation are.

    Args:
        name: of the aten operation, without its overload.
        operands: its tensor arguments in order; None for those not passed.
        options: its other arguments, by name, for the whole batch.
        results: the tensors that it returns.
        is_pointwise: whether each element of the result needs one element of each operand.

    Raises:
        ReduceFirst, ScaleFirst: an operand must be changed first.
        Refused: there is no rule, or the operation mixes samples.

    Example:
        >>> batch = Operand(BatchValue(SHARDED, 0), (8, 4), (0,))
        >>> weight = Operand(BatchValue(), (4, 3))
        >>> [str(v) for v in infer("mm", [batch, weight], {}, [Result((8, 3), (0,))], BatchMode())]
        ['sharded dim 0']
        >>> [str(v) for v in infer("sum", [batch], {"dim": [0]}, [Result((4,))], BatchMode())]
        ['partial sum']
    """
    call = _Call(name, operands, options, results, mode, is_pointwise)
    found = call.infer()
    is_gradient = in_backward or any(x.value.is_gradient for x in call.tensors)
    return [attrs.evolve(value, is_gradient=is_gradient) for value in found]


class _Call:
    def __init__(
        self,
        name: str,
        operands: Sequence[Operand | None],
        options: Mapping[str, Any],
        results: Sequence[Result],
        mode: BatchMode,
        is_pointwise: bool,
    ) -> None:
        self.name, self.operands, self.options, self.results, self.mode = name, operands, options, results, mode
        self.is_pointwise = is_pointwise
        self.tensors = [operand for operand in operands if operand is not None]
        self.values = [operand.value for operand in self.tensors]

    def infer(self) -> list[BatchValue]:
        name = self.name
        if not self.tensors or name in _FILLS or name in _LIKES or name in _DRAWS:
            return self._made()
        if all(value.kind == REPLICATED for value in self.values) and not self._grows():
            return self._replicated()
        if any(value.kind == FLAT for value in self.values):
            return [self._on_flat_shards()]
        if self.is_pointwise and name not in _WHERE:
            return [self._pointwise()]
        if name in _VIEWS:
            return [self._viewed()]
        rule = getattr(self, f"_{name.strip('_')}", None)
        if rule is not None:
            found = rule()
            return found if isinstance(found, list) else [found]
        if name in _WHERE:
            return self._kernel(_WHERE[name])
        if name in ROWS and ROWS[name].pattern is not None:
            return [self._row()]
        raise Refused(f"there is no rule for `{name}`")

    # -- factories and random numbers ---------------------------------------------------------------------------------

    def _made(self) -> list[BatchValue]:
        found = []
        for result in self.results:
            like = next((value for value in self.values if self.name in _LIKES or self.name in _DRAWS), BatchValue())
            is_zero = self.name in ("zeros", "zeros_like", "new_zeros") or (
                self.name in ("full", "full_like", "new_full") and self.options.get("fill_value") == 0
            )
            if not result.batch_dims:
                found.append(BatchValue(is_zero=is_zero))
            elif like.kind == SHARDED:
                found.append(BatchValue(SHARDED, like.dim, like.outer, is_zero=is_zero))
            else:
                found.append(BatchValue(SHARDED, self._one(result), is_zero=is_zero, is_iota=self.name == "arange"))
        if self.name == "randperm" and found[0].kind == SHARDED:
            raise Refused("a permutation of the samples mixes them")
        return found

    def _grows(self) -> bool:
        return any(result.batch_dims for result in self.results)

    def _one(self, result: Result) -> int:
        if len(result.batch_dims) > 1:
            raise Refused(f"a result of {_by(result.shape)} pairs the samples with one another")
        return result.batch_dims[0]

    def _replicated(self) -> list[BatchValue]:
        """Equal operands give equal results; exponents stay with operations that are linear."""
        share, degree = self._exponents()
        return [BatchValue(share=share, degree=degree) for _ in self.results]

    # -- exponents ----------------------------------------------------------------------------------------------------

    def _exponents(self) -> tuple[int, int]:
        """Return the exponents of the result; raise ScaleFirst for operands in which the operation is not linear."""
        name, values = self.name, self.values
        base = name.removesuffix("_")
        if base in _PRODUCTS or base == "mul":
            return sum(v.share for v in values), sum(v.degree for v in values)
        if base == "div":
            signs = [1, -1][: len(values)]
            pairs = list(zip(signs, values, strict=False))
            return sum(s * v.share for s, v in pairs), sum(s * v.degree for s, v in pairs)
        if base in _ADDS:
            return self._added()
        if base in _LINEAR or base in _VIEWS or base in _LINEAR_KERNELS:
            return values[0].share, values[0].degree
        if base.endswith(("_backward", "_backward_data")):  # linear in the gradient
            for i, value in enumerate(values[1:], 1):
                self._unscaled(i, value)
            return values[0].share, values[0].degree
        for i, value in enumerate(values):
            self._unscaled(i, value)
        return 0, 0

    def _unscaled(self, i: int, value: BatchValue) -> None:
        if value.share:
            raise ScaleFirst(self._number(i))

    def _number(self, i: int) -> int:
        """Return the place among all operands of tensor number i."""
        return [k for k, operand in enumerate(self.operands) if operand is not None][i]

    def _added(self) -> tuple[int, int]:
        present = [(i, v) for i, v in enumerate(self.values) if not v.is_zero]
        if self.name == "where":
            present = [(i, v) for i, v in present if i > 0]
        if not present:
            return 0, 0
        partial = [v for _, v in present if v.kind == PARTIAL]
        _, first = present[0]
        if partial:  # replicated addends are added on every rank, see `_pointwise`
            first = partial[0]
            present = [(i, v) for i, v in present if v.kind == PARTIAL]
        for i, value in present:
            if not self.mode.alike(first, value):
                odd = i if value.share or (value.degree and self.mode.divides(value)) else present[0][0]
                raise ScaleFirst(self._number(odd))
        degrees = {v.degree for _, v in present}
        return first.share, first.degree if len(degrees) == 1 or self.mode.divides(first) else 0

    # -- elementwise --------------------------------------------------------------------------------------------------

    def _pointwise(self) -> BatchValue:
        result = self.results[0]
        ndim = len(result.shape)
        kinds = {value.kind for value in self.values}
        if PARTIAL in kinds:
            self._keep_partial()
            share, degree = self._exponents()
            partial = next(value for value in self.values if value.kind == PARTIAL)
            return BatchValue(PARTIAL, share=share, degree=degree, power=partial.power)
        share, degree = self._exponents()
        dim, outer = self._aligned(ndim)
        is_zero = self.name == "mul" and any(v.is_zero for v in self.values)
        if dim is None:
            return BatchValue(share=share, degree=degree, is_zero=is_zero)
        return BatchValue(SHARDED, dim, outer, share, degree, is_zero=is_zero)

    def _keep_partial(self) -> None:
        """Raise ReduceFirst unless the result of the local values is partial, too."""
        name, values = self.name, self.values
        numbers = [i for i, value in enumerate(values) if value.kind == PARTIAL]
        others = {value.kind for value in values if value.kind != PARTIAL}
        ok = False
        if any(values[i].power != 1 for i in numbers):
            ok = False
        elif name in ("add", "sub", "rsub"):
            rest = [v for v in values if v.kind != PARTIAL and not v.is_zero]
            is_plain = len(values) == len([o for o in self.operands if o is not None]) and len(values) > 1
            ok = is_plain and (
                not rest
                or (others == {REPLICATED} and all(self.mode.adds_replicated(values[i]) for i in numbers))
            )
        elif name == "where":
            ok = values[0].kind == REPLICATED and all(v.kind == PARTIAL or v.is_zero for v in values[1:])
        elif name in _LINEAR or (name.endswith("_backward") and numbers == [0]):
            ok = len(numbers) == 1 and others <= {REPLICATED} and (name != "div" or numbers == [0])
        elif name == "masked_fill":
            ok = numbers == [0] and others <= {REPLICATED} and self.options.get("value") == 0
        if not ok:
            raise ReduceFirst(self._number(numbers[0]))

    def _aligned(self, ndim: int) -> tuple[int | None, int]:
        """Return the dim of the result that has the samples, from operands that are broadcast against each other."""
        found: tuple[int, int] | None = None
        for operand in self.tensors:
            value, offset = operand.value, ndim - len(operand.shape)
            if value.kind == SHARDED:
                here = value.dim + offset, value.outer
                if found is not None and found != here:
                    raise Refused("its operands have the samples in different dims")
                found = here
        if found is None:
            return None, 1
        for operand in self.tensors:
            dim = found[0] - (ndim - len(operand.shape))
            if operand.value.kind == REPLICATED and dim >= 0 and dim in operand.batch_dims:
                raise Refused("one operand has the values of all samples, the other those of a rank's")
        return found

    def _on_flat_shards(self) -> BatchValue:
        """Of shards of gradients: elementwise with numbers and shards of the same parameter, norms and sums."""
        if self.name in ("linalg_vector_norm", "norm"):
            return BatchValue(PARTIAL, power=float(self.options.get("ord", 2)))
        if self.name == "sum" and not self.results[0].shape:
            return BatchValue(PARTIAL)
        if not (self.is_pointwise or self.name in ("detach", "clone", "alias", "_to_copy")):
            raise Refused("each rank has a shard of this gradient: only elementwise operations and norms take it")
        for i, operand in enumerate(self.tensors):
            if operand.value.kind == PARTIAL:
                raise ReduceFirst(self._number(i))
            self._unscaled(i, operand.value)
            if operand.value.kind != FLAT and _product(operand.shape) != 1:
                raise Refused("each rank has a shard of this gradient, and the other operand is whole")
        return BatchValue(FLAT)

    # -- views --------------------------------------------------------------------------------------------------------

    def _viewed(self) -> BatchValue:
        value, result = self.values[0], self.results[0]
        shape = self.tensors[0].shape
        if value.kind == REPLICATED:
            if not result.batch_dims:
                return value
            dim = self._one(result)  # expanded to the batch: the same for each sample
            return attrs.evolve(value, kind=SHARDED, dim=dim, is_iota=False)
        if value.kind == PARTIAL:
            if result.batch_dims:
                raise ReduceFirst(0)
            return value
        before = _product(shape[: value.dim]) * value.outer
        dim = self._one(result) if result.batch_dims else None
        if dim is None:
            raise Refused(f"{_by(result.shape)} has no dim with the samples")
        if self.name == "expand":
            return attrs.evolve(value, dim=dim)
        outer, rest = divmod(before, _product(result.shape[:dim]))
        if rest:
            raise Refused("the view mixes the samples with another dim")
        counts = value.is_iota and _product(shape) == shape[value.dim]
        return attrs.evolve(value, dim=dim, outer=outer, is_iota=counts)

    def _copy(self) -> BatchValue:
        """``copy(x, source)``: the values of the source in the shape of x."""
        x, source = self.tensors
        if x.shape != source.shape or x.value.kind == SHARDED != source.value.kind:
            return self._pointwise() if source.value.kind != PARTIAL else self._reduce_first(1)
        return source.value

    def _reduce_first(self, i: int) -> NoReturn:
        raise ReduceFirst(i)

    def _permuted(self, order: Sequence[int]) -> BatchValue:
        value = self.values[0]
        return attrs.evolve(value, dim=order.index(value.dim), is_iota=False) if value.kind == SHARDED else value

    def _permute(self) -> BatchValue:
        ndim = len(self.tensors[0].shape)
        return self._permuted([d % ndim for d in self.options["dims"]])

    def _transpose(self) -> BatchValue:
        ndim = len(self.tensors[0].shape)
        order = list(range(ndim))
        if ndim:
            a, b = self.options["dim0"] % ndim, self.options["dim1"] % ndim
            order[a], order[b] = order[b], order[a]
        return self._permuted(order)

    def _t(self) -> BatchValue:
        return self._permuted(list(range(len(self.tensors[0].shape)))[::-1])

    def _slice(self) -> BatchValue:
        value = self.values[0]
        dim = self.options.get("dim", 0) % len(self.tensors[0].shape)
        if value.kind == SHARDED and dim == value.dim and self.results[0].shape != self.tensors[0].shape:
            raise Refused("it takes a part of the samples")
        return attrs.evolve(value, is_iota=value.is_iota and dim == value.dim)

    def _select(self) -> BatchValue:
        value = self.values[0]
        dim = self.options["dim"] % len(self.tensors[0].shape)
        if value.kind == SHARDED and dim == value.dim:
            raise Refused("it takes one of the samples")
        return attrs.evolve(value, dim=value.dim - (dim < value.dim)) if value.kind == SHARDED else value

    def _unbind(self) -> list[BatchValue]:
        value = self.values[0]
        dim = self.options.get("dim", 0) % len(self.tensors[0].shape)
        if value.kind == SHARDED and dim == value.dim:
            raise Refused("it takes the samples one by one")
        if value.kind == SHARDED:
            value = attrs.evolve(value, dim=value.dim - (dim < value.dim))
        return [value] * len(self.results)

    def _split(self) -> list[BatchValue]:
        value = self.values[0]
        dim = self.options.get("dim", 0) % len(self.tensors[0].shape)
        if value.kind == SHARDED and dim == value.dim and len(self.results) > 1:
            raise Refused("it takes ranges of the samples")
        return [value] * len(self.results)

    _split_with_sizes = _split

    def _slice_backward(self) -> BatchValue:
        return self._padded(self.options["dim"], 0)

    def _select_backward(self) -> BatchValue:
        return self._padded(self.options["dim"], 1)

    def _padded(self, dim: int, added: int) -> BatchValue:
        """The gradient of a part: zeros around it."""
        value, result = self.values[0], self.results[0]
        dim %= len(result.shape)
        if value.kind != SHARDED:
            return value
        own = value.dim + (added if dim <= value.dim else 0)
        if own == dim and result.shape != self.tensors[0].shape:
            raise Refused("it takes a part of the samples")
        return attrs.evolve(value, dim=own, is_iota=False)

    def _repeat(self) -> BatchValue:
        value, result = self.values[0], self.results[0]
        repeats = self.options["repeats"]
        if value.kind == SHARDED:
            dim = value.dim + len(result.shape) - len(self.tensors[0].shape)
            if repeats[dim] != 1:
                return attrs.evolve(value, dim=dim, outer=value.outer * repeats[dim], is_iota=False)
            return attrs.evolve(value, dim=dim, is_iota=False)
        if not result.batch_dims:
            return value
        if value.kind == PARTIAL:
            raise ReduceFirst(0)
        return attrs.evolve(value, kind=SHARDED, dim=self._one(result))

    # -- joins --------------------------------------------------------------------------------------------------------

    def _cat(self) -> BatchValue:
        dim = self.options.get("dim", 0) % len(self.results[0].shape)
        return self._joined(dim, 0)

    def _stack(self) -> BatchValue:
        dim = self.options.get("dim", 0) % len(self.results[0].shape)
        return self._joined(dim, 1)

    def _joined(self, dim: int, added: int) -> BatchValue:
        values = self.values
        kinds = {v.kind for v in values if not v.is_zero} or {REPLICATED}
        powers = {v.power for v in values}
        if PARTIAL in kinds:
            if kinds != {PARTIAL} or len(powers) > 1:
                raise ReduceFirst(self._number(next(i for i, v in enumerate(values) if v.kind == PARTIAL)))
            share, degree = self._added()
            return BatchValue(PARTIAL, share=share, degree=degree, power=values[0].power)
        share, degree = self._added()
        places = {(v.dim, v.outer) for v in values if v.kind == SHARDED}
        if not places:
            return BatchValue(share=share, degree=degree)
        if len(places) > 1 or any(v.kind == REPLICATED and self._has_batch(i) for i, v in enumerate(values)):
            raise Refused("its operands have the samples in different dims")
        own, outer = places.pop()
        if not added and own == dim:
            sizes = {operand.shape[dim] // operand.value.outer for operand in self.tensors}
            if len(sizes) > 1 or REPLICATED in kinds:
                raise Refused("it appends values that are not one for each sample to the samples")
            return BatchValue(SHARDED, own, outer * len(values), share, degree)
        return BatchValue(SHARDED, own + (added if dim <= own else 0), outer, share, degree)

    def _has_batch(self, i: int) -> bool:
        return bool(self.tensors[i].batch_dims)

    def _where(self) -> BatchValue:
        return self._pointwise()

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _dims(self) -> tuple[int, ...]:
        given = self.options.get("dim")
        if isinstance(given, list | tuple) and not given:
            given = None
        return several_dims(len(self.tensors[0].shape), given)

    def _sum(self) -> BatchValue:
        return self._summed(0, 1)

    def _mean(self) -> BatchValue:
        return self._summed(1, 0)

    def _summed(self, share: int, degree: int) -> BatchValue:
        value, dims = self.values[0], self._dims()
        if value.kind == PARTIAL and value.power != 1:
            raise ReduceFirst(0)
        if value.kind != SHARDED:
            return value
        if value.dim in dims:
            return BatchValue(PARTIAL, share=value.share + share, degree=value.degree + degree)
        return self._without(dims)

    def _without(self, dims: Sequence[int]) -> BatchValue:
        """The value if these dims are reduced, which do not have the samples."""
        value = self.values[0]
        gone = 0 if len(self.results[0].shape) == len(self.tensors[0].shape) else sum(d < value.dim for d in dims)
        return attrs.evolve(value, dim=value.dim - gone, is_iota=False)

    def _linalg_vector_norm(self) -> BatchValue:
        value, dims = self.values[0], self._dims()
        order = float(self.options.get("ord", 2))
        if value.kind == PARTIAL:
            if value.power == order and order != 1 and not self.results[0].shape:
                return value
            raise ReduceFirst(0)
        self._unscaled(0, value)
        if value.kind != SHARDED:
            return BatchValue()
        if value.dim not in dims:
            return attrs.evolve(self._without(dims), degree=0)
        return BatchValue(PARTIAL, power=order)

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _kernel(self, where: str) -> list[BatchValue]:
        """A kernel that computes each sample alone: results that have the samples are sharded, others are sums."""
        kinds = [value.kind for value in self.values]
        if PARTIAL in kinds:
            is_linear = self.name.endswith(("_backward", "_backward_data")) or self.name in _LINEAR_KERNELS
            if not is_linear or kinds != [PARTIAL] + [REPLICATED] * (len(kinds) - 1) or self.values[0].power != 1:
                raise ReduceFirst(self._number(kinds.index(PARTIAL)))
            share, degree = self._exponents()
            return [BatchValue(PARTIAL, share=share, degree=degree) for _ in self.results]
        share, degree = self._exponents()
        outers = set()
        for operand in self.tensors:
            if operand.value.kind == SHARDED:
                self._check_place(where, operand)
                outers.add(operand.value.outer)
            elif operand.batch_dims:
                raise Refused("one operand has the values of all samples, the other those of a rank's")
        if len(outers) > 1:
            raise Refused("its operands have the samples in different places")
        outer = outers.pop() if outers else 1
        found = []
        for result in self.results:
            if result.batch_dims:
                found.append(BatchValue(SHARDED, self._one(result), outer, share, degree))
            elif self.name in _EXTREMES or where == "named":
                raise Refused("it compares the samples with one another")
            elif self.name in _LOSSES and self._reduction() == 1:
                found.append(BatchValue(PARTIAL, share=share + 1, degree=degree))
            elif _is_counter(result, self.name):
                found.append(BatchValue())
            else:
                found.append(BatchValue(PARTIAL, share=share, degree=degree + 1))
        if self.name in _LOSSES and self.name.endswith("_backward") and self._reduction() == 1:
            found = [attrs.evolve(value, share=value.share + 1, degree=value.degree - 1) for value in found]
        return found

    def _reduction(self) -> int:
        return int(self.options.get("reduction", 1))

    def _check_place(self, where: str, operand: Operand) -> None:
        dim, ndim = operand.value.dim, len(operand.shape)
        ok = True
        if where == "first":
            ok = dim == 0
        elif where == "named":
            ok = ndim != len(self.tensors[0].shape) or dim not in self._dims()
        elif where == "normalized":
            ok = dim < len(self.tensors[0].shape) - len(self.options["normalized_shape"])
        elif where == "last":
            ok = dim < ndim - (len(self.options["pad"]) // 2 if "pad" in self.options else 2)
        if not ok:
            raise Refused(f"dim {dim} has the samples, and the operation needs the whole dim")

    def _amax(self) -> BatchValue:
        value, dims = self.values[0], self._dims()
        if value.kind == PARTIAL:
            raise ReduceFirst(0)
        self._unscaled(0, value)
        if value.kind == SHARDED and value.dim in dims:
            if len(self.results) > 1:
                raise Refused("it compares the samples with one another")
            return BatchValue(PARTIAL, power=float("inf") if _EXTREMES[self.name] == "max" else float("-inf"))
        return self._without(dims)

    _amin = _amax
    _any = _amax
    _all = _amax

    def _max(self) -> list[BatchValue]:
        if len(self.tensors) > 1:  # of two tensors
            return [self._pointwise()]
        if len(self.results) == 1:
            return [self._amax()]
        return self._kernel("named")

    _min = _max

    # -- by the rows of the table -------------------------------------------------------------------------------------

    def _row(self) -> BatchValue:
        rule = _rule_of(self.name, tuple(None if o is None else o.shape for o in self.operands), self._row_dims())
        if rule is None:
            raise Refused(f"there is no rule for `{self.name}` of these shapes")
        partial = [i for i, value in enumerate(self.values) if value.kind == PARTIAL]
        sharded = [i for i, value in enumerate(self.values) if value.kind == SHARDED]
        is_linear = self.name in _PRODUCTS
        if partial and (not is_linear or sharded or len(partial) > 1 or self.name.startswith("add")):
            raise ReduceFirst(self._number(partial[0]))
        share, degree = self._exponents()
        if partial:
            return BatchValue(PARTIAL, share=share, degree=degree)
        letter, outer = self._letter(rule)
        if letter in rule.whole:
            raise Refused("the dim with the samples must be whole")
        if letter in rule.output:
            dim = rule.output.index(letter)
            if self.name.startswith(("addm", "badd")):
                self._check_bias(share)
            return BatchValue(SHARDED, dim, outer, share, degree)
        if dict(rule.combine).get(letter, "sum") != "sum" or self.name.startswith(("addm", "badd", "addb")):
            raise Refused("it needs all samples at once")
        return BatchValue(PARTIAL, share=share, degree=degree + 1)

    def _check_bias(self, share: int) -> None:
        """Products and the bias that is added to them must have one factor."""
        first, *rest = self.values
        product = sum(value.share for value in rest)
        if first.share != product:
            raise ScaleFirst(0 if first.share else next(i for i, v in enumerate(self.values) if i and v.share))
        del share

    def _row_dims(self) -> tuple[int, ...]:
        dim = self.options.get("dim")
        return (dim % max(len(self.tensors[0].shape), 1),) if isinstance(dim, int) else ()

    def _letter(self, rule: Any) -> tuple[Any, int]:
        """Return the letter of the dim that has the samples."""
        found = set()
        for operand, letters in zip(self.tensors, rule.inputs, strict=True):
            if operand.value.kind == SHARDED:
                found.add((letters[operand.value.dim], operand.value.outer))
        if len(found) != 1:
            raise Refused("its operands have the samples in different dims")
        letter, outer = found.pop()
        for operand, letters in zip(self.tensors, rule.inputs, strict=True):
            if operand.value.kind != SHARDED and letter in letters:
                raise Refused("one operand has the values of all samples, the other those of a rank's")
        return letter, outer

    # -- indexing -----------------------------------------------------------------------------------------------------

    def _embedding(self) -> list[BatchValue]:
        weight, ids = self.tensors
        if weight.value.kind == SHARDED:
            raise Refused("the samples are looked up by number")
        if weight.value.kind == PARTIAL:
            raise ReduceFirst(0)
        return [attrs.evolve(ids.value, share=weight.value.share, degree=weight.value.degree, is_iota=False)]

    def _index(self) -> BatchValue:
        """``x[i, j, ...]``: tensor 0 is x, the others are indices of its dims, None where a dim is kept."""
        x, places = self.tensors[0], self.operands[1:]
        if x.value.kind == PARTIAL:
            raise ReduceFirst(0)
        if any(o is not None and o.value.kind == PARTIAL for o in places):
            raise ReduceFirst(1 + next(i for i, o in enumerate(places) if o is not None and o.value.kind == PARTIAL))
        result = self.results[0]
        indexed = [o for o in places if o is not None]
        if x.value.kind == SHARDED:
            own = places[x.value.dim] if x.value.dim < len(places) else None
            if own is not None and not own.value.is_iota:
                raise Refused("the samples are looked up by number")
            if own is None and any(o.value.kind == SHARDED for o in indexed):
                raise Refused("its operands have the samples in different dims")
        elif all(o.value.kind != SHARDED for o in indexed):
            return x.value
        return BatchValue(SHARDED, self._one(result), x.value.outer, x.value.share, x.value.degree)

    def _index_put(self) -> BatchValue:
        """Write or add `values` at indices: into zeros, for the gradient of `index`; operands: x, indices, values."""
        x, *places, values = self.operands
        assert x is not None and values is not None
        own = places[x.value.dim] if x.value.kind == SHARDED and x.value.dim < len(places) else None
        if PARTIAL in (x.value.kind, values.value.kind):
            raise ReduceFirst(0 if x.value.kind == PARTIAL else len(self.operands) - 1)
        indexed = [o for o in places if o is not None]
        if x.value.kind == SHARDED:
            if own is not None and not own.value.is_iota:
                raise Refused("the samples are written by number")
            if not x.value.is_zero and x.value.share != values.value.share:
                raise ScaleFirst(0 if x.value.share else len(self.operands) - 1)
            return attrs.evolve(x.value, share=values.value.share, degree=values.value.degree, is_zero=False)
        if SHARDED in {o.value.kind for o in indexed} | {values.value.kind}:
            return self._scattered(x, values)
        return x.value

    def _scattered(self, x: Operand, values: Operand) -> BatchValue:
        if not (x.value.is_zero and self.options.get("accumulate", True)):
            raise Refused("each sample writes to the same tensor")
        return BatchValue(PARTIAL, share=values.value.share, degree=values.value.degree + 1)

    def _gather(self) -> BatchValue:
        x, index = self.tensors
        dim = self.options["dim"] % max(len(x.shape), 1)
        if x.value.kind == PARTIAL:
            raise ReduceFirst(0)
        if x.value.kind == SHARDED and (dim == x.value.dim or index.value.dim != x.value.dim):
            raise Refused("the samples are looked up by number")
        if x.value.kind == REPLICATED and index.value.kind == SHARDED and index.value.dim != dim:
            raise Refused("one operand has the values of all samples, the other those of a rank's")
        return attrs.evolve(index.value, share=x.value.share, degree=x.value.degree, is_iota=False)

    def _scatter_add(self) -> BatchValue:
        x, index, source = self.tensors
        dim = self.options["dim"] % max(len(x.shape), 1)
        if source.value.kind == PARTIAL:
            raise ReduceFirst(2)
        if x.value.kind == SHARDED:
            if dim == x.value.dim or index.value.dim != x.value.dim:
                raise Refused("the samples are written by number")
            if not x.value.is_zero and x.value.share != source.value.share:
                raise ScaleFirst(0 if x.value.share else 2)
            return attrs.evolve(source.value, is_iota=False)
        if index.value.kind == SHARDED or source.value.kind == SHARDED:
            return self._scattered(x, source)
        return x.value

    def _scatter(self) -> BatchValue:
        x, index = self.tensors[:2]
        dim = self.options["dim"] % max(len(x.shape), 1)
        for i, value in enumerate(self.values):
            if value.kind == PARTIAL:
                raise ReduceFirst(self._number(i))
            self._unscaled(i, value)
        if x.value.kind != SHARDED or dim == x.value.dim or index.value.dim != x.value.dim:
            raise Refused("the samples are written by number")
        return attrs.evolve(x.value, is_zero=False)

    def _index_select(self) -> BatchValue:
        x, index = self.tensors
        dim = self.options["dim"] % max(len(x.shape), 1)
        if x.value.kind == PARTIAL:
            raise ReduceFirst(0)
        if x.value.kind == SHARDED and (dim == x.value.dim or index.value.kind == SHARDED):
            raise Refused("the samples are looked up by number")
        if x.value.kind == SHARDED:
            return attrs.evolve(x.value, is_iota=False)
        return BatchValue(SHARDED, dim, index.value.outer, x.value.share, x.value.degree)

    # -- collectives of other axes of the mesh ------------------------------------------------------------------------

    def _all_reduce(self) -> BatchValue:
        return self.values[0]

    _wait_tensor = _all_reduce

    def _all_gather_into_tensor(self) -> BatchValue:
        """The parts of all ranks of the other axis, end to end along the first dim."""
        value = self.values[0]
        if value.kind != SHARDED or value.dim:
            return value
        return attrs.evolve(value, outer=value.outer * self.options["group_size"], is_iota=False)

    def _reduce_scatter_tensor(self) -> BatchValue:
        value, size = self.values[0], self.options["group_size"]
        if value.kind != SHARDED or value.dim:
            return value
        return attrs.evolve(value, outer=self._divided(value, size), is_iota=False)

    def _all_to_all_single(self) -> BatchValue:
        value = self.values[0]
        if value.kind == SHARDED and not value.dim:
            self._divided(value, len(self.options["output_split_sizes"]))
        return value

    def _divided(self, value: BatchValue, ranks: int) -> int:
        if value.outer % ranks:
            raise Refused("ranks of another axis exchange parts of the samples")
        return value.outer // ranks


_LINEAR_KERNELS = frozenset(
    "native_dropout all_reduce wait_tensor permute transpose t unbind split split_with_sizes repeat gather index "
    "index_select constant_pad_nd masked_fill tril triu cumsum flip roll _adaptive_avg_pool2d avg_pool2d "
    "_adaptive_avg_pool3d avg_pool3d avg_pool1d pixel_shuffle pixel_unshuffle im2col col2im "
    "embedding unsqueeze squeeze view _unsafe_view".split()
)
"""Other operations that are linear in their first operand."""


def _is_counter(result: Result, name: str) -> bool:
    """Whether a result of an attention kernel is its random state, or is empty."""
    return "attention" in name and (len(result.shape) == 0 or _product(result.shape) <= 2)


@lru_cache(maxsize=4096)
def _rule_of(name: str, shapes: tuple[Shape | None, ...], dims: tuple[int, ...]) -> Any:
    return ROWS[name].rule(shapes, dims)


def _product(sizes: Sequence[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def _by(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "one number"
