"""Forwards and backwards in every order: several, nested, checkpointed, broken off, through inner modules."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp.counted import counted
from fsdp.twins import LOCAL, Block, Net, both_backward, ids_of, loss_of, same_gradients, same_values, twins
from harness import FULL, device
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx

sim, both = pytest.mark.worlds("sim"), pytest.mark.worlds("sim", "gloo")
worlds = pytest.mark.parametrize("size", [1, 2, 3])


def _case_b30(form):
    model = nn.Linear(2, 2, bias=False, device=device())
    x1, x2 = (torch.tensor([row], device=device()) for row in ([1.0, 2.0], [3.0, 4.0]))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model

        def forward(self, a, b):
            return self.layer(a), self.layer(b)

    outer = Twice()
    fully_shard(model)
    if form == "called twice":
        fully_shard(outer)
    with counted(outer) as seen:
        if form == "called twice":
            y1, y2 = outer(x1, x2)
        elif form == "plain":
            y1, y2 = model(x1), model(x2)
        else:
            y1, y2 = (checkpoint(model, x.requires_grad_(), use_reentrant=form == "reentrant") for x in (x1, x2))
        (y1.sum() + 2 * y2.sum()).backward()
    return model.weight.grad.full_tensor().tolist(), seen["reduce"]


@sim
@pytest.mark.parametrize("form", ["plain", "called twice", "checkpointed", "reentrant"])
def test_two_forwards_before_one_backward(world, form):
    reductions = 2 if form == "reentrant" else 1  # each reentrant checkpoint is a backward of its own
    assert world(_case_b30, 2, form=form) == [([[7.0, 10.0], [7.0, 10.0]], reductions)] * 2


def _retained():
    dense, model = twins(reshard_after_forward=True)
    for step in range(2):
        ids, mine = ids_of(step)
        for m, part in ((dense, ids), (model, mine)):
            loss = loss_of(m(part))
            loss.backward(retain_graph=True)
            (2 * loss).backward()
        same_gradients(dense, model)


@sim
@worlds
def test_retain_graph(world, size):
    world(_retained, size)


def _between(mode):
    dense, model = twins()
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (dense, model)]
    for step in range(3):
        with mode():
            ids, mine = ids_of(step + 50)
            group = as_group()
            expected = dense.eval()(ids)[group.index * LOCAL :][:LOCAL]
            torch.testing.assert_close(model.eval()(mine), expected, rtol=1e-5, atol=1e-5)
        dense.train()
        model.train()
        both_backward(dense, model, step)
        same_gradients(dense, model)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=step % 2 == 0)
    same_values(dense, model)


@sim
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_between_steps(world, size, mode):
    world(_between, size, mode=mode)


class Checkpointed(Net):
    """Recomputes: whole units, part of a unit, or several units at once."""

    kind, reentrant = "", False

    def forward(self, ids):
        x = self.embed(ids)
        if self.kind == "several":
            x = self._again(self._two, x)
            return self.head(self.blocks[2](x))
        for block in self.blocks:
            x = self._again(block, x) if self.kind == "whole" else block(x)
        return self.head(x)

    def _again(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def _two(self, x):
        return self.blocks[1](self.blocks[0](x))


class Partly(Block):
    reentrant = False

    def forward(self, x):
        mid = checkpoint(lambda x: torch.tanh(self.up(self.norm(x))), x, use_reentrant=self.reentrant)
        return x + self.down(mid)


def _checkpointed(kind, reentrant, reshard):
    def make():
        net = Checkpointed()
        net.kind, net.reentrant = kind, reentrant
        if kind == "part":
            for block in net.blocks:
                block.__class__, block.reentrant = Partly, reentrant
        return net

    dense, model = twins(make=make, reshard_after_forward=reshard)
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (dense, model)]
    for step in range(3):
        ids, mine = ids_of(step)
        for m, part in ((dense, ids), (model, mine)):
            if kind == "all":
                m.embed.weight.requires_grad_()
                loss = checkpoint(lambda ids, m=m: loss_of(m(ids)), part, use_reentrant=False)
            else:
                loss = loss_of(m(part))
            loss.backward()
        same_gradients(dense, model)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    same_values(dense, model)


@sim
@pytest.mark.parametrize("size", [1, 3] if FULL else [3])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["whole", "part", "several", "all"])
def test_checkpoints(world, size, kind, reentrant, reshard):
    world(_checkpointed, size, kind=kind, reentrant=reentrant, reshard=reshard)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Sequential(Block(), nn.Linear(5, 5))) for _ in range(2))
        self.head = nn.Linear(5, 7)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.blocks[0](x))  # one is called again


def _deep(reshard):
    torch.manual_seed(0)
    dense = Deep().to(device())
    model = copy.deepcopy(dense)
    for outer in model.blocks:
        fully_shard(outer[1][0], reshard_after_forward=reshard)
        fully_shard(outer[1], reshard_after_forward=reshard)
        fully_shard(outer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (dense, model)]
    for step in range(3):
        with counted(model) as seen:
            both_backward(dense, model, step)
        assert seen["reduce"] == 7
        same_gradients(dense, model)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    same_values(dense, model)


@sim
@worlds
@pytest.mark.parametrize("reshard", [None, True, False])
def test_nested_units_and_one_called_twice(world, size, reshard):
    world(_deep, size, reshard=reshard)


class Trips(Block):
    """Raises in forward or in backward when it is told to."""

    fails = ""

    def forward(self, x):
        if self.fails == "forward":
            raise ArithmeticError("in forward")
        y = super().forward(x)
        if self.fails == "backward":

            def trip(grad):
                raise ArithmeticError("in backward")

            y.register_hook(trip)
        return y


def _broken(where, reset):
    def make():
        net = Net()
        for block in net.blocks:
            block.__class__ = Trips
        return net

    dense, model = twins(make=make, reshard_after_forward=True)
    both_backward(dense, model)
    for at in range(3):
        model.blocks[at].fails = where
        with pytest.raises(ArithmeticError, match=where):
            loss_of(model(ids_of(at)[1])).backward()
        model.blocks[at].fails = ""
        assert all(isinstance(p, st.ShardedTensor) for p in model.parameters())
        if reset:
            model.reset_iter_state()
        dense.zero_grad()
        model.zero_grad()
        for step in range(2):
            both_backward(dense, model, step)
            same_gradients(dense, model)


@both
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reset", [True, False])
def test_what_raises_leaves_the_model_usable(world, where, reset):
    world(_broken, 2, where=where, reset=reset)


def _backward_after_broken():
    """A backward that follows a broken one, with no forward between them, is whole."""
    dense, model = twins(reshard_after_forward=True)
    both_backward(dense, model)
    dense.zero_grad()
    model.zero_grad()
    ids, mine = ids_of(1)
    good = loss_of(model(mine))
    bad = loss_of(model(mine))
    bad.register_hook(lambda grad: None)
    bad_graph = bad * 1

    def trip(grad):
        raise ArithmeticError("in backward")

    x = model.embed.weight._local
    handle = model.blocks[1]._fsdp_state.param_groups[0].unsharded_params[0].register_hook(trip)
    with pytest.raises(ArithmeticError):
        bad_graph.backward()
    handle.remove()
    model.zero_grad()
    good.backward()
    loss_of(dense(ids)).backward()
    same_gradients(dense, model)
    assert x is model.embed.weight._local


@sim
@worlds
def test_a_backward_after_a_broken_one(world, size):
    world(_backward_after_broken, size)


class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Net(depth=2), nn.Linear(7, 3)

    def forward(self, ids):
        return self.decoder(self.encoder(ids))


def _inner(order):
    torch.manual_seed(0)
    dense = Encoded().to(device())
    model = copy.deepcopy(dense)
    for block in model.encoder.blocks:
        fully_shard(block)
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model)
    for step, called in enumerate(order):
        for m, part in zip((dense, model), ids_of(step), strict=True):
            loss_of((m.encoder if called == "inner" else m)(part)).backward()
        same_gradients(dense, model)
        dense.zero_grad()
        model.zero_grad()
    ids, mine = ids_of(9)
    for m, part in ((dense, ids), (model, mine)):
        (loss_of(m.encoder(part)) + loss_of(m(part))).backward()
    same_gradients(dense, model)


@sim
@worlds
@pytest.mark.parametrize("first", ["inner", "whole"])
def test_an_inner_module_is_called_by_itself(world, size, first):
    second = "whole" if first == "inner" else "inner"
    world(_inner, size, order=[first, second, first, second, second])


class Generates(Net):
    def generate(self, ids, *, scale=1.0):
        """Another way through."""
        return self.head(self.blocks[0](self.embed(ids))) * scale


def _other_method():
    dense, model = twins(make=Generates)
    register_fsdp_forward_method(model, "generate")
    register_fsdp_forward_method(nn.Linear(1, 1), "nothing")
    share_comm_ctx([model, model.blocks[0]])
    assert model.generate.__name__ == "generate" and "way through" in model.generate.__doc__
    for step in range(3):
        ids, mine = ids_of(step)
        for m, part in ((dense, ids), (model, mine)):
            (m.generate(part, scale=2.0).logsumexp(-1).mean() + loss_of(m(part))).backward()
        same_gradients(dense, model)
    for wrong in ("no_such", "blocks_"):
        with pytest.raises(ValueError, match="has no method"):
            register_fsdp_forward_method(model, wrong)
    with pytest.raises(ValueError, match="Linear"):
        share_comm_ctx([model, model.head])


@sim
@pytest.mark.parametrize("size", [1, 2])
def test_forward_methods(world, size):
    world(_other_method, size)


def _methods_of_all():
    model = fully_shard(nn.Linear(2, 2, device=device()))
    assert isinstance(model, FSDPModule)
    event = torch.Event() if torch.cuda.is_available() else None
    model.set_post_optim_event(event)
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_reduce_scatter_unused_params(True)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(False)
    model(torch.ones(1, 2, device=device())).sum().backward()
    for wrong, error in ((True, TypeError), (1.5, TypeError), (0, ValueError)):
        with pytest.raises(error):
            model.set_reduce_scatter_max_input_buffers(wrong)
    return model.weight.grad.full_tensor().tolist()


@sim
@pytest.mark.parametrize("size", [1, 2])
def test_settings_that_change_no_result(world, size):
    assert world(_methods_of_all, size) == [[[1.0, 1.0], [1.0, 1.0]]] * size


class _PassedBy(torch.autograd.Function):
    """A product whose weight gets no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0].T, None


class _PartlyPassedBy(nn.Linear):
    def forward(self, x):
        first = x @ self.weight
        return first + checkpoint(lambda x: _PassedBy.apply(x, self.weight), x, use_reentrant=True)


def _passed_by():
    model = fully_shard(_PartlyPassedBy(3, 3, bias=False, device=device()))
    x = torch.ones(2, 3, device=device(), requires_grad=True)
    for _ in range(2):
        with counted(model) as seen:
            model(x).sum().backward()
        grad = model.weight.grad.full_tensor()
        assert torch.equal(grad, torch.full((3, 3), 2.0, device=device()))
        model.zero_grad()
    return seen["reduce"]


@sim
def test_a_checkpoint_without_gradients_for_the_unit_reduces_nothing(world):
    assert world(_passed_by, 2) == [1, 1]


class _Around(nn.Module):
    def __init__(self, inner, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.own, self.inner = nn.Linear(3, 3), inner

    def forward(self, x):
        return self.inner(self.own(x))


def _in_two_models():
    torch.manual_seed(0)
    dense = nn.ModuleList(_Around(nn.Linear(3, 3), seed) for seed in (1, 2)).to(device())
    dense[1].inner = dense[0].inner
    models = copy.deepcopy(dense)
    for unit in (models[0].inner, models[1].own):  # the inner one is first in one model, and second in the other
        fully_shard(unit, reshard_after_forward=True)
    for model in models:
        fully_shard(model)
    for step, turn in enumerate((0, 1, 0, 0, 1)):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).to(device())
        dense[turn](x).pow(2).mean().backward()
        with counted(models[turn]) as seen:
            models[turn](x).pow(2).mean().backward()
        assert seen["reduce"] == 2
        same_gradients(dense, models)
        with torch.no_grad():
            for both in (dense, models):
                for p in both.parameters():
                    p -= 0.1 * p.grad if p.grad is not None else 0
                    p.grad = None
        same_values(dense, models)


@sim
def test_a_unit_in_two_models_that_run_in_turns(world):
    world(_in_two_models, 2)
