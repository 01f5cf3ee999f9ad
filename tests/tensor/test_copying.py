"""deepcopy, copy, pickle: independent where they should be, tied where they were, refused in another place."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size
from torch import nn

import shardtensor as st
from shardtensor import load_with_process_group

SPECS = ("[tp balanced, -]", "[-, tp balanced]", "flat(tp)", "replicate")


def whole() -> torch.Tensor:
    return torch.arange(15.0, device=device()).view(5, 3)


def check_deepcopy() -> None:
    for spec in SPECS:
        x = st.distribute(whole(), spec, requires_grad=True)
        x.tag = ["mine"]
        x.backward(torch.ones_like(whole()))
        twins = copy.deepcopy({"a": x, "b": x, "grad": x.grad})
        twin = twins["a"]
        assert twins["b"] is twin and twins["grad"] is twin.grad
        assert twin is not x and twin.sharding_spec() == x.sharding_spec() and twin.requires_grad and twin.is_leaf
        assert twin.tag == ["mine"] and twin.tag is not x.tag
        with torch.no_grad():
            x._local.zero_()
            x.grad._local.zero_()
        assert torch.equal(twin.full_tensor(), whole())
        assert torch.equal(twin.grad.full_tensor(), torch.ones_like(whole()))
        param = nn.Parameter(twin)
        param.grad = twin.grad
        again = copy.deepcopy(param)
        assert isinstance(again, nn.Parameter) and again.grad is None  # as of a plain parameter
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(param * 2)
        alias = copy.copy(param)
        assert alias is not param and alias._local is param._local and isinstance(alias, nn.Parameter)


@every_size
def test_copies(world, size):
    world(check_deepcopy, size)


def check_module() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 5))
    net[1].weight = net[0].weight
    st.shard_parameter(net, "0.weight", "[tp balanced, -]")
    assert net[1].weight is net[0].weight
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        weight = twin[0].weight
        assert twin[1].weight is weight and isinstance(weight, nn.Parameter) and isinstance(weight, st.ShardedTensor)
        assert weight is not net[0].weight and len(list(twin.parameters())) == 3
        assert torch.equal(weight.full_tensor(), net[0].weight.full_tensor())
        with torch.no_grad():
            weight._local.add_(1)
        assert torch.equal(weight.full_tensor(), net[0].weight.full_tensor() + 1)


def test_copies_of_a_module_keep_ties_and_parameters(world):
    world(check_module, 2)


def check_pickle() -> None:
    for spec in SPECS:
        x = st.distribute(whole(), spec, requires_grad=True)
        for loaded in (_saved(x, weights_only=True), _saved(x, weights_only=False), pickle.loads(pickle.dumps(x))):
            assert str(loaded.sharding_spec()) == str(x.sharding_spec()) and loaded.requires_grad and loaded.is_leaf
            assert torch.equal(loaded.full_tensor(), whole())
    big = torch.zeros(1000, device=device())
    part = st.init_from_local_tensor(big[:2], "[tp]")
    file = io.BytesIO()
    torch.save(part, file)
    assert file.tell() < 3500  # not the kilobytes that the leaf is a view of
    both = _saved([x, x, x._local], weights_only=True)
    assert both[0] is both[1] and both[2].data_ptr() == both[0]._local.data_ptr()
    assert _saved(x, map_location="meta").device.type == "meta"
    chunk = st.zeros(st.ChunkShardingSpec(0, [f"rank:{r}/{device(r)}" for r in range(dist.get_world_size())]), 4)
    assert str(_saved(chunk, map_location="meta").sharding_spec().placements[0]) == "rank:0/meta"


def _saved(value: object, **options: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@every_size
def test_pickles(world, size):
    world(check_pickle, size)


def check_mesh() -> None:
    mesh = dist.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    x = st.distribute(whole(), "[dp balanced, tp balanced]", process_group=mesh)
    blob = pickle.dumps(x)
    with load_with_process_group(mesh):
        inside = pickle.loads(blob)
    assert torch.equal((inside + x).full_tensor(), whole() * 2)
    a, b = pickle.loads(blob), pickle.loads(blob)  # the mesh is told again from what was written
    assert torch.equal((a + b).full_tensor(), whole() * 2)


def test_a_pickle_on_a_mesh(world):
    world(check_mesh, 4)


def check_devices() -> None:
    blob = pickle.dumps(st.zeros("[tp]", 4))
    rank = dist.get_rank()
    group = dist.new_group([0, 2, 3])
    with load_with_process_group(group), pytest.raises(RuntimeError) as error:
        pickle.loads(blob)
    text = {
        0: "Local world size at save time was 4, but at load time was 3",
        1: "Local rank at save time was 1, but at load time was -1",
    }.get(rank, f"Local rank at save time was {rank}, but at load time was {rank - 1}")
    assert str(error.value) == text
    assert torch.equal(pickle.loads(blob).full_tensor(), torch.zeros(4, device=device()))
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="Need to initialize default process group"):
        pickle.loads(blob)


def test_a_pickle_is_refused_in_another_place(world):
    world(check_devices, 4)
