"""Transforms, tracers and wrappers over modules with sharded parameters: the dense answer, or the way out."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from harness import device
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel as DDP

import shardtensor as st
from shardtensor.comm.process_group import as_group

PLAN = {"0.weight": "[tp balanced, -]", "0.bias": "[tp balanced]", "2.weight": "[-, tp balanced]"}


def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)).to(device())


def inputs():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(device())


def other_values(module):
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(p.shape, generator=generator).to(device()) for name, p in module.named_parameters()}


def whole(x):
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


# -- functional_call


def calls():
    module, oracle, x = st.shard_module(dense(), PLAN), dense(), inputs()
    values = other_values(oracle)
    some = {"0.weight": values["0.weight"]}
    laid_out = {name: st.distribute(value, "replicate") for name, value in values.items()}
    laid_out["0.weight"] = st.distribute(values["0.weight"], "[-, tp]" if as_group().size < 3 else "[tp balanced, -]")
    for given, want in [(values, values), (some, some), (laid_out, values), (dict(module.named_parameters()), {})]:
        given = {name: value.detach().requires_grad_() for name, value in given.items()}
        want = {name: value.detach().requires_grad_() for name, value in want.items()} or dict(
            oracle.named_parameters()
        )
        found, expected = functional_call(module, given, (x,)), functional_call(oracle, want, (x,))
        torch.testing.assert_close(found, expected)
        got = torch.autograd.grad(found.pow(2).sum(), list(given.values()))
        for one, other in zip(got, torch.autograd.grad(expected.pow(2).sum(), list(want.values())), strict=True):
            torch.testing.assert_close(whole(one), other)
    assert isinstance(module[0].weight, st.ShardedTensor)
    with pytest.raises(RuntimeError):  # a part is not the whole
        functional_call(module, {"0.weight": torch.ones(1, 2)}, (x,))
    stacked, _ = torch.func.stack_module_state([module, module])
    torch.testing.assert_close(whole(stacked["0.weight"]), torch.stack([oracle[0].weight] * 2))


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_functional_call_with_plain_and_with_sharded_tensors(world, size):
    world(calls, size)


# -- transforms


def dual_output(module, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, x))).tangent


def loss(module, x):
    return lambda params: functional_call(module, params, (x,)).pow(2).sum()


def named(module):
    return dict(module.named_parameters())


FUNC = "does not see through ShardedTensors"
BELOW = "reached a ShardedTensor below the level where operations are sharded"
REFUSED = {
    "grad of inputs": (FUNC, lambda m, x: torch.func.grad(lambda x: m(x).sum())(x)),
    "vjp of inputs": (FUNC, lambda m, x: torch.func.vjp(m, x)),
    "jvp of inputs": (FUNC, lambda m, x: torch.func.jvp(m, (x,), (x,))),
    "vmap over inputs": (FUNC, lambda m, x: torch.func.vmap(m)(x)),
    "jacrev": (FUNC, lambda m, x: torch.func.jacrev(m)(x)),
    "jacfwd": (FUNC, lambda m, x: torch.func.jacfwd(m)(x)),
    "hessian": (FUNC, lambda m, x: torch.func.hessian(lambda x: m(x).sum())(x)),
    "functionalize": (FUNC, lambda m, x: torch.func.functionalize(m)(x)),
    "forward mode": (FUNC, dual_output),
    "grad of parameters": (BELOW, lambda m, x: torch.func.grad(loss(m, x))(named(m))),
    "vjp of parameters": (BELOW, lambda m, x: torch.func.vjp(loss(m, x), named(m))),
    "vmap over a parameter": (BELOW, lambda m, x: torch.func.vmap(lambda w: w * 2)(m[0].weight)),
    "grads of samples": (
        BELOW,
        lambda m, x: torch.func.vmap(
            torch.func.grad(lambda p, x: functional_call(m, p, (x,)).sum()), in_dims=(None, 0)
        )(named(m), x),
    ),
    "export": ("a fake tensor of a ShardedTensor would not know how", lambda m, x: torch.export.export(m, (x,))),
    "batched gradients": (
        "is_grads_batched=True is not supported",
        lambda m, x: torch.autograd.grad(m(x), m[0].weight, torch.ones(2, 3, 2), is_grads_batched=True),
    ),
}


def refused(name, frozen):
    text, call = REFUSED[name]
    module = st.shard_module(dense(), PLAN).requires_grad_(not frozen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at the first use of forward mode
        with pytest.raises(RuntimeError, match=text) as error:
            call(module, inputs())
    return str(error.value)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_transforms_are_refused_alike_on_every_rank(world, name, frozen):
    assert len(set(world(refused, 2, name=name, frozen=frozen))) == 1


FORWARD = {
    "a sum of rows": ("[tp balanced, -]", lambda x, w: (x @ w.t()).sum()),
    "columns": ("[-, tp balanced]", lambda x, w: whole(x @ w.t())),
    "rows": ("[tp balanced, -]", lambda x, w: whole(w @ x)),
    "a linear": ("[-, tp balanced]", lambda x, w: whole(torch.nn.functional.linear(x, w))),
    "a sum of everything": ("[tp balanced, -]", lambda x, w: (w * x).sum()),
    "a maximum": ("[tp balanced, -]", lambda x, w: (w * x).amax()),
}


def forward_refused(call, jacobian):
    spec, of = FORWARD[call]
    x, w = torch.ones(4), st.distribute(torch.arange(8.0).view(2, 4), spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(st.RuleError) as error:
            torch.func.jacfwd(lambda x: of(x, w))(x) if jacobian else torch.func.jvp(lambda x: of(x, w), (x,), (x,))
    return str(error.value)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("jacobian", [False, True])
@pytest.mark.parametrize("call", FORWARD)
@pytest.mark.parametrize("size", [2, 3])
def test_forward_mode_through_a_collective_is_refused_alike_on_every_rank(world, size, call, jacobian):
    texts = set(world(forward_refused, size, call=call, jacobian=jacobian))
    assert len(texts) == 1
    assert "does not see through ShardedTensors" in texts.pop()


def test_a_refused_transform_tells_the_way_out(world):
    text = world(refused, 2, name="vmap over inputs", frozen=False)[0]
    assert text == (
        "linear: a torch.func transform (grad, vjp, jvp, vmap, functionalize, ...) does not see "
        "through ShardedTensors\n"
        "  either  unshard_module(module), or full_tensor(), and transform the function of plain tensors\n"
        "  or      torch.autograd.grad and torch.autograd.functional (vectorize=False) take sharded parameters"
    )


def ways_out():
    module, oracle, x = st.shard_module(dense(), PLAN), dense(), inputs()
    for derive in (torch.autograd.functional.jacobian, lambda f, x: torch.autograd.functional.jvp(f, x, x)):
        torch.testing.assert_close(derive(module, x), derive(oracle, x))
    plain = st.unshard_module(module)
    torch.testing.assert_close(torch.func.vmap(plain)(x), torch.func.vmap(oracle)(x))
    torch.testing.assert_close(
        torch.func.grad(loss(plain, x))(named(plain)), torch.func.grad(loss(oracle, x))(named(oracle))
    )


@pytest.mark.worlds("sim")
def test_the_ways_out_give_the_dense_answer(world):
    world(ways_out, 2)


def recorded():
    module = st.shard_module(dense(), PLAN)
    with pytest.raises(st.RuleError) as error:
        make_fx(module)(inputs())
    assert str(error.value) == (
        "make_fx, or an export through it, records the start of a collective and not its end\n"
        "  either  torch.compile(module) records both\n"
        "  or      unshard_module(module) first"
    )


def test_a_collective_is_not_recorded_without_its_end(world):
    world(recorded, 2)


# -- DistributedDataParallel


def ddp():
    module = st.shard_module(dense(), PLAN)
    for options in ({}, {"init_sync": False}, {"static_graph": True, "init_sync": False}):
        with pytest.raises(st.RuleError) as error:
            DDP(module, **options)
        assert str(error.value).splitlines() == [
            "DistributedDataParallel cannot hold sharded parameters; nothing was sent",
            "  sharded  0.weight, 0.bias, 2.weight",
            '  either   shardtensor.data_parallel(module, "dp", mesh) averages gradients over the data ranks of a mesh',
            "  or       before it is made: DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(",
            "               module, names)",
        ]
    DDP._set_params_and_buffers_to_ignore_for_model(module, list(PLAN))
    wrapped, oracle, x = DDP(module), dense(), inputs()
    for _ in range(2):
        torch.testing.assert_close(wrapped(x), oracle(x))
        wrapped(x).sum().backward()
        oracle(x).sum().backward()
    for p, q in zip(module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)
    holder = nn.Module()
    holder.module = module  # under that name elsewhere


@pytest.mark.parametrize("size", [1, 2])
def test_ddp_refuses_sharded_parameters_that_it_is_not_told_to_ignore(world, size):
    world(ddp, size)
