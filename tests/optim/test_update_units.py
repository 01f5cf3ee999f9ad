"""Which classes may step each parameter by itself: those of torch, and those that state their unit."""

from __future__ import annotations

from functools import partial

import torch

from shardtensor.optim.update_units import steps_apart


class Own(torch.optim.SGD):
    """A class of a user, of which nothing is known."""


class Stated(Own):
    update_unit = "parameter"


class Together(Own):
    update_unit = "all"


def test_parameters_are_stepped_apart_where_a_class_is_known_to():
    assert steps_apart(torch.optim.AdamW) and steps_apart(partial(torch.optim.SGD, lr=0.1))
    assert steps_apart(Stated)
    assert not steps_apart(Own)
    assert not steps_apart(Together)
