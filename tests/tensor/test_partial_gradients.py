"""A plain tensor that becomes partial sums: its gradients, and those of the gradients, are the dense ones on all
ranks."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from harness.quick import sampled

import shardtensor as st
from shardtensor.comm.process_group import as_group


@pytest.mark.parametrize("world", ["tp=1", "tp=2", "tp=4", "dp=2, tp=2"])
@pytest.mark.parametrize("spec", ["[-] partial(tp)", "[-] partial(tp, op=avg)", "[tp balanced]"])
def test_gradients_of_what_was_made_partial(world, spec):
    def body():
        w = torch.arange(1.0, 4.0, requires_grad=True)
        y = st.distribute(w * 2, spec)
        once, twice = ((y * y).sum(), (y * y * y).sum())
        (g,) = torch.autograd.grad(once, w, create_graph=True)
        (gg,) = torch.autograd.grad((g * g).sum(), w, retain_graph=True)
        torch.testing.assert_close(g.detach(), 8 * w.detach())
        torch.testing.assert_close(gg, 128 * w.detach())
        (g,) = torch.autograd.grad(twice, w, create_graph=True)
        (gg,) = torch.autograd.grad(g.sum(), w)
        torch.testing.assert_close(g.detach(), 24 * w.detach() ** 2)
        torch.testing.assert_close(gg, 48 * w.detach())

    st.simulate(world, body)


SPECS = {
    "tp=3": ["replicate", "[-] partial(tp)", "[-] partial(tp, op=avg)", "[tp balanced]"],
    "dp=2, tp=3": [
        "replicate",
        "[-] partial(dp)",
        "[-] partial(tp, op=avg)",
        "[dp balanced] partial(tp, op=avg)",
        "[-] partial(dp, op=avg) partial(tp)",
        "[tp*dp balanced]",
        "[tp balanced]",
        "flat(tp) partial(dp)",
    ],
}


@pytest.mark.parametrize("world", SPECS)
def test_gradients_through_any_two_layouts(world):
    def body():
        for one, other in sampled(product(SPECS[world], repeat=2), 25):
            w = torch.arange(1.0, 6.0, requires_grad=True)
            y = st.reshard(st.distribute(w * 2, one), other)
            torch.testing.assert_close(y.full_tensor().detach(), 2 * w.detach())
            close = partial(torch.testing.assert_close, msg=lambda text, pair=(one, other): f"{pair}: {text}")
            (g,) = torch.autograd.grad((y * y).sum(), w, create_graph=True)
            (gg,) = torch.autograd.grad((g * g).sum(), w, retain_graph=True)
            close(g.detach(), 8 * w.detach())
            close(gg, 128 * w.detach())
            (g,) = torch.autograd.grad((y * y * y).sum(), w, create_graph=True)
            (gg,) = torch.autograd.grad(g.sum(), w, create_graph=True)
            close(g.detach(), 24 * w.detach() ** 2)
            close(gg.detach(), 48 * w.detach())
            (ggg,) = torch.autograd.grad((gg * gg).sum(), w, create_graph=True)
            close(ggg.detach(), 2 * 48 * 48 * w.detach())
            (gggg,) = torch.autograd.grad((ggg * w).sum(), w)
            close(gggg, 4 * 48 * 48 * w.detach())

    st.simulate(world, body)


@pytest.mark.parametrize("other", ["replicate", "[tp balanced]", "[-] partial(tp)", "flat(tp)"])
@pytest.mark.parametrize(("op", "share"), [("sum", 1), ("avg", 1 / 3)])
def test_an_partial_sum_gets_its_share_of_the_gradient_of_all(op, share, other):
    def body():
        rank = as_group().rank
        partials = [torch.arange(1.0, 6.0) * (r + 1) for r in range(3)]
        mine = partials[rank].clone().requires_grad_()
        x = st.init_from_local_tensor(mine, f"[-] partial(tp, op={op})", 5)
        total = sum(partials) * share
        y = st.reshard(x, other)
        torch.testing.assert_close(y.full_tensor().detach(), total)
        (y * y).sum().backward()
        torch.testing.assert_close(mine.grad, 2 * total * share)

    st.simulate("tp=3", body)
