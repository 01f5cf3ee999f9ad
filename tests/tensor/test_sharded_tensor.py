"""What a ShardedTensor says of itself, its shards, and what gathers it."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size
from shardtensor.sharded_tensor import ShardedTensorBase, pre_load_state_dict_hook, state_dict_hook
from torch import nn

import shardtensor as st
from shardtensor import GatherWarning, custom_sharded_op_impl, custom_sharding_spec_op
from shardtensor.comm.group import SingleRankGroup
from shardtensor.tensor import dispatch
from shardtensor.tensor.dispatch import HANDLERS

SPECS = ("[tp balanced, -]", "[-, tp balanced]", "flat(tp)", "replicate")


def whole() -> torch.Tensor:
    return torch.arange(15.0, device=device()).view(5, 3)


def plain(x: object) -> object:
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x


def check_properties() -> None:
    getters = [n for n in dir(torch.Tensor) if inspect.isgetsetdescriptor(inspect.getattr_static(torch.Tensor, n))]
    names = [n for n in [*getters, "itemsize", "nbytes", "T", "mT", "H", "mH", "real"] if not n.startswith("__")]
    dense = whole().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for spec in SPECS:
            x = st.distribute(whole(), spec)
            for name in names:
                try:
                    want = getattr(dense, name)
                except RuntimeError:
                    continue
                try:
                    found = getattr(x, name)
                except (RuntimeError, AttributeError):
                    assert name == "_cdata", name
                    continue
                if name == "data":
                    found = found.full_tensor()
                if isinstance(want, torch.Tensor):
                    assert torch.equal(plain(found), want), (spec, name)
                elif name not in ("_version", "_python_dispatch"):
                    assert found == want, (spec, name, found, want)
            for call in ("size", "stride", "dim", "numel", "nelement", "ndimension", "element_size", "is_contiguous",
                         "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "__len__",
                         "is_pinned", "get_device", "tolist", "type", "__hash__"):  # fmt: skip
                want, found = getattr(dense, call)(), getattr(x, call)()
                assert found == want or call == "__hash__", (spec, call)
            assert x.size(-1) == 3 and x.stride(0) == 3 and hash(x) == id(x)
            for dim in (2, -3):
                with pytest.raises(IndexError, match="Dimension out of range"):
                    x.size(dim)
            assert torch.numel(x) == 15 and torch.Tensor.size(x) == (5, 3) and torch.Tensor.grad.__get__(x) is None


@every_size
def test_every_property_answers_for_the_whole(world, size):
    world(check_properties, size)


class Silent(SingleRankGroup):
    """A group of two that nobody may talk in."""

    size = 2

    def refuse(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("something was sent")

    all_reduce = all_gather = reduce_scatter = all_to_all = gather = broadcast = exchange = exchange_objects = refuse


def test_telling_about_a_tensor_sends_nothing():
    group = Silent()
    group.ranks = range(2)
    x = st.zeros("[tp]", 6, process_group=group)
    assert repr(x) == ("ShardedTensor(shape=(6,), dtype=torch.float32, spec=[tp], rank 0 holds [0:3] as (3,) on cpu)")
    assert f"{[x]}" == f"[{x!r}]" and len(x.metadata().shards_metadata) == 2
    copy.deepcopy(x), x.half(), x.sharding_spec(), x.local_shards(), x.requires_grad_(), x.detach(), x.data, x.is_leaf


def check_shards() -> None:
    for spec in SPECS:
        for x in (st.zeros(spec, 5, 3), st.rand(spec, 5, 3), st.full(spec, (5, 3), 2), st.distribute(whole(), spec)):
            local = x._local
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size(), spec
    rank, size = dist.get_rank(), dist.get_world_size()
    x = st.distribute(whole(), "[tp balanced, -]", requires_grad=True)
    (shard,) = x.local_shards()
    assert shard.tensor is x._local and x.local_tensor() is x._local
    new = torch.full_like(shard.tensor, 7.0).double().requires_grad_()
    shard.tensor = new
    assert x._local is new and x.dtype == torch.float64 and x.local_shards()[0].tensor is new
    assert torch._C.TensorBase.dtype.__get__(x) == torch.float64
    with pytest.raises(ValueError, match="cannot hold one of shape"):
        shard.tensor = torch.ones(9, 9)
    metadata = copy.deepcopy(shard.metadata)
    metadata.placement = f"rank:{rank}/meta"
    shard.metadata = metadata
    assert str(x.local_shards()[0].metadata.placement) == f"rank:{rank}/meta"
    with pytest.raises(ValueError, match="its offsets and sizes follow from the layout"):
        shard.metadata = st.ShardMetadata([0, 1], [1, 1])
    chunk = st.ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(size)] * 2)
    many = st.distribute(torch.arange(4.0 * size), chunk)
    first, second = many.local_shards()
    second.tensor = torch.full_like(second.tensor, -1)
    assert first.tensor.tolist() == [2.0 * rank, 2.0 * rank + 1] and second.tensor.tolist() == [-1, -1]
    assert plain(many)[2 * (size + rank)] == -1
    with pytest.raises(NotImplementedError) as raised:
        many.local_tensor()
    assert str(raised.value) == (
        "Only single local shard is supported.\n"
        f"  spec    {chunk}\n"
        f"  rank {rank}  holds 2 shards\n"
        "  fix     local_shards() returns all of them, each with its tensor and its metadata"
    )
    twins = copy.deepcopy(x.local_shards())
    assert (
        twins[0].tensor is not new
        and torch.equal(twins[0].tensor, new)
        and twins[0].metadata == x.local_shards()[0].metadata
    )


def test_shards_can_be_set_and_own_their_bytes(world):
    world(check_shards, 1)
    world(check_shards, 3)


def check_gather() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for spec in SPECS:
        x = st.distribute(whole(), spec, requires_grad=True)
        for dst in range(size):
            out = torch.empty(5, 3, device=device()) if rank == dst else None
            assert x.gather(dst, out) is None
            assert out is None or torch.equal(out, whole())
        out = torch.empty(5, 3, dtype=torch.float64, device=device()) if rank == 0 else None
        x.gather(out=out, dtype=torch.float64)
        assert out is None or torch.equal(out, whole().double())
    faults = {
        "dst=9 is not a rank of this group": (9, None),
        "must NOT be specified on non-destination ranks": (0, torch.empty(5, 3, device=device())),
        "must be specified on destination rank 0": (0, None),
        r"have size \(3,\),but should be \(5, 3\)": (0, torch.empty(3, device=device()) if rank == 0 else None),
    }
    for text, (dst, out) in faults.items():
        with pytest.raises(ValueError, match=text):
            x.gather(dst, out)


def test_gather_fills_one_rank_and_faults_are_the_same_everywhere(world):
    world(check_gather, 3)


def run_as_thread(rank: int, results: list, errors: list) -> None:
    try:
        group = SingleRankGroup(rank)
        with st.strict(rank == 0):
            x = st.distribute(torch.arange(4.0) + rank, "[tp]", process_group=group, requires_grad=True)
            (x * 2).backward(torch.ones(4))
            results[rank] = x.grad.full_tensor().tolist(), copy.deepcopy(x).full_tensor().tolist()
    except BaseException as error:
        errors.append(error)


def test_ranks_may_be_threads():
    results, errors = [None] * 4, []
    threads = [threading.Thread(target=run_as_thread, args=(rank, results, errors)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert results == [([2.0] * 4, [float(rank + i) for i in range(4)]) for rank in range(4)]


def test_a_users_function_wins_over_the_librarys():
    before = {f: HANDLERS.get(f) for f in (torch.asin, nn.functional.linear)}
    spec = st.ChunkShardingSpec(0, ["rank:0/cpu"])
    try:

        @custom_sharded_op_impl(torch.asin)
        def asin(types, args, kwargs, process_group):
            return types, len(args), kwargs, process_group

        @custom_sharding_spec_op(st.ChunkShardingSpec, nn.functional.linear)
        def linear(types, args, kwargs, process_group):
            return "mine"

        assert torch.asin(st.ones(spec, 4)) == ((st.ShardedTensor,), 1, {}, None)
        x = torch.ones(2, 4)
        assert nn.functional.linear(x, st.ones(spec, 3, 4)) == "mine"
        assert torch.equal(plain(nn.functional.linear(x, st.ones("[tp, -]", 3, 4))), torch.full((2, 3), 4.0))
        with pytest.raises(TypeError, match="expects signature"):
            custom_sharded_op_impl(torch.asin)(lambda types: None)
    finally:
        for function, handler in before.items():
            HANDLERS.pop(function) if handler is None else HANDLERS.update({function: handler})


class Holder(nn.Module):
    def __init__(self, value: st.ShardedTensor | None) -> None:
        super().__init__()
        self.value = value


def check_ported() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    boxes = [st.ShardMetadata([2 * r, 0], [2, 3], f"rank:{r}/{device(r)}") for r in range(size)]
    mine = st.Shard(torch.full((2, 3), float(rank), device=device()), boxes[rank])
    want = torch.arange(float(size), device=device()).repeat_interleave(2).view(-1, 1).expand(-1, 3)
    metadata = st.ShardedTensorMetadata(boxes, torch.Size([2 * size, 3]))
    make = st.ShardedTensor._init_from_local_shards_and_global_metadata
    for x in (
        st.ShardedTensor._init_from_local_shards([mine], [2 * size, 3]),
        st.ShardedTensor._init_from_local_tensor(mine.tensor, "[tp, -]", [2 * size, 3]),
        make([mine], sharded_tensor_metadata=metadata),
    ):
        assert torch.equal(plain(x), want) and x.local_shards()[0].tensor is mine.tensor
    with pytest.raises(RuntimeError, match="does not match number of local shards metadata"):
        make([], metadata)
    other = copy.deepcopy(metadata)
    other.tensor_properties.dtype = torch.float64
    with pytest.raises(ValueError, match="tensor dtype property is incompatible with"):
        make([mine], other)
    base = ShardedTensorBase._init_from_local_shards_and_global_metadata([mine], metadata)
    assert base.local_shards() == [mine] and base.metadata() is metadata and base.size() == (2 * size, 3)
    source, target = (nn.Sequential(Holder(value)) for value in (x, None))
    source._register_state_dict_hook(state_dict_hook)
    target._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)
    state = source.state_dict()
    assert list(state) == ["0.value"]
    target.load_state_dict(state, strict=False)
    assert target[0].value is x


def test_torchs_own_class_methods_and_hooks(world):
    world(check_ported, 3)


def check_write_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        for spec in SPECS:
            x, dense = st.distribute(whole(), spec), whole()
            a, b = st.distribute(whole(), spec), st.distribute(whole(), spec)
            torch._foreach_lerp_([a, b], [x, x + 1], 0.5)
            assert torch.equal(plain(a), dense) and torch.equal(plain(b), dense + 0.5)
            out = st.zeros(spec, 5, 3)
            torch.cumsum(x, 0, out=out)
            assert torch.equal(plain(out), dense.cumsum(0))


def test_the_safety_net_writes_back_every_operand_that_changed(world):
    world(check_write_back, 2)


def check_warnings() -> None:
    x = st.distribute(whole(), SPECS[0])
    dispatch._WARNED.clear()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", GatherWarning)
            with pytest.raises(GatherWarning, match="has no sharding rule"):
                torch.special.airy_ai(x)
    with pytest.warns(GatherWarning) as said:
        torch.special.airy_ai(x), torch.special.airy_ai(x)
    assert len([w for w in said if w.category is GatherWarning]) == 1


def test_a_gather_is_said_once_and_raised_each_time_on_every_rank(world):
    world(check_warnings, 2)


def check_outside() -> None:
    group = dist.new_group([1, 2])
    spec = st.ChunkShardingSpec(0, [f"rank:{rank}/{device(rank)}" for rank in (1, 2, 1)])
    x = st.zeros(spec, 6, 3, process_group=group)
    assert [shard.shard_offsets for shard in x.metadata().shards_metadata] == [[0, 0], [2, 0], [4, 0]]
    assert [shard.placement.rank() for shard in x.metadata().shards_metadata] == [1, 2, 1]
    if dist.get_rank() == 0:
        assert x.local_shards() == [] and x.shape == (6, 3)
        with pytest.raises(ValueError, match="rank 0 is not a member of the process group"):
            st.zeros("[tp, -]", 6, 3, process_group=group)


def test_a_rank_outside_of_the_group_has_the_metadata_and_no_shards(world):
    world(check_outside, 3)
