"""Public bug reports, by case number, through `shard_module`: whole small models, outputs and gradients."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from harness import device, every_size
from torch import nn

import shardtensor as st

pytestmark = pytest.mark.worlds("sim")


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def set_to(param: torch.Tensor, values: Iterable) -> None:
    with torch.no_grad():
        param.copy_(torch.tensor(values, device=param.device))


def twins(dense: nn.Module, rules: Mapping[str, str]) -> tuple[nn.Module, nn.Module]:
    """A model sharded by rules, and the dense one."""
    dense = dense.to(device())
    return st.shard_module(copy.deepcopy(dense), rules), dense


def assert_same_gradients(module: nn.Module, dense: nn.Module) -> None:
    for (name, param), want in zip(module.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), want.grad, msg=lambda text, name=name: f"{name}: {text}")


class Norm(nn.Module):
    """The norm of a product that is a sum over ranks."""

    def __init__(self, order: float) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(self.fc(x), self.order)


def norm_of_a_sum() -> None:
    for order, number in ((2, 5.0), (1, 7.0), (math.inf, 4.0)):
        model = Norm(order)
        set_to(model.fc.weight, [[1.0, 2.0], [3.0, 1.0]])  # on two ranks the partial sums are [1, 3] and [2, 1]
        module, dense = twins(model, {"fc": "[-, tp balanced]"})
        for net in (module, dense):
            found = net(torch.ones(2, device=device()))
            assert whole(found).item() == number
            found.backward()
        assert_same_gradients(module, dense)


@every_size
def test_b10_norm_of_an_unreduced_sum_in_a_module(world, size):
    world(norm_of_a_sum, size)


class Classifier(nn.Module):
    """Logits by number, and the loss of targets; the class weights are a buffer of the loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.loss = loss

    def forward(self, numbers: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.table(numbers), targets)


def weighted_mean() -> None:
    likely = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1], [0.2, 0.8]], device=device()).log()
    weights = torch.tensor([1.0, 10.0])
    losses: list[tuple[Callable[[], nn.Module], list[int], float | None]] = [
        (lambda: nn.NLLLoss(weights), [0, 0, 1, 1], 1.2425786),
        (lambda: nn.CrossEntropyLoss(weights, ignore_index=-100), [0, 0, 1, -100], None),  # live ones: 2 and 1
        (lambda: nn.CrossEntropyLoss(ignore_index=-100), [0, 0, 1, -100], None),
    ]
    for (loss, labels, number), cut in itertools.product(losses, ("[tp balanced, -]", "[-, tp balanced]")):
        model = Classifier(loss())
        set_to(model.table.weight, likely.tolist())
        rules = {"table": cut} | ({} if model.loss.weight is None else {"loss.weight": "[tp balanced]"})
        for batch in ("[tp balanced]", None):
            module, dense = twins(model, rules)
            numbers, targets = torch.arange(4, device=device()), torch.tensor(labels, device=device())
            want = dense(numbers, targets)
            if batch is not None:
                numbers, targets = st.distribute(numbers, batch), st.distribute(targets, batch)
            found = module(numbers, targets)
            torch.testing.assert_close(whole(found), want)
            assert number is None or math.isclose(whole(found).item(), number, rel_tol=1e-6)
            dense.zero_grad()
            found.backward(), want.backward()
            assert_same_gradients(module, dense)


@every_size
def test_b11_class_weighted_mean_loss_of_a_module(world, size):
    world(weighted_mean, size)


def bias() -> None:
    for rules in ({"0.weight": "[-, tp balanced]"}, {"0": "[tp balanced, ...]"}, {"0.weight": "[tp balanced, -]"}):
        model = nn.Sequential(nn.Linear(4, 3))
        set_to(model[0].weight, [[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]])
        set_to(model[0].bias, [100.0, 200, 300])
        module, _ = twins(model, rules)
        y = module(torch.arange(1.0, 9, device=device()).view(2, 4))
        assert whole(y).tolist() == [[104, 206, 310], [112, 214, 326]]
        y.sum().backward()
        assert whole(module[0].bias.grad).tolist() == [2, 2, 2]
        assert whole(module[0].weight.grad).tolist() == [[6, 8, 10, 12]] * 3


@every_size
def test_b14_bias_of_an_input_sharded_linear_in_a_module(world, size):
    world(bias, size)


def padding() -> None:
    for padding_idx, cut in itertools.product((5, -3), ("[tp balanced, -]", "[-, tp balanced]", "flat(tp)")):
        model = nn.Sequential(nn.Embedding(8, 2, padding_idx=padding_idx))
        set_to(model[0].weight, torch.arange(16.0).view(8, 2).tolist())
        module, dense = twins(model, {"0": cut})
        ids = torch.tensor([1, 5, 5, 7], device=device())
        for net in (module, dense):
            y = net(ids)
            assert whole(y).tolist() == [[2, 3], [10, 11], [10, 11], [14, 15]]
            y.sum().backward()
        assert whole(module[0].weight.grad).sum(1).tolist() == [0, 2, 0, 0, 0, 0, 0, 2]
        assert_same_gradients(module, dense)


@every_size
def test_b15_padding_index_is_global_in_a_module(world, size):
    world(padding, size)


def norm_of_rows() -> None:
    for cut in ("[-, tp balanced]", "[tp balanced, -]"):
        model = nn.Sequential(nn.Embedding(2, 2, max_norm=1.0), nn.Linear(2, 1, bias=False))
        set_to(model[0].weight, [[3.0, 4.0], [0.0, 0.5]])
        set_to(model[1].weight, [[1.0, 2.0]])
        module, dense = twins(model, {"0": cut})
        want = torch.tensor([[0.6, 0.8], [0.0, 0.5]], device=device())
        ids = torch.tensor([0, 1], device=device())
        torch.testing.assert_close(whole(module[0](ids)), want)
        torch.testing.assert_close(whole(module[0].weight), want)
        for net in (module, dense):
            net(ids).sum().backward()
        assert_same_gradients(module, dense)


@every_size
def test_b17_max_norm_is_of_whole_rows_in_a_module(world, size):
    world(norm_of_rows, size)


class Head(nn.Module):
    """A vocabulary's head over one feature: the logits of input 1 are its weight."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.out = nn.Linear(1, len(logits), bias=False)
        self.loss = nn.CrossEntropyLoss()
        set_to(self.out.weight, [[x] for x in logits])

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.loss(self.out(x), label)


def vocabulary() -> None:
    x = torch.ones(1, 1, device=device())
    for cut in ("[tp balanced, -]", "replicate"):
        module, _ = twins(Head([0.0, 1, 2, 3]), {"{out}": cut})
        loss = module(x, torch.tensor([3], device=device()))
        assert math.isclose(whole(loss).item(), 0.4401897, rel_tol=1e-6)
        loss.backward()
        want = torch.tensor([0.0320586, 0.0871443, 0.2368828, -0.3560857], device=device())
        torch.testing.assert_close(whole(module.out.weight.grad)[:, 0], want)
    module, dense = twins(Head([float(i) for i in range(7)]), {"{out}": "[tp balanced, -]"})
    losses = [net(x, torch.tensor([6], device=device())) for net in (module, dense)]
    assert all(math.isclose(whole(loss).item(), 0.4577628, rel_tol=1e-6) for loss in losses)
    for loss in losses:
        loss.backward()
    assert_same_gradients(module, dense)
    module, dense = twins(Head([0.0, 1e4, 2e4, 3e4]), {"{out}": "[tp balanced, -]"})
    for net in (module, dense):
        net(x, torch.tensor([2], device=device())).backward()
    assert whole(module.out.weight.grad).isfinite().all()
    assert_same_gradients(module, dense)


@every_size
def test_b18_cross_entropy_over_a_cut_vocabulary_of_a_module(world, size):
    world(vocabulary, size)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def both_uses(model: Tied, ids: torch.Tensor) -> torch.Tensor:
    """The gradient of the embedding plus that of the head, each computed with the two untied."""
    apart = copy.deepcopy(model)
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    nn.functional.cross_entropy(apart(ids), ids).backward()
    return apart.embed.weight.grad + apart.head.weight.grad


def tie(cut: str, name: str) -> None:
    torch.manual_seed(3)
    model = Tied()
    ids = torch.arange(7, device=device())
    module, dense = twins(model, {name: cut})
    first = both_uses(dense, ids)
    assert module.embed.weight is module.head.weight
    optimizers = [torch.optim.SGD(net.parameters(), 0.5) for net in (module, dense)]
    assert all(len(optimizer.param_groups[0]["params"]) == 1 for optimizer in optimizers)
    for step in range(3):
        for net, optimizer in zip((module, dense), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(whole(net(ids)), ids).backward()
            if step == 0:
                torch.testing.assert_close(whole(net.embed.weight.grad), first)
            optimizer.step()
    embed, head = whole(module.embed.weight), whole(module.head.weight)
    assert torch.equal(embed, head)
    torch.testing.assert_close(embed, dense.embed.weight)
    assert module.embed.weight is module.head.weight


@every_size
@pytest.mark.parametrize("name", ["embed.weight", "{embed,head}.weight"])
@pytest.mark.parametrize("cut", ["[tp balanced, -]", "[-, tp balanced]"])
def test_b20_a_tie_survives_sharding_a_module(world, size, cut, name):
    world(tie, size, cut=cut, name=name)
