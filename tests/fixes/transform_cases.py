"""Errors of transforms, tracers, wrappers and Functions that do not know sharded tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import handle_torch_function, has_torch_function

import shardtensor as st
from fixes.case import Case, alone, grid, linear, mlp, weight

X = torch.ones(2, 6)


def plain() -> nn.Module:
    return st.unshard_module(linear())


def by_rows() -> nn.Module:
    return st.shard_module(mlp(), {"0": st.colwise("tp"), "2": st.rowwise("tp")})


def hidden() -> Any:
    """A sharded tensor that a plain Function makes."""
    return Leaky.apply(torch.ones(4, 6, requires_grad=True))


class Leaky(torch.autograd.Function):
    returns = staticmethod(lambda: weight() * 1)

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor) -> Any:
        return cls.returns()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Whole(Leaky):
    returns = staticmethod(lambda: weight().full_tensor())


class Local(Leaky):
    returns = staticmethod(lambda: weight().local_tensor())


def ddp(module: nn.Module, names: tuple[str, ...] = ()) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    DistributedDataParallel(module)(X).sum().backward()


def mesh() -> Any:
    return init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


def dtensor() -> Any:
    return distribute_tensor(torch.ones(4, 6), mesh(), [Shard(0)])


def largest() -> st.ShardedTensor:
    return st.init_from_local_tensor(torch.ones(4, 6).requires_grad_(), "[-, -] partial(tp, op=max)", (4, 6))


def over(device_mesh: Any) -> st.ShardedTensor:
    return st.zeros("[tp, -]", 4, 6, process_group=device_mesh)


def elementwise(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row * 2)(x)


def square() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def from_group_to_group(between: list[int]) -> None:
    """From ranks 0 and 1 to ranks 0 and 2, in a world of the ranks `between`."""
    first, last = dist.new_group([0, 1]), dist.new_group([0, 2])
    with st.load_with_process_group(dist.new_group(between)):
        st.reshard(over(first), "[-, tp]", process_group=last)


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __iter__(self) -> Any:
        return iter([self.value])


def total(values: Any) -> Any:
    """A function that asks its operands, as torch's own do."""
    if has_torch_function(tuple(values)):
        return handle_torch_function(total, tuple(values), values)
    return sum(value.sum() for value in values)


TRANSFORM = {
    "unshard_module(module), or full_tensor(), and transform the function of plain tensors": lambda: [
        torch.func.vmap(plain())(X),
        elementwise(weight().full_tensor()),
    ],
    "torch.autograd.grad and torch.autograd.functional (vectorize=False)": lambda: [
        torch.autograd.grad((module := linear())(X).sum(), module[0].weight),
        torch.autograd.functional.jacobian(linear(), X),
    ],
}

CASES: dict[str, Case] = {
    "vmap of a module": Case(lambda: torch.func.vmap(linear())(X), TRANSFORM),
    "vmap over a sharded tensor": Case(
        lambda: elementwise(weight()),
        {
            "call full_tensor() first and work on the plain tensor": lambda: elementwise(weight().full_tensor()),
            "unshard_module(module) makes its parameters plain": lambda: elementwise(plain()[0].weight),
        },
    ),
    "an export": Case(
        lambda: torch.export.export(linear(), (X,)),
        {"unshard_module(module) first": lambda: torch.export.export(plain(), (X,))},
    ),
    "a recorder": Case(
        lambda: alone(lambda: make_fx(by_rows())(torch.ones(2, 4)), 2),
        {
            "torch.compile(module) records both": lambda: alone(
                lambda: torch.compile(by_rows(), backend="eager")(torch.ones(2, 4)), 2
            ),
            "unshard_module(module) first": lambda: alone(
                lambda: make_fx(st.unshard_module(by_rows()))(torch.ones(2, 4)), 2
            ),
        },
        mesh="",
    ),
    "DistributedDataParallel": Case(
        lambda: alone(lambda: ddp(linear())),
        {
            'shardtensor.data_parallel(module, "dp", mesh)': lambda: alone(
                lambda: st.data_parallel(linear(None), "dp", grid(("dp", 1), ("tp", 1)))(X).sum().backward()
            ),
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(": lambda: alone(
                lambda: ddp(linear(), ("0.weight",))
            ),
        },
        mesh="",
    ),
    "a Function that makes a sharded tensor": Case(
        hidden,
        {
            "return full_tensor() of it from forward": lambda: Whole.apply(torch.ones(4, 6, requires_grad=True)),
            "return local_tensor() of it and wrap that outside": lambda: st.init_from_local_tensor(
                Local.apply(torch.ones(4, 6, requires_grad=True)), "[tp, -]", (4, 6)
            ),
        },
    ),
    "a DTensor beside a sharded tensor": Case(
        lambda: alone(lambda: weight() + dtensor()),
        {
            "shardtensor.from_dtensor(dtensor) is a ShardedTensor on the same memory": lambda: alone(
                lambda: [(x := dtensor()), over(x.device_mesh) + st.from_dtensor(x)]
            ),
            "tensor.to_dtensor(dtensor.device_mesh) is a DTensor on the same memory": lambda: alone(
                lambda: [(x := dtensor()), weight().to_dtensor(x.device_mesh) + x]
            ),
        },
        mesh="",
    ),
    "a partial maximum as a DTensor": Case(
        lambda: alone(lambda: largest().to_dtensor(mesh())),
        {"reduce it under torch.no_grad()": lambda: alone(lambda: torch.no_grad()(largest().full_tensor)())},
        mesh="",
    ),
    "a DTensor of simulated ranks": Case(
        lambda: weight().to_dtensor(),
        {
            "call to_dtensor(mesh) with a DeviceMesh of the ranks that hold it": lambda: alone(
                lambda: weight().to_dtensor(mesh())
            )
        },
        mesh="tp=1",
    ),
    "a DeviceMesh of other ranks": Case(
        lambda: alone(lambda: over(square()["dp"]).to_dtensor(square()), 4),
        {
            "pass the DeviceMesh of the ranks that hold the tensor": lambda: alone(
                lambda: over(square()["dp"]).to_dtensor(square()["dp"]), 4
            )
        },
        mesh="",
    ),
    "groups that no group holds": Case(
        lambda: alone(lambda: from_group_to_group([0, 1]), 3),
        {
            "make a process group of all of them and reshard to a spec on it first": lambda: alone(
                lambda: from_group_to_group([0, 1, 2]), 3
            )
        },
        mesh="",
    ),
    "an object that holds a sharded tensor": Case(
        lambda: total(Box(weight())), {"pass a list": lambda: total([weight()])}
    ),
    "a collective of torch": Case(
        lambda: alone(lambda: dist.all_reduce(weight())),
        {
            "pass local_tensor() to communicate shards": lambda: alone(
                lambda: dist.all_reduce(weight().local_tensor())
            ),
            "full_tensor() or gather() for the whole": lambda: alone(lambda: weight().full_tensor()),
        },
        mesh="",
    ),
    "a rank that is no member": Case(
        lambda: alone(lambda: over(dist.GroupMember.NON_GROUP_MEMBER)),
        {
            "call this on the members only": lambda: alone(lambda: over(dist.group.WORLD)),
            "use a spec that names its ranks, such as chunk(...)": lambda: alone(
                lambda: st.zeros(
                    'chunk(dim=0, placements=["rank:0/cpu"])', 4, 6, process_group=dist.GroupMember.NON_GROUP_MEMBER
                )
            ),
        },
        mesh="",
    ),
}
