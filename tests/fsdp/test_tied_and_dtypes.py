"""Parameters under several names that are replaced after fully_shard; the dtypes that gradients can be summed in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardtensor as st
from shardtensor.errors import LayoutError, RuleError
from shardtensor.fsdp import MixedPrecisionPolicy, fully_shard
from shardtensor.fsdp.checks import _check_dtype

F8 = torch.float8_e4m3fn


class Tied(nn.Module):
    """One weight under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.two.weight = self.three.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(2 * x) + self.three(4 * x)


def replaced(values: dict[str, float]) -> float:
    """The output after the weights under some names were replaced; of a weight of all ones it is 21."""
    torch.manual_seed(0)
    model = Tied()
    nn.init.ones_(model.one.weight)
    fully_shard(model)
    x = torch.ones(1, 3)
    assert model(x)[0, 0] == 21
    for name, value in values.items():
        getattr(model, name).weight = nn.Parameter(torch.full((3, 3), value))
    out = model(x)
    assert model.one.weight is model.two.weight is model.three.weight
    out.sum().backward()
    assert model.one.weight.grad.full_tensor().shape == (3, 3)
    return out[0, 0].item()


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"one": 2.0}, 42),
        ({"three": 2.0}, 42),
        ({"one": 3.0, "two": 3.0}, 63),
        ({"one": 3.0, "two": 3.0, "three": 3.0}, 63),
    ],
)
def test_what_one_name_is_given_all_have(values, found):
    assert st.simulate(2, replaced, values) == [found] * 2


@pytest.mark.parametrize(
    "values", [{"one": 2.0, "two": 3.0}, {"one": 2.0, "two": 2.0, "three": 3.0}, {"one": 1.0, "three": 2.0}]
)
def test_different_tensors_under_the_names_of_one_are_refused(values):
    with pytest.raises(RuleError, match="has 3 names, under which there are different tensors now"):
        st.simulate(2, replaced, values)


def test_what_is_taken_out_or_of_another_shape_is_refused():
    def body() -> None:
        for change, text in (
            (lambda model: setattr(model.two, "weight", nn.Parameter(torch.ones(3, 4))), "a tensor of another shape"),
            (lambda model: delattr(model.two, "weight"), "was taken out of"),
            (lambda model: setattr(model.three, "weight", None), "was taken out of"),
        ):
            model = fully_shard(Tied())
            model(torch.ones(1, 3))
            change(model)
            with pytest.raises(RuleError, match=text):
                model(torch.ones(1, 3))

    st.simulate(2, body)


DTYPES = [
    # of the parameter, param_dtype, reduce_dtype, whether that has a sum
    (torch.float32, None, None, True),
    (torch.bfloat16, None, None, True),
    (torch.complex64, None, None, True),
    (F8, None, None, False),
    (F8, None, torch.float32, True),
    (F8, torch.bfloat16, None, True),
    (F8, torch.bfloat16, F8, False),
    (torch.float32, F8, None, False),
    (torch.float32, F8, torch.bfloat16, True),
    (torch.float32, torch.bfloat16, F8, False),
    (torch.float32, None, torch.int32, False),
]


@pytest.mark.parametrize(("own", "param_dtype", "reduce_dtype", "fits"), DTYPES)
def test_gradients_are_summed_in_a_dtype_that_has_a_sum(own, param_dtype, reduce_dtype, fits):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    entry = SimpleNamespace(name="w", param=nn.Parameter(torch.zeros(2, dtype=own)))
    if fits:
        _check_dtype(entry, policy)
    else:
        with pytest.raises(LayoutError, match='the gradient of "w" would be summed over the ranks in'):
            _check_dtype(entry, policy)
    entry.param.requires_grad_(False)
    _check_dtype(entry, policy)
