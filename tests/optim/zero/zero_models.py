"""Parameters, gradients and optimizer classes for the tests of `ZeroRedundancyOptimizer`; every rank holds them whole.

The oracle is the same optimizer in one process, without partitioning: `twins` makes its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from harness import FULL, device
from torch import nn, optim

import shardtensor as st
from shardtensor.comm.process_group import as_group

SHAPES = {
    "matrix": (5, 3),
    "row": (1, 7),
    "bias": (12,),
    "number": (),
    "empty": (0, 4),
    "strided": (4, 6),  # a transposed tensor
    "cube": (2, 3, 2),
    "last": (3,),
}
MATRICES = ("matrix", "row", "strided")

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"foreach": True}, {"maximize": True}],
    "AdamW": [{}, {"fused": True}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adamax": [{}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "ASGD": [{"t0": 1.0}],
    "Rprop": [{}],
    "Adafactor": [{}, {"weight_decay": 0.1}],
    "Muon": [{}],
    "LBFGS": [{"max_iter": 3}],
}
"""Every class of torch.optim that takes dense gradients, with options; `lr` is given by the tests."""

MODES: dict[str, dict[str, Any]] = {
    "owners": {},
    "views": {"parameters_as_bucket_view": True},
    "ranges": {"partition": "ranges"},
}
ROUNDED = {"rtol": 1e-5, "atol": 1e-6}
STEPS = 3

Params = dict[str, torch.Tensor]


def in_turns(cases: Iterable[Any], sizes: Iterable[int] = (2, 3, 4, 1)) -> list[Any]:
    """Parameters of a case and a number of ranks: all of them, or in a quick run one number for each case, in turns."""
    cases, sizes = list(cases), list(sizes)
    pairs = [(case, size) for i, case in enumerate(cases) for size in (sizes if FULL else [sizes[i % len(sizes)]])]
    return [pytest.param(case, size, id=f"{_id_of(case)}-{size}") for case, size in pairs]


def _id_of(case: Any) -> str:
    return "-".join(case) if isinstance(case, tuple) else case.__name__


def names_for(cls: str) -> list[str]:
    """The parameters that a class takes: torch's LBFGS views gradients as flat, Adafactor divides by their lengths."""
    if cls == "Muon":
        return list(MATRICES)
    refused = {"LBFGS": "strided", "Adafactor": "empty"}.get(cls)
    return [name for name in SHAPES if name != refused]


def dense(names: Iterable[str] = tuple(SHAPES), seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in names:
        shape = SHAPES[name]
        value = torch.randn(shape[::-1] if name == "strided" else shape, generator=generator).to(device())
        found[name] = nn.Parameter(value.t() if name == "strided" else value)
    return found


def twins(names: Iterable[str] = tuple(SHAPES)) -> tuple[Params, Params]:
    """Equal parameters for the optimizer that is tested, and for the oracle."""
    names = list(names)
    return dense(names), dense(names)


def zero(params: Any, cls: Any, mode: str = "owners", **options: Any) -> st.ZeroRedundancyOptimizer:
    """The optimizer that is tested, over a dict of parameters or over what it takes."""
    params = list(params.values()) if isinstance(params, dict) else params
    return st.ZeroRedundancyOptimizer(params, cls, **MODES[mode], **options)


def groups_of(params: Params, cls: str = "SGD") -> list[dict[str, Any]]:
    """Two groups that take turns in the order of the parameters; LBFGS takes one."""
    members = list(params.values())
    if cls == "LBFGS" or len(members) < 2:
        return [{"params": members}]
    return [{"params": members[::2], "lr": 0.02}, {"params": members[1::2], "lr": 0.2}]


def set_grads(step: int, *models: Params, skipped: Iterable[str] = ()) -> None:
    """Equal random gradients for equal names, with the strides of the parameter; None for those skipped."""
    for i, name in enumerate(models[0]):
        generator = torch.Generator().manual_seed(1000 * step + i)
        grad = torch.randn(models[0][name].shape, generator=generator).to(device())
        for model in models:
            param = model[name]
            param.grad = None if name in skipped else torch.empty_like(param, requires_grad=False).copy_(grad)


def quadratic(params: Params) -> Any:
    """A closure that computes gradients itself: LBFGS calls it several times a step."""

    def closure() -> torch.Tensor:
        for param in params.values():
            param.grad = None
        loss = torch.stack([(i + 1) * (param - 1).square().sum() for i, param in enumerate(params.values())]).sum()
        loss.backward()
        return loss.detach()

    return closure


PARTITIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "of_owners": {"partition": "owners"},
    "of_ranges": {"partition": "ranges"},
}
MANY = 1e-4
"""MiB of a bucket that a few of the parameters fill."""
AVERAGED = {"rtol": 1e-4, "atol": 1e-5}
"""Gradients that are sums in another order."""


def reducing(params: Any, cls: Any, mode: str = "default", **options: Any) -> st.ZeroRedundancyOptimizer:
    """The optimizer that reduces gradients in backward, in many buckets."""
    params = list(params.values()) if isinstance(params, dict) else params
    options = {"bucket_mib": MANY, **PARTITIONS[mode], **options}
    return st.ZeroRedundancyOptimizer(params, cls, overlap_gradients=True, **options)


def batch(step: int, size: int = 12) -> torch.Tensor:
    return torch.randn(size, 24, generator=torch.Generator().manual_seed(step)).to(device())


def part_of(x: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    """The part of a batch that this rank computes its loss of, or that a given rank does."""
    group = as_group()
    return x.chunk(group.size)[group.rank if rank is None else rank]


def loss_of(params: Params, x: torch.Tensor, used: Iterable[str] | None = None) -> torch.Tensor:
    """A mean over rows of `x`, to which each parameter in `used` gives a value for each row; it is read twice."""
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for i, name in enumerate(params if used is None else used):
        flat, weights = params[name].reshape(-1), x[:, : params[name].numel()]
        products = torch.sin(weights.to(flat.dtype) @ flat) + 0.1 * (i + 1) * torch.sin(flat.square().sum())
        total = total + products.double()
    return (total - 1).square().mean() / 10


def backward(model: Params, oracle: Params, step: int = 0, used: Any = None, scale: Any = 1.0) -> None:
    """Run backward from the loss of this rank's part, and from the mean of all parts' losses in the oracle.

    Args:
        used: the names of the parameters that a rank's loss depends on: for all ranks, or by rank.
    """
    size, x = as_group().size, batch(step)
    names = used if callable(used) else lambda rank: used
    (loss_of(model, part_of(x), names(as_group().rank)) * scale).backward()
    (sum(loss_of(oracle, part_of(x, rank), names(rank)) for rank in range(size)) / size * scale).backward()


def assert_averaged(model: Params, oracle: Params, why: Any = "", **close: float) -> None:
    """The gradients are ShardedTensors with the values of the oracle's; None where the oracle has none."""
    for name, want in oracle.items():
        got = model[name].grad
        assert (got is None) == (want.grad is None), f"{why} {name}: {got} is not {want.grad}"
        if want.grad is not None:
            assert isinstance(got, st.ShardedTensor), f"{why} {name}: {type(got)}"
            assert_value(got, want.grad, f"gradient of {name} {why}", **(close or AVERAGED))


def train_both(
    model: Params, ours: optim.Optimizer, oracle: Params, plain: optim.Optimizer, steps: Iterable[int], **close: float
) -> None:
    """Step both, and compare gradients and parameters in each step."""
    for step in steps:
        backward(model, oracle, step)
        assert_averaged(model, oracle, step, **close)
        ours.step()
        plain.step()
        assert_equal(model, oracle, step, **(close or AVERAGED))
        ours.zero_grad()
        plain.zero_grad()


def assert_equal(model: Params, oracle: Params, why: Any = "", **close: float) -> None:
    """Equal values under every name: bit for bit, or as `close` says."""
    for name, want in oracle.items():
        assert_value(model[name], want, f"{why} {name}", **close)


def assert_value(got: Any, want: Any, why: str = "", **close: float) -> None:
    """Equal nested values with equal keys, in any order, and equal types; tensors of one dtype."""
    got = got.full_tensor() if isinstance(got, st.ShardedTensor) else got
    want = want.full_tensor() if isinstance(want, st.ShardedTensor) else want
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{why}: {got!r} is not {want!r}"
        got, want = got.detach(), want.detach()
        assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{why}: {got} is not {want}"
        is_same = torch.allclose(got, want, **close) if close else torch.equal(got, want)
        assert is_same, f"{why}: {got} is not {want}"
    elif isinstance(want, dict):
        assert set(got) == set(want), f"{why}: {list(got)} is not {list(want)}"
        for key in want:
            assert_value(got[key], want[key], f"{why}[{key!r}]", **close)
    elif isinstance(want, list | tuple):
        assert type(got) is type(want) and len(got) == len(want), f"{why}: {got!r} is not {want!r}"
        for i, pair in enumerate(zip(got, want, strict=True)):
            assert_value(*pair, f"{why}[{i}]", **close)
    else:
        assert type(got) is type(want) and got == want, f"{why}: {got!r} is not {want!r}"


def assert_loads(state: dict[str, Any], load: Any) -> None:
    """Load a state dict, which must not change it."""
    before = copy.deepcopy(state)
    load(state)
    assert_value(state, before, "the caller's dict")


class Factored(optim.Optimizer):
    """A class of the kind of Shampoo: the state of a parameter is a number and a list of one matrix for each dim."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["count"] = 0
                    state["factors"] = [torch.eye(size, device=param.device) for size in param.shape]
                state["count"] += 1
                update = param.grad
                for dim, factor in enumerate(state["factors"]):
                    rows = param.grad.movedim(dim, 0).reshape(param.shape[dim], -1)
                    factor += rows @ rows.t()
                    update = torch.tensordot(torch.linalg.inv(factor), update, ([1], [dim])).movedim(0, dim)
                param -= group["lr"] * update


class WithoutClosure(optim.Optimizer):
    """A class whose step takes no closure but an argument of its own, and which adds keys to its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            group["calls"] = 0

    @torch.no_grad()
    def step(self, *, scale: float = 1.0) -> None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["last_scale"] = scale
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * scale * param.grad
