"""A step that cannot be compiled is one error, equal on every rank, before anything of the training run changes."""

from __future__ import annotations

import re
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from bad_step_texts import TEXTS
from harness import FULL, Pool
from spmd_steps import compiled, in_turns, mlp, own_batch, plain_step
from torch import nn

import shardtensor as st

OTHER = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def reads_item(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch[0]).mean()
    print(loss.item())
    loss.backward()
    optimizer.step()


def branches(model, optimizer, batch):
    loss = model(batch[0]).mean()
    if loss > 0:
        loss.backward()
    optimizer.step()


def converts(model, optimizer, batch):
    model(batch[0]).mean().backward()
    return float(sum(p.grad.norm() for p in model.parameters()))


def has_no_rule(model, optimizer, batch):
    optimizer.zero_grad()
    loss = torch.logcumsumexp(model(batch[0]), 0).mean()
    loss.backward()
    optimizer.step()


def steps_another(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch[0]).mean().backward()
    OTHER.step()


def changes_lr(model, optimizer, batch):
    plain_step(model, optimizer, batch)
    optimizer.param_groups[0]["lr"] = 0.01


def replaces(model, optimizer, batch):
    model[0].bias = nn.Parameter(torch.zeros(6))
    plain_step(model, optimizer, batch)


def breaks(model, optimizer, batch):
    plain_step(model, optimizer, batch)
    return 1 / 0


def loops_over_samples(model, optimizer, batch):
    optimizer.zero_grad()
    sum(model(x).mean() for x in batch[0]).backward()
    optimizer.step()


def on_one_rank(model, optimizer, batch):
    (reads_item if dist.get_rank() == 1 else plain_step)(model, optimizer, batch)


STEPS = {
    f.__name__: f
    for f in (
        reads_item, branches, converts, has_no_rule, steps_another, changes_lr,
        replaces, breaks, loops_over_samples, on_one_rank,
    )
}  # fmt: skip


def no_model(model, optimizer, batch):
    return optimizer, batch


def other_samples(model, optimizer, batch):
    return model, optimizer, (batch[0], torch.randn(3, 3))


def no_samples(model, optimizer, batch):
    return model, optimizer, own_batch(0)


def other_samples_on_one_rank(model, optimizer, batch):
    return model, optimizer, (batch[0], torch.randn(3 if dist.get_rank() else 4, 3))


def other_dtype(model, optimizer, batch):
    return model, optimizer, (batch[0], batch[1].to(torch.float64 if dist.get_rank() else torch.float32))


def other_dims(model, optimizer, batch):
    return model, optimizer, (batch[0], batch[1][:, : 3 - dist.get_rank()])


def other_optimizer(model, optimizer, batch):
    return model, optimizer if dist.get_rank() else torch.optim.SGD(model.parameters(), lr=0.1), batch


def other_number(model, optimizer, batch):
    return model, optimizer, (*batch, dist.get_rank())


def other_model(model, optimizer, batch):
    return mlp(), optimizer, batch


def frozen_on_one_rank(model, optimizer, batch):
    if dist.get_rank():
        model[0].bias.requires_grad_(False)
    return model, optimizer, batch


ARGUMENTS = {
    f.__name__: f
    for f in (
        no_model, other_samples, no_samples, other_samples_on_one_rank, other_dtype, other_dims, other_optimizer,
        other_number, other_model, frozen_on_one_rank,
    )
}  # fmt: skip


def snapshot(model, optimizer):
    """All that a step may change."""
    params = [
        (p, p.detach().clone(), p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()
    ]
    modules = [(m, type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    hooks = [len(p._backward_hooks or {}) for p in model.parameters()]
    names = set(vars(optimizer))
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    listed = [list(map(id, g["params"])) for g in optimizer.param_groups]
    random = torch.get_rng_state()
    state = deepcopy(optimizer.state_dict()["state"])
    return params, modules, hooks, names, groups, listed, random, state


def own(x):
    """This rank's part: the ranks may hold different things."""
    return getattr(x, "_local", x)


def check_unchanged(before, after):
    params, modules, hooks, names, groups, listed, random, state = before
    for (p, value, flag, grad), (q, now, now_flag, now_grad) in zip(params, after[0], strict=True):
        assert p is q
        assert torch.equal(own(value), own(now))
        assert flag == now_flag
        assert (grad is None) == (now_grad is None)
        assert grad is None or torch.equal(own(grad), own(now_grad))
    assert (modules, hooks, names, groups, listed) == after[1:6]
    assert torch.equal(random, after[6])
    torch.testing.assert_close(state, after[7])


def normal(text):
    text = re.sub(r"\.py:\d+", ".py:N", text)
    return re.sub(r"(/[^ /]+)+/", "", text)


def wrong(style, step=None, arguments=None):
    """Return the error; nothing has changed, the module trains in eager, and a good step compiles."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    batch = own_batch()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    plain_step(model, optimizer, (torch.ones(4, 5), torch.ones(4, 3)))
    run = compiled(STEPS[step] if step else plain_step, style)
    args = ARGUMENTS[arguments](model, optimizer, batch) if arguments else (model, optimizer, batch)
    before = snapshot(model, optimizer)
    for _ in range(2):  # the first error of a process may have another line: see below
        with pytest.raises(st.ShardTensorError) as error:
            run(*args)
        check_unchanged(before, snapshot(model, optimizer))
    plain_step(model, optimizer, (torch.ones(4, 5), torch.ones(4, 3)))
    model.requires_grad_(True)
    good = compiled(plain_step, style)
    good(model, optimizer, batch)
    return f"{type(error.value).__name__}: {normal(str(error.value))}"


@pytest.mark.parametrize(("style", "step"), in_turns(list(STEPS)))
def test_steps(world, style, step):
    assert world(wrong, 2, style=style, step=step) == [TEXTS[step]] * 2


@pytest.mark.parametrize(("style", "arguments"), in_turns(ARGUMENTS))
def test_arguments(world, style, arguments):
    assert world(wrong, 2, style=style, arguments=arguments) == [TEXTS[arguments]] * 2


def first_error():
    model = mlp()
    with pytest.raises(st.RuleError) as error:
        compiled(reads_item, "replicate")(model, torch.optim.SGD(model.parameters()), own_batch())
    return re.search(r"at .* in (.*)", str(error.value))[1]


@pytest.mark.skipif(not FULL, reason="starts a process")
@pytest.mark.xfail(reason="operations that torch runs while the first error of a process is made change the line")
def test_the_line_of_the_first_error_of_a_process():
    pool = Pool(1)
    try:
        assert pool(first_error, 1) == ["reads_item"]
    finally:
        pool.close()


# -- faults behind the first call


def replaced_parameter(model, optimizer, batch):
    model[0].bias = nn.Parameter(torch.zeros(6))


def replaced_second(model, optimizer, batch):
    model[2].bias = nn.Parameter(torch.zeros(3))


def added_layer(model, optimizer, batch):
    model.append(nn.Linear(3, 3))


def removed_layer(model, optimizer, batch):
    del model[1]


def other_batch(model, optimizer, batch):
    batch[1] = batch[1].to(torch.float64 if dist.get_rank() else torch.float32)


def replaced_on_one_rank(model, optimizer, batch):
    if dist.get_rank():
        replaced_parameter(model, optimizer, batch)


def gradients(model, optimizer, batch):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def gradients_on_one_rank(model, optimizer, batch):
    optimizer.zero_grad()
    if dist.get_rank():
        gradients(model, optimizer, batch)


def adding_step(model, optimizer, batch):
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()


CHANGES = {
    f.__name__: f
    for f in (
        replaced_parameter, replaced_second, added_layer, removed_layer, gradients, replaced_on_one_rank, other_batch,
        gradients_on_one_rank,
    )
}  # fmt: skip


def later(style, change):
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run = compiled(adding_step if "gradients" in change else plain_step, style)
    batch = list(own_batch())
    run(model, optimizer, batch)
    CHANGES[change](model, optimizer, batch)
    before = snapshot(model, optimizer)
    with pytest.raises(st.ShardTensorError) as error:
        run(model, optimizer, batch)
    check_unchanged(before, snapshot(model, optimizer))
    return f"{type(error.value).__name__}: {normal(str(error.value))}"


LATER = {"replaced_on_one_rank", "other_batch", "gradients_on_one_rank"}
"""Faults of one rank in a later call."""


@pytest.mark.parametrize(("style", "change"), in_turns(list(CHANGES)))
def test_changes(world, style, change):
    kind = "Sequential" if style == "replicate" else "FSDPSequential"
    text = TEXTS[change].replace("{kind}", kind)
    for found in world(later, 2, timeout_s=6, style=style, change=change):
        assert found == text or (change in LATER and found.startswith(text))
