"""Ranks whose part is empty, or one element long, go the way of the others: the dense answer, forward and backward.

A simulated rank that sends another thing than the others is an error, so that each call also holds the law that what
is sent, in which dtype and order, follows from layouts alone.
"""

from __future__ import annotations

import warnings
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F

import shardtensor as st

HALVES = [torch.bfloat16, torch.float16]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def whole(x):
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def same(found, want):
    torch.testing.assert_close(whole(found), want, equal_nan=True)


def check(world: str, call, inputs, specs, second: bool = False, autocast: bool = False) -> None:
    """Compare ``call(*operands)`` and its gradients with the dense ones; `second`: and those of the gradients."""

    def run(operands):
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            warnings.simplefilter("ignore", st.GatherWarning)
            warnings.filterwarnings("ignore", ".*is in beta")
            out = call(*operands)
        given = [x for x in operands if x.requires_grad]
        grads = torch.autograd.grad(out.sum(), given, create_graph=second, allow_unused=True)
        if second:
            loss = sum(g.square().sum() for g in grads if g is not None) + out.sum()
            grads += torch.autograd.grad(loss, given, allow_unused=True)
        return [out, *(g for g in grads if g is not None)]

    def leaf(x):
        return x.clone().requires_grad_(x.is_floating_point())

    def body():
        operands = [
            leaf(x) if spec is None else st.distribute(x, spec, requires_grad=x.is_floating_point())
            for x, spec in zip(inputs, specs, strict=True)
        ]
        found, want = run(operands), run([leaf(x) for x in inputs])
        assert len(found) == len(want)
        for y, z in zip(found, want, strict=True):
            assert y.dtype == z.dtype
            if autocast:
                torch.testing.assert_close(whole(y), z, rtol=0.05, atol=0.05)
            else:
                same(y, z)

    st.simulate(world, body)


# -- sums of half precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("world", "call", "shapes", "specs"),
    [
        ("tp=3", lambda x: x.sum(), [(2, 3)], ["[tp balanced, -]"]),
        ("tp=3", lambda x: x.nansum(0), [(2, 3)], ["[tp balanced, -]"]),
        ("tp=3", lambda x: x.sum(0, keepdim=True), [(2, 3)], ["[tp balanced, -]"]),
        ("tp=3", lambda x: x.mean(), [(2, 3)], ["[tp balanced, -]"]),
        ("tp=2", lambda y, x: (y + x).sum(), [(), (1, 1)], [None, "[tp balanced, -]"]),
        ("dp=2, tp=2", lambda x: x.sum(1).float().sum(), [(3, 4)], ["[tp sizes(0, 3), -] flat(dp)"]),
        ("tp=2", lambda x: x.std(1), [(1, 4)], ["[tp balanced, -]"]),
        ("tp=3", lambda x, w: x @ w, [(2, 3), (3, 2)], ["[tp balanced, -]", None]),
        ("tp=4", lambda x, w: x @ w, [(2, 3), (3, 2)], ["[-, tp balanced]", None]),
        ("tp=4", F.linear, [(2, 4), (3, 4), (3,)], [None, "[tp balanced, -]", None]),
        ("tp=4", F.linear, [(2, 3), (3, 3), (3,)], [None, "[-, tp balanced]", None]),
    ],
)
def test_halves_with_an_empty_part(world, call, shapes, specs, half):
    check(world, call, [values(*shape, seed=i).to(half) for i, shape in enumerate(shapes)], specs)


@pytest.mark.parametrize("half", HALVES)
def test_a_conversion_to_half_before_a_sum(half):
    check("tp=3", lambda x: x.to(half).sum(), [values(2, 1, 4)], ["[tp balanced, -, -]"])
    check("dp=2, tp=2", lambda x: x.sum(1).to(half).sum(), [values(3, 4)], ["[tp sizes(0, 3), -] flat(dp)"])


def test_partials_of_half_precision_are_summed_in_float32():
    def body():
        large = torch.tensor([6e4, 6e4, -6e4, -6e4]).half()
        assert st.distribute(large, "[tp]").sum().item() == 0
        assert st.distribute(large, "[tp]").sum(0, dtype=torch.float16).item() == 0
        assert st.distribute(torch.tensor([256, 1, 1, 1, 1]).bfloat16(), "[tp balanced]").sum().item() == 260

    st.simulate("tp=4", body)


@pytest.mark.parametrize("spec", ["[tp balanced, -, -]", "[-, tp balanced, -]", "[-, -, tp balanced]"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms_of_norms(spec, dtype):
    def body():
        x = st.distribute(values(2, 4, 2).to(dtype), spec, requires_grad=True)
        F.group_norm(F.normalize(F.softplus(x), dim=-2), 2).square().sum().backward()
        assert x.grad.full_tensor().dtype == dtype

    st.simulate("tp=3", body)


# -- kernels -----------------------------------------------------------------------------------------------------------

KERNELS = [
    ("einsum", lambda x, w: torch.einsum("bk,kn->bn", x, w), [(2, 4), (4, 5)], 0),
    ("einsum over what is cut", lambda x, w: torch.einsum("bk,kn->bn", x, w), [(4, 2), (2, 5)], 1),
    ("einsum that only multiplies", lambda x, w: torch.einsum("bk,bk->bk", x, w), [(2, 4), (2, 4)], 0),
    ("einsum of three", lambda *xs: torch.einsum("ij,kj,kl->il", *xs), [(2, 3), (1, 3), (1, 2)], 0),
    ("matmul", torch.matmul, [(2, 4), (4, 5)], 0),
    ("conv", lambda x, w: F.conv1d(x, w, padding=1), [(2, 2, 6), (3, 2, 2)], 0),
    ("conv of what is cut", lambda x, w: F.conv1d(x, w, padding=1), [(2, 2, 6), (3, 2, 2)], 1),
    ("conv of one", lambda x, w: F.conv1d(x, w), [(1, 2, 2), (3, 2, 2)], 0),
    ("max_pool", lambda x: F.max_pool1d(x, 2), [(2, 2, 6)], 0),
    ("avg_pool", lambda x: F.avg_pool1d(x, 2), [(2, 2, 6)], 0),
    ("group_norm", lambda x, w: F.group_norm(x, 2, w), [(2, 4, 3), (4,)], 0),
    ("instance_norm", lambda x, w: F.instance_norm(x, weight=w), [(2, 4, 3), (4,)], 0),
    ("pad", lambda x: F.pad(x, (1, 2), mode="circular"), [(2, 2, 6)], 0),
    ("logsumexp", lambda x: torch.logsumexp(x, 0), [(2, 4)], 0),
    ("var", lambda x: torch.var(x, 1), [(2, 4)], 0),
]


@pytest.mark.parametrize("world", ["tp=2", "tp=3"])
@pytest.mark.parametrize(("name", "call", "shapes", "dim"), KERNELS, ids=[kernel[0] for kernel in KERNELS])
def test_gradients_of_gradients(world, name, call, shapes, dim):
    spec = f"[{', '.join('tp balanced' if d == dim else '-' for d in range(len(shapes[0])))}]"
    inputs = [values(*shape, seed=i) for i, shape in enumerate(shapes)]
    check(world, call, inputs, [spec, *[None] * (len(shapes) - 1)], second=True)
    check(world, lambda *xs: call(*xs).pow(3), inputs, [spec, *[None] * (len(shapes) - 1)], second=True)


@pytest.mark.parametrize("world", ["tp=2", "tp=3"])
@pytest.mark.parametrize(("name", "call", "shapes", "dim"), KERNELS[:7], ids=[kernel[0] for kernel in KERNELS[:7]])
def test_under_autocast(world, name, call, shapes, dim):
    spec = f"[{', '.join('tp balanced' if d == dim else '-' for d in range(len(shapes[0])))}]"
    inputs = [values(*shape, seed=i).float() for i, shape in enumerate(shapes)]
    check(world, call, inputs, [spec, *[None] * (len(shapes) - 1)], autocast=True)


@pytest.mark.parametrize("autocast", [False, True])
def test_attention_of_no_heads(autocast):
    def call(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    heads = [values(2, 2, 3, 4, seed=i).float() for i in range(3)]
    check("tp=3", call, [*heads, values(3, 3).float()], ["[-, tp balanced, -, -]"] * 3 + [None], autocast=autocast)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [False, True])
def test_embedding_bag_of_halves(mode, offsets):
    ids = torch.tensor([0, 1, 1, 0] if offsets else [[0, 1], [1, 0]])
    starts = torch.tensor([0, 2]) if offsets else None
    check("tp=4", lambda w: F.embedding_bag(ids, w, starts, mode=mode), [values(2, 4).bfloat16()], ["[tp balanced, -]"])


@pytest.mark.parametrize("ord", [-inf, -2, -1, 0.5, 1, 2, inf])
def test_norms_of_every_order(ord):
    distinct = torch.arange(1.0, 9.0).view(2, 4)
    for dim in (None, 0, 1):
        check("tp=3", lambda x, dim=dim: torch.linalg.vector_norm(x, ord, dim), [distinct], ["[tp balanced, -]"])


def test_a_result_without_elements_is_written_alike_on_all_ranks():
    def body():
        x = st.distribute(values(1, 4, 3), 'chunk(dim=1, placements=["rank:1/cpu"])', requires_grad=True)
        return tuple(torch.topk(x, 0, 0)[0].relu_().shape)

    assert st.simulate("tp=2", body) == [(0, 4, 3)] * 2


@pytest.mark.parametrize("ord", [-inf, -1, inf])
@pytest.mark.parametrize("spec", ["[tp balanced, -]", "[-, tp balanced]"])
def test_nothing_has_no_norm_of_an_extreme(ord, spec):
    nothing = torch.empty(0, 4)
    with pytest.raises(RuntimeError) as want:
        torch.linalg.vector_norm(nothing, ord, 0)

    def body():
        with pytest.raises(RuntimeError) as found:
            torch.linalg.vector_norm(st.distribute(nothing, spec), ord, 0)
        assert str(found.value) == str(want.value)

    st.simulate("tp=3", body)


def test_what_is_minus_infinity_on_one_rank_has_no_gradient_and_leaves_that_of_others():
    for x in (torch.tensor([-inf, -inf, 1.0, 2.0]), torch.tensor([inf, 1.0, 2.0, 3.0]), torch.full((4,), -inf)):
        check("tp=2", lambda x: torch.logsumexp(x, 0), [x], ["[tp]"])


def test_the_whole_batch_of_a_group_norm_is_looked_at():
    check("tp=2", lambda x: F.group_norm(x, 4), [values(2, 4)], ["[tp, -]"])

    def refused():
        for shape in ((1, 4), (1, 4, 1)):
            x = torch.ones(shape)
            with pytest.raises(ValueError, match="more than 1 value per channel") as want:
                F.group_norm(x, 4)
            with pytest.raises(ValueError, match="more than 1 value per channel") as found:
                F.group_norm(st.distribute(x, "replicate" if len(shape) == 2 else "[-, tp, -]"), 4)
            assert str(found.value) == str(want.value)

    st.simulate("tp=2", refused)


@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (2, 4, 0, 2), (2, 0, 2, 2)])
@pytest.mark.parametrize("spec", ["[tp, -, -, -]", "[-, tp, -, -]", "replicate"])
def test_tensors_without_elements(shape, spec):
    st.simulate(
        "tp=2",
        lambda: same(F.pixel_shuffle(st.distribute(torch.ones(shape), spec), 2), F.pixel_shuffle(torch.ones(shape), 2)),
    )  # torch's backward takes none
    check("tp=2", F.instance_norm, [torch.ones(shape)], [spec])


def test_vectors_without_elements_among_what_is_laid_end_to_end():
    rows, nothing = values(4, 2), torch.empty(0, dtype=torch.float64)
    for dim in (0, 1):
        check("tp=2", lambda a, b, dim=dim: torch.cat([a, b], dim), [nothing, rows], [None, "[tp, -]"])
        check("tp=2", lambda a, b, dim=dim: torch.cat([a, b, a], dim), [nothing, rows], ["[tp]", "[-, tp]"])


# -- in place under autograd -------------------------------------------------------------------------------------------


def _at(f):
    def call(x):
        y = x * 1
        f(y)
        return y.square()

    return call


AT = torch.zeros(2, 3, dtype=torch.int64)
TWOS = torch.full((2, 3), 2.0, dtype=torch.float64)
REDUCED = ("sum", "prod", "mean", "amax")
IN_PLACE = {
    "cumsum_": lambda y: y.cumsum_(0),
    "cumprod_": lambda y: y.cumprod_(0),
    "index_put_": lambda y: y.index_put_((torch.tensor([0, 1]),), TWOS),
    **{f"scatter_reduce_ {r}": lambda y, r=r: y.scatter_reduce_(0, AT, TWOS, r) for r in REDUCED},
    **{f"index_reduce_ {r}": lambda y, r=r: y.index_reduce_(0, AT[0, :2], TWOS, r) for r in REDUCED[1:]},
}  # fmt: skip


@pytest.mark.parametrize("spec", ["[tp balanced, -]", "[-, tp balanced]", "flat(tp)"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_that_backward_looks_behind(name, spec):
    check("tp=2", _at(IN_PLACE[name]), [values(4, 3).abs() + 1], [spec])


@pytest.mark.parametrize("specs", [[None, "[-, tp]", None], [None, "[tp, -]", None], ["[tp, -]", "[tp, -]", None]])
def test_what_beta_0_leaves_out_has_a_gradient_of_zeros(specs):
    inputs = [torch.full((2, 3), nan), values(2, 4).float(), values(4, 3).float()]
    check("tp=2", lambda i, a, b: torch.addmm(i, a, b, beta=0), inputs, specs)
