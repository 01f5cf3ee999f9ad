"""Random operations on ShardedTensors: dense numbers, dense gradients, the generator where the dense call ends."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import device

import shardtensor as st
from shardtensor.tensor.drawing import default_generator

SHAPE = (7, 5)
BIG = (131, 1031)  # more than two pieces of scratch, and no multiple of 16

FILLS = {
    "uniform": lambda t, **g: t.uniform_(-1, 2, **g),
    "normal": lambda t, **g: t.normal_(1.0, std=2.0, **g),
    "exponential": lambda t, **g: t.exponential_(2.0, **g),
    "bernoulli": lambda t, **g: t.bernoulli_(0.3, **g),
    "random": lambda t, **g: t.random_(**g),
    "random to": lambda t, **g: t.random_(9, **g),
    "random from": lambda t, **g: t.random_(-3, 9, **g),
    "cauchy": lambda t, **g: t.cauchy_(1, 2, **g),
    "log_normal": lambda t, **g: t.log_normal_(**g),
    "geometric": lambda t, **g: t.geometric_(0.2, **g),
}
LIKES = {
    "rand_like": lambda t: torch.rand_like(t),
    "randn_like half": lambda t: torch.randn_like(t, dtype=torch.bfloat16),
    "randint_like": lambda t: torch.randint_like(t, 3, 100),
    "randint_like high": lambda t: torch.randint_like(t, high=7, dtype=torch.int64),
    "bernoulli": lambda t: torch.bernoulli(t, 0.4),
    "dropout": lambda t: F.dropout(t, 0.3),
    "torch.dropout": lambda t: torch.dropout(t, 0.3, True),
    "dropout of a transposed tensor": lambda t: F.dropout(t.t(), 0.3).t(),
    "rand_like of a transposed tensor": lambda t: torch.rand_like(t.t()).t(),
}
GATHERED = {
    "multinomial": lambda t, **g: torch.multinomial(t, 3, **g),
    "bernoulli of probabilities": lambda t, **g: torch.bernoulli(t, **g),
    "normal of means": lambda t, **g: torch.normal(t, 2.0, **g),
    "alpha_dropout": lambda t, **g: F.alpha_dropout(t, 0.4, training=True),
    "alpha_dropout in place": lambda t, **g: F.alpha_dropout(t.clone(), 0.4, training=True, inplace=True),
    "dropout1d": lambda t, **g: F.dropout1d(t, 0.5),
}


def specs(size: int, shape: tuple[int, ...] = SHAPE) -> list[st.ShardingSpec]:
    """Chunks of either dim, packed boxes, a rank outside, flat ranges."""
    kind = device().type
    places = [f"rank:0-{size - 1}/{kind}"]
    rows = shape[0]
    cuts = [0, 1, 2, rows]  # rank 0 holds two of the three
    boxes = [
        st.ShardMetadata([a, 0], [b - a, shape[1]], f"rank:{r}/{kind}")
        for a, b, r in zip(cuts, cuts[1:], (0, size - 1, 0), strict=False)
    ]
    return [
        st.ChunkShardingSpec(0, places),
        st.ChunkShardingSpec(1, places),
        st.ChunkShardingSpec(0, [f"rank:{size - 1}/{kind}"]),
        st.EnumerableShardingSpec(boxes),
        st.parse_spec("flat(dp)"),
        st.Replicate(),
    ]


def stream(generator: torch.Generator | None = None) -> torch.Generator:
    return default_generator(device()) if generator is None else generator


def disagree(state: torch.Tensor, size: int) -> None:
    """Only rank 0 comes with `state`."""
    if size > 1 and dist.get_rank():
        stream().manual_seed(99)
    else:
        stream().set_state(state)


@contextlib.contextmanager
def gathering() -> Iterator[None]:
    """Let operations gather that have no rule for a layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", st.GatherWarning)
        yield


def begin() -> torch.Tensor:
    stream().manual_seed(7)
    torch.empty(3, device=device()).normal_()  # an odd count leaves half a pair cached in the CPU generator
    return stream().get_state()


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    whole = found.full_tensor() if isinstance(found, st.ShardedTensor) else found
    assert whole.dtype == expected.dtype
    assert torch.equal(whole, expected)


def fill(names: list[str], shape: tuple[int, ...]) -> None:
    size = dist.get_world_size()
    for name, spec in product(names, specs(size, shape)):
        state = begin()
        expected = FILLS[name](torch.zeros(shape, device=device()))
        end = stream().get_state()
        disagree(state, size)
        x = st.zeros(spec, shape)
        assert FILLS[name](x) is x
        assert torch.equal(stream().get_state(), end), (name, spec)
        assert_equal(x, expected)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_in_place_methods_draw_the_dense_numbers(world, size):
    world(fill, size, names=list(FILLS), shape=SHAPE)


def test_large_tensors_are_drawn_in_pieces(world):
    world(fill, 4, names=["normal", "bernoulli"], shape=BIG)


def own_generator() -> None:
    for name, draw in {**FILLS, **GATHERED}.items():
        if "dropout" in name:
            continue
        begin()
        dense, own = torch.full(SHAPE, 0.5, device=device()), torch.Generator(device()).manual_seed(3)
        expected = draw(dense, generator=own)
        untouched = stream().get_state()
        other = torch.Generator(device()).manual_seed(3 + dist.get_rank())
        x = st.full(specs(3)[0], SHAPE, 0.5)
        with gathering():
            found = draw(x, generator=other)
        assert torch.equal(other.get_state(), own.get_state()), name
        assert torch.equal(stream().get_state(), untouched), name
        assert_equal(found, expected)


def test_a_given_generator_is_used_and_the_default_one_left_alone(world):
    world(own_generator, 3)


def like(name: str) -> None:
    size = dist.get_world_size()
    make = (LIKES | GATHERED)[name]
    values = torch.rand(SHAPE, device=device())
    for spec in specs(size)[: -1 if "transposed" in name else None]:  # copies turned are plain tensors
        state = begin()
        expected = make(values)
        end = stream().get_state()
        disagree(state, size)
        with gathering():
            found = make(st.distribute(values, spec))
        assert torch.equal(stream().get_state(), end)
        assert_equal(found, expected)


@pytest.mark.parametrize("name", [*LIKES, *GATHERED])
@pytest.mark.parametrize("size", [1, 3])
def test_new_tensors_hold_the_dense_numbers(world, size, name):
    world(like, size, name=name)


def dropped(inplace: bool, p: float, dtype: torch.dtype) -> None:
    values, weight = torch.randn(SHAPE, device=device(), dtype=dtype), torch.randn(SHAPE, device=device(), dtype=dtype)
    for spec in specs(3)[:-1]:  # copies become plain tensors with the first operation
        dense = values.clone().requires_grad_()
        state = begin()
        expected = F.dropout(dense * 2, p, inplace=inplace)
        end = stream().get_state()
        (expected * weight).sum().backward()
        if 0 < p < 1:
            disagree(state, 3)
        with gathering():
            x = st.distribute(values, spec, requires_grad=True)
            y = x * 2
            with st.strict():
                found = F.dropout(y, p, inplace=inplace)
            assert torch.equal(stream().get_state(), end if 0 < p < 1 else state)
            assert_equal(found, expected)
            (found * st.distribute(weight, spec)).sum().backward()
        assert_equal(x.grad, dense.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_is_the_dense_mask_forward_and_backward(world, inplace, p, dtype):
    world(dropped, 3, inplace=inplace, p=p, dtype=dtype)


def module() -> None:
    drop = torch.nn.Dropout(0.5)
    x = st.ones(specs(2)[0], SHAPE)
    before = stream().get_state()
    assert drop.eval()(x) is x
    assert torch.equal(stream().get_state(), before)
    stream().manual_seed(1)
    expected = drop.train()(torch.ones(SHAPE, device=device()))
    stream().manual_seed(1)
    assert_equal(drop(x), expected)
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            F.dropout(x, p)
        with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1"):
            torch.dropout_(x, p, True)


def test_the_dropout_module(world):
    world(module, 2)


def gradient() -> None:
    x = st.ones(specs(2)[0], SHAPE, requires_grad=True)
    before = stream().get_state()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x.normal_()
    with pytest.raises(RuntimeError, match="normal expects std >= 0"):
        x.normal_(0, -1)
    with pytest.raises(TypeError):
        x.uniform_(1, 2, 3)
    assert torch.equal(stream().get_state(), before)
    assert torch.equal(x.full_tensor(), torch.ones(SHAPE, device=device()))
    y = x * 2
    y.uniform_()  # what is overwritten passes no gradient on
    with gathering():
        y.sum().backward()
    assert x.grad.full_tensor().abs().sum() == 0


def test_bad_calls_draw_nothing_and_overwriting_ends_the_gradient(world):
    world(gradient, 2)


def partial() -> None:
    for op in ("sum", "avg", "max"):
        partial_sum = torch.ones(SHAPE, device=device())
        x = st.init_from_local_tensor(partial_sum, f"replicate partial(tp, op={op})", SHAPE)
        stream().manual_seed(3)
        expected = torch.empty(SHAPE, device=device()).normal_()
        stream().manual_seed(3)
        torch.testing.assert_close(x.normal_().full_tensor(), expected)
        stream().manual_seed(3)
        torch.testing.assert_close(torch.randn_like(x).full_tensor(), expected)


def test_a_partial_tensor_takes_the_numbers_once(world):
    world(partial, 3)
