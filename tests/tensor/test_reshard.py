"""Reshard: from any layout to any other with the values, the gradients and the bytes that the law asks for."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from harness import device, every_size
from harness.quick import sampled
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh

SHAPES = ((5, 6), (4, 4), (1, 7), (0, 3), (3, 2, 4))


def specs(ndim: int, size: int) -> list[str]:
    """Specs of every kind for a tensor of `ndim` dims on `size` ranks."""
    rest = ", -" * (ndim - 1)
    last = "-, " * (ndim - 1)
    places = f'placements=["rank:0-{size - 1}/{device().type}"]'
    found = [
        "replicate",
        *(f"[tp balanced{rest}]", f"[{last}tp balanced]", f"[tp pad(3){rest}]", f"[tp blocks(1, 1) balanced{rest}]"),
        *("flat(tp)", "flat(tp, unit=row)", "replicate partial(tp)", "replicate partial(tp, op=avg)"),
        *(f"chunk(dim=0, {places})", f"chunk(dim=-1, {places})"),
        f'chunk(dim=0, placements=["rank:{size - 1}/{device().type}", "rank:0/{device().type}"])',
        f'chunk(dim=0, placements=["rank:{size - 1}/{device().type}"])',
    ]
    return found if size > 1 else [spec for spec in found if "rank:0/" not in spec or "chunk(dim=0, pl" in spec]


def filled(spec: str, dense: torch.Tensor, group=None) -> st.ShardedTensor | None:
    """`dense` in a layout, its partial sums different on every rank; None where the spec does not fit."""
    try:
        x = st.reshard(st.distribute(dense, "replicate", process_group=group), spec)
    except st.LayoutError:
        return None
    if x._layout.partial:
        rank, size = as_group().rank, as_group().size
        shares = torch.arange(size, device=dense.device) - (size - 1) / 2  # add up to nothing
        with torch.no_grad():
            x._local.add_(shares[rank] * 2)
    return x.detach()


def values_and_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    size = as_group().size
    dense = torch.randint(-9, 9, shape, device=device()).float()
    factor = torch.randint(-9, 9, shape, device=device()).float()
    for one, other in sampled(product(specs(len(shape), size), repeat=2), 45):
        x = filled(one, dense)
        if x is None or filled(other, dense) is None:
            continue
        assert torch.equal(x.full_tensor(), dense), one
        x.requires_grad_()
        y = st.reshard(x, other)
        where = f"{one} -> {other}"
        same = torch.allclose if "avg" in other else torch.equal  # a third of it, three times
        assert same(y.full_tensor(), dense), where
        assert y._local.untyped_storage().data_ptr() != x._local.untyped_storage().data_ptr() or not y._local.numel()
        assert y.sharding_spec() == st.parse_spec(other)
        if "avg" in one:  # the gradient of a mean's partial sum is its share
            continue
        (y * factor).sum().backward()
        assert same(x.grad.full_tensor(), factor), where


@pytest.mark.worlds("sim")
@every_size
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_layout_to_any_other(world, size, shape):
    world(values_and_gradients, size, shape=shape)


@pytest.mark.worlds("gloo")
def test_any_layout_to_any_other_on_processes(world):
    world(values_and_gradients, 3, shape=(5, 6))


def on_a_grid() -> None:
    grid = as_group().on_mesh(Mesh((("dp", 2), ("tp", 2))), {})
    dense = torch.arange(30.0, device=device()).view(5, 6)
    texts = [
        *("replicate", "[dp balanced, tp balanced]", "[tp balanced, -]", "[-, dp balanced]", "[tp*dp balanced, -]"),
        *("[dp*tp balanced, -]", "[tp balanced, -] flat(dp)", "flat(dp*tp)", "[dp balanced, -] partial(tp)"),
        *("replicate partial(dp)", "[-, tp balanced] partial(dp)", "replicate partial(dp*tp)"),
    ]
    for one, other in sampled(product(texts, repeat=2), 35):
        x = st.reshard(st.distribute(dense, "replicate", process_group=grid), one).requires_grad_()
        y = st.reshard(x, other)
        assert torch.equal(y.full_tensor(), dense), (one, other)
        (y * dense).sum().backward()
        assert torch.equal(x.grad.full_tensor(), dense), (one, other)
    x = st.distribute(dense, "[x balanced, -]")  # a row of ranks, and a grid of the same
    y = st.reshard(x, "[dp balanced, tp balanced]", process_group=grid)
    assert y._group is grid
    assert torch.equal(y.full_tensor(), dense)
    assert torch.equal(st.reshard(y, "[-, x balanced]", process_group=as_group()).full_tensor(), dense)


@pytest.mark.worlds("sim", "gloo")
def test_any_layout_to_any_other_on_a_grid(world):
    world(on_a_grid, 4)


def between_groups() -> None:
    group = as_group()
    dense = torch.arange(20.0, device=device()).view(5, 4)
    x = st.distribute(dense, f'chunk(dim=0, placements=["rank:0-1/{device().type}"])')
    y = st.reshard(x, f'chunk(dim=1, placements=["rank:2-3/{device().type}"])')
    assert y._local.shape == ((5, 2) if group.rank >= 2 else (5, 0))
    assert torch.equal(y.full_tensor(), dense)


@pytest.mark.worlds("sim", "gloo")
def test_from_some_ranks_to_others(world):
    world(between_groups, 4)


def in_place() -> None:
    dense = torch.arange(35.0, device=device()).view(5, 7)
    layer = nn.Linear(7, 5).to(device())
    with torch.no_grad():
        layer.weight.copy_(dense)
    st.shard_parameter(layer, "weight", "[tp balanced, -]")
    weight = layer.weight
    x = torch.ones(2, 7, device=device())
    layer(x).sum().backward()
    before = weight.grad.full_tensor().clone()
    assert weight.reshard("[-, tp balanced]") is weight is layer.weight
    assert weight.is_leaf
    assert weight.requires_grad
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(weight.full_tensor(), dense)
    assert torch.equal(weight.grad.full_tensor(), before)
    assert weight.grad._local.shape == weight._local.shape
    assert weight._local.untyped_storage().nbytes() == weight._local.numel() * 4
    layer(x).sum().backward()
    assert torch.equal(weight.grad.full_tensor(), 2 * before)
    with pytest.raises(st.LayoutError):
        weight.reshard("[-, -, tp]")
    assert torch.equal(weight.full_tensor(), dense)
    early = st.distribute(dense, "[tp balanced, -]", requires_grad=True)
    total = (early * 3).sum()
    early.reshard("[-, tp balanced]").reshard("flat(tp)")
    (total + early.sum()).backward()  # one graph holds the leaf of before
    assert torch.equal(early.grad.full_tensor(), torch.full_like(dense, 4))
    result = st.distribute(dense, "[tp balanced, -]", requires_grad=True)
    y = (result * 2).reshard("[-, tp balanced]")
    y.sum().backward()
    assert (result.grad.full_tensor() == 2).all()


@pytest.mark.worlds("sim", "gloo")
@every_size
def test_in_place_it_stays_the_same_parameter(world, size):
    world(in_place, size)


def of_a_part() -> None:
    dense = torch.arange(12.0, device=device()).view(4, 3)
    x = st.distribute(dense, "[tp balanced, -]")
    whole = st.reshard(x, "replicate")
    x.add_(1)
    assert torch.equal(whole.full_tensor(), dense)
    again = st.reshard(x, "[tp balanced, -]")
    again.zero_()
    assert torch.equal(x.full_tensor(), dense + 1)


@pytest.mark.worlds("sim")
@every_size
def test_a_new_tensor_shares_nothing_with_the_old(world, size):
    world(of_a_part, size)


def second_order() -> None:
    dense = torch.arange(6.0, device=device()).view(2, 3)
    x = st.distribute(dense, "[tp balanced, -]", requires_grad=True)
    y = st.reshard(x, "[-, tp balanced]")
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (first * dense).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 6 * dense * dense)


@pytest.mark.worlds("sim")
@every_size
def test_gradients_of_gradients(world, size):
    world(second_order, size)


def dtypes() -> None:
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.bfloat16, torch.float8_e4m3fn, torch.float64):
        dense = torch.arange(30, device=device()).view(5, 6).remainder(2).to(dtype)
        for x in (
            st.distribute(dense, "[tp balanced, -]"),
            st.distribute(dense.t().contiguous(), "[tp balanced, -]").t(),
        ):
            y = st.reshard(x, "[-, tp balanced]")
            assert y.dtype == dtype
            assert torch.equal(y.full_tensor().to(torch.complex64), dense.to(torch.complex64))
    dense = torch.arange(16.0, device=device()).view(4, 4)
    turned = st.distribute(torch.complex(dense * 0 + 1, dense), "[tp balanced, -]").conj()
    assert torch.equal(st.reshard(turned, "[-, tp balanced]").full_tensor(), turned.full_tensor())


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("size", [2, 3])
def test_any_dtype_and_order_of_memory(world, size):
    world(dtypes, size)


def test_steps_are_said_with_their_bytes(capsys):
    st.explain_reshard("[dp*tp, -]", "[-, tp] partial(dp)", shape=(64, 64), mesh="dp=2, tp=4", dtype="bfloat16")
    st.explain_reshard("[tp, -]", "[tp, -]", shape=(64, 64), mesh="tp=4")
    st.explain_reshard("[tp balanced, -]", "replicate", shape=(5, 1024), mesh="tp=4", dtype=torch.float64)
    assert capsys.readouterr().out == (
        "[dp*tp, -] -> [-, tp] partial(dp)   64 x 64 bfloat16 on 8 ranks\n"
        "  all_to_all over dp=2 * tp=4   1.8 KiB received by each rank\n"
        "  split   nothing is sent\n"
        "[tp, -] -> [tp, -]   64 x 64 float32 on 4 ranks\n"
        "  nothing moves: both say the same\n"
        "[tp balanced, -] -> replicate   5 x 1024 float64 on 4 ranks\n"
        "  all_to_all over tp=4   24.0 KiB to 32.0 KiB received by each rank\n"
    )
    with pytest.raises(st.LayoutError, match="missing  shape, mesh"):
        st.explain_reshard("[tp, -]", "[-, tp]")


def test_steps_of_a_tensor_whose_group_has_no_mesh(capsys):
    def explain() -> None:
        x = st.distribute(torch.ones(4, 4), 'chunk(dim=0, placements=["rank:0-1/cpu"])')
        if as_group().rank == 0:
            st.explain_reshard(x, "replicate")

    st.simulate(2, explain)
    assert capsys.readouterr().out == (
        'chunk(dim=0, placements=["rank:0-1/cpu"]) -> replicate   4 x 4 float32 on 2 ranks\n'
        "  all_gather over axis0=2   32 B received by each rank\n"
    )
