"""``torch.distributed.checkpoint`` of sharded tensors: while the program goes on, and between FSDP2 and ours.

What one world saves, a world of another size loads; `tests/tensor/test_checkpointing.py` has all layouts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import device
from torch import nn
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.default_planner import _create_default_local_metadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.fsdp import fully_shard

import shardtensor as st
from shardtensor.comm.process_group import as_group

MATRIX = torch.arange(35.0).view(5, 7)
SPECS = ("[tp balanced, -]", "[-, tp balanced]", "flat(tp)", "[-, tp balanced blocks(2)]", "replicate")


def laid_out() -> dict[str, Any]:
    """The matrix in several layouts, under names and nested, and values that are no sharded tensors."""
    found: dict[str, Any] = {spec: st.distribute(MATRIX.to(device()), spec) for spec in SPECS[:3]}
    tail = {"blocks": st.distribute(MATRIX[:, :6].to(device()), SPECS[3]), "step": 3}
    return {**found, "nested": [tail], "plain": torch.ones(2, device=device())}


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def async_saved(folder: str, times: int, *, keeps: bool) -> None:
    state = laid_out()
    given: dict[str, Any] = {"process_group": dist.new_group(backend="gloo")}  # it is needed where the others are NCCL
    if keeps:
        given["async_stager"] = DefaultStager(StagingOptions(False, False, False, False))
    for i in range(times):
        with torch.no_grad():
            for x in tensors_in(state):
                x.add_(1.0)
        done: Any = dcp.async_save(state, checkpoint_id=f"{folder}/{i}", **given)
        if hasattr(done, "staging_completion"):  # with the stager it depends on torch's version
            done.staging_completion.result()
            done = done.upload_completion
        with torch.no_grad():
            for x in tensors_in(state):
                x.add_(100.0)  # after the copies: the files do not see it
        done.result()
        with torch.no_grad():
            for x in tensors_in(state):
                x.sub_(100.0)
    dist.destroy_process_group(given["process_group"])


def loaded(folder: str, more: float) -> None:
    state = laid_out()
    want = [whole(x) + more for x in tensors_in(state)]
    with torch.no_grad():
        for x in tensors_in(state):
            x.zero_()
    dcp.load(state, checkpoint_id=folder)
    for x, y in zip(tensors_in(state), want, strict=True):
        assert torch.equal(whole(x), y)


@pytest.mark.parametrize("keeps", [False, True], ids=["", "a stager that keeps its memory"])
def test_async_save_writes_the_values_of_the_call(world, tmp_path, keeps):
    world(async_saved, 3, folder=str(tmp_path), times=2, keeps=keeps)
    for i in range(2):
        world(loaded, 2, folder=str(tmp_path / str(i)), more=i + 1.0)


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device())


def trained(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of torch's FSDP2, or one of ours, after a step with equal gradients on all ranks."""
    model = mlp(seed)
    if kind == "torch":
        mesh = dist.init_device_mesh(device().type, (as_group().size,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "fsdp":
        st.fully_shard(model[0])
        st.fully_shard(model)
    else:
        st.shard_module(model, {"0": "[tp balanced, ...]", "2.weight": "[-, tp balanced]"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    whole_of(model(torch.ones(2, 5, device=device()))).square().sum().backward()
    optimizer.step()
    return model, optimizer


def whole_of(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def state_of(kind: str, seed: int) -> dict[str, Any]:
    model, optimizer = trained(kind, seed)
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def flat_values(state: Any, name: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {key: x for k, item in state.items() for key, x in flat_values(item, f"{name}/{k}").items()}
    return {name: whole_of(state).clone() if isinstance(state, torch.Tensor) else state}


def saved_by(kind: str, folder: str) -> dict[str, Any]:
    state = state_of(kind, 0)
    dcp.save(state, checkpoint_id=folder)
    return flat_values(state)


def loaded_by(kind: str, folder: str) -> dict[str, Any]:
    state = state_of(kind, 1)
    dcp.load(state, checkpoint_id=folder)
    return flat_values(state)


@pytest.mark.parametrize(
    "kinds", [("torch", "fsdp"), ("torch", "tp"), ("fsdp", "torch"), ("tp", "torch")], ids="-".join
)
@pytest.mark.parametrize("sizes", [(1, 3), (4, 2), (3, 4)])
@pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")
def test_models_of_fsdp2_and_ours_load_each_other(world, tmp_path, kinds, sizes):
    before = world(saved_by, sizes[0], kind=kinds[0], folder=str(tmp_path))[0]
    after = world(loaded_by, sizes[1], kind=kinds[1], folder=str(tmp_path))
    for found in after:
        assert found.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


def described() -> None:
    """The plan of a state dict, for which no rank has to be asked, covers each tensor once."""
    found = _create_default_local_metadata({spec: st.distribute(MATRIX.to(device()), spec) for spec in SPECS[:3]})
    sizes = [md.size for md in found.state_dict_metadata.values()]
    assert sizes == [MATRIX.shape] * 3
    for md in found.state_dict_metadata.values():
        covered = torch.zeros_like(MATRIX)
        for chunk in md.chunks:
            covered[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert bool((covered == 1).all())
    replicated = planner_helpers._create_write_items("w", st.distribute(MATRIX.to(device()), "replicate"))
    assert [item.tensor_data.chunk.sizes for item in replicated] == [MATRIX.shape]


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_described_checkpoint_covers_each_tensor_once(world, size):
    world(described, size)


def looked_up() -> None:
    tensor = st.distribute(MATRIX.to(device()), "[-, tp balanced]")
    rank = as_group().rank
    own = (0, (0, 4)[rank])
    box = find_tensor_shard(tensor, MetadataIndex("w", torch.Size(own), index=99))
    assert torch.equal(box, MATRIX[:, own[1] : own[1] + (4, 3)[rank]].to(device()))
    with pytest.raises(ValueError, match="no offset was provided"):
        find_tensor_shard(tensor, MetadataIndex("w"))
    with pytest.raises(ValueError, match=r"Could not find shard at 'torch.Size\(\[0, 1\]\)' for FQN: 'w'"):
        find_tensor_shard(tensor, MetadataIndex("w", torch.Size([0, 1])))
    same = st.distribute(MATRIX.to(device()), "replicate")
    assert torch.equal(find_tensor_shard(same, MetadataIndex("w")), MATRIX.to(device()))


@pytest.mark.worlds("sim", "gloo")
def test_a_box_is_found_by_its_offset_alone(world):
    world(looked_up, 2)
