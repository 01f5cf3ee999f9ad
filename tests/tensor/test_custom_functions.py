"""``autograd.Function.apply`` on sharded tensors: the dense result and gradient, or an error; never cut off."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from harness import device, every_size

import shardtensor as st
from shardtensor import GatherWarning


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return 2 * x * scale * grad, (x * x * grad).sum().view_as(scale)


class Halves(torch.autograd.Function):
    """Has a setup_context, two results, one of another shape."""

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b


class Leaky(torch.autograd.Function):
    """Makes a ShardedTensor of plain arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return st.distribute(x, "[tp balanced, -]")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def whole() -> torch.Tensor:
    return torch.arange(15.0, device=device()).view(5, 3)


def _takes_names() -> bool:
    try:
        Halves.apply(x=whole())
    except TypeError:
        return False
    return True


TAKES_NAMES = _takes_names()  # torch 2.11 passes operands of a Function by their places alone


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def check_apply() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        for spec in ("[tp balanced, -]", "[-, tp balanced]", "flat(tp)", "replicate"):
            x, dense = st.distribute(whole(), spec, requires_grad=True), whole().requires_grad_()
            scale = torch.tensor(3.0, device=device(), requires_grad=True)
            y, want = Square.apply(x, scale), Square.apply(dense, scale)
            assert isinstance(y, st.ShardedTensor) == isinstance(x * 1, st.ShardedTensor) and y.requires_grad
            assert torch.equal(full(y), want)
            found = torch.autograd.grad(y, (x, scale), whole())
            for a, b in zip(found, torch.autograd.grad(want, (dense, scale), whole()), strict=True):
                assert torch.equal(full(a), b)
            (a, b), (c, d) = Halves.apply(x), Halves.apply(dense)
            assert torch.equal(full(a), c) and torch.equal(full(b), d)
            grads = [torch.autograd.grad((full(u) * 3).sum() + v.sum(), z)[0] for u, v, z in ((a, b, x), (c, d, dense))]
            assert torch.equal(full(grads[0]), grads[1])
            if TAKES_NAMES:
                assert torch.equal(full(Halves.apply(x=x)[0]), whole() * 2)


@every_size
def test_a_function_gives_the_dense_result_and_gradient(world, size):
    world(check_apply, size)


def check_refusals() -> None:
    x = st.distribute(whole(), "[tp balanced, -]", requires_grad=True)
    scale = torch.ones((), device=device())
    with st.strict(), pytest.raises(st.RuleError, match=r"Square.apply: no sharding rule"):
        Square.apply(x, scale)
    with pytest.raises(st.RuleError, match="Leaky returns a ShardedTensor: its result would be cut off from autograd"):
        Leaky.apply(whole().requires_grad_())
    with torch.no_grad():
        assert isinstance(Leaky.apply(whole()), st.ShardedTensor)  # nothing to cut off


def test_strict_refuses_to_gather_and_a_cut_off_result_is_always_refused(world):
    world(check_refusals, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_traces_functions_as_before(backend):
    apply = Square.apply

    def model(x: torch.Tensor) -> torch.Tensor:
        return apply(torch.sin(x), x.new_ones(())) + Square.apply(x, x.new_ones(()))

    x = torch.arange(4.0, requires_grad=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    results = [torch.autograd.grad(f(x).sum(), x)[0] for f in (model, compiled)]
    torch.testing.assert_close(results[1], results[0])


def test_plain_calls_are_torchs_own():
    x = torch.arange(4.0, requires_grad=True)
    assert Square.apply.__name__ == "apply" and Square.apply.__self__ is Square
    assert torch.equal(torch.autograd.grad(Square.apply(x, torch.ones(())).sum(), x)[0], 2 * x)
    assert torch.equal(torch.func.grad(lambda x: Halves.apply(x)[0].sum())(torch.ones(3)), torch.full((3,), 2.0))


def full_backward_hooks() -> None:
    warnings.simplefilter("ignore", GatherWarning)
    seen: list[list[torch.Tensor]] = []
    for spec in (None, "[tp balanced, -]"):
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh()).to(device())
        if spec is not None:
            st.shard_parameter(module, "0.weight", spec)
        grads: list[torch.Tensor] = []
        for layer in module:
            layer.register_full_backward_hook(lambda _, into, out, grads=grads: grads.extend((*into, *out)))
        x = whole().requires_grad_()
        full(module(x)).square().sum().backward()
        assert x.grad is not None
        seen.append([*grads, x.grad])
    torch.testing.assert_close(*seen)


@every_size
def test_full_backward_hooks_of_modules_see_whole_gradients(world, size):
    world(full_backward_hooks, size)
