"""Compiled steps beside the same steps run by `data_parallel` or `fully_shard`: what both must leave, bit for bit."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import FULL
from torch import nn

import shardtensor as st
from shardtensor.spmd import DataParallel, compile
from shardtensor.spmd.building import shard_layers

STYLES = ("replicate", "fully_shard")

needs_a_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler"
)


def in_turns(items: Iterable[Any]) -> list[Any]:
    """Items with both styles in a full run; else with one of them in turns, as parameters ``style, item``."""
    return [
        pytest.param(style, *item.values, marks=item.marks) if hasattr(item, "marks") else (style, item)
        for i, item in enumerate(items)
        for style in (STYLES if FULL else STYLES[i % 2 : i % 2 + 1])
    ]


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def plain_step(model: Any, optimizer: Any, batch: Any) -> Any:
    """The step of most tests: the mean square of what the model returns."""
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def mlp(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def own_batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 5), torch.randn(rows, 3)


def spread(module: nn.Module, style: str) -> nn.Module:
    """Make a module data parallel as the compiled step does, with the eager library."""
    if style == "replicate":
        return st.data_parallel(module)
    shard_layers(module, None)
    return module


def eager_optimizer(module: nn.Module, style: str, cls: Any, options: dict[str, Any]) -> Any:
    trained = [(name, p) for name, p in module.named_parameters()]
    return (
        cls([p for _, p in trained], **options)
        if style == "replicate"
        else st.ShardedOptimizer(trained, cls, **options)
    )


def compiled(step: Callable[..., Any], style: str, **options: Any) -> Any:
    made = {key: options.pop(key) for key in ("backend", "cache_dir", "graphed") if key in options}
    return compile(parallel_mode=DataParallel(style, **options), **{"backend": "eager"} | made)(step)


def same_tensors(a: Any, b: Any, what: str, exact: bool) -> None:
    a, b = whole(a), whole(b)
    if exact:
        assert torch.equal(a, b), f"{what}: {(a - b).abs().max().item():.1e}"
    else:
        torch.testing.assert_close(a, b, msg=lambda text: f"{what}: {text}")


def same_modules(a: nn.Module, b: nn.Module, *, exact: bool = True, grads: bool = True) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        same_tensors(p.detach(), q.detach(), name, exact)
        if grads:
            assert (p.grad is None) == (q.grad is None), f"the gradient of {name}: {p.grad} and {q.grad}"
            if p.grad is not None:
                same_tensors(p.grad, q.grad, f"the gradient of {name}", exact)
    for (name, x), y in zip(a.named_buffers(), b.buffers(), strict=True):
        same_tensors(x, y, name, exact)


def same_states(a: Any, b: Any, params: Sequence[Any], others: Sequence[Any], *, exact: bool = True) -> None:
    for i, (p, q) in enumerate(zip(params, others, strict=True)):
        own, other = a.state.get(p, {}), b.state.get(q, {})
        assert set(own) == set(other), f"the state of parameter {i}"
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                same_tensors(value, other[key], f"{key} of parameter {i}", exact)
            else:
                assert value == other[key], f"{key} of parameter {i}"


def train_both(
    style: str,
    build: Callable[[], nn.Module] = mlp,
    batch: Callable[[], Any] = own_batch,
    step: Callable[..., Any] = plain_step,
    cls: Any = torch.optim.SGD,
    options: dict[str, Any] | None = None,
    *,
    steps: int = 3,
    exact: bool = True,
    between: Callable[[int, Any], None] = lambda i, optimizer: None,
    warm: int = 0,
    compiles: int = 1,
    eager_step: Callable[..., Any] | None = None,
    **mode: Any,
) -> Any:
    """Train a module by the compiled step and its copy by the eager library, on other batches on each rank.

    Args:
        between: called with both optimizers behind each step; before the first one, too, with number -1.
        warm: how many eager steps, on one device, the optimizer has made before; with equal batches on all ranks.
    """
    torch.manual_seed(0)
    module, options = build(), options or {"lr": 0.1}
    optimizer = cls(module.parameters(), **options)
    for _ in range(warm):
        step(module, optimizer, batch())
    other = copy.deepcopy(module)
    saved = copy.deepcopy(optimizer.state_dict())
    run = compiled(step, style, **mode)
    spread(other, style)
    other_optimizer = eager_optimizer(other, style, cls, options)
    if warm:
        load(other_optimizer, saved, style, module)
    for each in (optimizer, other_optimizer):
        between(-1, each)
    torch.manual_seed(1 + dist.get_rank())
    size = dist.get_world_size()
    for i in range(steps):
        given = batch()
        random = torch.get_rng_state()
        result = run(module, optimizer, copy.deepcopy(given))
        after = torch.get_rng_state()
        torch.set_rng_state(random)
        expected = (eager_step or step)(other, other_optimizer, given)
        assert torch.equal(after, torch.get_rng_state()), "the state of the generator"
        if isinstance(expected, torch.Tensor):
            mean = expected.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(result, mean / size, rtol=1e-4, atol=1e-5)
            assert not result.requires_grad
        between(i, optimizer)
        between(i, other_optimizer)
        same_modules(module, other, exact=exact)
        same_states(optimizer, other_optimizer, list(module.parameters()), list(other.parameters()), exact=exact)
    assert run.compiles == compiles
    return module, optimizer, other, other_optimizer, run


def same_as_eager(style: str, *args: Any, **kwargs: Any) -> None:
    """The law of most tests, as `train_both` says."""
    train_both(style, *args, **kwargs)


def load(optimizer: Any, saved: dict[str, Any], style: str, module: nn.Module) -> None:
    """Load the state of a torch optimizer; into a sharded one by names."""
    if style == "replicate":
        optimizer.load_state_dict(saved)
        return
    names = [name for name, _ in module.named_parameters()]
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
    optimizer.load_state_dict({"state": {names[i]: x for i, x in saved["state"].items()}, "param_groups": groups})
