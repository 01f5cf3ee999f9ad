"""What programs for torch's own ShardedTensor do with its values: old tensors and files, constructors, dataclasses."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import device
from shardtensor.sharded_tensor import ShardedTensorBase
from torch import nn
from torch.distributed._shard import sharded_tensor as theirs
from torch.distributed._shard import sharding_spec as their_spec

import shardtensor as st
from shardtensor.comm.process_group import as_group


def torchs(rows: int) -> Any:
    """Torch's tensor of increasing numbers, cut by rows over all ranks."""
    size = dist.get_world_size()
    spec = their_spec.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(size)])
    made = theirs.empty(spec, rows, 3)
    for shard in made.local_shards():
        start, length = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(torch.arange(3.0 * rows).view(rows, 3)[start : start + length])
    return made


def taken() -> None:
    warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)  # says torch of its own
    for rows in (7, 2, 6):  # two: a rank without any
        old, dense = torchs(rows), torch.arange(3.0 * rows).view(rows, 3)
        new = st.from_torch_sharded_tensor(old)
        assert torch.equal(new.full_tensor(), dense)
        assert str(new.sharding_spec()).startswith("chunk(dim=0")
        for mine, its in zip(new.local_shards(), old.local_shards(), strict=True):
            assert mine.tensor is its.tensor
        other = st.zeros("[-, tp balanced]", rows, 3)
        assert torch.equal(other.copy_(old).full_tensor(), dense)
    boxes = [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0, 2), (4, 1))]
    listed = [their_spec.ShardMetadata(list(at), list(n), f"rank:{i % 2}/cpu") for i, (at, n) in enumerate(boxes)]
    grid = theirs.ones(their_spec.EnumerableShardingSpec(listed), 4, 3)
    assert torch.equal(st.from_torch_sharded_tensor(grid).full_tensor(), torch.ones(4, 3))
    with pytest.raises(TypeError, match="this takes torch's ShardedTensor, and this is a Tensor"):
        st.from_torch_sharded_tensor(torch.ones(2))


def test_tensors_of_torch_are_taken(world):
    world(taken, 3)


def from_a_file(folder: str) -> None:
    warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)  # says torch of its own
    file = f"{folder}/{dist.get_rank()}.pt"
    torch.save({"weight": torchs(7), "bias": torch.ones(7)}, file)
    state = torch.load(file, weights_only=False)
    for spec in ("[-, tp balanced]", "[tp balanced, -]", "flat(tp)"):
        model = nn.Linear(3, 7)
        st.shard_parameter(model, "weight", spec)
        model.load_state_dict(state)
        assert torch.equal(model.weight.full_tensor(), torch.arange(21.0).view(7, 3))
    model = nn.Linear(3, 7)
    st.fully_shard(model)
    model.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 3)), torch.arange(21.0).view(7, 3).sum(1)[None] + 1)


def test_old_files_load_into_sharded_models(world, tmp_path):
    world(from_a_file, 2, folder=str(tmp_path))


def constructed() -> None:
    size = as_group().size
    chunk = st.ChunkShardingSpec(0, [f"rank:{rank}/{device()}" for rank in range(size)])
    for spec in (chunk, "[tp balanced, -]"):
        x = st.ShardedTensor(spec, 5, 3, dtype=torch.float64, requires_grad=True)
        assert type(x) is st.ShardedTensor and isinstance(x, ShardedTensorBase)
        assert x.shape == (5, 3) and x.dtype == torch.float64 and x.requires_grad
        assert [shard.tensor.shape[1] for shard in x.local_shards()] == [3]
        assert isinstance(nn.Parameter(x), st.ShardedTensor)
    base = ShardedTensorBase(chunk, 5, 3, dtype=torch.float16)
    assert base.metadata().shards_metadata == st.zeros(chunk, 5, 3).metadata().shards_metadata
    assert base.size() == (5, 3) and base.local_shards() == [] and base.sharding_spec() == chunk
    assert base.metadata().tensor_properties.dtype == torch.float16


@pytest.mark.worlds("sim")
def test_constructors(world):
    world(constructed, 3)


def outside() -> list[bool]:
    group = as_group().subgroup((0, 2))
    x, y = (st.ones("[tp balanced, -]", 4, 3, process_group=group) for _ in range(2))
    answers = [torch.equal(x, y), torch.allclose(x, y), torch.equal(x, y[:2])]
    if group.index >= 0:
        answers += [torch.equal(x, y + 1), torch.allclose(x, y + 1)]
    return answers


@pytest.mark.worlds("sim")
def test_ranks_outside_of_the_group_compare_equal(world):
    inside = [True, True, False, False, False]
    assert world(outside, 3) == [inside, [True, True, False], inside]


SHARD = st.ShardMetadata([0, 0], [2, 3], "rank:0/cpu")
CHUNK = st.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (SHARD, {"shard_sizes": [4, 3]}),
        (CHUNK, {"dim": 1}),
        (CHUNK, {"placements": ["rank:1/cpu"]}),
        (st.EnumerableShardingSpec([SHARD]), {"shards": [st.ShardMetadata([0], [4], "rank:1/cpu")]}),
        (st.GridShardingSpec((2, 1), "rank:0-1/cpu"), {"splits": (1, 2)}),
        (st.DevicePlacementSpec("rank:0/cpu"), {"device": "rank:1/cpu"}),
        (st.TensorProperties(), {"dtype": torch.float16}),
        (st.ShardedTensorMetadata([SHARD], torch.Size([2, 3])), {"size": torch.Size([4, 3])}),
        (st.ShardingPlan({"a": "replicate"}), {"return_local_tensor": [""]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_dataclasses_replace(value, changes):
    """The changed field is the constructor's, the others stay, and the value itself does too."""
    before = repr(value)
    names = [field.name for field in dataclasses.fields(value)]
    assert dataclasses.is_dataclass(value) and set(changes) <= set(names)
    assert dataclasses.replace(value) == value
    changed = dataclasses.replace(value, **changes)
    assert changed == type(value)(**{**{name: getattr(value, name) for name in names}, **changes}) != value
    assert repr(value) == before
    assert dataclasses.asdict(value).keys() == set(names)
