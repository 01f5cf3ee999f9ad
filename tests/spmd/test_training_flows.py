"""Compiled steps inside a training run: several modules, nested arguments, checkpoints, eager steps between them."""

from __future__ import annotations

from collections import UserDict, namedtuple
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import FULL
from spmd_steps import (
    STYLES,
    compiled,
    eager_optimizer,
    mlp,
    needs_a_compiler,
    own_batch,
    plain_step,
    same_modules,
    same_states,
    spread,
    train_both,
    whole,
)
from torch import nn

import shardtensor as st

styles = pytest.mark.parametrize("style", STYLES)
Parts = namedtuple("Parts", "inputs labels")


# -- several modules and optimizers


def adversarial_step(generator, critic, optimizers, real, clears, first):
    if first:
        optimizers["generator"].zero_grad()
    noise = torch.randn_like(real)
    optimizers["critic"].zero_grad()
    fake = generator(noise).detach()
    critic_loss = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake)).mean()
    critic_loss.backward()
    optimizers["critic"].step()
    optimizers["generator"].zero_grad()
    if clears:
        optimizers["critic"].zero_grad()
    generator_loss = -critic(generator(noise)).mean()
    generator_loss.backward()
    optimizers["generator"].step()
    return {"critic": critic_loss, "generator": generator_loss}


def adversarial(style, clears, first=False):
    torch.manual_seed(0)
    nets = nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    others = [spread(deepcopy(net), style) for net in nets]
    kinds = {"generator": torch.optim.Adam, "critic": torch.optim.SGD}
    ours = {k: cls(net.parameters(), lr=0.01) for (k, cls), net in zip(kinds.items(), nets, strict=True)}
    theirs = {
        key: eager_optimizer(net, style, cls, {"lr": 0.01})
        for (key, cls), net in zip(kinds.items(), others, strict=True)
    }
    run = compiled(adversarial_step, style)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        real = torch.randn(4, 5)
        state = torch.get_rng_state()
        found = run(*nets, ours, real, clears, first)
        torch.set_rng_state(state)
        expected = adversarial_step(*others, theirs, real, clears, first)
        for key, loss in expected.items():
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(found[key], mean / dist.get_world_size())
        for net, other in zip(nets, others, strict=True):
            same_modules(net, other, exact=clears)  # gradients that are added after a step are reduced apart
    assert run.compiles == 1


@pytest.mark.parametrize("clears", [True, False])
@styles
def test_two_modules_and_two_optimizers(world, style, clears):
    """The generator's backward adds to the critic's gradients, which the next step drops; or each drops all first."""
    world(adversarial, 2, style=style, clears=clears)


@styles
def test_two_modules_that_drop_gradients_first(world, style):
    world(adversarial, 2, style=style, clears=True, first=True)


# -- arguments and results


class Inputs(UserDict):
    """As the batches of Hugging Face: a mapping that is no dict."""


def nested_step(parts, *, batches, scale):
    (model, (optimizer,)) = parts["trained"]
    optimizer.zero_grad()
    out = model(batches["first"].inputs) + model(batches["second"]["x"])
    loss = scale * (out - batches["first"].labels).pow(2).mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss, "scale": scale, "out": [out, None, "text"], "rows": Parts(1, loss * 2)}


def nested(style):
    torch.manual_seed(0)
    module = mlp()
    other = spread(deepcopy(module), style)
    ours, theirs = (
        torch.optim.SGD(module.parameters(), lr=0.1),
        eager_optimizer(other, style, torch.optim.SGD, {"lr": 0.1}),
    )
    run = compiled(nested_step, style)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        first, second = own_batch(), own_batch()
        batches = [Parts(*first), Inputs(x=second[0])]
        given = {"first": batches[0], "second": batches[1]}
        found = run({"trained": [module, (ours,)]}, batches=given, scale=0.5)
        expected = nested_step({"trained": [other, (theirs,)]}, batches=given, scale=0.5)
        same_modules(module, other)
        assert list(found) == ["loss", "scale", "out", "rows"]
        assert (found["scale"], found["out"][1:], type(found["rows"]), found["rows"][0]) == (
            0.5,
            [None, "text"],
            Parts,
            1,
        )
        assert torch.equal(found["out"][0], expected["out"][0])  # this rank's samples
        mean = expected["loss"].detach()
        dist.all_reduce(mean)
        torch.testing.assert_close(found["loss"], mean / dist.get_world_size())
        torch.testing.assert_close(found["rows"].labels, 2 * found["loss"])
    run({"trained": [module, (ours,)]}, batches=given, scale=0.25)  # another number: another program
    return run.compiles


@styles
def test_nested_arguments_and_results(world, style):
    assert world(nested, 2, style=style) == [2, 2]


def meanings_step(model, optimizer, batch):
    loss = plain_step(model, optimizer, batch)
    out = model(batch[0])
    return loss, out.sum(), out.amax(), out.mean(0), (out > 0).sum(), out


def meanings(style):
    torch.manual_seed(0)
    module = mlp()
    torch.manual_seed(dist.get_rank())
    batch = own_batch()
    run = compiled(meanings_step, style)
    found = run(module, torch.optim.SGD(module.parameters(), lr=0.0), batch)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, batch)
    batch = tuple(torch.cat(x) for x in zip(*everyone, strict=True))
    dense = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    dense.load_state_dict({k: whole(v) for k, v in module.state_dict().items()})
    expected = meanings_step(dense, torch.optim.SGD(dense.parameters(), lr=0.0), batch)
    for got, x in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(got, x.detach())
    torch.testing.assert_close(found[-1], expected[-1].chunk(dist.get_world_size())[dist.get_rank()].detach())


@styles
def test_results_are_those_of_the_whole_batch(world, style):
    world(meanings, 3, style=style)


# -- eager steps, checkpoints


def alternating(style, name):
    """Eager steps run between compiled ones, on the same module and optimizer."""
    torch.manual_seed(0)
    cls, options = getattr(torch.optim, name), {"lr": 0.01}
    module = mlp()
    other = spread(deepcopy(module), style)
    if style == "replicate":
        spread(module, style)
    optimizer, beside = cls(module.parameters(), **options), eager_optimizer(other, style, cls, options)
    run = compiled(plain_step, style)
    torch.manual_seed(dist.get_rank())
    for i in range(6):
        batch = own_batch()
        (run if i % 2 == 0 or i == 1 else plain_step)(module, optimizer, batch)
        plain_step(other, beside, batch)
        same_modules(module, other)
        same_states(optimizer, beside, list(module.parameters()), list(other.parameters()))
    assert run.compiles == 1


@pytest.mark.parametrize(
    ("style", "name"),
    [
        ("replicate", "SGD"),
        ("fully_shard", "SGD"),
        ("fully_shard", "Adam"),
    ],
)
def test_eager_steps_between_compiled_ones(world, style, name):
    world(alternating, 2, style=style, name=name)


def saved(style, folder, steps, loads, ranks, as_sharded=False):
    """Train; the state is that of a run which never stopped."""
    torch.manual_seed(0)
    module = mlp()
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=0.1)
    if as_sharded:
        if style == "fully_shard":
            spread(module, style)
        optimizer = st.ShardedOptimizer(module, torch.optim.AdamW, lr=0.1)
    run = compiled(plain_step, style)
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        batch = torch.randn(12, 5, generator=generator), torch.randn(12, 3, generator=generator)
        batch = tuple(x.chunk(ranks)[dist.get_rank()].clone() for x in batch)
        if loads and step < 2:
            if step == 1:
                run(module, optimizer, batch)
                st.load(folder, model=module, optimizer=optimizer)
            continue
        run(module, optimizer, batch)
        if step == 1 and not loads:
            st.save(folder, model=module, optimizer=optimizer)
    return {name: whole(x).detach() for name, x in module.state_dict().items()}


@styles
@pytest.mark.parametrize(("first", "second"), [(2, 3)] + [(3, 1), (4, 2), (1, 4)] * FULL)
def test_saved_and_loaded_in_another_world(world, tmp_path, style, first, second):
    """With an optimizer of the library, whose state has names."""
    here = {"style": style, "folder": str(tmp_path / "run"), "as_sharded": True}
    straight = world(saved, first, steps=4, loads=False, ranks=first, **here)[0]
    resumed = world(saved, second, steps=4, loads=True, ranks=second, **here)[0]
    for name, x in straight.items():
        torch.testing.assert_close(resumed[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_saved_with_a_torch_optimizer(world, tmp_path, style):
    here = {"style": style, "folder": str(tmp_path / "run")}
    straight = world(saved, 2, steps=4, loads=False, ranks=2, **here)[0]
    resumed = world(saved, 3, steps=4, loads=True, ranks=3, **here)[0]
    for name, x in straight.items():
        torch.testing.assert_close(resumed[name], x, rtol=1e-4, atol=1e-5)


def state_dicts(style):
    """The state of the optimizer, taken and loaded by torch's own methods between compiled steps."""
    module, optimizer, _, _, run = train_both(style, cls=torch.optim.Adam, steps=2)
    kept = deepcopy(optimizer.state_dict())
    weights = {name: x.clone() for name, x in module.state_dict().items()}
    batch = own_batch()
    run(module, optimizer, batch)
    first = {name: whole(x).clone() for name, x in module.state_dict().items()}
    module.load_state_dict(weights)
    optimizer.load_state_dict(kept)
    run(module, optimizer, batch)
    for name, x in module.state_dict().items():
        assert torch.equal(whole(x), first[name]), name
    assert run.compiles == 1


@pytest.mark.parametrize(
    "style",
    [
        "replicate",
        "fully_shard",
    ],
)
def test_state_dicts_between_steps(world, style):
    world(state_dicts, 2, style=style)


def shards(style):
    module, optimizer, *_ = train_both("fully_shard", cls=torch.optim.Adam, steps=1)
    for p in module.parameters():
        assert isinstance(p, st.ShardedTensor)
        assert isinstance(p.grad, st.ShardedTensor)
        state = optimizer.state[p]
        assert isinstance(state["exp_avg"], st.ShardedTensor)
        torch.testing.assert_close(whole(state["exp_avg"]), 0.1 * whole(p.grad))
    st.unshard_module(module)
    assert not any(isinstance(p, st.ShardedTensor) for p in module.parameters())


def test_parameters_stay_sharded_tensors(world):
    world(shards, 2, style="fully_shard")


# -- programs


def kept_programs(style, folder):
    torch.manual_seed(0)
    made = []
    for _ in range(2):
        module = mlp()
        run = compiled(plain_step, style, backend="inductor", cache_dir=folder)
        run(module, torch.optim.SGD(module.parameters(), lr=0.1), own_batch())
        made.append((run.compiles, run.lowered))
    return made


@needs_a_compiler
def test_a_second_start_compiles_nothing(world, tmp_path):
    for found in world(kept_programs, 2, timeout_s=300, style="replicate", folder=str(tmp_path)):
        assert found[0][0] == found[1][0] == 1
        assert found[0][1] > 0 == found[1][1]


def kinds_of_calls(style):
    torch.manual_seed(0)
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = compiled(plain_step, style)
    counts = []
    for rows in (4, 4, 2, 4, 2):
        run(module, optimizer, own_batch(rows))
        counts.append(run.compiles)
    module.eval()
    run(module, optimizer, own_batch(4))
    counts.append(run.compiles)
    module.train()
    module[0].bias.requires_grad_(False)
    run(module, optimizer, own_batch(4))
    return [*counts, run.compiles]


@styles
def test_a_program_for_each_kind_of_call(world, style):
    assert world(kinds_of_calls, 2, style=style) == [[1, 1, 2, 2, 2, 3, 4]] * 2
