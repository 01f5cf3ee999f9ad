"""The exponents of results, and the registry of rules of `shardtensor.rules.batch_infer`."""

from __future__ import annotations

from collections.abc import Callable

from shardtensor.rules.batch import PARTIAL, BatchCall, BatchValue, Exponents, ScaleFirst, WeighFirst

BatchRule = Callable[[BatchCall], list[BatchValue]]

RULES: dict[str, BatchRule] = {}
"""Rules of single operations, by name."""


def rule(*names: str) -> Callable[[BatchRule], BatchRule]:
    """Register the rule of some operations."""

    def register(function: BatchRule) -> BatchRule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


VIEWS = frozenset(
    "view _unsafe_view reshape flatten squeeze unsqueeze expand clone detach alias contiguous lift_fresh _to_copy "
    "lift_fresh_copy view_of _reshape_alias _conj_physical".split()
)
PRODUCTS = frozenset("mm bmm mv dot addmm baddbmm addmv addbmm convolution einsum outer".split())
"""Linear in each operand."""

LINEAR = frozenset("neg mul div positive conj real imag".split())
"""Elementwise operations that are linear in each tensor (`div`: in the first)."""

_ADDS = frozenset("add sub rsub cat stack where".split())
_OF_FIRST = frozenset(
    "sum mean slice select permute transpose t unbind split split_with_sizes repeat gather index _unsafe_index "
    "index_select constant_pad_nd masked_fill tril triu cumsum flip roll diagonal unfold embedding copy "
    "native_dropout all_reduce wait_tensor _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "pixel_shuffle pixel_unshuffle im2col col2im upsample_nearest2d upsample_bilinear2d".split()
)


_GROW_ALIKE = frozenset("clamp clamp_min clamp_max maximum minimum abs relu round floor ceil trunc".split())
"""Operations whose result grows with the batch as their first operand does."""


def is_linear_in_first(call: BatchCall) -> bool:
    """Whether the operation is linear in its first tensor, if the others are fixed."""
    name = call.name
    if name in ("masked_fill", "constant_pad_nd"):
        return len(call.tensors) < 3 and call.number("value") == 0
    if name == "_to_copy":
        return call.results[0].is_float
    return name in _OF_FIRST or name in VIEWS or name.endswith(("_backward", "_backward_data"))


def exponents_of(call: BatchCall) -> Exponents:
    """Return share and degree of the result.

    Raises:
        ScaleFirst: the operation is not linear in an operand whose share is not 0.
        WeighFirst: it adds gradients that will be divided by the number of ranks, and others.
    """
    name, values = call.name, call.values
    if name in ("addmm", "baddbmm", "addmv", "addbmm"):
        return _added_product(call)
    if name in PRODUCTS or name == "mul":
        return sum(v.share for v in values), _sum([v.degree for v in values])
    if name == "div" and not call.options.get("rounding_mode"):
        signs = [1, -1][: len(values)]
        return (
            sum(s * v.share for s, v in zip(signs, values, strict=True)),
            _sum([None if v.degree is None else s * v.degree for s, v in zip(signs, values, strict=True)]),
        )
    if name in _ADDS:
        return _added(call)
    if name in LINEAR and len(values) == 1:
        return values[0].share, values[0].degree
    if is_linear_in_first(call):
        for i in range(1, len(values)):
            call.unscaled(i)
        return values[0].share, values[0].degree
    for i in range(len(values)):
        call.unscaled(i)
    return 0, values[0].degree if name in _GROW_ALIKE else 0


def adds_number(call: BatchCall) -> bool:
    """Whether one of the addends is a number that is not 0."""
    return call.number("other", "self") != 0


def _added_product(call: BatchCall) -> Exponents:
    """A product and what is added to it must have one factor."""
    bias, *factors = call.values
    share = sum(v.share for v in factors)
    if bias.share != share:
        raise ScaleFirst(call.numbers[0 if bias.share else next(i for i, v in enumerate(call.values) if i and v.share)])
    _weighed(call, [0, *[i for i, v in enumerate(call.values) if v.is_gradient and i][:1]])
    degree = _sum([v.degree for v in factors])
    return share, degree if bias.degree == degree or not bias.of_batch else None


def _added(call: BatchCall) -> Exponents:
    values = call.values
    present = [i for i, v in enumerate(values) if not v.is_zero and (i or call.name != "where")]
    if not present:
        return 0, 0
    _weighed(call, present)
    # with a partial value, replicated ones are added that were split; see `shardtensor.rules.batch_kernels`
    partial = [i for i in present if values[i].kind == PARTIAL] or present
    shares = {values[i].share for i in partial}
    if len(shares) > 1 or (shares != {0} and adds_number(call)):
        raise ScaleFirst(call.numbers[next(i for i in partial if values[i].share)])
    degrees = {values[i].degree for i in present if values[i].of_batch}
    degree = values[present[0]].degree if not degrees else degrees.pop() if len(degrees) == 1 else None
    return values[partial[0]].share, degree


def _weighed(call: BatchCall, addends: list[int]) -> None:
    """Gradients that depend on the batch may be divided by the number of ranks; so must those that are added be."""
    if call.mode.averages:
        gradients = [i for i in addends if call.values[i].is_gradient]
        of_batch = [call.values[i].of_batch for i in gradients]
        if any(of_batch) and not all(of_batch):
            raise WeighFirst(call.numbers[gradients[of_batch.index(False)]])


def _sum(degrees: list[int | None]) -> int | None:
    known = [degree for degree in degrees if degree is not None]
    return sum(known) if len(known) == len(degrees) else None
