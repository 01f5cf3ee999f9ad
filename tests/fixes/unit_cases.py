"""Errors of fully sharded modules: meshes and parameters they are made of, what happens between their passes."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardtensor as st
from fixes.case import Act, Case, alone, grid, mlp, step, units
from shardtensor.fsdp import free_gathered, fully_shard

NOT_FOLLOWED = {"fsdp/checks.py:check_device": "of two devices that both have values, one is a GPU"}

X = torch.ones(2, 4)


def form(asked: Any, **options: Any) -> Any:
    return fully_shard(mlp(), shard_placement_fn=lambda p: asked, **options)


def over_data(spec: str, **options: Any) -> None:
    """A step of a module that is sharded by a spec over tp, and then fully over dp."""
    mesh = grid(("dp", 2), ("tp", 2))
    model = st.shard_module(mlp(), {"0.weight": spec}, process_group=mesh)
    ignored = {model[0].weight} if options else None
    step(fully_shard(model, mesh=mesh.axis("dp"), ignored_params=ignored))


class Hiding(nn.Module):
    """Two layers; what the first one gives is kept, and returned only where that is asked for."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.up, self.down, self.returns = nn.Linear(96, 96), nn.Linear(96, 96), returns

    def forward(self, x: torch.Tensor) -> Any:
        self.hidden = torch.tanh(self.up(torch.tanh(self.up(x))))
        return (self.down(self.hidden), self.hidden) if self.returns else self.down(self.hidden)


class Hidings(nn.Module):
    def __init__(self, returns: bool, **options: Any) -> None:
        super().__init__()
        self.layers, self.returns = nn.ModuleList(Hiding(returns) for _ in range(4)), returns
        for layer in self.layers:
            fully_shard(layer, **options)
        fully_shard(self)

    def forward(self, x: torch.Tensor) -> Any:
        seen = []
        for layer in self.layers:
            x = layer(x)
            if self.returns:
                x, hidden = x
                seen.append(hidden)
        return x, seen


def hidden(returns: bool, **options: Any) -> None:
    """A loss of what a layer kept."""
    model = Hidings(returns, **options)
    _, seen = model(torch.ones(2, 96))
    (seen[1] if returns else model.layers[1].hidden).square().mean().backward()


class Caller(nn.Module):
    """Its forward calls a module that is not in it, or is."""

    def __init__(self, other: nn.Module, inside: bool) -> None:
        super().__init__()
        self.own = nn.Linear(200, 200)
        self.others = nn.ModuleList([other]) if inside else [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.others[0](self.own(x)))


class Callers(nn.Module):
    def __init__(self, inside: bool, **options: Any) -> None:
        super().__init__()
        called = fully_shard(nn.Linear(200, 200))
        self.first = fully_shard(Caller(called, inside), **options)
        self.middle = fully_shard(nn.Linear(200, 200))
        if not inside:
            self.called = called
        fully_shard(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(self.first(x))


def called(inside: bool, **options: Any) -> None:
    Callers(inside, **options)(torch.ones(2, 200)).sum().backward()


class Table(nn.Module):
    """Returns its parameter."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.weight, self.give = nn.Parameter(torch.ones(4, 4)), give

    def forward(self) -> Any:
        return self.give(self.weight)


def given(give: Any) -> Any:
    return fully_shard(Table(give))()


def replaced(model: Any, values: torch.Tensor) -> Any:
    model[0].weight = nn.Parameter(values)
    return model


def tied(*values: float) -> None:
    """A table under two names, which are given other tensors after fully_shard."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model)
    tensors = [nn.Parameter(torch.full((8, 4), value)) for value in dict.fromkeys(values)]
    model[0].weight, model[1].weight = tensors[0], tensors[-1]
    model(torch.arange(8)).sum().backward()


def converted(early: bool, whole: bool = False) -> None:
    model: Any = mlp()
    if early:
        fully_shard(model[0].to(torch.float64))
    fully_shard(model)
    if not early:
        (model if whole else model[0]).to(torch.float64)
    if early:
        model[0](X.double()).sum().backward()
    else:
        step_of(model, X.double() if whole else X)


def step_of(model: Any, x: torch.Tensor) -> None:
    model(x).sum().backward()


def late(drops: bool) -> None:
    model = mlp()
    held: list[Any] = [model(X), weakref.ref(model[0].weight)]
    if drops:
        held.clear()
    step(fully_shard(model))


def freed(backward_first: bool, again: bool = False) -> None:
    """Memory is freed between a forward and its backward, or after it."""
    model = units()
    loss = model(X).sum()
    if backward_first:
        loss.backward()
    elif again:
        del loss
    free_gathered(model)


def freed_early(order: str) -> None:
    """A backward whose gradients need the input alone, before or after memory is freed; or of a forward again."""
    model = units()
    step(model)
    loss = model[0](X).sum()
    if order == "backward first":
        loss.backward()
    free_gathered(model)
    if order == "forward again":
        loss = model[0](X).sum()
    if order != "backward first":
        loss.backward()


def device_mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def on_both_axes() -> Any:
    mesh, layer = device_mesh(), nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Shard(0)]))
    return fully_shard(layer, mesh=mesh["dp"])


def on_one_axis() -> Any:
    mesh = device_mesh()
    return fully_shard(parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])


def resetting(act: Act | None = None) -> None:
    model = units()
    step(model)
    (model[0] if act is None else model).reset_iter_state()


def refused(name: str, *args: Any) -> Act:
    return lambda: getattr(units(), name)(*args)


COPIES = "rep=2, dp=2"

CASES: dict[str, Case] = {
    "a transform": Case(
        lambda: torch.func.vmap(units())(X),
        {
            "torch.autograd.grad(loss, inputs), or loss.backward() and param.grad": lambda: [
                torch.autograd.grad(units()(x := X.clone().requires_grad_()).sum(), x),
                step(units()),
            ],
            "shardtensor.unshard_module(module) makes it a plain module": lambda: torch.func.vmap(
                st.unshard_module(units())
            )(X),
        },
        mesh="dp=2",
    ),
    "a rank outside of the mesh": Case(
        lambda: alone(lambda: units(mesh=dist.GroupMember.NON_GROUP_MEMBER)),
        {"call fully_shard on the ranks of the mesh only": lambda: alone(lambda: step(units(mesh=dist.group.WORLD)))},
        mesh="",
    ),
    "a form over another axis": Case(
        lambda: form("flat(rep)", mesh="rep*dp"),
        {
            "write flat(dp), or pass a mesh whose last axis is the one to cut over": lambda: [
                step(form("flat(dp)", mesh="rep*dp")),
                step(form("flat(rep)", mesh="dp*rep")),
            ]
        },
        mesh=COPIES,
    ),
    "a reset of an inner module": Case(
        resetting, {"call it on the outermost one, a FSDPSequential": lambda: resetting(units)}, mesh="dp=2"
    ),
    "a stream for a sum over copies": Case(
        lambda: units(mesh="rep*dp").set_all_reduce_hook(lambda grad: None, stream=object()),
        {
            "leave it out: the hook runs in the stream of the sum over the copies": lambda: units(
                mesh="rep*dp"
            ).set_all_reduce_hook(lambda grad: None)
        },
        mesh=COPIES,
    ),
    "no buffers": Case(
        refused("set_reduce_scatter_max_input_buffers", 0),
        {"give 2, or more": refused("set_reduce_scatter_max_input_buffers", 2)},
        mesh="dp=2",
    ),
    "gathers of another kind": Case(
        refused("set_custom_all_gather", None),
        {
            "use set_modules_to_forward_prefetch to set how far gathers run ahead": lambda: [
                (model := units()),
                model.set_modules_to_forward_prefetch([model[0]]),
                step(model),
            ]
        },
        mesh="dp=2",
    ),
    "reductions of another kind": Case(
        refused("set_custom_reduce_scatter", None),
        {
            "use set_all_reduce_hook for a sum over more ranks": lambda: [
                (model := units()),
                model.set_all_reduce_hook(lambda grad: grad.mul_(2)),
                step(model),
            ]
        },
        mesh="dp=2",
    ),
    "memory of the process group": Case(
        refused("set_allocate_memory_from_process_group_for_comm", True),
        {"leave it out; buffers are fixed already": lambda: step(units())},
        mesh="dp=2",
    ),
    "symmetric memory": Case(
        refused("set_symm_mem_for_comm"),
        {"leave it out; buffers are fixed already": lambda: step(units())},
        mesh="dp=2",
    ),
    "a DTensor on the data axis, too": Case(
        lambda: alone(on_both_axes, 4),
        {
            'parallelize_module(module, mesh["tp"], plan), then fully_shard(module, mesh=mesh["dp"])': lambda: alone(
                on_one_axis, 4
            )
        },
        mesh="",
    ),
    "a parameter that cannot be cut further": Case(
        lambda: over_data("flat(tp)"),
        {
            "leave it out: ignored_params=[...]; or shard it by a spec such as [tp, -] over other axes": lambda: [
                over_data("flat(tp)", ignored=True),
                over_data("[tp, -]"),
            ]
        },
        mesh=4,
        differs=True,
    ),
    "memory that a graph needs": Case(
        lambda: freed(backward_first=False),
        {
            "call backward first, or drop the results of that forward": lambda: [
                freed(backward_first=True),
                freed(backward_first=False, again=True),
            ]
        },
        mesh="dp=2",
    ),
    "a backward after its memory was freed": Case(
        lambda: freed_early(""),
        {
            "call backward before free_gathered, or the forward again": lambda: [
                freed_early("backward first"),
                freed_early("forward again"),
            ]
        },
        mesh="dp=2",
    ),
    "a module beside its caller": Case(
        lambda: called(inside=False),
        {
            "make the other a submodule of the caller, and shard that after it": lambda: called(inside=True),
            "fully_shard(caller, reshard_after_forward=False)": lambda: called(
                inside=False, reshard_after_forward=False
            ),
        },
        mesh="dp=2",
    ),
    "a parameter of another shape": Case(
        lambda: step(replaced(units(), torch.ones(3, 4))),
        {"change modules before fully_shard": lambda: step(fully_shard(replaced(mlp(), torch.ones(8, 4))))},
        mesh="dp=2",
    ),
    "a tie that was cut": Case(
        lambda: tied(2.0, 3.0), {"put one tensor under all names of a tied parameter": lambda: tied(2.0)}, mesh="dp=2"
    ),
    "parameters of two dtypes": Case(
        lambda: converted(early=False),
        {
            "convert the whole module that fully_shard was called on, or convert parts of it before": lambda: [
                converted(early=False, whole=True),
                converted(early=True),
            ]
        },
        mesh="dp=2",
    ),
    "a parameter inside of an object": Case(
        lambda: given(lambda weight: SimpleNamespace(weight=weight)),
        {
            "return a copy (parameter.clone()), or return it in a list, tuple, dict or dataclass": lambda: [
                given(lambda weight: SimpleNamespace(weight=weight.clone())),
                given(lambda weight: [weight]),
                given(lambda weight: {"weight": weight}),
            ]
        },
        mesh="dp=2",
    ),
    "a parameter that is no longer gathered": Case(
        lambda: hidden(returns=False),
        {
            "return what the loss is computed from in the results of the module's forward": lambda: hidden(True),
            "fully_shard(module, reshard_after_forward=False) keeps parameters gathered": lambda: hidden(
                False, reshard_after_forward=False
            ),
        },
        mesh="dp=2",
    ),
    "a parameter that something holds": Case(
        lambda: late(drops=False),
        {
            "shard before the first forward, or drop its results, compiled modules and weak references": (
                lambda: [step(units()), late(drops=True)]
            )
        },
        mesh="dp=2",
    ),
}
