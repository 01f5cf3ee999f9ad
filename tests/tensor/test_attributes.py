"""Reading an attribute of a ShardedTensor says what the dense tensor's says, and sends nothing for what is no value."""

from __future__ import annotations

import pytest
import torch

import shardtensor as st

MESH = "dp=2, tp=2"
LAYOUTS = ("[tp, -]", "[-, tp balanced]", "[tp, -] flat(dp)", "flat(dp*tp)", "replicate", "[dp, -] partial(tp)")
VALUES = {"T", "H", "mT", "mH", "real", "imag"}
"""Attributes that are other tensors of the same elements; these follow the rules of their operations."""
OWN = {"__weakref__", "_cdata", "_python_dispatch", "_version", "__cuda_array_interface__"}
"""What says something of one process's object or memory, in which no dense tensor is equal to another."""
ATTRIBUTES = sorted(
    name
    for name in dir(torch.Tensor)
    if type(getattr(torch.Tensor, name)).__name__ in ("getset_descriptor", "property", "member_descriptor")
)


def dense(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(24.0).view(4, 6).to(dtype).clone()


def made(spec: str, dtype: torch.dtype) -> torch.Tensor:
    return st.distribute(dense(dtype), spec)


def read(x: torch.Tensor, name: str) -> object:
    try:
        return getattr(x, name)
    except (RuntimeError, AttributeError, TypeError) as error:
        return type(error).__name__ if isinstance(error, st.RuleError) else str(error).splitlines()[0]


def whole(x: object) -> object:
    if isinstance(x, st.ShardedTensor):
        return x.full_tensor().tolist()
    return x.tolist() if isinstance(x, torch.Tensor) else x


@pytest.mark.filterwarnings("ignore:volatile was removed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64], ids=str)
@pytest.mark.parametrize("spec", LAYOUTS)
def test_no_attribute_but_a_value_sends_anything(spec, dtype):
    names = [name for name in ATTRIBUTES if name not in VALUES or (name == "real" and not dtype.is_complex)]
    traffic = st.count_bytes(MESH, lambda: [read(made(spec, dtype), name) for name in names])
    assert traffic.calls == 0, str(traffic)


@pytest.mark.filterwarnings("ignore:volatile was removed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("spec", LAYOUTS)
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")  # a flat range has no dims to turn around
def test_attributes_are_those_of_the_dense_tensor(spec, dtype):
    names = [name for name in ATTRIBUTES if name not in OWN]

    def body():
        return {name: whole(read(made(spec, dtype), name)) for name in names}

    want = {name: whole(read(dense(dtype), name)) for name in names}
    for found in st.simulate(MESH, body):
        assert found == want


@pytest.mark.parametrize("spec", ["[tp, -]", "flat(dp*tp)"])
def test_parts_of_complex_numbers_are_views(spec):
    def body():
        x = made(spec, torch.complex64).requires_grad_()
        y = x * 2
        (y.real * 3 + y.imag).sum().backward()
        with torch.no_grad():
            x.real.mul_(-1)
            x.imag.fill_(5)
        return x.grad.full_tensor(), x.full_tensor()

    x = dense(torch.complex64).requires_grad_()
    y = x * 2
    (y.real * 3 + y.imag).sum().backward()
    with torch.no_grad():
        x.real.mul_(-1)
        x.imag.fill_(5)
    for grad, value in st.simulate(MESH, body):
        assert torch.equal(grad, x.grad)
        assert torch.equal(value, x)


def test_hooks_are_those_of_the_leaf():
    x = made("[tp, -]", torch.float32).requires_grad_()
    assert x._backward_hooks is None and x._post_accumulate_grad_hooks is None
    handles = x.register_hook(lambda grad: None), x.register_post_accumulate_grad_hook(lambda tensor: None)
    assert len(x._backward_hooks) == len(x._post_accumulate_grad_hooks) == 1
    for handle in handles:
        handle.remove()
    assert not x._backward_hooks and not x._post_accumulate_grad_hooks
