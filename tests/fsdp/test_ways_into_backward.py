"""A backward may enter a unit in any way: what reaches a saved parameter finds its values, or raises and says why."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from types import SimpleNamespace

import pytest
import torch
from fsdp.twins import same_gradients
from harness import device
from torch import nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from shardtensor.comm.process_group import as_group
from shardtensor.errors import RuleError
from shardtensor.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

sim, both = pytest.mark.worlds("sim"), pytest.mark.worlds("sim", "gloo")
WIDTH = 96  # 96 * 96 float64 are above 64 KiB: units give their memory back after the forward


class Layer(nn.Module):
    """A linear unit whose output, of three dims, is a view, and what is done to it outside of the unit."""

    def __init__(self, change="add"):
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x):
        y = self.linear(x)
        return CHANGES[self.change](y, x)


def _slice_write(y, x):
    y[:, 0] = x[:, 1]
    return y


CHANGES = {
    "add": lambda y, x: y.add_(x),
    "mul": lambda y, x: y.mul_(x.detach().sigmoid()),
    "relu": lambda y, x: y.relu_(),
    "inplace module": lambda y, x: nn.ReLU(inplace=True)(y),
    "slice": _slice_write,
    "masked fill": lambda y, x: y.masked_fill_(x.detach() > 0, 0.5),
    "view of the view": lambda y, x: y.transpose(0, 1).mul_(2.0).transpose(0, 1),
    "nothing": lambda y, x: y,
}


class Stack(nn.Module):
    """Layers one after the other, each linear a unit; `via` calls each."""

    def __init__(self, change="add", depth=4, via=lambda layer, x: layer(x)):
        super().__init__()
        self.layers = nn.ModuleList(Layer(change) for _ in range(depth))
        self.via = via

    def forward(self, x):
        for layer in self.layers:
            x = self.via(layer, x)
        return x


def _twins(make, of=lambda model: [layer.linear for layer in model.layers], root=True, **options):
    torch.manual_seed(0)
    dense = make().double().to(device())
    model = copy.deepcopy(dense)
    for unit in of(model):
        fully_shard(unit, **options)
    if root:
        fully_shard(model, **options)
    return dense, model


def _batches(step=0, rows=2):
    """The whole batch, and this rank's part of it."""
    group = as_group()
    made = torch.Generator().manual_seed(step)
    whole = torch.randn(group.size * rows, 3, WIDTH, generator=made, dtype=torch.float64).to(device())
    return whole, whole[group.index * rows :][:rows]


def _compare(dense, model, loss, steps=2):
    """Gradients of `loss(model, batch)`, a mean over the batch, beside the dense ones; twice, with other values."""
    for step in range(steps):
        for each, x in zip((dense, model), _batches(step), strict=True):
            each.zero_grad()
            loss(each, x.clone().requires_grad_()).backward()
        same_gradients(dense, model)
        with torch.no_grad():
            for each in (dense, model):
                for param in each.parameters():
                    param.mul_(1.1)


def _square(model, x):
    return model(x).square().mean()


VIA = {
    "plain": lambda layer, x: layer(x),
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}


def _in_place(change, via):
    _compare(*_twins(lambda: Stack(change, via=VIA[via])), _square)


@sim
@pytest.mark.parametrize("change", CHANGES)
def test_an_output_is_written_to(world, change):
    world(_in_place, 2, change=change, via="plain")


@sim
@pytest.mark.parametrize("via", ["checkpoint", "reentrant"])
def test_an_output_is_written_to_inside_of_a_checkpoint(world, via):
    world(_in_place, 2, change="add", via=via)


def _near(via):
    _compare(*_twins(lambda: Stack("nothing", via=VIA[via]), reshard_after_forward=2), _square)


@sim
@pytest.mark.parametrize("via", VIA)
def test_some_ranks_hold_a_unit_together(world, via):
    world(_near, 4, via=via)


class Record:
    """A class of the user's own."""

    def __init__(self, y):
        self.inner = [y]


class Node:
    """A class that torch's trees know."""

    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


_pytree.register_pytree_node(Node, lambda node: ([node.y], None), lambda leaves, _: Node(*leaves))

HOLDERS = {
    "namespace": (lambda y: SimpleNamespace(y=y), lambda held: held.y),
    "UserDict": (lambda y: UserDict(y=y), lambda held: held["y"]),
    "deque": (lambda y: deque([y]), lambda held: held[0]),
    "tree": (Node, lambda held: held.y),
    "object": (Record, lambda held: held.inner[0]),
    "set": (lambda y: {y}, lambda held: next(iter(held))),
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0), lambda held: held.mean),
}


class Holding(nn.Linear):
    """A linear layer that returns its output inside of something."""

    kind = "namespace"

    def forward(self, x):
        return HOLDERS[self.kind][0](super().forward(x))


class Held(nn.Module):
    def __init__(self, kind, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Holding(WIDTH, WIDTH) for _ in range(depth))
        for layer in self.layers:
            layer.kind = kind
        self.kind = kind

    def forward(self, x):
        for layer in self.layers:
            x = x + HOLDERS[self.kind][1](layer(x))
        return x


def _held(kind):
    _compare(*_twins(lambda: Held(kind), of=lambda model: model.layers), _square)


@sim
@pytest.mark.parametrize("kind", HOLDERS)
def test_an_output_inside_of_an_object(world, kind):
    world(_held, 2, kind=kind)


# -- a backward that no result of a forward begins --------------------------------------------------------------------


class Hiding(nn.Module):
    """Two layers; what the first one gives is kept, and not returned."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.hidden = torch.tanh(self.up(torch.tanh(self.up(x))))
        return self.down(self.hidden)


class Hidings(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Hiding() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def _blocks(model):
    return model.layers


def _hidden_alone(model, x):
    model(x)
    return model.layers[1].hidden.square().mean()


def _hidden_too(model, x):
    return model(x).square().mean() + sum(layer.hidden.square().mean() for layer in model.layers)


def _hidden_by_hook(model, x):
    kept = []
    handle = model.layers[1].up.register_forward_hook(lambda module, args, y: kept.append(y))
    model(x)
    handle.remove()
    return kept[-1].square().mean()


LOSSES = {"kept": _hidden_alone, "a hook's": _hidden_by_hook}
OPTIONS = {
    "default": {},
    "bf16": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": True,
    },
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "near": {"reshard_after_forward": 2},
}


def _refused(loss, **options):
    _, model = _twins(Hidings, of=_blocks, **options)
    _, x = _batches()
    with pytest.raises(RuleError) as caught:
        loss(model, x).backward()
    return str(caught.value)


NOT_GATHERED = """\
backward came to parameters of a fully sharded module that are no longer gathered, by another way than a result of the \
module's forward
  module        layers.1 (Hiding)
  saved tensor  (96, 96)
  either        return what the loss is computed from in the results of the module's forward, rather than keep it in \
an attribute, a hook or a closure
  or            fully_shard(module, reshard_after_forward=False) keeps parameters gathered; second derivatives \
(create_graph=True) need it"""


@both
@pytest.mark.parametrize("loss", LOSSES)
def test_a_hidden_tensor_alone_is_refused(world, loss):
    assert world(_refused, 2, loss=LOSSES[loss]) == [NOT_GATHERED] * 2


@sim
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_refused_whatever_the_options(world, options):
    assert world(_refused, 4, loss=_hidden_alone, **OPTIONS[options]) == [NOT_GATHERED] * 4


def _followed(loss, **options):
    _compare(*_twins(Hidings, of=_blocks, **options), loss)


@sim
@pytest.mark.parametrize("loss", LOSSES)
def test_a_hidden_tensor_where_parameters_stay_gathered(world, loss):
    world(_followed, 2, loss=LOSSES[loss], reshard_after_forward=False)


@sim
def test_a_hidden_tensor_beside_the_result(world):
    world(_followed, 2, loss=_hidden_too)


def _penalty(model, x):
    """The penalty on the gradient of what a critic says, and what it says."""
    y = model(x).tanh()
    [grad] = torch.autograd.grad(y.sum(), x, create_graph=True)
    return grad.square().mean() + y.mean()


def _penalty_alone(model, x):
    [grad] = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    return grad.square().mean()


PENALTIES = {"beside": _penalty, "alone": _penalty_alone}


def _penalized(loss, root_only=False, via="plain", **options):
    of = (lambda model: ()) if root_only else _blocks
    _compare(*_twins(lambda: Stack("nothing", via=VIA[via]), of=of, **options), loss)


@both
@pytest.mark.parametrize("via", ["plain", "checkpoint"])
@pytest.mark.parametrize("loss", PENALTIES)
@pytest.mark.parametrize("root_only", [False, True])
def test_second_derivatives_where_parameters_stay_gathered(world, via, loss, root_only):
    options = {} if root_only else {"reshard_after_forward": False}
    world(_penalized, 2, via=via, loss=PENALTIES[loss], root_only=root_only, **options)


def _right_or_refused(loss, via):
    try:
        _penalized(loss, via=via)
    except RuleError as error:
        return str(error).splitlines()[1:]
    return "right"


@sim
@pytest.mark.parametrize("via", ["plain", "checkpoint"])
@pytest.mark.parametrize("loss", PENALTIES)
def test_second_derivatives_where_they_do_not(world, via, loss):
    first, second = world(_right_or_refused, 2, loss=PENALTIES[loss], via=via)
    assert first == second

    assert first == "right" or "layers." in first[0]


def _graph_of_gradients():
    _, model = _twins(lambda: Stack("nothing"))
    _, x = _batches()
    with pytest.raises(RuleError) as caught:
        _square(model, x).backward(create_graph=True)
    return str(caught.value)


@sim
def test_gradients_of_parameters_have_no_gradient(world):
    expected = """\
the gradient of a fully sharded parameter has no gradient (create_graph=True)
  parameters  bias, weight
  fix         keep what needs second derivatives out of fully_shard"""
    assert world(_graph_of_gradients, 2) == [expected] * 2


# -- parameters that a forward returns --------------------------------------------------------------------------------

RETURNED = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight[1:].t(),
    "in a list": lambda weight: [weight.view(-1)],
    "in a named dict": lambda weight: {"table": (weight,)},
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
}


class Positions(nn.Module):
    """Learned positions: a unit that computes nothing."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(WIDTH, WIDTH)), kind

    def forward(self):
        return RETURNED[self.kind](self.weight)


class Positioned(nn.Module):
    """Reads what such units returned after others have run."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([Positions(kind), *(nn.Linear(WIDTH, WIDTH) for _ in range(4))])

    def forward(self, x):
        positions, *linears = self.layers
        [found] = _pytree.tree_leaves(positions())
        for linear in linears:
            x = linear(x)
        return x * found.sum() / WIDTH + found.square().mean()


def _returned(kind):
    dense, model = _twins(lambda: Positioned(kind), of=_blocks)
    for step in range(2):
        whole, mine = _batches(step)
        with torch.no_grad():
            torch.testing.assert_close(model(mine), dense(mine))
        for each, x in ((dense, whole), (model, mine)):
            each.zero_grad()
            _square(each, x).backward()
        same_gradients(dense, model)


@sim
@pytest.mark.parametrize("kind", RETURNED)
def test_a_forward_returns_its_parameter(world, kind):
    world(_returned, 2, kind=kind)


def _returned_inside_of_an_object():
    class Odd(Positions):
        def forward(self):
            return SimpleNamespace(weight=self.weight)

    model = fully_shard(Odd("itself").to(device()))
    with pytest.raises(RuleError) as caught:
        model()
    return str(caught.value)


@sim
def test_a_forward_returns_its_parameter_inside_of_an_object(world):
    expected = """\
the forward of a fully sharded module returned a view of its parameter inside of an object; other values come into \
that memory when the module has run
  module  (Odd)
  object  SimpleNamespace
  fix     return a copy (parameter.clone()), or return it in a list, tuple, dict or dataclass"""
    assert world(_returned_inside_of_an_object, 2) == [expected] * 2


# -- the same memory for other values ---------------------------------------------------------------------------------


def _written_before_a_gather_by_hand():
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device()))
    x = torch.ones(1, 4, device=device())
    kept = []
    model[0].register_forward_hook(lambda module, args, y: kept.append(y))
    loss = model(x).sum()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    model.unshard()
    with pytest.raises(RuleError) as caught:
        loss.backward()
    return str(caught.value)


@sim
def test_values_written_before_a_gather_by_hand(world):
    expected = """\
parameters were written between a forward and its backward
  parameters  0.bias, 0.weight, 2.bias, 2.weight
  fix         call backward before the optimizer steps or values are loaded"""
    assert world(_written_before_a_gather_by_hand, 2) == [expected] * 2
