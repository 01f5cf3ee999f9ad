"""Gradients of sharded tensors: the calls and numbers of plain tensors, hooks that see ShardedTensors."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import pytest
import torch
from harness import device, every_size
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import shardtensor as st
from shardtensor.comm.process_group import as_group

SPECS = ("[tp balanced, -]", "[-, tp balanced]", "flat(tp)", "replicate")


def whole() -> torch.Tensor:
    return torch.arange(15.0, device=device()).view(5, 3)


def sharded(spec: str, requires_grad: bool = True) -> st.ShardedTensor:
    return st.distribute(whole(), spec, requires_grad=requires_grad)


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def check_calls() -> None:
    start = torch.arange(15.0, device=device()).view(5, 3) - 4
    for spec in SPECS:
        x, dense = sharded(spec), whole().requires_grad_()
        want = torch.autograd.grad(dense * dense, dense, start)[0]
        for gradient in (start, st.distribute(start, spec), st.distribute(start, "[-, tp balanced]")):
            (found,) = torch.autograd.grad(x * x, [x], gradient)
            assert isinstance(found, st.ShardedTensor) and torch.equal(found.full_tensor(), want)
            assert x.grad is None
            y = x * x
            y.backward(gradient if isinstance(y, st.ShardedTensor) else full(gradient))
            torch.autograd.backward([x * x], [gradient], inputs=[x])
            torch.autograd.backward(full(x * x), start, inputs=x)
            assert torch.equal(x.grad.full_tensor(), 3 * want) and x.grad is x.grad
            x.grad = None
        plain = torch.ones(5, 3, device=device(), requires_grad=True)
        grads = torch.autograd.grad(full(x * plain), (x, plain), start)
        assert torch.equal(grads[0].full_tensor(), start) and torch.equal(grads[1], start * whole())
        (first,) = torch.autograd.grad(x * x * x, x, torch.ones_like(start), create_graph=True)
        (second,) = torch.autograd.grad(first, x, torch.ones_like(start))
        assert torch.equal(second.full_tensor(), 6 * whole())
        unused = sharded(spec)
        assert torch.autograd.grad(x * 2, (x, unused), start, allow_unused=True)[1] is None
        zero = torch.autograd.grad(x * 2, unused, start, allow_unused=True, materialize_grads=True)[0]
        assert torch.equal(zero.full_tensor(), torch.zeros_like(start))
        for call in ((x * 2).backward, lambda: torch.autograd.grad(x * 2, x)):  # noqa: B023
            with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
                call()
        with pytest.raises(RuntimeError, match=r"Mismatch in shape: grad_output\[0\] has a shape of"):
            (x * 2).backward(torch.ones(3, device=device()))
    one = st.distribute(torch.ones(1, 1, device=device()), "[tp balanced, -]", requires_grad=True)
    (one * 3).backward()
    assert one.grad.full_tensor().item() == 3


@every_size
def test_backward_and_grad_give_the_dense_gradients(world, size):
    world(check_calls, size)


def check_state() -> None:
    for spec in SPECS:
        x = sharded(spec)
        y = x * 2
        assert x.is_leaf and x.grad_fn is None and x.grad is None and x.requires_grad
        assert not y.is_leaf and y.grad_fn is not None and y.requires_grad and not y.retains_grad
        y.retain_grad()
        x.retain_grad()
        (y * 3).backward(torch.ones_like(whole()))
        assert torch.equal(full(y.grad), torch.full_like(whole(), 3))
        given = sharded(spec, requires_grad=False)
        x.grad = given
        assert x.grad is given
        x.grad = whole()
        assert torch.equal(x.grad.full_tensor(), whole()) and x.grad._local is not x._local
        with pytest.raises(RuntimeError, match="assigned grad has data of a different size"):
            x.grad = torch.ones(3, device=device())
        assert torch.equal(x.grad.full_tensor(), whole())
        z = (x * 2).detach_()
        assert not z.requires_grad and z.is_leaf and z.requires_grad_() is z and z.requires_grad
        z.requires_grad = False
        assert not z.requires_grad and not torch._C.TensorBase.requires_grad.__get__(z)
        version = z._version
        with torch.no_grad():
            z.add_(1)
        assert z._version > version
        data = x.data
        assert not data.requires_grad and data._local.data_ptr() == x._local.data_ptr()
        leaf = x._local
        x.data = x.data.double()
        assert x._local is leaf and x.dtype == torch.float64 and x.requires_grad
        with pytest.raises(st.RuleError, match="a plain tensor cannot become the data"):
            x.data = whole()


@every_size
def test_leaf_grad_and_data_follow_torch(world, size):
    world(check_state, size)


def check_hooks() -> None:
    for spec in SPECS:
        x = sharded(spec)
        seen = []
        first = x.register_hook(lambda g, seen=seen: seen.append(g) or g * 2)
        second = x.register_hook(lambda g: g.full_tensor() + 1)
        post = x.register_post_accumulate_grad_hook(seen.append)
        (x * 1).backward(torch.ones_like(whole()))
        assert isinstance(seen[0], st.ShardedTensor) and seen[0].shape == x.shape and seen[1] is x
        assert torch.equal(x.grad.full_tensor(), torch.full_like(whole(), 3))
        for handle in (first, second, post):
            handle.remove()
        x.grad = None
        (x * 1).backward(torch.ones_like(whole()))
        assert torch.equal(x.grad.full_tensor(), torch.ones_like(whole())) and len(seen) == 2
        y = x * 2
        y.register_hook(lambda g: g * 10)
        assert torch.equal(torch.autograd.grad(y, x, whole())[0].full_tensor(), whole() * 20)


@every_size
def test_hooks_get_sharded_tensors_and_the_very_parameter(world, size):
    world(check_hooks, size)


def test_nothing_needs_the_collector_but_a_hook_that_holds_its_parameter():
    gc.collect()
    gc.disable()
    try:
        x = st.distribute(torch.ones(4), "[tp]", requires_grad=True)
        x.register_hook(lambda g: None)
        (x * 2).backward(torch.ones(4))
        assert x.grad is not None
        leaf = weakref.ref(x._local)
        del x
        assert leaf() is None
        x = st.distribute(torch.ones(4), "[tp]", requires_grad=True)
        x.register_post_accumulate_grad_hook(lambda p: None)
        (x * 2).backward(torch.ones(4))
        leaf = weakref.ref(x._local)
        del x
        gc.collect()
        assert leaf() is None
    finally:
        gc.enable()


class Block(nn.Module):
    """Column- then row-parallel, or one matrix whose output stays cut."""

    def __init__(self, ends_cut: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(3, 5, device=device()), nn.Linear(5, 3, device=device())
        self.ends_cut = ends_cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        return hidden if self.ends_cut else self.down(hidden)


def check_checkpoint() -> None:
    for ends_cut in (False, True):
        for given in ("plain", "[tp balanced, -]"):
            results = []
            for use_reentrant in (None, False, True):
                block = Block(ends_cut)
                st.shard_parameter(block, "up.weight", "[tp balanced, -]")
                st.shard_parameter(block, "down.weight", "[-, tp balanced]")
                x = whole().requires_grad_() if given == "plain" else sharded(given)
                y = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
                total = full(y)
                (total * total).sum().backward()
                grads = [p.grad for p in (x, *block.parameters()) if p.grad is not None]
                results.append([total, *map(full, grads)])
            for other in results[1:]:
                assert len(other) == len(results[0])
                for a, b in zip(results[0], other, strict=True):
                    torch.testing.assert_close(a, b, msg=lambda m: f"{ends_cut} {given} {m}")  # noqa: B023


def test_checkpointing_of_both_kinds_gives_the_same_gradients(world):
    world(check_checkpoint, 1)
    world(check_checkpoint, 3)


def check_averaged() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(3, 5, device=device())
    cut = nn.Linear(3, 5, device=device())
    cut.load_state_dict(dense.state_dict())
    st.shard_parameter(cut, "weight", "[tp balanced, -]")
    kinds = ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"avg_fn": lambda a, p, n: a + (p - a) / (n + 1)})
    for kind in kinds:
        averages = AveragedModel(dense, **kind), AveragedModel(cut, **kind)
        for _ in range(3):
            with torch.no_grad():
                for p in (*dense.parameters(), *cut.parameters()):
                    p.mul_(2).add_(1)
            averages[0].update_parameters(dense)
            averages[1].update_parameters(cut)
        found = averages[1].module.weight
        assert isinstance(found, st.ShardedTensor)
        torch.testing.assert_close(found.full_tensor(), averages[0].module.weight.detach())


def test_averaged_models(world):
    world(check_averaged, 2)


RESULTS = {
    "sharded": lambda x: x * 2,
    "whole": lambda x: x.full_tensor() * 1 if isinstance(x, st.ShardedTensor) else x * 1,
    "gathered": lambda x: x.full_tensor() if isinstance(x, st.ShardedTensor) else x * 1,
    "summed": lambda x: x.sum(0),
    "number": lambda x: (x * 2).sum(),
}
NEEDS_WHOLE = "a sharded gradient for a plain tensor: y.backward(gradient) needs gradient.full_tensor()"
GIVEN = ("[tp balanced, -]", "[-, tp balanced]", "flat(tp)", "[tp sizes(0, 5, 0), -]", "replicate")


def is_refused(y: torch.Tensor, gradient: st.ShardedTensor) -> bool:
    try:
        y.backward(gradient)
    except st.RuleError as error:
        return NEEDS_WHOLE in str(error)
    return False


def check_sharded_gradients() -> None:
    """The dense gradients, or the same error on every rank, never a collective of other slices on each rank."""
    values = torch.arange(15.0, device=device()).view(5, 3) - 4
    for name, act in RESULTS.items():
        dense = values.clone().requires_grad_()
        y = act(dense)
        gradient = torch.arange(1.0, y.numel() + 1, device=device()).view(y.shape)
        y.backward(gradient)
        for of_x, of_gradient in product((*GIVEN, "[-, -] partial(tp)"), GIVEN):
            if "partial" in of_x:
                own = values.clone() if not as_group().rank else torch.zeros_like(values)
                x = st.init_from_local_tensor(own, of_x, (5, 3)).requires_grad_()
            else:
                x = st.distribute(values.clone(), of_x, requires_grad=True)
            spec = of_gradient if y.dim() == 2 else "[tp balanced]" if y.dim() else "replicate"
            given = st.distribute(gradient, spec)
            if is_refused(act(x), given):  # what gave the plain result is no collective
                assert name == "whole" or "partial" in of_x or of_x == "replicate"
                act(x).backward(given.full_tensor())
            assert torch.equal(full(x.grad), dense.grad), (name, of_x, of_gradient)


def test_a_sharded_gradient_is_the_whole_one_or_refused(world):
    world(check_sharded_gradients, 3)
