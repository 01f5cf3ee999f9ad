"""The border to DTensor: the same values, the same memory, gradients both ways, for every layout that DTensor says."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import FULL, device
from harness.quick import sampled
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import shardtensor as st
from shardtensor.comm.process_group import as_group

SHAPES = [(4, 6), (5, 3), (1, 7), (0, 3), (2, 1), (12, 12)]
MESHES = [(1,), (2,), (3,), (4,), (1, 1), (1, 3), (2, 2)]


def dense(shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(1.0, count + 1, device=device()).view(shape)


def device_mesh(sizes: tuple[int, ...]) -> Any:
    names = ("dp", "tp", "pp")[: len(sizes)]
    return dist.init_device_mesh(device().type, sizes, mesh_dim_names=names)


def placed(whole: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> Any:
    """A DTensor of these values. Of a sum, each rank's partial sum is the whole times one more than its place."""
    kept = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(whole, mesh, kept, src_data_rank=None).to_local()
    factor = 1.0
    for axis, placement in enumerate(placements):
        if placement.is_partial() and placement.reduce_op != "avg":
            factor *= mesh.get_coordinate()[axis] + 1
    stride = whole.stride() if whole.dim() else ()
    return DTensor.from_local(local * factor, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def expected(whole: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> torch.Tensor:
    for axis, placement in enumerate(placements):
        size = mesh.size(axis)
        if placement.is_partial():
            whole = whole * {"sum": size * (size + 1) / 2, "avg": 1, "max": size, "min": 1}[placement.reduce_op]
    return whole


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and (
        a.numel() == 0 or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape)
    )


def choices(ndim: int) -> list[Any]:
    return [
        Replicate(),
        *(Shard(dim) for dim in range(ndim)),
        *(Partial(op) for op in ("sum", "avg", "max", "min")),
        _StridedShard(0, split_factor=2),
        _StridedShard(ndim - 1, split_factor=3),
    ]


def mixes(placements: tuple[Any, ...]) -> bool:
    """Whether different reductions are left to do; their order would matter, and DTensor refuses it."""
    return len({p.reduce_op for p in placements if p.is_partial()}) > 1


def some_of(sizes: tuple[int, ...], ndim: int) -> list[tuple[Any, ...]]:
    """Placements along all axes of a mesh; in a quick run each kind along each axis, now and then."""
    return sampled(product(choices(ndim), repeat=len(sizes)), 13)


def cross(sizes: tuple[int, ...]) -> int:
    mesh, tried = device_mesh(sizes), 0
    for shape in SHAPES:
        whole = dense(shape)
        for placements in some_of(sizes, len(shape)):
            if mixes(placements):
                continue
            tried += 1
            what = (shape, placements)
            theirs = placed(whole, mesh, placements)
            ours = st.from_dtensor(theirs)
            assert same_memory(ours._local, theirs.to_local()), what
            assert ours.shape == theirs.shape
            assert ours._local.shape == ours._layout.local_shape(dist.get_rank())
            want = expected(whole, mesh, placements)
            assert torch.equal(ours.full_tensor(), want), what
            back = ours.to_dtensor(mesh)
            assert same_memory(back.to_local(), theirs.to_local()), what
            assert back.shape == theirs.shape and back.stride() == theirs.stride()
            if not any(isinstance(p, _StridedShard) for p in placements):
                assert tuple(back.placements) == placements, what
                assert torch.equal(back.full_tensor(), want), what
            again = st.from_dtensor(back)
            assert again._layout == ours._layout, what
            again._local.mul_(2)
            assert torch.equal(ours.full_tensor(), expected(2 * whole, mesh, placements)), what
    return tried


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_placements_cross_without_a_copy(world, sizes):
    counts = world(cross, torch.Size(sizes).numel(), sizes=sizes, timeout_s=300)
    assert min(counts) >= len(SHAPES) * (8 ** len(sizes) if FULL else 6)


def weights(shape: torch.Size) -> torch.Tensor:
    return torch.arange(2.0, 2 + shape.numel(), device=device()).view(shape)


def gradients_of(sizes: tuple[int, ...]) -> int:
    mesh, tried = device_mesh(sizes), 0
    for shape in [(4, 6), (5, 3), (1, 7)]:
        whole = dense(shape)
        for placements in some_of(sizes, len(shape)):
            if mixes(placements) or any(p.is_partial() and p.reduce_op in ("max", "min") for p in placements):
                continue
            tried += 1
            what = (shape, placements)
            w = weights(whole.shape)

            theirs = placed(whole, mesh, placements).detach().requires_grad_()
            (st.from_dtensor(theirs).full_tensor() * w).sum().backward()
            assert [p.is_replicate() for p in theirs.grad.placements if p.is_partial()] == []
            torch.testing.assert_close(st.from_dtensor(theirs.grad).full_tensor(), w)  # a third of a mean is rounded

            ours = st.from_dtensor(placed(whole, mesh, placements).detach()).requires_grad_()
            crossed = ours.to_dtensor(mesh)
            assert crossed.requires_grad
            if not any(isinstance(p, _StridedShard) for p in placements):  # torch gathers uneven ones amiss
                (crossed.full_tensor() * w).sum().backward()
                averaged = 1
                for axis, placement in enumerate(placements):
                    averaged *= mesh.size(axis) if placement.is_partial() and placement.reduce_op == "avg" else 1
                kept = tuple(Replicate() if p.is_partial() else p for p in placements)
                reduced = st.from_dtensor(placed(w / averaged, mesh, kept))
                assert torch.equal(ours._local.grad, reduced._local), what

            # There and back is the identity for gradients, too.
            ours._local.grad = None
            (st.from_dtensor(ours.to_dtensor(mesh)).full_tensor() * w).sum().backward()
            direct = ours.detach().requires_grad_()
            (direct.full_tensor() * w).sum().backward()
            assert torch.allclose(ours._local.grad, direct._local.grad), what
    return tried


@pytest.mark.parametrize("sizes", [(2,), (3,), (1, 2), (2, 2)], ids=str)
def test_gradients_cross_both_ways(world, sizes):
    counts = world(gradients_of, torch.Size(sizes).numel(), sizes=sizes, timeout_s=300)
    assert min(counts) >= 3 * (6 ** len(sizes) if FULL else 4)


def cross_three_axes() -> None:
    mesh = device_mesh((2, 1, 2))
    whole = dense((5, 2, 3))
    for placements in product([Replicate(), Shard(0), Shard(2), Partial()], repeat=3):
        theirs = placed(whole, mesh, placements)
        ours = st.from_dtensor(theirs)
        assert torch.equal(ours.full_tensor(), expected(whole, mesh, placements)), placements
        assert tuple(ours.to_dtensor().placements) == placements


def test_a_mesh_of_three_axes(world):
    assert world(cross_three_axes, 4, timeout_s=120) == [None] * 4


def scalars() -> None:
    mesh = device_mesh((2,))
    for placement in (Replicate(), Partial()):
        theirs = DTensor.from_local(torch.tensor(3.0, device=device()), mesh, [placement], run_check=False)
        ours = st.from_dtensor(theirs)
        assert ours.shape == () and ours.full_tensor().item() == (6.0 if placement.is_partial() else 3.0)
        assert tuple(ours.to_dtensor().placements) == (placement,)


def test_scalars(world):
    assert world(scalars, 2) == [None] * 2


def say_specs() -> list[str]:
    mesh = device_mesh((2, 2))
    said = []
    for shape, placements in [
        ((8, 4), (Shard(0), Shard(1))),
        ((8, 4), (Shard(0), Shard(0))),
        ((8, 4), (_StridedShard(0, split_factor=2), Shard(0))),
        ((8, 4), (Replicate(), Partial("max"))),
        ((5, 4), (Shard(0), Replicate())),
        ((12, 4), (_StridedShard(0, split_factor=3), Replicate())),
    ]:
        said.append(str(st.from_dtensor(placed(dense(shape), mesh, placements)).sharding_spec()))
    return said


def test_specs_of_what_came_over(world):
    assert world(say_specs, 4)[0] == [
        "[dp, tp]",
        "[dp*tp, -]",
        "[tp*dp, -]",
        "replicate partial(tp, op=max)",
        "[dp sizes(3, 2), -]",
        "[dp blocks(3), -]",
    ]


def train_on_either_side() -> None:
    mesh = device_mesh((2,))
    torch.manual_seed(0)
    whole = torch.randn(4, 3, device=device())
    theirs = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    ours = nn.Parameter(st.from_dtensor(theirs))
    assert isinstance(ours, nn.Parameter) and isinstance(ours, st.ShardedTensor) and ours.is_leaf and ours.requires_grad
    back = nn.Parameter(ours.to_dtensor())
    assert isinstance(back, nn.Parameter) and isinstance(back, DTensor) and back.is_leaf
    assert same_memory(back.to_local(), theirs.to_local()) and same_memory(ours._local, theirs.to_local())
    x = torch.ones(2, 3, device=device())
    loss = torch.nn.functional.linear(x, ours).square().sum()
    loss.backward()
    torch.optim.SGD([ours], lr=0.125).step()
    plain = whole.clone().requires_grad_()
    torch.nn.functional.linear(x, plain).square().sum().backward()
    with torch.no_grad():
        plain -= 0.125 * plain.grad
    torch.testing.assert_close(theirs.full_tensor(), plain)
    assert theirs.grad is None and back.grad is None
    with torch.no_grad():
        assert not st.from_dtensor(theirs).requires_grad and not ours.to_dtensor().requires_grad


def test_parameters_share_memory_and_keep_their_own_gradients(world):
    assert world(train_on_either_side, 2) == [None] * 2


def mesh_of_its_own() -> list[str]:
    rows = st.distribute(dense((5, 3)), "[tp balanced, -]")
    first, second = rows.to_dtensor(), rows.to_dtensor()
    assert first.device_mesh is second.device_mesh
    count = len(dist.distributed_c10d._world.pg_map)
    mesh = device_mesh((1, dist.get_world_size()))
    known = st.distribute(dense((5, 4)), "[-, tp balanced]", process_group=mesh)
    made = len(dist.distributed_c10d._world.pg_map)
    assert known.to_dtensor().device_mesh is mesh
    assert len(dist.distributed_c10d._world.pg_map) == made
    return [str(first.placements), str(known.to_dtensor().placements), str(count >= 1)]


def test_without_a_mesh(world):
    assert world(mesh_of_its_own, 2)[0] == ["(Shard(dim=0),)", "(Replicate(), Shard(dim=1))", "True"]


def part_of_the_world() -> str:
    mesh = device_mesh((2, 2))
    part = mesh["tp"]
    theirs = distribute_tensor(dense((5, 2)), part, [Shard(0)], src_data_rank=None)
    ours = st.from_dtensor(theirs)
    assert torch.equal(ours.full_tensor(), dense((5, 2))) and list(ours._group.ranks) == part.mesh.tolist()
    flat = mesh._flatten("all") if hasattr(mesh, "_flatten") else mesh.flatten("all")
    theirs = distribute_tensor(dense((5, 2)), flat, [Shard(0)], src_data_rank=None)
    assert torch.equal(st.from_dtensor(theirs).full_tensor(), dense((5, 2)))
    chunks = st.distribute(dense((5, 2)), f'chunk(dim=0, placements=["rank:0-3/{device().type}"])')
    crossed = chunks.to_dtensor(flat)
    assert torch.equal(crossed.full_tensor(), dense((5, 2)))
    return str(crossed.placements)


def test_parts_of_a_mesh_and_flattened_ones(world):
    assert world(part_of_the_world, 4) == ["(Shard(dim=0),)"] * 4


def outside_of_the_mesh() -> tuple[int, ...]:
    mesh = dist.DeviceMesh(device().type, [0, 1])
    theirs = distribute_tensor(dense((5, 2)), mesh, [Shard(0)], src_data_rank=None)
    ours = st.from_dtensor(theirs)
    assert ours.shape == (5, 2)
    assert ours.to_dtensor(mesh).shape == (5, 2)
    return tuple(ours._local.shape)


def test_ranks_outside_of_the_mesh_hold_nothing(world):
    assert world(outside_of_the_mesh, 3) == [(3, 2), (2, 2), (0, 2)]


def transposed() -> None:
    mesh = device_mesh((2,))
    theirs = distribute_tensor(dense((4, 6)), mesh, [Shard(0)], src_data_rank=None).t()
    ours = st.from_dtensor(theirs)
    assert torch.equal(ours.full_tensor(), dense((4, 6)).t())
    assert same_memory(ours._local, theirs.to_local())
    back = ours.to_dtensor()
    assert back.stride() == theirs.stride() and same_memory(back.to_local(), theirs.to_local())


def test_memory_in_another_order_stays(world):
    assert world(transposed, 2) == [None] * 2


def refusals() -> list[str]:
    mesh = device_mesh((2, 2))
    flat = st.distribute(dense((5, 3)), "[-, -] flat(dp*tp)", process_group=mesh)
    uneven = st.distribute(dense((5, 3)), "[tp sizes(1, 4), -]", process_group=mesh)
    half = st.distribute(dense((4, 3)), "[dp, -]", process_group=mesh["dp"])
    texts = []
    for tensor, where in ((flat, None), (uneven, mesh), (half, mesh)):
        with pytest.raises(st.LayoutError) as caught:
            tensor.to_dtensor(where)
        texts.append(str(caught.value))
    with pytest.raises(TypeError, match="from_dtensor takes a DTensor, this is a Tensor"):
        st.from_dtensor(torch.ones(2))
    largest = st.from_dtensor(placed(dense((4, 3)), mesh, (Replicate(), Partial("max")))).requires_grad_()
    with pytest.raises(st.RuleError) as caught:
        largest.to_dtensor(mesh)
    product_ = DTensor.from_local(dense((2, 2)), mesh, [Partial("product"), Replicate()], run_check=False)
    with pytest.raises(st.LayoutError) as wrong:
        st.from_dtensor(product_)
    return [*texts, str(caught.value), str(wrong.value)]


def test_what_cannot_be_said(world):
    flat, uneven, half, largest, odd = world(refusals, 4)[0]
    assert flat == (
        "DTensor cannot say this layout\n"
        "  tensor  [-, -] flat(dp*tp)\n"
        "  shape   5 x 3\n"
        "  mesh    (dp=2, tp=2)\n"
        '  fix     tensor.reshard("[dp*tp sizes(2, 1, 1, 1), -]").to_dtensor(mesh) is the nearest that it can'
    )
    assert uneven == (
        "DTensor cannot say this layout\n"
        "  tensor  [tp sizes(1, 4), -]\n"
        "  shape   5 x 3\n"
        "  mesh    (dp=2, tp=2)\n"
        '  fix     tensor.reshard("[tp sizes(3, 2), -]").to_dtensor(mesh) is the nearest that it can'
    )
    assert half == (
        "the mesh has other ranks than the tensor\n"
        "  tensor   [dp, -]\n"
        "  shape    4 x 3\n"
        "  mesh     (dp=2, tp=2)\n"
        "  held by  ranks 0, 2\n"
        "  fix      pass the DeviceMesh of the ranks that hold the tensor"
    )
    assert largest == (
        "a partial max has no gradient\n  layout  [-, -] partial(tp, op=max)\n  fix     reduce it under torch.no_grad()"
    )
    assert odd == (
        "the placement Partial(product) has no meaning outside of DTensor\n"
        "  placements  Partial(product), Replicate()\n"
        "  shape       2 x 2\n"
        "  fix         redistribute it first: dtensor.redistribute(placements=[Replicate(), ...])"
    )


def what_the_nearest_gives() -> None:
    mesh = device_mesh((2, 2))
    flat = st.distribute(dense((5, 3)), "[-, -] flat(dp*tp)", process_group=mesh)
    moved = st.distribute(flat.full_tensor(), "[dp*tp sizes(2, 1, 1, 1), -]", process_group=as_group(mesh))
    assert tuple(moved.to_dtensor(mesh).placements) == (Shard(0), Shard(0))


def test_the_nearest_can_be_said(world):
    assert world(what_the_nearest_gives, 4) == [None] * 4


def beside_each_other() -> list[str]:
    mesh = device_mesh((2,))
    theirs = distribute_tensor(dense((4, 3)), mesh, [Shard(0)], src_data_rank=None)
    ours = st.distribute(dense((4, 3)), "[tp, -]")
    texts = []
    for call in (lambda: ours + theirs, lambda: theirs * ours, lambda: ours.copy_(theirs), lambda: ours @ theirs.t()):
        with pytest.raises(st.RuleError) as caught:
            call()
        texts.append(str(caught.value))
    with pytest.raises(TypeError) as wrong:
        st.distribute(theirs, "[tp, -]")
    assert torch.equal((ours + st.from_dtensor(theirs)).full_tensor(), 2 * dense((4, 3)))
    return [*texts, str(wrong.value)]


def test_a_dtensor_beside_a_sharded_tensor(world):
    *texts, distributed = world(beside_each_other, 2)[0]
    fix = (
        "  either   shardtensor.from_dtensor(dtensor) is a ShardedTensor on the same memory\n"
        "  or       tensor.to_dtensor(dtensor.device_mesh) is a DTensor on the same memory"
    )
    assert texts == [
        f"{name}: a DTensor beside a ShardedTensor\n  DTensor  {shape} as {said}\n{fix}"
        for name, shape, said in [
            ("Tensor.add", "4 x 3", "Shard(dim=0)"),
            ("Tensor.mul", "4 x 3", "Shard(dim=0)"),
            ("Tensor.copy_", "4 x 3", "Shard(dim=0)"),
            ("Tensor.matmul", "3 x 4", "Shard(dim=1)"),
        ]
    ]
    assert distributed == (
        "distribute takes a tensor that every rank holds whole, or a ShardedTensor, and this is a DTensor: "
        "pass from_dtensor(tensor)"
    )
