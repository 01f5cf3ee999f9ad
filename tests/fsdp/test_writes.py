"""Whatever writes a parameter through a public handle shows in the next forward, and never silently in a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp.twins import WORLDS, backward, ids_of, loss_of, net, same_values, shard, train, twins
from harness import FULL
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardtensor as st
from shardtensor.fsdp.autograd import Versions


def _steps(cls: Any, **options: Any) -> Callable[[nn.Module], None]:
    def write(model: nn.Module) -> None:
        optimizer = cls(model.parameters(), lr=0.05, **options)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()

    return write


def _sharded_steps(**options: Any) -> Callable[[nn.Module], None]:
    def write(model: nn.Module) -> None:
        optimizer = st.ShardedOptimizer(model, torch.optim.AdamW, lr=0.05, **options)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()

    return write


@torch.no_grad()
def _each(model: nn.Module, change: Callable[[Any, torch.Tensor], Any]) -> None:
    for i, param in enumerate(model.parameters()):
        change(param, torch.linspace(-1, 1, param.numel(), dtype=param.dtype).view(param.shape) * (i + 1) / 64)


@torch.no_grad()
def _foreach(model: nn.Module) -> None:
    torch._foreach_lerp_(list(model.parameters()), [torch.ones_like(p) for p in model.parameters()], 0.25)


def _set_data(param: Any, new: torch.Tensor) -> None:
    value = torch.zeros_like(param)
    value.copy_(new)
    param.data = value


def _init(model: nn.Module) -> None:
    for i, param in enumerate(model.parameters()):
        torch.manual_seed(i)
        nn.init.normal_(param, std=0.2)


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "fused AdamW": _steps(torch.optim.AdamW, fused=True),
    "foreach AdamW": _steps(torch.optim.AdamW, foreach=True),
    "for-loop AdamW": _steps(torch.optim.AdamW, foreach=False),
    "fused SGD": _steps(torch.optim.SGD, fused=True, momentum=0.9),
    "fused Adagrad": _steps(torch.optim.Adagrad, fused=True),
    "ShardedOptimizer": _sharded_steps(),
    "fused ShardedOptimizer": _sharded_steps(fused=True),
    "copy_": lambda m: _each(m, lambda p, new: p.copy_(new)),
    "data.copy_": lambda m: _each(m, lambda p, new: p.data.copy_(new)),
    "data.mul_": lambda m: _each(m, lambda p, new: p.data.mul_(0.9)),
    "data =": lambda m: _each(m, _set_data),
    "detach().copy_": lambda m: _each(m, lambda p, new: p.detach().copy_(new)),
    "add_": lambda m: _each(m, lambda p, new: p.add_(new)),
    "foreach": _foreach,
    "nn.init": _init,
    "load_state_dict": lambda m: m.load_state_dict(net(seed=3).state_dict()) and None,
    "state_dict": lambda m: [v.mul_(0.9) for v in m.state_dict().values()] and None,
}

BETWEEN = [("at once", True), ("after a forward", None), ("after an eval", True)]
if FULL:
    BETWEEN += [("at once", None), ("after a forward", True), ("after an eval", None)]


@pytest.mark.parametrize(
    ("world", "name"),
    [(4, name) for name in WRITES] + [(1, name) for name in WRITES if FULL or name in ("fused SGD", "add_", "data =")],
)
def test_a_write_shows_in_the_next_forward(world: int, name: str) -> None:
    write = WRITES[name]

    def body() -> None:
        dense, sharded = twins()
        train(dense, sharded, [], 1)
        for model in (dense, sharded):
            write(model)
            model.zero_grad()
        same_values(dense, sharded)
        whole, _ = ids_of(0)
        with torch.no_grad():
            torch.testing.assert_close(sharded(whole), dense(whole))
        write(dense), write(sharded)
        for model in (dense, sharded):
            model.zero_grad()
        backward(dense, sharded, 1)
        with torch.inference_mode():
            torch.testing.assert_close(sharded(whole), dense(whole))
        backward(dense, sharded, 2)

    st.simulate(world, body)


@pytest.mark.parametrize(("again", "reshard"), BETWEEN)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_forward_and_backward(name: str, again: str, reshard: bool | None) -> None:
    """A backward gives the gradient at the values of its forward, or an error on all ranks: no third thing."""
    write = WRITES[name]

    def body() -> bool:
        model = shard(net(), reshard_after_forward=reshard)
        _, part = ids_of(0)
        loss_of(model(part)).backward()
        want = [p.grad.full_tensor() for p in model.parameters()]
        model.zero_grad()
        loss = loss_of(model(part))
        write(model)
        model.zero_grad()
        if again == "after a forward":
            loss_of(model(part)).backward()
            model.zero_grad()
        elif again == "after an eval":
            with torch.no_grad():
                model(part)
        try:
            loss.backward()
        except RuntimeError as error:  # torch's own, of a buffer
            if "between a forward and its backward" not in str(error) and "modified by an inplace" not in str(error):
                raise
            model.zero_grad()
            loss_of(model(part)).backward()  # and goes on
            return False
        for p, value in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), value)
        return True

    assert len(set(st.simulate(2, body))) == 1


def test_moving_average() -> None:
    def body() -> None:
        dense, sharded = twins()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (dense, sharded)]
        averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (dense, sharded)]
        for step in range(3):
            train(dense, sharded, optimizers, 1, first=step)
            averages[0].update_parameters(dense)
            averages[1].update_parameters(sharded)
            same_values(averages[0].module, averages[1].module)
        whole, _ = ids_of(0)
        with torch.no_grad():
            torch.testing.assert_close(averages[1](whole), averages[0](whole))
        train(dense, sharded, optimizers, 1, first=7)

    for world in WORLDS:
        st.simulate(world, body)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_one_unit_written_in_its_own_backward() -> None:
    """An optimizer in a post-accumulate hook writes while backward goes on, and spoils nothing."""

    def body() -> None:
        dense, sharded = twins()
        for model in (dense, sharded):
            for p in model.parameters():
                optimizer = torch.optim.SGD([p], lr=0.1)
                p.register_post_accumulate_grad_hook(lambda q, o=optimizer: _step(o))
        for step in range(3):
            whole, part = ids_of(step)
            loss_of(dense(whole)).backward()
            loss_of(sharded(part)).backward()
            same_values(dense, sharded)

    for world in (1, 2, 4):
        st.simulate(world, body)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_a_saved_tensor_may_be_a_parameter_or_its_transpose(sizes: tuple[int, int]) -> None:
    class State:
        versions: Any = None
        title = "a module"

    for part in (torch.ones(2, 3), torch.ones(3, 2)):
        versions = Versions(State(), [part])
        assert part._version == versions.absent
        assert versions.has_one_of(sizes)
        assert not versions.has_one_of((2, 2)) and not versions.has_one_of((2, 3, 1))
