"""Errors of optimizers that step a part of replicated parameters on each rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Pool
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

import shardtensor as st
from fixes.case import Case, alone, mlp
from shardtensor.comm.process_group import as_group

X = torch.linspace(-1, 1, 32).view(8, 4)
IDS = torch.arange(8) % 3
Call = Callable[[Any, torch.Tensor], torch.Tensor]
"""The forward of a module."""


def same(model: nn.Module) -> nn.Module:
    """The module with values that every rank and every call gives it."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-0.5, 0.6, param.numel()).view(param.shape))
    return model


def made() -> nn.Module:
    return same(mlp())


def zero(model: nn.Module, cls: Any = optim.SGD, **options: Any) -> st.ZeroRedundancyOptimizer:
    return st.ZeroRedundancyOptimizer(model.named_parameters(), cls, **{"lr": 0.1, **options})


def reducing(model: nn.Module, cls: Any = optim.SGD, **options: Any) -> st.ZeroRedundancyOptimizer:
    return zero(model, cls, overlap_gradients=True, **options)


def averaged(model: nn.Module) -> nn.Module:
    return st.data_parallel(model, "dp")


def part(x: torch.Tensor) -> torch.Tensor:
    """The part of a batch that this rank computes its loss of."""
    return x.chunk(as_group().size)[as_group().rank]


def loss(model: nn.Module, x: torch.Tensor, call: Call = nn.Module.__call__) -> torch.Tensor:
    return (call(model, x) - 1).square().mean()


def step(model: nn.Module, optimizer: Any, x: torch.Tensor, call: Call = nn.Module.__call__) -> None:
    optimizer.zero_grad()
    loss(model, x, call).backward()
    optimizer.step()


def trains(
    make: Callable[[nn.Module], Any],
    model_of: Callable[[], nn.Module] = made,
    plain: Callable[..., Any] = optim.SGD,
    x: torch.Tensor = X,
    after: Callable[[Any], None] = lambda optimizer: None,
    call: Call = nn.Module.__call__,
) -> None:
    """Steps of the optimizer that `make` returns for a module are those of a plain one in the dense program.

    Args:
        after: called with the optimizer after each step.
    """
    model, dense = model_of(), model_of()
    ours, oracle = make(model), plain(dense.parameters(), lr=0.1)
    for _ in range(3):
        step(model, ours, part(x), call)
        after(ours)
        step(dense, oracle, x, call)
    assert_equal(model, dense)


def assert_equal(model: nn.Module, dense: nn.Module) -> None:
    for param, want in zip(model.parameters(), dense.parameters(), strict=True):
        value = param.full_tensor() if isinstance(param, st.ShardedTensor) else param
        torch.testing.assert_close(value, want)


# -- classes that update several elements or parameters together ------------------------------------------------------


class RowSums(optim.Optimizer):
    """Adagrad with one sum for each row; a parameter without dimensions is one row."""

    update_unit = "row"

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                rows = param.shape[0] if param.dim() else 1
                if param not in self.state:
                    self.state[param]["sums"] = param.new_zeros(rows)
                grad, sums = param.grad.reshape(rows, -1), self.state[param]["sums"]
                sums += grad.square().sum(1)
                param -= group["lr"] * (grad / (sums.sqrt() + 1)[:, None]).view(param.shape)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def loaded(partition: Any) -> None:
    """Go on from the state of a plain optimizer of the dense program."""
    model, dense = same(Scaled()), same(Scaled())
    oracle = RowSums(dense.named_parameters())
    step(dense, oracle, X)
    model.load_state_dict(dense.state_dict())
    ours = zero(averaged(model), RowSums, partition=partition)
    ours.load_state_dict(oracle.state_dict())
    step(model, ours, part(X))
    step(dense, oracle, X)
    assert_equal(model, dense)


def sharded(make: Callable[[nn.Module], Any]) -> None:
    """Every rank computes the loss of the whole batch."""
    model, dense = made(), made()
    st.shard_parameter(model, "0.weight", "[tp, -]")
    ours, oracle = make(model), optim.SGD(dense.parameters(), lr=0.1)
    for _ in range(2):
        step(model, ours, X)
        step(dense, oracle, X)
    assert_equal(model, dense)


def lbfgs(**options: Any) -> None:
    model, dense = made(), made()
    ours, oracle = zero(averaged(model), optim.LBFGS, **options), optim.LBFGS(dense.parameters(), lr=0.1)

    def closure(of: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        def gradients() -> torch.Tensor:
            of.zero_grad()
            value = loss(of, x)
            value.backward()
            return value

        return gradients

    ours.step(closure(model, part(X)))
    oracle.step(closure(dense, X))
    assert_equal(model, dense)


# -- parameters that change -------------------------------------------------------------------------------------------


def converted(is_first: bool) -> None:
    """The model gets another dtype between two steps."""
    model, dense = averaged(made()), made()
    ours, oracle = zero(model, optim.Adam, partition="ranges"), optim.Adam(dense.parameters(), lr=0.1)
    step(model, ours, part(X))
    step(dense, oracle, X)
    model.double()
    dense.double()
    if is_first:
        old, ours = ours, zero(model, optim.Adam, partition="ranges")
        ours.load_state_dict(old.state_dict())
        old_oracle, oracle = oracle, optim.Adam(dense.parameters(), lr=0.1)
        oracle.load_state_dict(old_oracle.state_dict())
    step(model, ours, part(X).double())
    step(dense, oracle, X.double())
    assert_equal(model, dense)


def thawed(is_first: bool) -> None:
    """The first layer is trained from the second step on."""
    models = made(), made()
    for model in models:
        model[0].requires_grad_(False)
    optimizers = reducing(models[0]), optim.SGD(models[1].parameters(), lr=0.1)
    for model, optimizer, x in zip(models, optimizers, (part(X), X), strict=True):
        step(model, optimizer, x)
        if is_first:
            model[0].requires_grad_()
        optimizer.zero_grad()
        model[0].requires_grad_()
        loss(model, x).backward()
        optimizer.step()
    assert_equal(*models)


def by_hand(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A forward that reads the parameters of modules which it does not call."""
    x = F.gelu(F.linear(x, model[0].weight, model[0].bias))
    return F.linear(x, model[2].weight, model[2].bias)


# -- gradients that are averaged --------------------------------------------------------------------------------------


def embedding(sparse: bool) -> Callable[[], nn.Module]:
    return lambda: same(nn.Embedding(6, 4, sparse=sparse))


def looked_up(partition: Any, sparse: bool) -> None:
    """Every rank has the gradient of the whole batch."""
    model, dense = embedding(sparse)(), embedding(sparse)()
    ours, oracle = zero(model, partition=partition), optim.SGD(dense.parameters(), lr=0.1)
    for _ in range(2):
        step(model, ours, IDS)
        step(dense, oracle, IDS)
    assert_equal(model, dense)


def accumulates(model: nn.Module, optimizer: Any, quiet: Callable[[], AbstractContextManager[None]]) -> None:
    """The sum of the gradients of two batches is reduced once."""
    dense = made()
    oracle = optim.SGD(dense.parameters(), lr=0.1)
    with quiet():
        loss(model, part(X)).backward()
    loss(model, part(-X)).backward()
    optimizer.step()
    (loss(dense, X) + loss(dense, -X)).backward()
    oracle.step()
    assert_equal(model, dense)


def accumulates_with_ddp() -> None:
    model = DistributedDataParallel(made())
    accumulates(model, zero(model), model.no_sync)


def accumulates_with_data_parallel() -> None:
    model = averaged(made())
    accumulates(model, zero(model), lambda: st.no_sync(model))


def accumulates_by_itself() -> None:
    model = made()
    optimizer = reducing(model)
    accumulates(model, optimizer, optimizer.no_sync)


def steps_after(is_last_reduced: bool) -> None:
    """Two backwards, the first or the second of which only accumulates."""
    model, dense = made(), made()
    optimizer, oracle = reducing(model), optim.SGD(dense.parameters(), lr=0.1)
    for i, x in enumerate((X, -X)):
        with optimizer.no_sync() if (i == 0) == is_last_reduced else nullcontext():
            loss(model, part(x)).backward()
        loss(dense, x).backward()
    optimizer.step()
    oracle.step()
    assert_equal(model, dense)


def second(deletes_first: bool) -> None:
    """Another optimizer for a model whose first one reduces its gradients."""
    model, dense = made(), made()
    first = reducing(model)
    if deletes_first:
        del first
    optimizer, oracle = reducing(model), optim.SGD(dense.parameters(), lr=0.1)
    step(model, optimizer, part(X))
    step(dense, oracle, X)
    assert_equal(model, dense)


def grows(deletes_first: bool) -> None:
    """A group that is added of a layer whose gradients another optimizer reduces."""
    model, dense = made(), made()
    first = reducing(model[0])
    optimizer, oracle = reducing(model[2]), optim.SGD(dense.parameters(), lr=0.1)
    if deletes_first:
        del first
    optimizer.add_param_group({"params": [(f"0.{name}", param) for name, param in model[0].named_parameters()]})
    step(model, optimizer, part(X))
    step(dense, oracle, X)
    assert_equal(model, dense)


def two_layers(names: tuple[str, str]) -> None:
    """Groups of two layers whose names are those inside of each layer, after a prefix."""
    model, dense = made(), made()
    layers = zip(names, (model[0], model[2]), strict=True)
    groups = [{"params": [(prefix + name, x) for name, x in layer.named_parameters()]} for prefix, layer in layers]
    optimizer = st.ZeroRedundancyOptimizer(groups, optim.SGD, lr=0.1)
    oracle = optim.SGD(dense.parameters(), lr=0.1)
    step(averaged(model), optimizer, part(X))
    step(dense, oracle, X)
    assert_equal(model, dense)


# -- DistributedDataParallel ------------------------------------------------------------------------------------------


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def stepped_in_backward(find_unused_parameters: bool) -> None:
    model, dense = DistributedDataParallel(made(), find_unused_parameters=find_unused_parameters), made()
    optimizer, oracle = zero(model, overlap_with_ddp=True), optim.SGD(dense.parameters(), lr=0.1)
    model.register_comm_hook(None, st.hook_with_zero_step(allreduce_hook, model, optimizer))
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, X).backward()
        step(dense, oracle, X)
    assert_equal(model, dense)


def stepped_after_backward() -> None:
    """Weight decay would change parameters that are unused but have a gradient of zeros."""
    model, dense = DistributedDataParallel(same(PartlyUsed()), find_unused_parameters=True), same(PartlyUsed())
    options = {"lr": 0.1, "weight_decay": 0.5}
    optimizer = zero(model, overlap_with_ddp=False, **options)
    oracle = optim.SGD(dense.parameters(), **options)
    for _ in range(2):
        step(model, optimizer, X)
        step(dense, oracle, X)
    assert_equal(model, dense)


# -- ranks with fewer inputs than others ------------------------------------------------------------------------------


class Averages(Joinable):
    """Averages gradients; a rank without inputs left adds zeros, and gets the average."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def average(self, joined: bool = False) -> None:
        if not joined:
            Join.notify_join_context(self)
        for param in self.model.parameters():
            if joined:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = JoinHook()
        hook.main_hook = lambda: self.average(joined=True)  # type: ignore[method-assign]
        return hook

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def joined() -> None:
    """A rank has one input more than the one before."""
    model, dense = made(), made()
    ours, oracle = zero(model), optim.SGD(dense.parameters(), lr=0.1)
    averages, size = Averages(model), dist.get_world_size()
    with Join([averages, ours]):
        for _ in range(dist.get_rank() + 1):
            ours.zero_grad()
            loss(model, X).backward()
            averages.average()
            ours.step()
    for number in range(size):
        oracle.zero_grad()
        (loss(dense, X) * (size - number) / size).backward()
        oracle.step()
    assert_equal(model, dense)


def in_processes(body: Callable[[], None]) -> None:
    """Run on two ranks that are processes: torch's Join is not simulated."""
    pool = Pool(2)
    try:
        pool(body, 2)
    finally:
        pool.close()


CASES: dict[str, Case] = {
    "parts of what a class updates together": Case(
        lambda: lbfgs(overlap_gradients=True),
        {"leave overlap_with_ddp and overlap_gradients out; every rank then steps all parameters": lbfgs},
        mesh="dp=2",
    ),
    "sharded parameters": Case(
        lambda: sharded(zero),
        {
            "step sharded parameters with ShardedOptimizer: it sends nothing": lambda: sharded(
                lambda model: st.ShardedOptimizer(model, optim.SGD, lr=0.1)
            )
        },
    ),
    "steps in a backward with unused parameters": Case(
        lambda: alone(lambda: stepped_in_backward(find_unused_parameters=True)),
        {
            "find_unused_parameters=False if all are used; else no hook": lambda: [
                alone(lambda: stepped_in_backward(find_unused_parameters=False)),
                alone(stepped_after_backward),
            ]
        },
        mesh="",
    ),
    "a gradient from before it was required": Case(
        lambda: thawed(is_first=False),
        {"call requires_grad_() before optimizer.zero_grad()": lambda: thawed(is_first=True)},
        mesh="dp=2",
    ),
    "averaged by data_parallel, too": Case(
        lambda: reducing(averaged(made())),
        {
            "delete the other optimizer first (del), or leave overlap_gradients out": lambda: [
                trains(lambda model: zero(averaged(model))),
                trains(reducing),
            ]
        },
        mesh="dp=2",
    ),
    "averaged by two optimizers": Case(
        lambda: second(deletes_first=False),
        {"delete the other optimizer first (del), or leave overlap_gradients out": lambda: second(deletes_first=True)},
        mesh="dp=2",
    ),
    "a group that another optimizer averages": Case(
        lambda: grows(deletes_first=False),
        {"delete the other optimizer first (del), or leave overlap_gradients out": lambda: grows(deletes_first=True)},
        mesh="dp=2",
    ),
    "a step after a backward that only accumulates": Case(
        lambda: steps_after(is_last_reduced=False),
        {"run the last backward before step() outside of no_sync()": lambda: steps_after(is_last_reduced=True)},
        mesh="dp=2",
    ),
    "two parameters of one name": Case(
        lambda: two_layers(("", "")),
        {"give each its own name": lambda: two_layers(("0.", "2."))},
        mesh="dp=2",
    ),
    "read before it has the values of the last step": Case(
        lambda: trains(lambda model: reducing(model, module=model), call=by_hand),
        {
            "call optimizer.wait() before forward, or pass the module whose forward reads them as module=": lambda: [
                trains(
                    lambda model: reducing(model, module=model),
                    after=st.ZeroRedundancyOptimizer.wait,
                    call=by_hand,
                ),
                trains(reducing, call=by_hand),
            ]
        },
        mesh="dp=2",
    ),
    "a sparse gradient that is reduced": Case(
        lambda: trains(reducing, embedding(sparse=True), x=IDS),
        {"make the embedding with sparse=False": lambda: trains(reducing, embedding(sparse=False), x=IDS)},
        mesh="dp=2",
    ),
    "a sparse gradient and ranges": Case(
        lambda: looked_up("ranges", sparse=True),
        {
            'make the embedding with sparse=False, or pass partition="owners"': lambda: [
                looked_up("ranges", sparse=False),
                looked_up("owners", sparse=True),
            ]
        },
        mesh="dp=2",
    ),
    "a rank without inputs that would reduce": Case(
        lambda: alone(lambda: Join([reducing(made())])),
        {
            "leave overlap_gradients out, and pass Join a Joinable before this one that averages gradients": lambda: (
                in_processes(joined)
            ),
        },
        mesh="",
    ),
    "gradients that it does not reduce": Case(
        lambda: accumulates(made(), (optimizer := zero(made())), optimizer.no_sync),
        {
            "use no_sync of DistributedDataParallel or data_parallel, or pass overlap_gradients=True": lambda: [
                alone(accumulates_with_ddp),
                st.simulate("dp=2", accumulates_with_data_parallel),
                st.simulate("dp=2", accumulates_by_itself),
            ]
        },
        mesh="",
    ),
    "state of another shape than the parameter": Case(
        lambda: loaded("ranges"),
        {'pass partition="owners"': lambda: loaded("owners")},
        mesh="dp=2",
    ),
    "a model that was converted": Case(
        lambda: converted(is_first=False),
        {"convert the model first; else keep state_dict(), delete this optimizer": lambda: converted(is_first=True)},
        mesh="dp=2",
    ),
}
