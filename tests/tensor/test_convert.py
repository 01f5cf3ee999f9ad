"""``to`` and its short forms: the dense values and gradients, the same object when nothing changes, honest specs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size

import shardtensor as st

SPECS = ("[tp balanced, -]", "[-, tp balanced]", "flat(tp)", "replicate")
FORMS = {
    "to(dtype)": lambda x: x.to(torch.float64),
    "to(dtype=)": lambda x: x.to(dtype=torch.int64),
    "to(device)": lambda x: x.to(device()),
    "to(text, dtype)": lambda x: x.to(device().type, torch.float16),
    "to(other)": lambda x: x.to(torch.ones(1, dtype=torch.float64, device=device())),
    "to(sharded other)": lambda x: x.to(x.double()),
    "to(copy)": lambda x: x.to(torch.float32, copy=True),
    "to(non_blocking)": lambda x: x.to(torch.bfloat16, non_blocking=True),
    "to(memory_format)": lambda x: x.to(memory_format=torch.contiguous_format),
    "half": lambda x: x.half(),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "int": lambda x: x.int(),
    "bool": lambda x: x.bool(),
    "type": lambda x: x.type(torch.float64),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.float64, device=device())),
}


def whole() -> torch.Tensor:
    return torch.arange(15.0, device=device()).view(5, 3)


def check_forms() -> None:
    for spec in SPECS:
        for name, form in FORMS.items():
            want = form(whole())
            x = st.distribute(whole(), spec, requires_grad=want.is_floating_point())
            found = form(x)
            assert found.dtype == want.dtype, (spec, name)
            assert (found is x) == (form(whole_ := whole()) is whole_), (spec, name)
            assert torch.equal(found.full_tensor(), want), (spec, name)
            if want.is_floating_point():
                assert torch.autograd.grad(found, x, torch.ones_like(want))[0].dtype == torch.float32, (spec, name)


@every_size
def test_every_form_gives_the_dense_values_type_identity_and_gradient(world, size):
    world(check_forms, size)


def check_partial() -> None:
    rank = dist.get_rank()
    partial_sum = torch.tensor([2049.0 if rank == 0 else 1.0], device=device())  # half can tell 2048 and 2050, not 2049
    x = st.init_from_local_tensor(partial_sum, "[-] partial(tp)", 1)
    assert x.half().full_tensor().item() == 2050.0


def test_a_partial_tensor_is_summed_before_it_is_rounded(world):
    world(check_partial, 2)


def check_moves() -> None:
    ranks = list(reversed(range(dist.get_world_size())))
    spec = st.ChunkShardingSpec(1, [f"rank:{rank}/{device(rank)}" for rank in ranks])
    x = st.zeros(spec, 4, 6, requires_grad=True)
    moved = x.to("meta")
    assert moved.device.type == "meta" and moved.is_meta and not moved.is_leaf
    found = moved.sharding_spec()
    assert isinstance(found, st.ChunkShardingSpec) and found.dim == 1 and list(found.placements.ranks) == ranks
    assert {str(shard.placement.device()) for shard in moved.metadata().shards_metadata} == {"meta"}
    assert isinstance(x.sharding_spec(), st.ChunkShardingSpec) and x.sharding_spec() == spec
    listed = st.EnumerableShardingSpec(x.metadata().shards_metadata)
    assert {str(s.placement) for s in st.zeros(listed, 4, 6).to("meta").sharding_spec().shards} == {
        f"rank:{rank}/meta" for rank in ranks
    }
    assert str(st.zeros("[tp, -]", 6, 6).to("meta").sharding_spec()) == "[tp, -]"
    assert x.cpu() is x or device().type == "cuda"


def test_a_moved_tensor_keeps_dim_and_ranks_and_names_its_new_devices(world):
    world(check_moves, 3)


def check_groups() -> None:
    other = dist.new_group([0, 1])
    x = st.distribute(whole(), "[tp balanced, -]")
    assert x.to(process_group=dist.group.WORLD) is x
    for moved in (x.cpu(process_group=other), x.to("cpu", process_group=other), x.to(process_group=other)):
        assert moved is not x and moved._process_group is other
        assert torch.equal(moved.full_tensor().cpu(), whole().cpu())
    small = dist.new_group([0])
    if dist.get_rank() == 0:
        with pytest.raises(st.LayoutError, match="lacks ranks that hold shards"):
            x.cpu(process_group=small)


def test_process_group_switches_the_group_when_it_has_all_the_ranks(world):
    world(check_groups, 2)


def test_other_memory_formats_are_refused():
    x = st.zeros("[tp, -]", 4, 6)
    for call in (lambda: x.cpu(memory_format=torch.channels_last), lambda: x.to(memory_format=torch.channels_last)):
        with pytest.raises(
            RuntimeError, match=r"Only `torch.contiguous_format` or `torch.preserve_format` is supported!"
        ):
            call()
