"""The data ranks of a module, by mesh, group and axis names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError
from shardtensor.fsdp import fully_shard
from shardtensor.fsdp.data_mesh import DataAxes, DataMesh, _named
from shardtensor.mesh import Mesh


def test_ranks_are_found_by_the_names_of_axes():
    def body() -> None:
        group = as_group()
        rank = group.rank
        one, both, again = DataMesh.of("b"), DataMesh.of("a*b"), DataMesh.of(("a", "b"))
        assert (one.axis, one.whole.size, one.replicate) == ("b", 2, None)
        assert list(one.shard.ranks) == list(group.axis("b").ranks)
        for domain in (both, again, DataMesh.of("a, b")):
            assert domain.axis == "b" and domain.whole.size == 4 and domain.is_named
            assert list(domain.shard.ranks) == list(group.axis("b").ranks)
            assert list(domain.replicate.ranks) == list(group.axis("a").ranks)
        assert _named("b").mesh is None and _named("a*b").mesh.names == ("a", "b")
        assert (
            DataMesh.of(None).replicate is None and DataMesh.of(None).whole.size == 4 and not DataMesh.of(None).is_named
        )
        three = group.on_mesh(Mesh((("x", 2), ("y", 2), ("z", 1))), {})
        with pytest.raises(LayoutError, match="one or two axes, not 3"):
            DataMesh.of(three)
        line = DataMesh.of(group.on_mesh(Mesh((("x", 4),)), {}))
        assert (line.axis, line.whole.size, line.replicate) == ("x", 4, None)
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
            assert DataMesh.of(pair).whole.size == 2

    st.simulate(3, plain)


def sharded_over_replicas():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    layer = nn.Linear(4, 4, bias=False)
    st.shard_parameter(layer, "weight", "[x, -]", process_group=mesh["rep"])
    with pytest.raises(LayoutError, match="ranks that no mesh joins with the data ranks"):
        fully_shard(layer, mesh=mesh)
    assert torch.equal(layer.weight.full_tensor(), layer.weight.full_tensor())


@pytest.mark.worlds("gloo")
def test_data_ranks_that_hold_other_parts_of_a_parameter_are_refused(world):
    world(sharded_over_replicas, 4)


def sharded_by_another_name():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    dense, layer = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    layer.load_state_dict(dense.state_dict())
    st.shard_parameter(layer, "weight", "[any, -]", process_group=mesh["tp"])
    fully_shard(layer, mesh=mesh["dp"])
    torch.testing.assert_close(layer.weight.full_tensor(), dense.weight)
    return str(layer.weight.sharding_spec())


@pytest.mark.worlds("gloo")
def test_the_spec_of_a_parameter_has_the_axis_names_of_the_mesh(world):
    assert all(spec.startswith("[tp, -] flat(dp") for spec in world(sharded_by_another_name, 4))


@pytest.mark.parametrize(
    ("spec", "others", "share"),
    [("[-, -]", [0, 1, 2], 1.0), ("[dp balanced, -]", [], 1 / 3), ("[-, -] only(dp, 1)", [], 1 / 3)],
)
def test_replicas_of_a_part_are_on_the_data_ranks_that_hold_it(spec, others, share):
    """None other than this rank, if each holds another part or one rank holds all."""

    def body() -> None:
        group = as_group()
        copies, found = DataAxes.of("dp", None).copies("weight", st.zeros(spec, 4, 2))
        assert list(copies.ranks) == (others or [group.rank])
        assert found == share

    st.simulate("dp=3", body)
