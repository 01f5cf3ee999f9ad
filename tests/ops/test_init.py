"""torch.nn.init on sharded parameters: bit for bit the dense values, from the global fan, for every layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size
from torch import nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardtensor as st
from shardtensor.tensor.drawing import default_generator

WIDE, TALL, KERNEL = (5, 8), (9, 4), (4, 3, 3, 3)

DRAWN: dict[str, Callable[..., Any]] = {
    "uniform_": lambda w, **g: init.uniform_(w, -1, 2, **g),
    "normal_": lambda w, **g: init.normal_(w, 1, 2, **g),
    "xavier_uniform_": lambda w, **g: init.xavier_uniform_(w, gain=2.0, **g),
    "xavier_normal_": lambda w, **g: init.xavier_normal_(w, **g),
    "kaiming_uniform_": lambda w, **g: init.kaiming_uniform_(w, a=5**0.5, **g),
    "kaiming_uniform_ fan_out": lambda w, **g: init.kaiming_uniform_(w, mode="fan_out", nonlinearity="relu", **g),
    "kaiming_normal_": lambda w, **g: init.kaiming_normal_(w, nonlinearity="tanh", **g),
    "trunc_normal_": lambda w, **g: init.trunc_normal_(w, std=0.7, a=-1.0, b=1.0, **g),
    "trunc_normal_ of a narrow range": lambda w, **g: init.trunc_normal_(w, mean=0.0, std=1.0, a=0.1, b=0.3, **g),
}
STILL: dict[str, Callable[..., Any]] = {
    "constant_": lambda w: init.constant_(w, 0.3),
    "ones_": init.ones_,
    "zeros_": init.zeros_,
}
MATRIX: dict[str, Callable[..., Any]] = {
    "orthogonal_": lambda w, **g: init.orthogonal_(w, gain=2.0, **g),
    "sparse_": lambda w, **g: init.sparse_(w, 0.4, **g),
}


def specs(size: int) -> list[Any]:
    kind = device().type
    places = [f"rank:0-{size - 1}/{kind}"]
    return [
        st.ChunkShardingSpec(0, places),
        st.ChunkShardingSpec(-1, places),
        st.ChunkShardingSpec(0, [f"rank:{size - 1}/{kind}"]),
        st.parse_spec("flat(dp)"),
        st.Replicate(),
    ]


def stream() -> torch.Generator:
    return default_generator(device())


def same(function: Callable[..., Any], shape: tuple[int, ...], *, may_gather: bool = False, draws: bool = True) -> None:
    """Assert that `function` gives a sharded parameter the values it gives a dense one, and ends where it ends."""
    for spec in specs(dist.get_world_size()):
        dense = nn.Parameter(torch.zeros(shape, device=device()))
        torch.manual_seed(7)  # the CPU's stream too: some functions draw there on any device
        function(dense)
        end = stream().get_state()
        weight = nn.Parameter(st.zeros(spec, shape))
        torch.manual_seed(7)
        stream().manual_seed(7 + (5 * dist.get_rank() if draws else 0))  # it is the first rank's state that counts
        with warnings.catch_warnings():
            if may_gather:
                warnings.simplefilter("ignore", st.GatherWarning)
            assert function(weight) is weight
        assert torch.equal(stream().get_state(), end)
        assert weight.requires_grad
        assert weight.is_leaf
        assert torch.equal(weight.full_tensor(), dense)


def every_function(shape: tuple[int, ...]) -> None:
    for name, function in {**DRAWN, **STILL}.items():
        try:
            same(function, shape, draws=name in DRAWN)
        except AssertionError as error:
            error.add_note(name)
            raise


@every_size
@pytest.mark.parametrize("shape", [WIDE, TALL, KERNEL], ids=str)
def test_values_and_generator_are_the_dense_ones(world, size, shape):
    world(every_function, size, shape=shape)


def matrix(name: str) -> None:
    for shape in (WIDE, TALL):
        same(MATRIX[name], shape, may_gather=True)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", MATRIX)
def test_functions_of_the_whole_matrix(world, size, name):
    world(matrix, size, name=name)


def still() -> None:
    for shape in (WIDE, TALL):
        same(init.eye_, shape, draws=False)
    for groups in (1, 2):
        same(lambda w, groups=groups: init.dirac_(w, groups), KERNEL, draws=False, may_gather=True)


def test_eye_and_dirac(world):
    world(still, 3)


def own_generator() -> None:
    for name, function in {**DRAWN, **MATRIX}.items():
        dense, own = torch.zeros(WIDE, device=device()), torch.Generator(device()).manual_seed(3)
        torch.manual_seed(1)
        function(dense, generator=own)
        after = stream().get_state()
        other = torch.Generator(device()).manual_seed(3 + dist.get_rank())
        torch.manual_seed(1)
        weight = st.zeros(specs(3)[0], WIDE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", st.GatherWarning)
            function(weight, generator=other)
        assert torch.equal(other.get_state(), own.get_state()), name
        assert torch.equal(stream().get_state(), after), name
        assert torch.equal(weight.full_tensor(), dense), name


def test_a_given_generator_is_used(world):
    world(own_generator, 3)


def refused() -> None:
    weight = st.zeros(specs(2)[0], 4)
    for function in (init.kaiming_uniform_, init.xavier_normal_):
        with pytest.raises(ValueError, match="fewer than 2 dimensions"):
            function(weight)
    with pytest.raises(ValueError, match="Mode fan not supported"):
        init.kaiming_uniform_(st.zeros(specs(2)[0], WIDE), mode="fan")
    with pytest.warns(UserWarning, match="Initializing zero-element tensors is a no-op"):
        init.kaiming_uniform_(st.zeros(specs(2)[0], 0, 3))
    with pytest.raises(ValueError, match="Only tensors with 2 dimensions"):
        init.eye_(weight)
    with pytest.raises(RuntimeError, match=r"out has shape \(4,\); it cannot be resized to \(4, 4\)"):
        torch.eye(4, out=weight)


def test_bad_calls_raise_what_torch_raises(world):
    world(refused, 2)


def modules() -> None:
    for make in (lambda: nn.Linear(9, 5), lambda: nn.Embedding(9, 5), lambda: nn.Linear(5, 9, bias=False)):
        for spec in specs(3):
            module = make().to(device())
            stream().manual_seed(11)
            module.reset_parameters()
            expected = {name: value.detach().clone() for name, value in module.named_parameters()}
            end = stream().get_state()
            module.weight = nn.Parameter(st.zeros(spec, module.weight.shape))
            stream().manual_seed(11 + dist.get_rank())
            module.reset_parameters()
            assert torch.equal(stream().get_state(), end)
            assert torch.equal(module.weight.full_tensor(), expected.pop("weight"))
            for name, value in expected.items():  # a plain bias, drawn after the weight
                assert torch.equal(getattr(module, name), value)


def test_reset_parameters_of_a_module_with_a_sharded_weight(world):
    world(modules, 3)


def padded() -> None:
    for spec in specs(3):
        module = nn.Embedding(7, 3, padding_idx=-2, device=device())
        stream().manual_seed(2)
        module.reset_parameters()
        expected = module.weight.detach().clone()
        module.weight = nn.Parameter(st.zeros(spec, 7, 3))
        stream().manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", st.GatherWarning)
            module.reset_parameters()
        assert torch.equal(module.weight.full_tensor(), expected)


def test_reset_parameters_zeroes_the_padding_row(world):
    world(padded, 3)


def fan() -> None:
    """Case B19: every layout of every world holds the unsharded numbers, and the fan is the global one."""
    size = dist.get_world_size()
    for spec in specs(size)[:2]:
        torch.manual_seed(7)  # the CPU's stream too: some functions draw there on any device
        values = init.uniform_(st.empty(spec, 4, 4)).full_tensor()
        torch.manual_seed(7)  # the CPU's stream too: some functions draw there on any device
        assert torch.equal(values, torch.rand(4, 4, device=device()))
        if device().type == "cpu":
            row = torch.tensor([0.53492254, 0.19880319, 0.65921170, 0.65689027])
            torch.testing.assert_close(values[0], row, rtol=0, atol=1e-7)
    module = nn.Linear(64, 8, device=device())
    stream().manual_seed(7)
    module.reset_parameters()
    expected = module.weight.detach().clone()
    module.weight = nn.Parameter(st.empty(specs(size)[1], 8, 64))
    stream().manual_seed(7)
    module.reset_parameters()
    found = module.weight.full_tensor()
    assert torch.equal(found, expected)
    assert found.abs().max() <= 0.125


@pytest.mark.parametrize("size", [1, 2, 4])
def test_b19_init_equals_unsharded_for_every_spec_and_uses_global_fan_in(world, size):
    world(fan, size)


def scratch() -> None:
    """A rank that holds little must not hold the whole for a moment."""
    drawn: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            drawn.extend(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    shape = (512, 1024) if device().type == "cpu" else (8192, 1024)  # a card draws a million numbers at once
    for name, function in DRAWN.items():
        weight = st.zeros(specs(4)[0], shape)
        with Watch():
            function(weight)
        assert drawn
        assert max(drawn) <= weight.numel() // 4, name
        drawn.clear()


def test_scratch_is_bounded(world):
    world(scratch, 4)
