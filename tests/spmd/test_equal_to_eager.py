"""Compiled steps leave what the eager library leaves in the same world, random numbers included."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import FULL, every_size
from spmd_steps import STYLES, in_turns, mlp, plain_step, same_as_eager, same_modules, train_both
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardtensor as st

styles = pytest.mark.parametrize("style", STYLES)
CLASSES = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.1},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.1},
    "Rprop": {"lr": 0.01},
}
KINDS = [(name, {}) for name in CLASSES]
KINDS += [(name, {"foreach": True}) for name in CLASSES]
KINDS += [(name, {"fused": True}) for name in ("SGD", "Adam", "AdamW", "Adagrad")]


# -- optimizers


@pytest.mark.parametrize(
    ("style", "kind"),
    in_turns(KINDS if FULL else KINDS[::3]),
    ids=lambda x: x if isinstance(x, str) else f"{x[0]}-{[*x[1], 'loop'][0]}",
)
def test_optimizers(world, style, kind):
    name, how = kind
    options = CLASSES[name] | how
    if "fused" in how:
        options.pop("amsgrad", None)
    is_exact = "fused" not in how or style == "replicate"  # eager steps a unit as one tensor: vectors end elsewhere
    world(same_as_eager, 2, style=style, cls=getattr(torch.optim, name), options=options, exact=is_exact)


def lr_falls(i, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@styles
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_changed_learning_rate_is_used_without_compiling(world, style, name):
    world(same_as_eager, 2, style=style, cls=getattr(torch.optim, name), options=CLASSES[name], between=lr_falls)


def scheduled(style):
    made: dict[int, Any] = {}

    def between(i, optimizer):
        if i < 0:
            made[id(optimizer)] = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        else:
            made[id(optimizer)].step()

    _, optimizer, _, other, _ = train_both(style, cls=torch.optim.Adam, between=between)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] == 0.1 * 0.5**3


hooks = pytest.mark.parametrize("style", [STYLES[0], STYLES[1]])


@hooks
def test_a_scheduler_steps_outside(world, style):
    world(scheduled, 2, style=style)


def hooked(style):
    calls: list[tuple[int, str]] = []

    def between(i, optimizer):
        if i < 0:
            number = len(calls)
            calls.append((number, "made"))
            optimizer.register_step_pre_hook(lambda *_: calls.append((number, "before")))
            optimizer.register_step_post_hook(lambda *_: calls.append((number, "behind")))

    train_both(style, between=between, steps=2)
    assert [name for number, name in calls if number == 0] == ["made", "before", "behind", "before", "behind"]


@hooks
def test_hooks_of_optimizers_run(world, style):
    world(hooked, 2, style=style)


def groups_of(module, style, named):
    parts = [module[0], module[2]]
    rates = ({"lr": 0.1}, {"lr": 0.01, "weight_decay": 0.1})
    names = [[(f"{2 * i}.{name}", p) for name, p in part.named_parameters()] for i, part in enumerate(parts)]
    return [
        {"params": part if named else [p for _, p in part], **rate} for part, rate in zip(names, rates, strict=True)
    ]


def several_groups(style):
    from copy import deepcopy

    from spmd_steps import compiled, own_batch, spread

    torch.manual_seed(0)
    module = mlp()
    other = spread(deepcopy(module), style)
    optimizer = torch.optim.AdamW(groups_of(module, style, False))
    groups = groups_of(other, style, style == "fully_shard")
    beside = torch.optim.AdamW(groups) if style == "replicate" else st.ShardedOptimizer(groups, torch.optim.AdamW)
    run = compiled(plain_step, style)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        batch = own_batch()
        run(module, optimizer, batch)
        plain_step(other, beside, batch)
        same_modules(module, other)
    assert run.compiles == 1


@styles
def test_several_groups(world, style):
    world(several_groups, 2, style=style)


@styles
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_states_made_by_earlier_steps_are_kept(world, style, name):
    world(same_as_eager, 2, style=style, cls=getattr(torch.optim, name), options=CLASSES[name], warm=2)


# -- models


def cross_entropy_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
    loss.backward()
    optimizer.step()
    return loss


def decoder():
    from shardtensor.cli.demo import Decoder

    return Decoder(17, 8, 32, 2)


def tokens():
    return torch.randint(17, (2, 8)), torch.randint(17, (2, 8))


class TinyViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def images():
    return torch.randn(3, 3, 8, 8), torch.randint(3, (3,))


@every_size
@styles
def test_a_decoder(world, size, style):
    world(
        same_as_eager, size, style=style, build=decoder, batch=tokens, step=cross_entropy_step, cls=torch.optim.AdamW,
        options={"lr": 1e-3, "fused": True},
    )  # fmt: skip


@every_size
@styles
def test_a_vision_transformer(world, size, style):
    world(
        same_as_eager, size, style=style, build=TinyViT, batch=images, step=cross_entropy_step, cls=torch.optim.Adam,
        options={"lr": 1e-3},
    )  # fmt: skip


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12, num_labels=3, attn_implementation="eager",
    )  # fmt: skip
    return BertForSequenceClassification(config)


def texts():
    from transformers import BatchEncoding

    lengths = torch.randint(3, 9, (3, 1))
    mask = (torch.arange(8) < lengths).long()
    ids = torch.randint(31, (3, 8))
    return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, (3,))})


def bert_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss


@styles
def test_a_bert_with_dropout(world, style):
    pytest.importorskip("transformers")
    world(
        same_as_eager, 2, style=style, build=bert, batch=texts, step=bert_step, cls=torch.optim.AdamW,
        options={"lr": 1e-3}, timeout_s=120,
    )  # fmt: skip


# -- parts of steps


class Dropped(nn.Module):
    def __init__(self, use_reentrant=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 3)
        self.use_reentrant = use_reentrant

    def layer(self, i, x):
        return F.dropout(torch.tanh(self.layers[i](x)), 0.3)

    def forward(self, x):
        for i in range(3):
            if self.use_reentrant is None:
                x = self.layer(i, x)
            else:
                x = x if x.requires_grad else x.detach().requires_grad_()
                x = checkpoint(self.layer, i, x, use_reentrant=self.use_reentrant)
        return self.head(F.dropout(x, 0.5))


@every_size
@styles
def test_dropout(world, size, style):
    world(same_as_eager, size, style=style, build=Dropped)


@pytest.mark.parametrize(("style", "use_reentrant"), in_turns([True, False]))
def test_checkpoints_with_dropout(world, style, use_reentrant):
    world(same_as_eager, 2, style=style, build=partial(Dropped, use_reentrant))


def noisy_step(model, optimizer, batch):
    optimizer.zero_grad()
    x = batch[0] + 0.1 * torch.randn_like(batch[0])
    kept = torch.rand(x.shape[0]) < 0.9
    loss = ((model(x) - batch[1]).pow(2).mean(1) * kept).mean()
    loss.backward()
    optimizer.step()
    return loss


@styles
def test_random_numbers_of_a_step(world, style):
    world(same_as_eager, 2, style=style, step=noisy_step)


def autocast_step(model, optimizer, batch):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(batch[0]).float(), batch[1])
    loss.backward()
    optimizer.step()
    return loss


@styles
def test_autocast(world, style):
    world(same_as_eager, 2, style=style, step=autocast_step, exact=True)


def clipped_step(model, optimizer, batch, clip=nn.utils.clip_grad_norm_):
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    clip(model.parameters(), 0.1)
    optimizer.step()
    return loss


def clipped_by_the_library(model, optimizer, batch):
    return clipped_step(model, optimizer, batch, st.clip_grad_norm_)


@styles
def test_clipped_gradients(world, style):
    """The norm is summed in another order."""
    world(same_as_eager, 2, style=style, step=clipped_step, eager_step=clipped_by_the_library, exact=False)


def accumulating_step(model, optimizer, batch):
    optimizer.zero_grad()
    losses = []
    for i in range(2):
        loss = (model(batch[i][0]) - batch[i][1]).pow(2).mean() / 2
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return sum(losses)


def accumulating_without_sync(model, optimizer, batch):
    optimizer.zero_grad()
    losses = []
    for i in range(2):
        loss = (model(batch[i][0]) - batch[i][1]).pow(2).mean() / 2
        if i == 0 and not hasattr(model, "_fsdp_state"):
            with st.no_sync(model):
                loss.backward()
        else:
            if hasattr(model, "_fsdp_state"):
                model.set_requires_gradient_sync(i == 1)
            loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return sum(losses)


def two_batches():
    return [(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(2)]


@styles
def test_gradients_of_two_backwards_add_up(world, style):
    world(
        same_as_eager, 2, style=style, batch=two_batches, step=accumulating_step,
        eager_step=accumulating_without_sync,
    )  # fmt: skip


def zeroing_at_the_end(model, optimizer, batch):
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@styles
def test_gradients_dropped_at_the_end(world, style):
    world(same_as_eager, 2, style=style, step=zeroing_at_the_end, cls=torch.optim.Adam)


def silent_step(model, optimizer, batch):
    plain_step(model, optimizer, batch)


@styles
def test_a_step_that_returns_nothing(world, style):
    world(same_as_eager, 2, style=style, step=silent_step)


def by_hand(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(0.5)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    return loss


def twice(model, optimizer, batch):
    plain_step(model, optimizer, batch)
    return plain_step(model, optimizer, (batch[0] * 2, batch[1]))


def with_penalties(model, optimizer, batch):
    optimizer.zero_grad()
    x = batch[0].detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)  # of each sample
    loss = (out - batch[1]).pow(2).mean() + slope.pow(2).mean() + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    return loss.detach()


def with_closure(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[1]).pow(2).mean()
        loss.backward()
        return loss

    return optimizer.step(closure)


def zeroing_in_place(model, optimizer, batch):
    optimizer.zero_grad(set_to_none=False)
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def by_the_model(model, optimizer, batch):
    model.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


OTHER_STEPS = [by_hand, twice, with_penalties, with_closure, by_the_model]
OTHER_STEPS += [zeroing_in_place]


@pytest.mark.parametrize(("style", "step"), in_turns(OTHER_STEPS))
def test_other_steps(world, style, step):
    """Penalties are summed in another order."""
    world(same_as_eager, 2, style=style, step=step, exact=step is not with_penalties)


LOSSES = {
    "softplus": lambda out, y: F.softplus(out - y).mean(),
    "binary cross entropy": lambda out, y: F.binary_cross_entropy_with_logits(out, y.sigmoid()),
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft labels": lambda out, y: F.cross_entropy(out, y.softmax(1)),
    "smoothed labels": lambda out, y: F.cross_entropy(out, y.argmax(1), label_smoothing=0.1),
    "kl": lambda out, y: F.kl_div(out.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "masked attention": lambda out, y: F.scaled_dot_product_attention(
        out[:, None], y[:, None], y[:, None], attn_mask=torch.ones(1, 1, dtype=torch.bool)
    ).mean(),
}


class WithLoss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.inner, self.loss = mlp(), loss

    def forward(self, x, y):
        return LOSSES[self.loss](self.inner(x), y)


def loss_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    "loss",
    [loss for loss in LOSSES],
)
def test_losses(world, loss):
    world(same_as_eager, 2, style="replicate", build=partial(WithLoss, loss), step=loss_step, exact=False)


def frozen():
    module = mlp()
    module[0].requires_grad_(False)
    return module


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def normalized():
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3))


class MaskedAttention(nn.Module):
    """Ranks that are no power of two: a gradient that is divided early has other bits."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        q = self.first(x).view(len(x), 1, 2, 4)
        mask = torch.zeros(len(x), 1, 2, 2).masked_fill(x[:, None, None, :2] > 1, -1.0)
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return self.head(out.flatten(1))


@pytest.mark.parametrize(("style", "build"), in_turns([frozen, Unused, Tied, normalized, MaskedAttention]))
def test_parameters(world, style, build):
    world(same_as_eager, 3, style=style, build=build, cls=torch.optim.Adam)
