"""The rules of data parallelism: kinds, shares and degrees of results, and the texts of what is refused."""

from __future__ import annotations

import pytest
import torch

from shardtensor.rules.batch import (
    FLAT,
    PARTIAL,
    REPLICATED,
    SHARDED,
    BatchMode,
    BatchValue,
    Operand,
    ReduceFirst,
    Refused,
    ResultShape,
    ScaleFirst,
    SplitFirst,
    WeighFirst,
)
from shardtensor.rules.batch_exponents import RULES
from shardtensor.rules.batch_infer import infer
from shardtensor.rules.batch_kernels import DRAWS, FILLS, KERNELS, LIKES

N = 4
MODE = BatchMode(True, N)
BATCH = Operand(BatchValue(SHARDED, 0, of_batch=True), (N, 6))
MEANS = Operand(BatchValue(SHARDED, 0, share=1, degree=-1, of_batch=True), (N, 6))
WEIGHT = Operand(BatchValue(), (6,))
SUM = Operand(BatchValue(PARTIAL, degree=1, of_batch=True), (6,))
MEAN = Operand(BatchValue(PARTIAL, share=1, of_batch=True), (6,))
LARGEST = Operand(BatchValue(PARTIAL, power=float("inf"), of_batch=True), (6,))
ROWS, ROW = ResultShape((N, 6), (0,)), ResultShape((6,))
ELEMENTWISE = {"is_pointwise": True}


def one(name, operands, options, result, **kwargs) -> BatchValue:
    (found,) = infer(name, operands, options, [result], MODE, **kwargs)
    return found


@pytest.mark.parametrize("name", sorted({*KERNELS, *FILLS, *LIKES, *DRAWS, *RULES}))
def test_every_name_is_an_operation_of_torch(name):
    spaces = (torch.ops.aten, torch.ops._c10d_functional)
    assert any(hasattr(space, name) for space in spaces)


def test_rows_of_kernels_say_where_samples_may_be():
    assert set(KERNELS.values()) == {"named", "result", "normalized", "first", "last", "any"}


@pytest.mark.parametrize(
    ("name", "operands", "options", "result", "share", "degree"),
    [
        ("sum", [BATCH], {"dim": [0]}, ROW, 0, 1),
        ("mean", [BATCH], {"dim": [0]}, ROW, 1, 0),
        ("sum", [MEANS], {"dim": [0]}, ROW, 1, 0),
        ("mul", [SUM, WEIGHT], {}, ROW, 0, 1),
        ("div", [MEAN, WEIGHT], {}, ROW, 1, 0),
        ("add", [SUM, SUM], {}, ROW, 0, 1),
        ("neg", [MEAN], {}, ROW, 1, 0),
    ],
)
def test_shares_and_degrees_of_partial_values(name, operands, options, result, share, degree):
    found = one(name, operands, options, result, is_pointwise=name not in ("sum", "mean"))
    assert (found.kind, found.share, found.degree, found.of_batch) == (PARTIAL, share, degree, True)


def test_degrees_of_products_quotients_and_of_what_is_neither_a_sum_nor_a_mean():
    total = Operand(BatchValue(degree=1, of_batch=True), ())
    average = Operand(BatchValue(of_batch=True), ())
    number = ResultShape(())
    assert one("mul", [total, total], {}, number, **ELEMENTWISE).degree == 2
    assert one("div", [BATCH, total], {}, ROWS, **ELEMENTWISE).degree == -1
    assert one("clamp", [total], {"min": 1}, number, **ELEMENTWISE).degree == 1
    assert one("exp", [total], {}, number, **ELEMENTWISE).degree == 0
    assert one("add", [total, average], {}, number, **ELEMENTWISE).degree is None
    assert one("add", [total, Operand(BatchValue(), ())], {}, number, **ELEMENTWISE).degree == 1


@pytest.mark.parametrize(
    ("name", "operands", "options", "error", "number"),
    [
        ("exp", [SUM], {}, ReduceFirst, 0),
        ("mul", [BATCH, SUM], {}, ReduceFirst, 1),
        ("add", [SUM], {"other": 2.0}, ReduceFirst, 0),
        ("div", [WEIGHT, SUM], {}, ReduceFirst, 1),
        ("div", [SUM, WEIGHT], {"rounding_mode": "floor"}, ReduceFirst, 0),
        ("neg", [LARGEST], {}, ReduceFirst, 0),
        ("exp", [MEANS], {}, ScaleFirst, 0),
        ("add", [MEANS, BATCH], {}, ScaleFirst, 0),
        ("add", [MEANS], {"other": 1}, ScaleFirst, 0),
        ("masked_fill", [MEANS, BATCH], {"value": 1.0}, ScaleFirst, 0),
        ("add", [SUM, WEIGHT], {}, SplitFirst, 1),
        ("where", [WEIGHT, SUM, WEIGHT], {}, SplitFirst, 2),
    ],
)
def test_operands_that_must_be_changed_first(name, operands, options, error, number):
    result = ROWS if any(x.value.kind == SHARDED for x in operands) else ROW
    with pytest.raises(error) as caught:
        one(name, operands, options, result, is_pointwise=True)
    assert caught.value.operand == number


def test_gradients_of_weights_alone_are_weighed_before_they_are_added_to_those_of_the_batch():
    own = Operand(BatchValue(is_gradient=True), (6,))
    of_batch = Operand(BatchValue(PARTIAL, of_batch=True, is_gradient=True), (6,))
    with pytest.raises(WeighFirst) as caught:
        one("add", [of_batch, own], {}, ROW, **ELEMENTWISE)
    assert caught.value.operand == 1
    with pytest.raises(SplitFirst):  # nothing is divided
        infer("add", [of_batch, own], {}, [ROW], BatchMode(False, N), is_pointwise=True)


@pytest.mark.parametrize(
    ("name", "operands", "options", "result", "text"),
    [
        ("sort", [BATCH], {"dim": 0}, ROWS, "dim 0 has the samples, and the operation needs the whole dim"),
        ("select", [BATCH], {"dim": 0, "index": 0}, ROW, "it takes one of the samples"),
        (
            "view",
            [Operand(BatchValue(SHARDED, 1), (6, N))],
            {},
            ResultShape((N, 6), (0,)),
            "has no dim with the samples",
        ),
        (
            "view",
            [Operand(BatchValue(SHARDED, 1), (3, N, 2))],
            {},
            ResultShape((N, 2, 3), (0,)),
            "no dim with the samples",
        ),
        ("mm", [BATCH, Operand(BatchValue(SHARDED, 1), (6, N))], {}, ResultShape((N, N), (0, 1)), "in different dims"),
        ("slice", [Operand(BatchValue(), (9, 6))], {"dim": 0}, ROWS, "a result of 4 x 6 depends on all samples"),
        ("linspace", [], {}, ResultShape((N,), (0,)), "`linspace` makes values of all samples"),
        ("eye", [], {}, ResultShape((N, N), (0, 1)), "a result of 4 x 4 pairs the samples with one another"),
        ("svd", [BATCH], {}, ROWS, "there is no rule for `svd`"),
    ],
)
def test_what_is_refused(name, operands, options, result, text):
    with pytest.raises(Refused) as caught:
        one(name, operands, options, result)
    assert text in str(caught.value)


def test_views_keep_blocks_of_samples():
    x = Operand(BatchValue(SHARDED, 1), (3, N, 2))
    flat = one("view", [x], {}, ResultShape((3 * N, 2), (0,)))
    assert str(flat) == "sharded dim 0 in 3 blocks"
    assert one("view", [Operand(flat, (3 * N, 2))], {}, ResultShape((3, N, 2), (1,))) == BatchValue(
        SHARDED, 1, of_batch=True
    )


def test_what_is_the_same_for_each_sample_has_no_blocks():
    ones = Operand(one("ones", [], {}, ResultShape((3 * N, 2), (0,))), (3 * N, 2))
    blocks = Operand(BatchValue(SHARDED, 0, 3), (3 * N, 2))
    assert one("mul", [ones, blocks], {}, ResultShape((3 * N, 2), (0,)), **ELEMENTWISE).outer == 3
    assert one("view", [ones], {}, ResultShape((3, N, 2), (1,))).dim == 1


def test_values_as_text():
    values = [BatchValue(), BatchValue(SHARDED, 1), SUM.value, MEAN.value, LARGEST.value, BatchValue(FLAT)]
    assert [*map(str, values)] == [
        REPLICATED, "sharded dim 1", "partial sum", "partial mean", "partial norm inf", "flat shard"
    ]  # fmt: skip
