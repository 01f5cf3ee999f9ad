"""Stock torch optimizers over sharded parameters: their fused and foreach steps, whatever the layout of their state."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import device

import shardtensor as st

STEP_LAYOUTS = ["[tp balanced, -]", "[-, tp]", "flat(tp)", "replicate", None]


def steps_of_stock_optimizer(name, options):
    """Two steps under one layout, a load, two steps under another: as four dense steps, for every pair of layouts."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = [torch.randn(5, 3, generator=generator).to(device()) for _ in range(5)]

    def laid_out(x, spec):
        return x.clone() if spec is None else st.distribute(x.clone(), spec)

    def steps(value, spec, grads, state=None):
        param = torch.nn.Parameter(value)
        optimizer = getattr(torch.optim, name)([param], lr=0.1, **options)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        for grad in grads:
            param.grad = laid_out(grad, spec)
            optimizer.step()
        return param.detach(), optimizer.state_dict()

    want, want_state = steps(start.clone(), None, grads)
    for spec in STEP_LAYOUTS:
        half, state = steps(laid_out(start, spec), spec, grads[:2])
        for other in STEP_LAYOUTS:
            got, got_state = steps(laid_out(whole(half), other), other, grads[2:], state)
            torch.testing.assert_close(whole(got), want, msg=lambda text, at=(spec, other): f"{at}: {text}")
            for key, value in got_state["state"][0].items():
                torch.testing.assert_close(whole(value), want_state["state"][0][key])
                if isinstance(value, st.ShardedTensor) and isinstance(got, st.ShardedTensor) and options.get("fused"):
                    assert value._layout == got._layout  # moved once, not in every step


def whole(x):
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"fused": True}),
        ("Adam", {"fused": True, "amsgrad": True}),
        ("SGD", {"fused": True, "momentum": 0.9}),
        ("Adagrad", {"fused": True}),
        ("AdamW", {"foreach": True}),
        ("SGD", {"foreach": True, "momentum": 0.9}),
    ],
    ids=str,
)
def test_stock_steps_go_on_after_a_load_from_another_layout(world, size, name, options):
    world(steps_of_stock_optimizer, size, name=name, options=options)


def frozen_then_trained():
    torch.manual_seed(0)
    dense = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).to(device())
    module = st.fully_shard(copy.deepcopy(dense))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (dense, module)]
    for step in range(4):
        for m, optimizer in zip((dense, module), optimizers, strict=True):
            m[0].weight.requires_grad_(step < 2)
            m(torch.ones(2, 5, device=device())).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for got, want in zip(module.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want.detach(), rtol=1e-4, atol=1e-5)


def test_fused_steps_go_on_after_a_parameter_was_frozen(world):
    world(frozen_then_trained, 2)


def other_shape():
    param = torch.nn.Parameter(st.distribute(torch.ones(4, 2, device=device()), "replicate"))
    param.grad = st.distribute(torch.ones(4, 2, device=device()), "replicate")
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    optimizer.state[param]["exp_avg"] = torch.ones(2, 4, device=device())
    with pytest.raises(st.RuleError, match="a parameter and its state or gradient differ in shape"):
        optimizer.step()


def test_fused_steps_refuse_state_of_another_shape(world):
    world(other_shape, 2)
