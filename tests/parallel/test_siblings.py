"""Products of one input share its one collective, which runs beside their weights' gradients; no number changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
from harness import device, every_size
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardtensor as st
from shardtensor.comm.group import Pending
from shardtensor.comm.process_group import as_group
from shardtensor.ops import linear
from shardtensor.parallel import flow_hooks
from shardtensor.sim.traffic import CountingGroup

WIDTH, TOKENS = 5, 12


@pytest.fixture(autouse=True)
def every_sum_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "BESIDE_BYTES", 0)


class Mixer(nn.Module):
    """Three products of one input, and one of what comes of them; polynomials, so that integers stay integers."""

    def __init__(self, hidden: int = 6, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, hidden, bias=bias) for _ in range(3))
        self.o = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) * self.k(x) + self.v(x))


def whole_numbers(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator))
    return module.to(device(), torch.float64)


def plan_of(stream: str) -> dict[str, Any]:
    enters = "replicate" if stream == "replicate" else f"{stream} -> replicate"
    return {
        "in": enters,
        "{q,k,v}": st.colwise(balanced=True),
        "o": st.rowwise(balanced=True, to=stream),
    }


def pair(
    dense: nn.Module, stream: str = "replicate", prepare: Callable[[Any], Any] = lambda module: None
) -> list[tuple[Any, torch.Tensor]]:
    """The module as it is and sharded, each with this rank's part of one input."""
    whole_numbers(dense)
    prepare(dense)
    module = st.shard_module(copy.deepcopy(dense), plan_of(stream))
    x = torch.arange(TOKENS * WIDTH, dtype=torch.float64, device=device()).view(1, TOKENS, WIDTH) % 7 - 3
    group = as_group()
    mine = x if stream == "replicate" else x.tensor_split(group.size, 1)[group.index]
    return [(dense, x.clone().requires_grad_()), (module, mine.clone().requires_grad_())]


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def grads_of(module: nn.Module) -> dict[str, Any]:
    return {name: whole(param.grad) for name, param in module.named_parameters()}


def own(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of the dense input's gradient."""
    group = as_group()
    return grad if grad.shape == like.shape else grad.tensor_split(group.size, 1)[group.index]


def same(step: Callable[[Any, torch.Tensor], Any], *args: Any, **options: Any) -> None:
    """`step` leaves and returns the same on both."""
    (dense, x), (module, part) = pair(*args, **options)
    wanted, found = step(dense, x), step(module, part)
    torch.testing.assert_close(grads_of(module), grads_of(dense), rtol=0, atol=0)
    if x.grad is not None:
        torch.testing.assert_close(part.grad, own(x.grad, part), rtol=0, atol=0)
    if isinstance(wanted, torch.Tensor):
        wanted = own(wanted, found)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def backward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = module(x)
    y.square().sum().backward()
    return y.detach()


def equals_dense(hidden: int, stream: str, bias: bool) -> None:
    same(backward, Mixer(hidden, bias), stream)


@pytest.mark.worlds("sim")
@every_size
@pytest.mark.parametrize(
    ("hidden", "stream", "bias"),
    [(8, "replicate", True), (6, "replicate", False), (2, "replicate", True), (8, "[-, tp, ...]", False),
     (7, "[-, tp balanced, ...]", True), (2, "[-, tp, ...]", True)],
)  # fmt: skip
def test_numbers_are_the_dense_ones(world, size, hidden, stream, bias):
    world(equals_dense, size, hidden=hidden, stream=stream, bias=bias)


def over_processes() -> None:
    with mock.patch.object(linear, "BESIDE_BYTES", 0):  # of this process
        for stream in ("replicate", "[-, tp, ...]", "[-, tp balanced, ...]"):
            same(backward, Mixer(7), stream)


def test_numbers_are_the_dense_ones_over_processes(world):
    world(over_processes, 2)


# -- what people do with a graph ---------------------------------------------------------------------------------------


def frozen(*names: str) -> Callable[[nn.Module], None]:
    def prepare(module: nn.Module) -> None:
        for name in names:
            module.get_submodule(name).requires_grad_(False)

    return prepare


def tied(module: Any) -> None:
    module.k.weight = module.q.weight


def of_constants(module: nn.Module, x: torch.Tensor) -> None:
    backward(module, x.detach())


def kept(module: nn.Module, x: torch.Tensor) -> None:
    loss = module(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def again_after_an_error(module: Any, x: torch.Tensor) -> None:
    """One that comes after the gradient of some products is known, and before the shared sum."""
    seen = []

    def fail(module: nn.Module, args: Any, y: torch.Tensor) -> None:
        def raise_once(grad: torch.Tensor) -> None:
            seen.append(grad)
            if len(seen) == 1:
                raise KeyError("once")

        y.register_hook(raise_once)

    handle = module.q.register_forward_hook(fail)  # the last product whose gradient comes
    loss = module(x).square().sum()
    with pytest.raises(KeyError, match="once"):
        loss.backward(retain_graph=True)
    module.zero_grad()
    loss.backward()
    handle.remove()


def checkpointed(reenters: bool) -> Any:
    def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(module, x, use_reentrant=reenters)
        y.square().sum().backward()
        return y.detach()

    return step


class CheckpointedProduct(Mixer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = checkpoint(self.k, x, use_reentrant=False)
        return self.o(self.q(x) * k + checkpoint(self.v, x, use_reentrant=True))


def asked(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """autograd.grad for some of it leaves no ``.grad``."""
    loss = module(x).square().sum()
    (of_x,) = torch.autograd.grad(loss, [x], retain_graph=True)
    of_weights = torch.autograd.grad(loss, [module.q.weight, module.v.bias], retain_graph=True)
    loss.backward(inputs=[module.k.weight])
    assert module.q.weight.grad is None and x.grad is None
    x.grad = of_x  # to be compared as such
    return [whole(grad) for grad in of_weights]


def hooked(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Hooks are called once each, with the whole sum."""
    found: list[torch.Tensor] = []
    module.q.weight.register_hook(lambda grad: found.append(whole(grad).clone()))
    module.k.weight.register_hook(lambda grad: grad * 2)
    module.v.weight.register_post_accumulate_grad_hook(lambda weight: found.append(whole(weight.grad).clone()))
    backward(module, x)
    assert len(found) == 2
    return sorted(found, key=lambda t: t.sum().item())


def twice(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = module(module(x) * 2 - x)
    y.sum().backward()
    module(x).sum().backward()  # on top of it
    return y.detach()


class ManyUses(Mixer):
    """A product that is made twice, one of something else, one not at all, and other things done with the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) * self.q(x) + self.q(2 * x - 1) + self.k(x))


class ChangesItsInput(Mixer):
    """In place, before its products read it: torch lets a stream be changed, which was gathered for the module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 1 * x if x.is_leaf or x._is_view() else x
        return super().forward(x.mul_(2))


class WithoutOne(Mixer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) * self.v(x))


def unused_with_hook(module: Any, x: torch.Tensor) -> None:
    module.k.weight.register_hook(lambda grad: grad * 2)
    backward(module, x)
    assert module.k.weight.grad is None


def twice_derived(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    (grad,) = torch.autograd.grad(module(x).square().sum(), [x], create_graph=True)
    grad.square().sum().backward()
    return []


def in_a_copy(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    other = copy.deepcopy(module)
    y = backward(other, x)
    assert all(param.grad is None for param in module.parameters())
    for param, copied in zip(module.parameters(), other.parameters(), strict=True):
        param.grad = copied.grad
    return y


SITUATIONS: dict[str, tuple[Any, ...]] = {
    "one weight frozen": (backward, Mixer, frozen("k")),
    "all weights frozen": (backward, Mixer, frozen("q", "k", "v")),
    "an input without gradient": (of_constants, Mixer),
    "a graph that is kept": (kept, Mixer),
    "an error on the way": (again_after_an_error, Mixer),
    "checkpoint": (checkpointed(False), Mixer),
    "reentrant checkpoint": (checkpointed(True), Mixer),
    "checkpoint around products": (backward, CheckpointedProduct),
    "some gradients asked for": (asked, Mixer),
    "hooks": (hooked, Mixer),
    "tied weights": (backward, Mixer, tied),
    "several uses": (twice, Mixer),
    "several uses of one product": (backward, ManyUses),
    "an unused one": (unused_with_hook, WithoutOne),
    "an input that is changed": (backward, ChangesItsInput),
    "gradients of gradients": (twice_derived, Mixer),
    "a copy of the module": (in_a_copy, Mixer),
}


def in_situation(name: str, stream: str) -> None:
    step, make, *prepare = SITUATIONS[name]
    same(step, make(), stream, *prepare)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("stream", ["replicate", "[-, tp balanced, ...]"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_whatever_is_done_with_the_graph(world, name, stream):
    world(in_situation, 2, name=name, stream=stream)


def mixed_precision() -> None:
    _, (module, x) = pair(Mixer())
    module, x = module.float(), x.detach().float().requires_grad_()
    plain, other = copy.deepcopy(module), x.detach().clone().requires_grad_()
    for each, value in ((module, x), (plain, other)):
        least = 1 << 40 if each is plain else linear.BESIDE_BYTES
        with patch.object(linear, "BESIDE_BYTES", least), torch.autocast(device().type, torch.bfloat16):
            y = each(value)
        y.float().square().sum().backward()
    torch.testing.assert_close(grads_of(module), grads_of(plain), rtol=0, atol=0)
    torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=0)


@pytest.mark.worlds("sim")
def test_products_that_autocast_casts_are_ordinary_ones(world):
    world(mixed_precision, 2)


# -- what runs when ----------------------------------------------------------------------------------------------------


class Told(CountingGroup):
    """Says when a collective is started, and when it is waited for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(0, range(2), lambda name, *_: events.append(name))
        self.events = events

    def _make_subgroup(self, ranks: tuple[int, ...]) -> Any:
        return self

    def all_reduce_async(self, t: torch.Tensor, op: str = "sum") -> Pending:
        return Waited(super().all_reduce_async(t, op), self.events)

    def reduce_scatter_async(self, flat: torch.Tensor, counts: Any = None) -> Pending:
        return Waited(super().reduce_scatter_async(flat, counts), self.events)


class Waited:
    def __init__(self, pending: Pending, events: list[str]) -> None:
        self.pending, self.events = pending, events

    def wait(self) -> torch.Tensor:
        self.events.append("wait")
        return self.pending.wait()


class Products(TorchDispatchMode):
    """Says which products are made: of an input's gradient, or of a weight's."""

    def __init__(self, events: list[str], tokens: int) -> None:
        super().__init__()
        self.events, self.tokens = events, tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.events.append("of the input" if found.shape[0] == self.tokens else "of a weight")
        return found


@pytest.mark.parametrize(
    ("stream", "collective"), [("replicate", "all_reduce"), ("[-, tp, ...]", "reduce_scatter")], ids=["copy", "stream"]
)
def test_the_sum_starts_before_the_gradients_of_the_weights_and_is_met_after_them(stream, collective):
    events: list[str] = []
    plan = plan_of(stream) | {"o": st.rowwise(balanced=True)}
    module = st.shard_module(whole_numbers(Mixer()), plan, process_group=Told(events))
    x = torch.ones(1, TOKENS if stream == "replicate" else TOKENS // 2, WIDTH, dtype=torch.float64, requires_grad=True)
    y = module(x.to(device()))
    events.clear()
    with Products(events, TOKENS):
        y.sum().backward()
    row_parallel, shared = events[:2], events[2:]
    assert sorted(row_parallel) == ["of a weight", "of the input"]
    assert shared == [*["of the input"] * 3, collective, *["of a weight"] * 3, "wait"]


def test_the_products_of_a_small_input_are_ordinary_ones(monkeypatch):
    """To share costs the host more than it hides there."""
    monkeypatch.setattr(linear, "BESIDE_BYTES", 1 << 20)
    monkeypatch.delattr(flow_hooks, "share")
    events: list[str] = []
    module = st.shard_module(whole_numbers(Mixer()), plan_of("replicate"), process_group=Told(events))
    x = torch.ones(1, TOKENS, WIDTH, dtype=torch.float64, device=device(), requires_grad=True)
    events.clear()
    module(x).sum().backward()
    assert events == ["all_reduce", "all_reduce"]  # of the row-parallel product, and of the input's gradient
