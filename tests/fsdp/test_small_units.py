"""Modules of any size and use train as the dense model: small, frozen, skipped, recomputed ones."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp.twins import same_gradients, same_values
from harness import device
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as some
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardtensor as st
from shardtensor.comm import primitives
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard

DIM = 7


class Layer(nn.Module):
    """A small layer, or one of more than 64 KiB; some are skipped in some steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM, bias=False)
        self.is_used, self.is_again = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh()) if self.is_used else x


class Stack(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if layer.is_again and layer.is_used else layer(x)
        return x


def stacks(widths, frozen=(), **options):
    """A dense stack, and one of the same values whose layers are units."""
    torch.manual_seed(3)
    dense = Stack(widths).double().to(device())
    for i in frozen:
        dense.layers[i].up.requires_grad_(False)
    model = copy.deepcopy(dense)
    for layer in model.layers:
        fully_shard(layer, **options)
    return dense, fully_shard(model, **options)


def _use(stack, mask):
    for layer, is_used in zip(stack.layers, mask, strict=True):
        layer.is_used = is_used


def batch_of(step, index, size):
    """All samples of a step, and those of one rank."""
    x = torch.randn(2 * size, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).to(device())
    return x, x.chunk(size)[index]


def _train(widths, frozen, used, waits):
    """Backwards that add up; layers in `waits` reduce in the last one only, `used` tells which each goes through."""
    dense, model = stacks(widths, frozen)
    me = as_group()
    for step, mask in enumerate(used):
        is_last = step == len(used) - 1
        for each in (dense, model):
            _use(each, mask)
        for layer, is_late in zip(model.layers, waits, strict=True):
            layer.set_requires_gradient_sync(is_last or not is_late)
        whole, own = batch_of(step, me.index, me.size)
        dense(whole).pow(2).mean().backward()
        model(own).pow(2).mean().backward()
        for name, param in model.named_parameters():
            if is_last or not waits[int(name.split(".")[1])]:
                expected = dense.get_parameter(name).grad
                assert (param.grad is None) == (expected is None), name
                if expected is not None:
                    torch.testing.assert_close(param.grad.full_tensor(), expected)
    for each in (dense, model):
        torch.optim.AdamW(each.parameters(), lr=0.1).step()
    same_values(dense, model)


@some.composite
def cases(draw):
    widths = draw(some.lists(some.sampled_from([1, 2, 5, 16, 700]), min_size=2, max_size=6))
    flags = some.lists(some.booleans(), min_size=len(widths), max_size=len(widths))
    frozen = [i for i, is_frozen in enumerate(draw(flags)) if is_frozen]
    used = [[True] * len(widths), *draw(some.lists(flags.filter(any), min_size=1, max_size=2))]
    return widths, frozen, used, draw(flags)


@examples(12)
@given(cases(), some.integers(1, 4))
def test_any_units_train_as_the_dense_model(case, size):
    st.simulate(size, _train, *case)


def test_memory_of_reductions_may_go_after_each_backward(monkeypatch):
    monkeypatch.setattr("shardtensor.tensor.bucket.KEPT_BYTES", 0)
    st.simulate(2, _train, [5, 700, 2], [], [[True] * 3, [True, True, False], [True] * 3], [False, True, False])


@pytest.mark.worlds("gloo")
def test_units_of_processes_train_as_the_dense_model(world):
    used, waits = [[True] * 5, [True, False, True, True, False]], [False, True, False, False, False]
    world(_train, 3, widths=[5, 5, 700, 2, 16], frozen=[0, 3], used=used, waits=waits)


def _noting(sent, kind, call):
    def noted(group, out, given, *op):
        sent.append((kind, max(out.numel(), given.numel())))
        return call(group, out, given, *op)

    return noted


def _skipping_among_checkpoints(widths, again, masks, reshard, forwards):
    """Steps in which each rank uses layers of its own; gradients that any rank has are everyone's."""
    dense, model = stacks(widths, find_unused=True, reshard_after_forward=reshard)
    for layer, is_again in zip(model.layers, again, strict=True):
        layer.is_again = is_again
    me = as_group()
    for step, masks_of_ranks in enumerate(masks):
        batches = [batch_of(2 * step + i, 0, me.size)[0].requires_grad_().chunk(me.size) for i in range(forwards)]
        dense.zero_grad()
        model.zero_grad()
        for rank, mask in enumerate(masks_of_ranks):
            _use(dense, mask)
            for parts in batches if any(mask) else ():
                (dense(parts[rank]).pow(2).mean() / me.size).backward()
        _use(model, masks_of_ranks[me.index])
        losses = [model(parts[me.index].detach().requires_grad_()).pow(2).mean() for parts in batches]
        for loss in losses:
            loss.backward()
        same_gradients(dense, model)


@some.composite
def skips(draw):
    widths = draw(some.lists(some.sampled_from([5, 2, 16, 700]), min_size=2, max_size=4))
    mask = some.lists(some.booleans(), min_size=len(widths), max_size=len(widths))
    masks = draw(some.lists(some.tuples(mask, mask).filter(lambda two: any(map(all, two))), min_size=2, max_size=3))
    again = draw(mask)
    if any(again):  # what a reentrant checkpoint computes again is the same on all ranks
        masks = [(one, one) for one, _ in masks]
    return widths, again, masks


@examples(30)
@given(skips(), some.sampled_from([None, True, False]), some.integers(1, 2))
def test_ranks_may_use_other_layers_and_skip_checkpoints_alike(case, reshard, forwards):
    st.simulate(2, _skipping_among_checkpoints, *case, reshard, forwards)


def _sent_with_checkpoints(is_called_alone):
    """What the last of some steps reduces."""
    _, model = stacks([5, 2, 16, 1])
    own = batch_of(0, 0, 1)[0].requires_grad_()
    for layer in model.layers:
        layer.is_again = not is_called_alone
    model(own).sum().backward()
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            primitives, "reduce_scatter_into", _noting(sent, "reduce_scatter_into", primitives.reduce_scatter_into)
        )
        (model.layers[1] if is_called_alone else model)(own).sum().backward()
    return len(sent)


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("is_called_alone", [False, True])
def test_a_backward_through_some_sends_no_message_for_the_others(world, is_called_alone):
    sent = 1 if is_called_alone else 4  # one for each layer
    assert world(_sent_with_checkpoints, 2, is_called_alone=is_called_alone) == [sent, sent]


def _written_while_another_is_kept(asked, written, is_async):
    """A unit gathered by hand brings its company; what is written to one of that shows, and does not wait for it."""
    dense, model = stacks([5, 2, 700, 16])
    me = as_group()
    for step in range(2):
        for each in (dense, model):
            each.zero_grad()
        if step:
            model.layers[asked].unshard(is_async)
            with torch.no_grad():
                for each in (dense, model):
                    for param in each.layers[written].parameters():
                        param.mul_(1.5)
        whole, own = batch_of(step, me.index, me.size)
        for each, x in ((dense, whole), (model, own)):
            each(x).pow(2).mean().backward()
        same_gradients(dense, model)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("asked", "written"), [(0, 0), (0, 1), (3, 0), (2, 1)])
def test_what_is_written_beside_a_unit_gathered_by_hand_shows(asked, written, is_async):
    st.simulate(2, _written_while_another_is_kept, asked, written, is_async)


def _kept_from_forward(kept, skipped):
    """Layers of the last rank give what they got, after some were told to stay gathered from forward to backward."""
    dense, model = stacks([700] * 6, find_unused=True)
    me = as_group()
    for step in range(3):
        parts = batch_of(step, 0, me.size)[0].chunk(me.size)
        for rank, part in enumerate(parts):
            for each in (dense, model):
                for i, layer in enumerate(each.layers):
                    layer.is_used = step < 2 or rank < me.size - 1 or i not in skipped
            (dense(part).pow(2).mean() / me.size).backward()
            if rank == me.index:
                model(part).pow(2).mean().backward()
        same_gradients(dense, model)
        for i in kept:
            model.layers[i].set_reshard_after_forward(False)


@pytest.mark.parametrize(("kept", "skipped"), [([], [3]), ([], [2, 3, 5]), ([4, 5], [5]), ([4, 5], [2, 4])])
def test_units_of_some_ranks_may_give_what_they_got(kept, skipped):
    st.simulate(2, _kept_from_forward, kept, skipped)


class _Watched:
    """A gather's handle, which tells when it was waited for."""

    def __init__(self, work, going_on, place):
        self.work, self.going_on, self.place = work, going_on, place

    def wait(self):
        self.work.wait()
        self.going_on.discard(self.place)


def _gathers_that_nobody_waits_for():
    """Gathers are given up, by hand and by a forward that raises, and made again."""
    dense, model = stacks([5, 2, 700, 16])
    me = as_group()
    going_on, overlaps, gather = set(), [], primitives.all_gather_into

    def watched(group, out, part):
        place, work = out.data_ptr(), gather(group, out, part)
        if work is None:  # a stream of the device puts it in order
            return None
        overlaps.extend([place] if place in going_on else [])
        going_on.add(place)
        return _Watched(work, going_on, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "all_gather_into", watched)
        for step, layer in enumerate(model.layers):
            layer.unshard(async_op=True)
            layer.reshard()
            stop = model.layers[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
            whole, own = batch_of(step, me.index, me.size)
            with pytest.raises(ZeroDivisionError):
                model(own)
            stop.remove()
            for each, x in ((dense, whole), (model, own)):
                each(x).pow(2).mean().backward()
            same_gradients(dense, model)
    assert not overlaps


@pytest.mark.worlds("gloo")
def test_no_gather_begins_in_memory_that_another_still_writes_to(world):
    world(_gathers_that_nobody_waits_for, 2)


def _backward_twice(widths, skipped, retains):
    """The last rank skips some layers; two backwards follow one forward, or two forwards."""
    dense, model = stacks(widths, find_unused=True)
    me = as_group()
    for step in range(2):
        parts = batch_of(step, 0, me.size)[0].chunk(me.size)
        for each in (dense, model):
            each.zero_grad()
        for rank, part in enumerate(parts):
            for each in (dense, model):
                for i, layer in enumerate(each.layers):
                    layer.is_used = rank < me.size - 1 or i not in skipped
            (2 * dense(part).pow(2).mean() / me.size).backward()
            if rank == me.index:
                losses = [model(part).pow(2).mean()] * 2 if retains else [model(part).pow(2).mean() for _ in range(2)]
                losses[0].backward(retain_graph=retains)
                losses[1].backward()
        same_gradients(dense, model)


@pytest.mark.parametrize("retains", [True, False])
@pytest.mark.parametrize(
    ("widths", "skipped"), [([5, 2, 16, 1], [1]), ([700, 700, 5, 5, 700], [2]), ([5, 700, 5], [0])]
)
def test_a_second_backward_gathers_what_had_stayed(widths, skipped, retains):
    st.simulate(2, _backward_twice, widths, skipped, retains)
