"""What goes past the overrides is refused: no answer for one shard, no crash."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from torch import nn

import shardtensor as st

WAYS = {
    "torch.tensor": torch.tensor,
    "torch.as_tensor to a dtype": lambda x: torch.as_tensor(x, dtype=torch.float64),
    "func.grad": lambda x: torch.func.grad(lambda y: (y * y).sum())(x),
    "func.vmap": lambda x: torch.func.vmap(lambda y: y * 2)(x),
    "np.asarray": np.asarray,
    "np.array": np.array,
    "numpy": lambda x: x.numpy(),
    "dlpack": lambda x: x.__dlpack__(),
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "from_dlpack": torch.from_dlpack,
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage_offset": lambda x: x.storage_offset(),
    "share_memory_": lambda x: x.share_memory_(),
    "resize_": lambda x: x.resize_(2),
    "as_subclass": lambda x: x.as_subclass(torch.Tensor),
    "index": operator.index,
}


def overridden(function):
    def call(x):
        with torch._C.DisableTorchFunctionSubclass():
            return function(x)

    return call


DISABLED = {
    "add": lambda x: torch.add(x, x),
    "clone": lambda x: torch.clone(x),
    "sum": lambda x: torch.sum(x),
    "add_": lambda x: torch.Tensor.add_(x, 1),
    "matmul": lambda x: torch.matmul(x, x),
    "copy_": lambda x: torch.ones(4, 4).copy_(x),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.tensor(x)
@pytest.mark.parametrize("name", WAYS)
def test_a_bypass_is_an_error(name):
    x = st.zeros("[tp, -]", 4, 4)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        WAYS[name](x)


@pytest.mark.parametrize("name", DISABLED)
def test_without_overrides_every_operation_is_refused(name):
    x = st.zeros("[tp, -]", 4, 4)
    with pytest.raises(st.RuleError, match="reached a ShardedTensor below the level where operations are sharded"):
        overridden(DISABLED[name])(x)


def check_ddp() -> None:
    module = nn.Linear(4, 4)
    st.shard_parameter(module, "weight", "[tp, -]")
    with pytest.raises(RuntimeError):
        nn.parallel.DistributedDataParallel(module)
    try:
        ddp = nn.parallel.DistributedDataParallel(module, init_sync=False)
    except RuntimeError:
        return
    ddp(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError):  # that a parameter got no gradient
        ddp(torch.ones(2, 4))


def test_ddp_over_sharded_parameters_is_refused_and_does_not_crash(world):
    world(check_ddp, 1)


def test_membership_is_by_identity_or_ambiguous_as_for_plain_tensors():
    x, y = st.zeros("[tp, -]", 4, 4), st.zeros("[tp, -]", 4, 4)
    assert x in [x]
    with pytest.raises(RuntimeError, match="ambiguous"):
        assert x in [y]
    assert len({x: 1, y: 2}) == 2
