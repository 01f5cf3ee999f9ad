"""Reading and writing by index tensors, lists and masks; running sums and the largest elements along cut dims."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from harness import device, every_size
from harness.law import case, check_table, whole

import shardtensor as st

S = (5, 6)
T3 = (4, 2, 6)
V = (7,)


def at(*index: object) -> tuple[object, ...]:
    return tuple(torch.tensor(i, device=device()) if isinstance(i, list) else i for i in index)


def assigned(x: torch.Tensor, index: object, value: object) -> torch.Tensor:
    x = x * 1
    x[index] = value
    return x


def quietly(function):
    """`function` without torch's warning that it may change."""

    def call(*args):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "index_reduce.. is in beta")
            return function(*args)

    return call


READS = [
    case("gather 0", lambda x, i: torch.gather(x, 0, i), (S, (3, 6)), make=("int", "ids:5")),
    case("gather 1", lambda x, i: torch.gather(x, 1, i), (S, (5, 2)), make=("int", "ids:6")),
    case("gather of less", lambda x, i: torch.gather(x, 0, i), (S, (8, 4)), make=("int", "ids:5")),
    case("gather more than there is", lambda x, i: torch.gather(x, 0, i), (V, (40,)), make=("int", "ids:7")),
    case("gather method", lambda x, i: x.gather(1, i), (S, (5, 3)), make=("int", "ids:6")),
    case("gather by name", lambda x, i: x.gather(dim=0, index=i), (S, (2, 6)), make=("int", "ids:5")),
    case(
        "take_along_dim",
        lambda x, i: torch.take_along_dim(x, i, 1),
        (S, (1, 2)),
        make=("int", "ids:6"),
        gathers=True,
    ),
    case("take_along_dim sorted", lambda x: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1), (S,), gathers=True),
    case("take", lambda x, i: x.take(i - 3), (S, (2, 4)), make=("int", "ids:30"), gathers=True),
    case("index_select 0", lambda x, i: x.index_select(0, i), (S, (3,)), make=("int", "ids:5")),
    case("index_select 1", lambda x, i: torch.index_select(x, -1, i), (S, (9,)), make=("int", "ids:6")),
    case("ids", lambda x, i: x[i], (S, (3,)), make=("int", "ids:5")),
    case("ids twice", lambda x, i: x[i], (S, (2, 3)), make=("int", "ids:5")),
    case("ids from the end", lambda x, i: x[:, i - 6], (S, (3,)), make=("int", "ids:6")),
    case("pairs", lambda x, i, j: x[i, j], (S, (3,), (3,)), make=("int", "ids:5", "ids:6")),
    case("outer", lambda x, i, j: x[i[:, None], j], (S, (3,), (4,)), make=("int", "ids:5", "ids:6")),
    case("apart", lambda x, i, j: x[i, :, j], (T3, (3,), (3,)), make=("int", "ids:4", "ids:6")),
    case("a new dim", lambda x, i: x[:, None, i], (S, (3,)), make=("int", "ids:6")),
    case("after a slice", lambda x, i: x[1:, i], (S, (3,)), make=("int", "ids:6")),
    case("after an integer", lambda x, i: x[2, :, i], (T3, (3,)), make=("int", "ids:6")),
    case("labels", lambda x, i: x[torch.arange(5, device=i.device), i], (S, (5,)), make=("int", "ids:6")),
    case("lists", lambda x: x[[0, 2]] + x[[-1, 1]] + x[..., [0, 3, 3, 1, 2, 0]][:2], (S,)),
    case("no ids", lambda x: x[:, []], (S,)),
    case("mask", lambda x: x[x > 0], (S,)),
    case("mask of rows", lambda x, m: x[m], (S, (5,)), make=("int", "bool"), gathers="into whole"),
    case("mask of columns", lambda x, m: x[:, m], (S, (6,)), make=("int", "bool")),
    case("mask of two dims", lambda x, m: x[m], (T3, (4, 2)), make=("int", "bool"), gathers=(0, 1)),
    case("mask of none", lambda x: x[x > 100], (S,)),
    case("mask and ids", lambda x, m: x[m, 1:], (S, (5,)), make=("int", "bool"), gathers="into whole"),
    case("masked_select", lambda x, m: torch.masked_select(x, m), (S, (6,)), make=("int", "bool")),
    case("nonzero", lambda x: x.nonzero(), (S,)),
    case("nonzero tuple", lambda x: torch.nonzero(x > 0, as_tuple=True), (S,)),
    case("where", lambda x: torch.where(x > 0), (S,)),
    case("argwhere", lambda x: torch.argwhere(x), (V,), gathers=True),
]
WRITES = [
    case("scatter 0", lambda x, i, y: x.scatter(0, i, y), (V, V, V), make=("int", "places:7", "int")),
    case("scatter number", lambda x, i: x.scatter(1, i, 2.0), (S, (5, 2)), make=("int", "ids:6")),
    case("scatter of less", lambda x, y: x.scatter(1, at([[2, 0], [5, 1]])[0], y), (S, (2, 2))),
    case("scatter_add 1", lambda x, i, y: x.scatter_add(1, i, y), (S, (5, 9), (5, 9)), make=("int", "ids:6", "int")),
    case(
        "scatter_add of less", lambda x, i, y: x.scatter_add(0, i, y), (S, (3, 4), (3, 4)), make=("int", "ids:5", "int")
    ),
    case(
        "scatter_reduce",
        lambda x, i, y: x.scatter_reduce(0, i, y, "amax", include_self=False),
        (S, (3, 6), (3, 6)),
        exact=False,
        make=("int", "ids:5", "int"),
    ),
    case(
        "scatter_reduce mean",
        lambda x, i, y: torch.scatter_reduce(x, 1, i, y, reduce="mean"),
        (S, (5, 9), (5, 9)),
        exact=False,
        make=("int", "ids:6", "int"),
    ),
    case(
        "scatter_add_", lambda x, i, y: (x * 1).scatter_add_(0, i, y), (S, (3, 6), (3, 6)), make=("int", "ids:5", "int")
    ),
    case("index_add", lambda x, i, y: x.index_add(0, i, y, alpha=2), (S, (3,), (3, 6)), make=("int", "ids:5", "int")),
    case("index_add_", lambda x, i, y: (x * 1).index_add_(1, i, y), (S, (3,), (5, 3)), make=("int", "ids:6", "int")),
    case("index_copy", lambda x, i, y: x.index_copy(0, i, y), (S, (3,), (3, 6)), make=("int", "places:5", "int")),
    case("index_fill", lambda x, i: x.index_fill(1, i, 2.0), (S, (3,)), make=("int", "ids:6")),
    case(
        "index_reduce",
        quietly(lambda x, i, y: x.detach().index_reduce(0, i, y.detach(), "amin")),
        (S, (3,), (3, 6)),
        make=("int", "ids:5", "int"),
    ),
    case("index_put", lambda x, i, y: x.index_put((i,), y), (S, (3,), (3, 6)), make=("int", "places:5", "int")),
    case(
        "index_put pairs",
        lambda x, i, j, y: x.index_put((i, j), y, accumulate=True),
        (S, (9,), (9,), (9,)),
        make=("int", "ids:5", "ids:6", "int"),
    ),
    case(
        "assign rows",
        lambda x, i, y: assigned(x, i, y),
        (S, (3,), (3, 6)),
        make=("int", "places:5", "int"),
        gathers="into whole",
    ),
    case(
        "assign columns",
        lambda x, i, y: assigned(x, at(slice(1, None), i), y),
        (S, (3,), (4, 3)),
        make=("int", "places:6", "int"),
        gathers="into whole",
    ),
    case("assign number", lambda x: assigned(x, at(slice(None), [-1, 2]), 7.0), (S,)),
    case("assign where", lambda x: assigned(x, x.detach() > 0, 1.0), (S,)),
    case("assign masked rows", lambda x, m: assigned(x, m, 1.0), (S, (5,)), make=("int", "bool"), gathers="into whole"),
    case(
        "assign at mask",
        lambda x, m, y: assigned(x, m, y[: int(m.sum())]),
        (S, S, (30,)),
        make=("int", "bool", "int"),
        gathers="into whole",
    ),
    case(
        "masked_scatter",
        lambda x, m, y: x.masked_scatter(m, y),
        (S, (6,), S),
        make=("int", "bool", "int"),
        gathers=True,
    ),
]
ALONG = [
    case("cumsum 0", lambda x: x.cumsum(0), (S,)),
    case("cumsum 1", lambda x: torch.cumsum(x, -1, dtype=torch.float64), (S,)),
    case("cumsum one dim", lambda x: x.cumsum(dim=0), (V,)),
    case("cumsum empty ranks", lambda x: x.cumsum(0), ((2, 3),)),
    case("cumsum integers", lambda x: x.cumsum(0), (V,), make=("long",)),
    case("cumsum bool", lambda x: (x > 0).cumsum(0), (V,)),
    case("cumsum half", lambda x: x.bfloat16().cumsum(0).float(), ((40,),)),
    case("cumsum_", lambda x: (x * 1).cumsum_(0), (S,)),
    case("cumprod", lambda x: x.cumprod(0), (S,), exact=False),
    case("cumprod of zeros", lambda x: (x * (x > -2)).cumprod(0), ((6,),), exact=False),
    case("topk 0", lambda x: x.topk(2, 0), (S,), make=("places:30",)),
    case("topk least", lambda x: torch.topk(x, 3, dim=-1, largest=False), (S,), make=("places:30",)),
    case("topk all", lambda x: x.topk(7), (V,), make=("places:7",)),
    case("topk none", lambda x: x.topk(0)[1], (V,), make=("places:7",)),
    case(
        "topk trained",
        lambda x: (x + torch.arange(30.0, device=x.device).view(S)).topk(2, 0)[0],
        (S,),
        make=("unit",),
        exact=False,
    ),
]


def reads() -> None:
    check_table(READS)


def writes() -> None:
    check_table(WRITES)


def along() -> None:
    check_table(ALONG)


@pytest.mark.worlds("sim")
@every_size
def test_reading_by_indices_equals_dense(world, size):
    world(reads, size)


@pytest.mark.worlds("sim")
@every_size
def test_writing_by_indices_equals_dense(world, size):
    world(writes, size)


@pytest.mark.worlds("sim")
@every_size
def test_running_sums_and_largest_equal_dense(world, size):
    world(along, size)


def out_of_range() -> None:
    """An id that one rank alone sees is the same error on every rank, which then go on together."""
    table = st.distribute(torch.arange(12.0, device=device()).view(6, 2), "[tp, -]")
    logits = torch.zeros(4, 6, device=device())
    calls = [
        lambda ids: F.embedding(ids, table),
        lambda ids: table.index_select(0, ids),
        lambda ids: torch.gather(table, 0, ids.view(4, 1)),
        lambda ids: table.scatter_add(0, ids.view(4, 1), table),
        lambda ids: torch.zeros(6, 2, device=device()).index_add(0, ids, table[:4]),
        lambda ids: F.nll_loss(st.distribute(logits, "[tp, -]"), ids),
        lambda ids: F.cross_entropy(st.distribute(logits, "[-, tp]"), ids),
        lambda ids: F.cross_entropy(st.distribute(logits, "[tp, -]"), ids.full_tensor()),
        lambda ids: table[ids - 6 * (ids < 0)],
    ]
    for call in calls:
        call(st.distribute(torch.tensor([0, 1, 2, 5], device=device()), "[tp]"))
        for bad in (6, -1):
            with pytest.raises(IndexError):
                call(st.distribute(torch.tensor([0, 1, 2, bad], device=device()), "[tp]"))


def test_an_index_out_of_range_on_one_rank_is_the_same_error_on_all(world):
    world(out_of_range, 2)


def two_meanings() -> None:
    x = st.distribute(torch.arange(6.0, device=device()).view(2, 3), "[tp, -]")
    out = torch.empty(2, 3, device=device()) if torch.distributed.get_rank() == 0 else None
    x.gather(0, out)
    full = x.full_tensor()
    assert out is None or torch.equal(out, full)
    index = torch.tensor([[0, 2], [1, 1]], device=device())
    assert torch.equal(whole(x.gather(1, index)), full.gather(1, index))
    only_here = index if torch.distributed.get_rank() == 0 else None
    with pytest.raises(st.LayoutError, match="must be specified on destination rank 1"):
        x.gather(1, only_here)
    with pytest.raises(st.DisagreementError):
        x.gather(0, index if torch.distributed.get_rank() == 0 else None)


def test_gather_means_what_its_second_argument_is(world):
    world(two_meanings, 2)


INDEXED = {
    "gather": lambda x, at: torch.gather(x, 0, at.view(-1, 1)),
    "index_select": lambda x, at: torch.index_select(x, 0, at),
    "scatter": lambda x, at: torch.scatter(x, 0, at.view(-1, 1), 7.0),
    "index_fill": lambda x, at: torch.index_fill(x, 0, at, 7.0),
    "index_add": lambda x, at: torch.index_add(x, 0, at, x[:2]),
    "index_copy": lambda x, at: torch.index_copy(x, 0, at, x[:2]),
}


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("spec", ["replicate", "[tp]"])
def test_a_plain_tensor_is_indexed_by_a_sharded_one(name, spec):
    x, at = torch.arange(12.0).view(4, 3), torch.tensor([2, 0])

    def body():
        return whole(INDEXED[name](x, st.distribute(at, spec)))

    assert all(torch.equal(found, INDEXED[name](x, at)) for found in st.simulate("tp=2", body))
