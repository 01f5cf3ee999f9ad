"""Contents of tensor objects are swapped as soon as nothing else refers to them, or not at all."""

from __future__ import annotations

from threading import Timer

import pytest
import torch

from shardtensor.errors import RuleError
from shardtensor.tensor.memory import swap


def test_a_tensor_to_which_something_refers_for_a_moment_is_swapped_after_that():
    tensor, other = torch.ones(2), torch.zeros(3)
    views = [tensor[:1]]
    Timer(0.1, views.clear).start()
    swap("the tensor", tensor, other)
    assert tensor.tolist() == [0, 0, 0] and other.tolist() == [1, 1] and not views


def test_a_tensor_to_which_something_keeps_referring_is_as_it_was():
    tensor, other = torch.ones(2), torch.zeros(3)
    view = tensor[:1]
    with pytest.raises(RuleError, match="the tensor cannot be sharded now: something else refers to it"):
        swap("the tensor", tensor, other)
    assert tensor.tolist() == [1, 1] and other.tolist() == [0, 0, 0] and view.tolist() == [1]
