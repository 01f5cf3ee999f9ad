"""A call that was decided before gives what it gave, what the dense one gives, and never what another form gives."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from harness import device, every_size

import shardtensor as st
from shardtensor.ops import local_call
from shardtensor.rules.table import ROWS, row_of


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, device=device()).float()


def forms() -> dict[str, list]:
    """Calls that share a function and differ in something that the result depends on."""
    weight, bias, mask = integers(4).requires_grad_(), integers(4), integers(3, 4) > 0
    return {
        "dims": [lambda x, d=d: x.sum(d) for d in (1, -1, (1,), None)],
        "keepdim": [lambda x: x.mean(1), lambda x: x.mean(1, True), lambda x: x.mean(1, keepdim=True)],
        "numbers of other types": [lambda x, n=n: torch.where(x > 0, x, n) for n in (1, 1.5, torch.tensor(True))],
        "dtypes": [lambda x, t=t: x.sum(1, dtype=t) for t in (torch.float64, torch.float32, None)],
        "sizes": [lambda x, s=s: x.view(s) for s in ((-1, 2, 2), (-1, 4), (7, 4), (7, 1, 4))],
        "spread sizes": [lambda x, s=s: x.reshape(*s) for s in ((-1, 2, 2), (-1, 4, 1))],
        "slices": [lambda x, s=s: x[:, s] for s in (slice(0, 2), slice(1, None), slice(None, None, 2), 1, None)],
        "lists": [lambda x, n=n: torch.cat([x] * n, 1) for n in (1, 2, 3)],
        "copies": [
            lambda x: F.layer_norm(x, (4,), weight, bias),
            lambda x: F.layer_norm(x, (4,), weight),
            lambda x: F.layer_norm(x, (4,), bias=bias),
            lambda x: F.layer_norm(x, [4], weight, eps=0.5),
        ],
        "products": [lambda x: x @ mask.t().float(), lambda x: x @ mask[:1].t().float(), lambda x: x @ bias],
        "equations": [lambda x, e=e: torch.einsum(e, x, x) for e in ("ij,ij->i", "ij,ij->ij", "ij,ij->ji")],
        "several results": [lambda x: x.sort(1)[0], lambda x: x.sort(1, descending=True)[0], lambda x: x.max(1)[0]],
    }


def calls_are_dense_again_and_again():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", st.GatherWarning)  # some of the views gather columns
        check_every_form()


def check_every_form():
    torch.manual_seed(0)
    for name, calls in forms().items():
        for _ in range(3):
            for number, call in enumerate(calls):
                dense = integers(7, 4).requires_grad_()
                for spec in ("[tp balanced, -]", "[-, tp balanced]", "replicate"):
                    x = st.distribute(dense.detach(), spec).requires_grad_()
                    got, want = call(x), call(dense)
                    assert whole(got).dtype == want.dtype, (name, number, spec)
                    torch.testing.assert_close(whole(got), want, msg=f"{name} {number} {spec}")
                    if want.requires_grad:
                        factor = integers(*want.shape).to(want.dtype)
                        (expected,) = torch.autograd.grad((want * factor).sum(), dense)
                        (whole(got) * factor).sum().backward()
                        torch.testing.assert_close(whole(x.grad), expected, msg=f"{name} {number} {spec}")


@every_size
def test_calls_of_one_function_are_told_apart(world, size):
    world(calls_are_dense_again_and_again, size)


def gradients_of_copies():
    """A copy that meets cut values gets the sum of its gradients, whether or not the first such call asked for it."""
    torch.manual_seed(1)
    dense, rows = integers(6, 4), integers(5, 4)
    x = st.distribute(dense, "[tp balanced, -]")
    for asks in (False, True, False, True):
        a, b = (rows.clone().requires_grad_(asks) for _ in range(2))
        got, want = x @ a.t(), dense @ b.t()
        assert torch.equal(whole(got), want)
        if asks:
            got.sum().backward()
            want.sum().backward()
            assert torch.equal(a.grad, b.grad)


@every_size
def test_a_copy_gets_the_sum_of_its_gradients_every_time(world, size):
    world(gradients_of_copies, size)


def views_of_copies_are_refused():
    x = st.distribute(integers(5, 6), "[tp balanced, -]")
    for _ in range(2):
        assert x.view(1, 5, 6).transpose(0, 1)._copied is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", st.GatherWarning)
            copy = x.view(6, 5)
        assert copy.transpose(0, 1)._copied is not None
        with pytest.raises(st.RuleError, match="in place on a copy"):
            copy[:, :2].mul_(2)


def test_a_view_of_a_copy_is_a_copy_every_time(world):
    world(views_of_copies_are_refused, 2)


def views_see_writes():
    dense = integers(6, 4)
    x = st.distribute(dense, "[tp balanced, -]")
    for make in (lambda t: t.view(6, 2, 2), lambda t: t.transpose(0, 1), lambda t: t[:, 1:3], lambda t: t.view(6, 4)):
        for _ in range(2):
            make(x).add_(1)
            make(dense).add_(1)
            assert torch.equal(whole(x), dense)


@every_size
def test_a_view_shares_memory_every_time(world, size):
    world(views_see_writes, size)


def rows_that_change():
    x = st.distribute(integers(6, 4, 2), "[tp balanced, -, -]")
    before = x.cumsum(2)
    known, ROWS["cumsum"] = ROWS["cumsum"], row_of("cumsum", "!b ... [!d] -> b ... [d]", "", "input, dim=")
    try:
        assert torch.equal(whole(x.cumsum(2)), whole(before))
        assert x.cumsum(2)._layout.cut_dims == (1,)
    finally:
        ROWS["cumsum"] = known
    assert x.cumsum(2)._layout.cut_dims == before._layout.cut_dims == (0,)


def test_a_row_that_changes_is_asked_anew(world):
    world(rows_that_change, 2)


def many_forms(most):
    local_call.MOST = most
    x = st.distribute(torch.zeros(4, 40, device=device()), "[tp, -]")
    for start in range(39):
        assert x[:, start:].shape == (4, 40 - start)
    return len(x._group.__dict__["_local_calls"])


def test_no_more_forms_are_kept_than_said(world):
    most = local_call.MOST
    try:
        assert all(count <= 8 for count in world(many_forms, 2, most=8))
    finally:
        local_call.MOST = most


def moved_operands() -> None:
    """Under `strict`, and of mixed dtypes, a call whose operands have to move goes the general way."""
    a, b = torch.arange(24.0).view(4, 6), torch.arange(24.0, 48.0).view(4, 6)
    x, y = st.distribute(a, "[tp, -]", requires_grad=True), st.distribute(b, "[-, tp]", requires_grad=True)
    for _ in range(3):
        assert torch.equal(whole(x + y), a + b)
        assert torch.equal(whole(y.double() - x), b.double() - a)
        with pytest.raises(st.RuleError, match="reshard"), st.strict():
            x + y
    ((x + y) * (x - y)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * a) and torch.equal(y.grad.full_tensor(), -2 * b)
    w = st.distribute(b.t().contiguous(), "[tp, -]")
    for t in (x, y):  # a product whose input is cut along what the weight is not
        assert torch.equal(
            whole(torch.nn.functional.linear(t.detach(), w.t().contiguous())), a @ b.t() if t is x else b @ b.t()
        )


def test_a_call_whose_operands_move_is_remembered(world):
    world(moved_operands, 2)


PRODUCTS = {
    "matmul": (torch.matmul, (4, 6), (6, 2), "[dp, tp]", "[tp, -]"),
    "linear": (F.linear, (4, 6), (2, 6), "[dp, tp]", "[-, tp]"),
    "einsum": (lambda x, w: torch.einsum("bk,kn->nb", x, w), (4, 6), (6, 2), "[dp, tp]", "[tp, -]"),
    "conv1d": (F.conv1d, (4, 2, 5), (3, 2, 2), "[dp, tp, -]", "[-, tp, -]"),
    "conv2d": (F.conv2d, (2, 4, 3, 4), (3, 4, 2, 2), "[dp, tp, -, -]", "[-, tp, -, -]"),
    "conv_transpose1d": (F.conv_transpose1d, (4, 2, 5), (2, 3, 2), "[dp, tp, -]", "[tp, -, -]"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_summed_over_one_axis_beside_a_shard_over_another_is_summed_once(name):
    call, x_shape, w_shape, x_spec, w_spec = PRODUCTS[name]
    x, w = integers(*x_shape), integers(*w_shape)

    def body():
        a, b = (st.distribute(*each, requires_grad=True) for each in ((x, x_spec), (w, w_spec)))
        for _ in range(2):
            found = call(a, b)
            assert torch.equal(whole(found), call(x, w))
            found.sum().backward()
        return whole(a.grad), whole(b.grad)

    dense = [t.clone().requires_grad_() for t in (x, w)]
    (2 * call(*dense).sum()).backward()
    for grads in st.simulate("dp=2, tp=2", body):
        assert all(torch.equal(grad, t.grad) for grad, t in zip(grads, dense, strict=True))
