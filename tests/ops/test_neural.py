"""softmax, norms, embedding, losses, attention; B15, B17, B18 and B11."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness import device, every_size
from harness.law import case, check_table, whole

import shardtensor as st

S = (5, 6)
TABLE = (7, 4)


def near(name, function, *shapes, make=(), gathers=(), exact=False):
    return case(name, function, shapes, exact=exact, make=make, gathers=gathers)


SOFTMAX = [
    near("softmax", lambda x: F.softmax(x, -1), S),
    near("softmax 0", lambda x: x.softmax(0), (2, 3)),
    near("log_softmax", lambda x: torch.log_softmax(x, 1), S),
    near("large", lambda x: F.log_softmax(x * 1e4, dim=-1), S),
    near("masked", lambda x: x.masked_fill(x > 0, float("-inf")).softmax(-1), (3, 12)),
    near("half", lambda x: F.softmax(x.bfloat16(), -1).float(), (2, 3), exact=0.01),
    near("dtype", lambda x: F.softmax(x, -1, dtype=torch.float64), S),
    near("softmin", lambda x: F.softmin(x, 0), S),
    near("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), S, (6,), (6,)),
    near("layer_norm 2", lambda x: F.layer_norm(x, (5, 6)), (3, *S)),
    near("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), S, (6,)),
    near("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 5), (4,), (4,), gathers=(1, 2)),
    near("normalize", lambda x: F.normalize(x, dim=-1), S),
    near("attention", F.scaled_dot_product_attention, (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 2)),
    near(
        "causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *((2, 4, 4, 5), (2, 4, 4, 5), (2, 4, 4, 5)),
    ),
    near("mask", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), *((2, 3, 4, 5),) * 3, (1, 1, 4, 4)),
    near(
        "grouped",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        *((2, 4, 3, 5), (2, 2, 3, 5), (2, 2, 3, 5)),
    ),
]
EMBEDDING = [
    case("embedding", lambda w, i: F.embedding(i, w), (TABLE, (2, 3)), make=("int", "ids:7")),
    case("padding", lambda w, i: F.embedding(i, w, padding_idx=5), (TABLE, (8,)), make=("int", "ids:7")),
    case("negative padding", lambda w, i: F.embedding(i, w, padding_idx=-3), (TABLE, (8,)), make=("int", "ids:7")),
    case("small table", lambda w, i: F.embedding(i, w), ((2, 3), (4,)), make=("int", "ids:2")),
    case("no ids", lambda w, i: F.embedding(i, w), (TABLE, (0,)), make=("int", "ids:7")),
    near(
        "frequency",
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
        *(TABLE, (8,)),
        make=("int", "ids:7"),
        gathers=True,
    ),
]
LABELS = ("int", "ids:6")
LOSSES = [
    near("cross_entropy", F.cross_entropy, S, (5,), make=LABELS),
    near("vocabulary 7", lambda x, t: F.cross_entropy(x, t, reduction="sum"), (3, 7), (3,), make=("int", "ids:7")),
    near("none", lambda x, t: F.cross_entropy(x, t, reduction="none"), S, (5,), make=LABELS),
    near("ignore", lambda x, t: F.cross_entropy(x, t, ignore_index=2), (12, 4), (12,), make=("int", "ids:4")),
    near("smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2, ignore_index=1), S, (5,), make=LABELS),
    near("weight", lambda x, t, w: F.cross_entropy(x, t, w.detach()), S, (5,), (6,), make=(*LABELS, "positive")),
    near(
        "weight smooth",
        lambda x, t, w: F.cross_entropy(x, t, w.detach(), label_smoothing=0.3, ignore_index=2),
        *(S, (5,), (6,)),
        make=(*LABELS, "positive"),
    ),
    near("images", F.cross_entropy, (2, 4, 3), (2, 3), make=("int", "ids:4")),
    near("one", F.cross_entropy, (6,), (), make=LABELS),
    near("probabilities", lambda x, p: F.cross_entropy(x, p.softmax(1), label_smoothing=0.1), S, S),
    near("large", lambda x, t: F.cross_entropy(x * 1e4, t), S, (5,), make=LABELS),
    near(
        "half", lambda x, t: F.cross_entropy(x.bfloat16(), t).float(), (2, 3), (2,), make=("int", "ids:3"), exact=0.02
    ),
    near("nll", lambda x, t: F.nll_loss(x.log_softmax(1), t), S, (5,), make=LABELS),
    near("nll weight", lambda x, t, w: F.nll_loss(x, t, w.detach()), S, (5,), (6,), make=(*LABELS, "positive")),
    near("mse", F.mse_loss, S, S),
    near("mse sum", lambda x, y: F.mse_loss(x, y, reduction="sum"), S, S),
    near("l1", F.l1_loss, S, S),
    near("huber", F.smooth_l1_loss, S, S),
    near("bce", lambda x, y: F.binary_cross_entropy(x, y.detach()), S, S, make=("unit", "unit")),
    near("bce logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach()), S, S, make=("int", "unit")),
    near("kl", lambda x, y: F.kl_div(x, y.detach(), reduction="batchmean"), S, S, make=("int", "unit")),
]


def softmax() -> None:
    check_table(SOFTMAX)


def embedding() -> None:
    check_table(EMBEDDING)


def losses() -> None:
    check_table(LOSSES)


@pytest.mark.worlds("sim")
@every_size
def test_softmax_norms_and_attention_equal_dense(world, size):
    world(softmax, size)


@pytest.mark.worlds("sim")
@every_size
def test_embedding_equals_dense(world, size):
    world(embedding, size)


@pytest.mark.worlds("sim")
@every_size
def test_losses_equal_dense(world, size):
    world(losses, size)


def known() -> None:
    with device():
        published_numbers()


def published_numbers() -> None:
    for spec in ("[tp, -]", "[-, tp]"):  # a padding index is global
        for padding_idx in (5, -3):
            table = st.distribute(torch.arange(16.0).view(8, 2), spec, requires_grad=True)
            F.embedding(torch.tensor([1, 5, 5, 7]), table, padding_idx=padding_idx).sum().backward()
            assert table.grad.full_tensor().sum(1).tolist() == [0, 2, 0, 0, 0, 0, 0, 2]
        table = st.distribute(torch.tensor([[3.0, 4.0], [0.0, 0.5]]), spec)  # max_norm is of whole rows
        out = F.embedding(torch.tensor([0, 1]), table, max_norm=1.0)
        want = torch.tensor([[0.6, 0.8], [0.0, 0.5]])
        torch.testing.assert_close(whole(out), want)
        torch.testing.assert_close(table.full_tensor(), want)
        with pytest.raises(st.RuleError, match="sparse gradients"):
            F.embedding(torch.tensor([0]), table, sparse=True)
        if device().type == "cpu":  # a card only asserts
            with pytest.raises(IndexError, match="index out of range"):
                F.embedding(torch.tensor([2]), table)
    logits = st.distribute(torch.arange(4.0).view(1, 4), "[-, tp]", requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([3]))
    assert type(loss) is torch.Tensor
    assert math.isclose(loss.item(), 0.4401897, rel_tol=1e-6)
    loss.backward()
    want = torch.tensor([[0.0320586, 0.0871443, 0.2368828, -0.3560857]])
    torch.testing.assert_close(logits.grad.full_tensor(), want)
    logits = st.distribute(torch.arange(7.0).view(1, 7), "[-, tp balanced]")
    assert math.isclose(F.cross_entropy(logits, torch.tensor([6])).item(), 0.4577628, rel_tol=1e-6)
    likely = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1], [0.2, 0.8]]).log()
    loss = F.nll_loss(st.distribute(likely, "[tp, -]"), torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 10.0]))
    assert math.isclose(loss.item(), 1.2425786, rel_tol=1e-6)


def test_published_numbers(world):
    world(known, 2)
