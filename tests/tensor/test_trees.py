"""Tensors in what modules take and return."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch

from shardtensor.tensor.trees import cast_floats, map_tensors, tensors_in

Pair = namedtuple("Pair", "a b")


@dataclass
class Output:
    loss: torch.Tensor
    more: Any = None
    count: int = field(default=0, init=False)


def test_every_tensor_is_replaced_and_nothing_else_is_touched():
    x, y = torch.ones(2), torch.zeros(3)
    made = {id(x): x + 1, id(y): y - 1}
    ordered, counted = OrderedDict(b=x, a=1), defaultdict(list, {"k": y})
    values = [x, [x, 1], (y, "s"), Pair(x, (y, None)), {"a": [x], 2: y}, ordered, counted, Output(x, {"y": [y]})]
    for value in [*values, values]:
        found = map_tensors(lambda t: made[id(t)], value)
        assert type(found) is type(value)
        assert [id(t) for t in tensors_in(found)] == [id(made[id(t)]) for t in tensors_in(value)]
        assert map_tensors(lambda t: t, value) is value, "what stays the same is the same object"
    assert list(map_tensors(lambda t: made[id(t)], ordered)) == ["b", "a"]
    assert map_tensors(lambda t: made[id(t)], counted)["new"] == []
    for other in (1, "a", None, Output, Pair, torch.float32, [1, (2,)], {}, object()):
        assert map_tensors(lambda t: 1 / 0, other) is other


def test_only_floats_of_another_dtype_are_cast():
    x, ids, half = torch.ones(2), torch.arange(2), torch.ones(2, dtype=torch.bfloat16)
    values = {"x": x, "ids": ids, "half": half, "z": torch.ones(1, dtype=torch.complex64)}
    found = cast_floats(values, torch.bfloat16)
    assert found["x"].dtype == torch.bfloat16 and found["half"] is half
    assert found["ids"] is ids and found["z"] is values["z"]
    assert cast_floats([x], torch.float32)[0] is x


def test_tensors_are_found_wherever_they_are():
    class Slotted:
        __slots__ = ("a", "b")

    class Plain:
        pass

    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    slotted, plain = Slotted(), Plain()
    slotted.a, plain.inner, plain.again = x, {"k": (slotted, {y: 1}, frozenset([z]))}, plain
    assert {id(t) for t in tensors_in([plain, 3, "s", torch.nn.Linear(1, 1)])} == {id(x), id(z)}
