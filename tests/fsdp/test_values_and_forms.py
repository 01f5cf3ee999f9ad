"""Pure parts of fully sharded modules: tensors in what modules take and give, how parameters are cut, data axes."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError
from shardtensor.fsdp.data_mesh import DataMesh, _named
from shardtensor.layout.bind import bind
from shardtensor.layout.shard_placement import ANYWHERE, ShardPlacement
from shardtensor.mesh import Mesh
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


# -- forms -------------------------------------------------------------------------------------------------------------

ASKED = [None, "flat(dp)", "flat(dp, unit=row)", "flat(dp, unit=4)", "only(dp, 1)", Shard(0), Shard(1), Shard(-1)]


def form(asked: Any, shape: tuple[int, ...]) -> ShardPlacement:
    return ShardPlacement.of(asked, "w", shape, "dp", True, 3)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_what_is_stored_is_shown_again(asked):
    for shape in ((4, 6), (3, 2, 4), (1, 5), (7, 1)):
        cut = form(asked, shape)
        x = torch.arange(float(math.prod(shape))).view(shape)
        stored = cut.stored(x)
        assert stored.shape == (x.numel(),)
        assert torch.equal(cut.as_param(stored, shape), x)
        grain = cut.grain(shape)
        whole_rows = {"flat(dp)": 1, None: 1, "flat(dp, unit=4)": 4, "only(dp, 1)": x.numel()}
        dim = asked.dim % len(shape) if isinstance(asked, Shard) else 0
        assert grain == whole_rows.get(asked if not isinstance(asked, Shard) else "", x.numel() // shape[dim])
        if isinstance(asked, Shard):  # a stretch of grains is a stretch along the dim
            first = cut.as_param(stored[:grain], tuple(1 if d == dim else n for d, n in enumerate(shape)))
            assert torch.equal(first, x.narrow(dim, 0, 1))


def test_a_spec_puts_on_each_rank_what_its_range_holds():
    mesh = Mesh((("dp", 3),))
    for asked, shape in itertools.product(ASKED, ((4, 6), (6, 3), (3, 2, 4))):
        cut = form(asked, shape)
        grain, total = cut.grain(shape), math.prod(shape)
        for counts in ((2, 1), (1, 1), (0, 3)):
            first, second = (min(count * grain, total) for count in counts)
            sizes = (first, min(second, total - first), total - first - min(second, total - first))
            layout = bind(cut.spec(None, shape, "dp", None if cut.owner is not None else sizes), shape, mesh)
            x = torch.arange(total).view(shape)
            stored = cut.stored(x)
            starts = (0, sizes[0], sizes[0] + sizes[1])
            for rank in range(3):
                held = {int(i) for box in layout.boxes(rank) for i in x[box.slices].flatten()}
                if cut.owner is not None:
                    assert held == (set(range(total)) if rank == 1 else set())
                else:
                    assert held == set(stored[starts[rank] : starts[rank] + sizes[rank]].tolist()), (
                        asked,
                        shape,
                        sizes,
                    )


def test_even_stretches_are_said_without_sizes():
    cut = form(Shard(1), (4, 6))
    assert str(cut.spec(None, (4, 6), "dp", (8, 8, 8))) == "[-, dp]"
    assert str(cut.spec(None, (4, 6), "dp", (8, 12, 4))) == "[-, dp sizes(2, 3, 1)]"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("[dp, -]", "what fully_shard cannot do"),
        ("replicate", "what fully_shard cannot do"),
        ("flat(dp, sizes=(1, 2))", "what fully_shard cannot do"),
        ("flat(dp) only(tp, 1)", "what fully_shard cannot do"),
        ("[-] partial(dp)", "what fully_shard cannot do"),
        ("flat(tp)", "over tp, but the data axis is dp"),
        ("flat(dp*tp)", r"over dp\*tp, but the data axis is dp"),
        ("only(tp, 0)", "over tp, but the data axis is dp"),
        ("only(dp, 3)", "to data rank 3, and there are 3"),
        (Shard(2), "cuts dim 2 of `w`, which has 2 dims"),
        (Shard(-3), "cuts dim -3 of `w`, which has 2 dims"),
    ],
    ids=str,
)
def test_what_no_data_ranks_can_hold_is_refused(asked, text):
    with pytest.raises(LayoutError, match=text):
        form(asked, (4, 6))


def test_an_axis_without_a_name_goes_by_any():
    assert ShardPlacement.of("flat(any)", "w", (4,), "dp", False, 3) == ShardPlacement(axis="any")
    assert ShardPlacement.of("only(any, 2)", "w", (4,), "dp", False, 3) == ShardPlacement(owner=2, axis="any")
    assert ShardPlacement.of("only(dp, 1)", "w", (), "dp", True, 3) == ShardPlacement(axis="dp"), "a number has a range"
    assert form(None, (4,)) is ANYWHERE and form(Shard(0), (4, 6)) == ShardPlacement(unit="row")


# -- data axes ---------------------------------------------------------------------------------------------------------


def test_ranks_are_found_by_the_names_of_axes():
    def body() -> None:
        group = as_group()
        rank = group.rank
        one, both, again = DataMesh.of("b"), DataMesh.of("a*b"), DataMesh.of(("a", "b"))
        assert (one.axis, one.size, one.replicate, list(one.shard.ranks)) == ("b", 2, None, list(group.axis("b").ranks))
        for domain in (both, again, DataMesh.of("a, b")):
            assert domain.axis == "b" and domain.size == 4 and domain.is_named
            assert list(domain.shard.ranks) == list(group.axis("b").ranks)
            assert list(domain.replicate.ranks) == list(group.axis("a").ranks)
        assert _named("b").mesh is None and _named("a*b").mesh.names == ("a", "b")
        assert DataMesh.of(None).replicate is None and DataMesh.of(None).size == 4 and not DataMesh.of(None).is_named
        three = group.on_mesh(Mesh((("x", 2), ("y", 2), ("z", 1))), {})
        with pytest.raises(LayoutError, match="one or two axes, not 3"):
            DataMesh.of(three)
        line = DataMesh.of(group.on_mesh(Mesh((("x", 4),)), {}))
        assert (line.axis, line.size, line.replicate) == ("x", 4, None)
        for text, unknown in (("c", "c"), ("a*c", "c"), ("d*a", "d")):
            with pytest.raises(LayoutError, match=f'no axis "{unknown}": the default group has the axes a, b'):
                DataMesh.of(text)
        assert rank in both.whole.ranks

    st.simulate("a=2, b=2", body)

    def plain() -> None:
        with pytest.raises(LayoutError, match="the default group has no named axes"):
            DataMesh.of("dp")
        assert DataMesh.of(None).axis == "dp"
        pair = as_group().subgroup([0, 1])
        if as_group().rank == 2:
            with pytest.raises(LayoutError, match="rank 2 is not in the mesh"):
                DataMesh.of(pair)
        else:
            assert DataMesh.of(pair).size == 2

    st.simulate(3, plain)
