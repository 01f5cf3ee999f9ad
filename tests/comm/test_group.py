"""Every collective of a group against its definition on the whole data, for any sizes, dtypes and strides."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size

from shardtensor.comm.backend_support import BackendSupport
from shardtensor.comm.checked import CheckedGroup
from shardtensor.comm.group import Group, SingleRankGroup
from shardtensor.comm.process_group import as_group
from shardtensor.comm.torch_group import TorchGroup
from shardtensor.errors import RuleError
from shardtensor.mesh import Mesh
from shardtensor.sim.simulate import SimGroup
from shardtensor.sim.traffic import CountingGroup

# Elements of each rank, as much of it as there are ranks: equal, uneven, one without, one with all, nobody with any.
COUNTS = [(3, 3, 3, 3), (5, 2, 3, 1), (4, 0, 0, 2), (0, 0, 6, 0), (0, 7, 0, 0), (0, 0, 0, 0)]
MOVED = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.uint64, torch.bool),
]


def whole(total: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small integers in a dtype, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, (total,), generator=generator).to(dtype).to(device())


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equality of dtype, device, shape and every byte."""
    alike = (got.dtype, got.device, got.shape) == (wanted.dtype, wanted.device, wanted.shape)
    return alike and as_bytes(got) == as_bytes(wanted)


def as_bytes(t: torch.Tensor) -> list[int]:
    return t.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


def check_moves(dtypes: list[torch.dtype], patterns: list[tuple[int, ...]]) -> None:
    group = as_group()
    n, me = group.size, group.index
    for dtype in dtypes:
        for pattern in patterns:
            counts = pattern[:n]
            full = whole(sum(counts), dtype)
            parts = full.split(counts)
            mine = parts[me].clone()

            assert same(group.all_gather(mine, counts), full)

            # Rank r sends (r + d) % 3 elements to rank d.
            table = [[(r + d) % 3 for d in range(n)] for r in range(n)]
            sent = [whole(sum(table[r]), dtype, seed=r) for r in range(n)]
            wanted = torch.cat([sent[r].split(table[r])[me] for r in range(n)])
            assert same(group.all_to_all(sent[me], table[me], [table[r][me] for r in range(n)]), wanted)

            source = whole(sum(counts), dtype, seed=7)
            target = source.clone() if me == n - 1 else torch.zeros_like(source)
            assert group.broadcast(target, n - 1) is target
            assert same(target, source)


@pytest.mark.worlds("sim", "gloo")
@every_size
def test_moves_of_uneven_and_empty_parts(world, size):
    world(check_moves, size, dtypes=[torch.float32], patterns=COUNTS)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [2, 3])
def test_moves_of_every_dtype(world, size):
    world(check_moves, size, dtypes=MOVED, patterns=COUNTS[:3])


def check_reductions(dtypes: list[torch.dtype]) -> None:
    group = as_group()
    for dtype in dtypes:
        terms = torch.stack([whole(6, torch.int64, seed=r) + 1 for r in range(group.size)])
        for op in ("sum", "max", "min", "prod", "avg"):
            t = terms[group.index].to(dtype, copy=True)
            refused = (op == "avg" and not (dtype.is_floating_point or dtype.is_complex)) or (
                op in ("max", "min") and (dtype.is_complex or dtype == torch.uint64)
            )
            if refused:
                with pytest.raises(RuleError):
                    group.all_reduce(t, op)
                continue
            values = terms.to(dtype).to(torch.complex128 if dtype.is_complex else torch.float64)
            wanted = {"sum": values.sum(0), "prod": values.prod(0), "avg": values.mean(0)}
            if not dtype.is_complex:
                wanted |= {"max": values.amax(0), "min": values.amin(0)}
            started = group.all_reduce_async(t.clone(), op)
            assert group.all_reduce(t, op) is t
            assert same(started.wait(), t)
            assert t.dtype == dtype
            wanted_op = wanted[op].to(dtype)
            exact = op != "avg" and not dtype.is_complex
            close = (
                torch.equal(t.double(), wanted_op.double())
                if exact
                else torch.allclose(t.to(values.dtype), wanted[op], rtol=0.07 if dtype.itemsize < 4 else 1e-6)
            )
            assert close, (dtype, op, t, wanted_op)
            assert dtype != torch.bool or t.view(torch.uint8).max() <= 1


@pytest.mark.worlds("sim", "gloo")
@every_size
def test_reductions(world, size):
    world(check_reductions, size, dtypes=[torch.float32, torch.int64, torch.bool, torch.complex64])


@pytest.mark.worlds("sim", "gloo")
def test_reductions_of_every_dtype(world):
    world(check_reductions, 2, dtypes=MOVED)


def check_reduce_scatter(dtypes: list[torch.dtype]) -> None:
    group = as_group()
    for dtype in dtypes:
        for pattern in COUNTS:
            counts = pattern[: group.size]
            terms = [whole(sum(counts), torch.int64, seed=r) for r in range(group.size)]
            wanted = torch.stack([t.to(dtype).to(torch.complex64) for t in terms]).sum(0).split(counts)[group.index]
            wanted = wanted.to(dtype) if dtype.is_complex else wanted.real.to(dtype)
            started = group.reduce_scatter_async(terms[group.index].to(dtype), counts)
            assert same(group.reduce_scatter(terms[group.index].to(dtype), counts), wanted), (dtype, pattern)
            assert same(started.wait(), wanted), (dtype, pattern)
        even = torch.ones(2 * group.size, dtype=torch.float64, device=device())
        assert group.reduce_scatter(even).tolist() == [group.size] * 2
        assert group.reduce_scatter_async(even).wait().tolist() == [group.size] * 2


@pytest.mark.worlds("sim", "gloo")
@every_size
def test_reduce_scatter(world, size):
    world(check_reduce_scatter, size, dtypes=[torch.float32, torch.bool, torch.complex64, torch.int16, torch.bfloat16])


def check_shapes() -> None:
    group = as_group()
    n, me = group.size, group.index
    base = torch.arange(24.0, device=device()).view(4, 6)
    strided = (base + me).t()[::2]
    assert not strided.is_contiguous()
    wanted = torch.cat([(base + r).t()[::2].flatten() for r in range(n)])
    assert torch.equal(group.all_gather(strided), wanted)
    total = strided.clone(memory_format=torch.contiguous_format) * n + sum(r - me for r in range(n))
    holder = base + me
    view = holder.t()[::2]
    assert group.all_reduce(view) is view
    assert torch.equal(view, total)
    assert torch.equal(holder[:, 1::2], (base + me)[:, 1::2])  # what the view does not show stays
    target = holder.clone().t()
    group.broadcast(target, 0)
    assert torch.equal(target, group.all_gather(holder.t()).view(n, 6, 4)[0])
    for one in (torch.arange(6, dtype=torch.int16, device=device())[::2][:1], torch.arange(6).bool()[::2][1:2]):
        assert group.all_gather(one).tolist() == one.tolist() * n
    scalar = torch.tensor(float(me), device=device())
    assert group.all_gather(scalar).tolist() == list(range(n))
    assert group.all_reduce(scalar).item() == sum(range(n))
    conjugate = torch.complex(scalar, scalar).conj()
    assert group.all_gather(conjugate).tolist() == [conjugate.item()] * n
    leaf = torch.ones(3, device=device(), requires_grad=True)
    assert group.all_reduce(leaf).tolist() == [n] * 3
    assert group.all_gather(torch.ones(2, 3, device=device())).untyped_storage().nbytes() == n * 6 * 4
    with torch.inference_mode():
        assert group.all_reduce(torch.ones(2, device=device())).tolist() == [n] * 2
        assert (
            group.all_reduce(torch.ones(2, 2, dtype=torch.int16, device=device()).t(), "prod").tolist() == [[1, 1]] * 2
        )


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [2, 3])
def test_shapes_and_strides(world, size):
    world(check_shapes, size)


def check_devices() -> None:
    group = as_group()
    # A tensor of the CPU, on any group: through the GPU and back where the backend moves that only.
    assert same(group.all_reduce(torch.ones(2)), torch.full((2,), float(group.size)))
    counts = [1, 2, 3, 4][: group.size]
    assert same(group.all_gather(torch.ones(counts[group.index]), counts), torch.ones(sum(counts)))
    assert group.device_type == group.subgroup([group.rank]).device_type == device().type
    assert group.exchange(bytes([group.index, 255])) == [bytes([r, 255]) for r in range(group.size)]
    assert group.exchange_objects("x" * group.index) == ["x" * r for r in range(group.size)]
    group.barrier()


@pytest.mark.worlds("sim", "gloo")
@every_size
def test_devices_and_small_exchanges(world, size):
    world(check_devices, size)


def check_gloo_moves_what_stands_on_a_gpu() -> None:
    group = as_group(dist.new_group(backend="gloo"))
    n = group.size
    t = torch.full((3,), float(group.index), device=device())
    assert same(group.all_gather(t), torch.arange(float(n), device=device()).repeat_interleave(3))
    assert same(group.all_reduce(t), torch.full((3,), float(sum(range(n))), device=device()))
    mixed = as_group(dist.new_group(backend="cpu:gloo,cuda:nccl"))
    assert mixed.support.backends == {"cpu": "gloo", "cuda": "nccl"}
    for where in ("cpu", device()):
        assert same(mixed.all_reduce(torch.ones(3, device=where)), torch.full((3,), float(n), device=where))
        assert same(mixed.all_gather(torch.ones(3, device=where).bool()), torch.ones(3 * n, device=where).bool())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_gloo_moves_what_stands_on_a_gpu(gpu_world, size):
    gpu_world(check_gloo_moves_what_stands_on_a_gpu, size)


def test_a_rank_that_is_alone_along_an_axis_keeps_its_kind_of_device():
    group = object.__new__(TorchGroup)
    group.rank, group.ranks, group.size, group.device_type, group._subgroups = 2, range(4), 4, "cuda", {}
    assert group.subgroup((2,)).device_type == "cuda"


# -- into memory that is given ----------------------------------------------------------------------------------------


def check_into() -> None:
    group = as_group()
    n, me = group.size, group.index
    for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64, torch.uint8):
        parts = [whole(2, dtype, seed=r) for r in range(n)]
        out = torch.zeros(2 * n, dtype=dtype, device=device())
        assert group.all_gather_into(out, parts[me]).wait() is out
        assert same(out, torch.cat(parts))
        out.zero_()
        mine = out[2 * me : 2 * me + 2].copy_(parts[me])
        group.all_gather_into(out, mine).wait()
        assert same(out, torch.cat(parts))

        terms = [whole(2 * n, dtype, seed=r) for r in range(n)]
        total = group.reduce_scatter(terms[me].clone())
        out = torch.zeros(2, dtype=dtype, device=device())
        assert group.reduce_scatter_into(out, terms[me].clone()).wait() is out
        assert same(out, total)
        flat = terms[me].clone()
        group.reduce_scatter_into(flat[2 * me : 2 * me + 2], flat).wait()
        assert same(flat[2 * me : 2 * me + 2], total)


def check_averages_and_broadcasts():
    group = as_group()
    n, me = group.size, group.index
    for dtype in (torch.float32, torch.float16, torch.float64):
        terms = [whole(2 * n, dtype, seed=r) for r in range(n)]
        out = torch.zeros(2, dtype=dtype, device=device())
        pending = group.reduce_scatter_into(out, terms[me].clone(), "avg")
        assert pending.wait() is out
        want = (sum(term.double() for term in terms) / n)[2 * me : 2 * me + 2]
        assert torch.allclose(out.double(), want, rtol=1e-2 if dtype == torch.float16 else 1e-6)
        pending.wait()
        assert torch.allclose(out.double(), want, rtol=1e-2 if dtype == torch.float16 else 1e-6), "it averages once"
    for dtype in (torch.float32, torch.bool, torch.int16, torch.complex64):
        for source in range(n):
            given = whole(4, dtype, seed=me).view(2, 2).t()
            sent = whole(4, dtype, seed=source).view(2, 2).t()
            pending = group.broadcast_async(given, source)
            assert same(pending.wait(), sent) and same(given, sent)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [1, 3])
def test_averages_and_broadcasts_that_are_started(world, size):
    world(check_averages_and_broadcasts, size)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [1, 3])
def test_into_memory_that_is_given(world, size):
    world(check_into, size)


def check_exchanges_into() -> None:
    group = as_group()
    n, me = group.size, group.index
    table = [[(r + 2 * d) % 3 for d in range(n)] for r in range(n)]
    receives = [table[r][me] for r in range(n)]
    for dtype in MOVED:
        sent = [whole(sum(table[r]), dtype, seed=r) for r in range(n)]
        wanted = torch.cat([sent[r].split(table[r])[me] for r in range(n)])
        strided = torch.stack([sent[me], sent[me]], 1)[:, 0]
        for flat in (sent[me], strided):
            assert same(group.all_to_all(flat, table[me], receives), wanted)
            out = torch.zeros(sum(receives), dtype=dtype, device=device())
            assert group.all_to_all(flat, table[me], receives, out) is out
            assert same(out, wanted)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [1, 3])
def test_an_exchange_into_memory_of_any_dtype(world, size):
    world(check_exchanges_into, size)


@pytest.mark.parametrize("kind", [SingleRankGroup, TorchGroup, CheckedGroup, SimGroup, CountingGroup])
def test_all_groups_have_the_arguments_of_the_base_class(kind):
    for name, method in vars(Group).items():
        if callable(method) and not name.startswith("_"):
            assert inspect.signature(getattr(kind, name)).parameters == inspect.signature(method).parameters, name
    assert inspect.signature(kind.broadcast).parameters["src_index"].default == 0


def test_alone_everything_is_given_back_flat():
    alone = SingleRankGroup(3, "a process group", "cuda")
    assert (alone.rank, list(alone.ranks), alone.index, alone.size) == (3, [3], 0, 1)
    x = torch.arange(6.0).view(2, 3).t()
    for got in (alone.all_gather(x), alone.reduce_scatter(x), alone.reduce_scatter_async(x).wait()):
        assert same(got, x.reshape(-1))
    assert same(alone.all_to_all(x, [6], [6]), x.reshape(-1))
    for op in ("sum", "avg", "max", "min", "prod"):
        assert alone.all_reduce(x, op) is alone.all_reduce_async(x, op).wait() is x
    with pytest.raises(RuleError):
        alone.all_reduce(x.long(), "avg")
    assert alone.broadcast(x) is x
    assert alone.exchange(b"x") == [b"x"] and alone.exchange_objects("x") == ["x"] and alone.barrier() is None
    assert alone.with_new_communicator() is alone is alone.axis("any") is alone.subgroup([3])
    with pytest.raises(RuleError, match='no reduction is called "median"'):
        alone.all_reduce(x, "median")
    mesh = Mesh((("a", 1), ("b", 1)), (3,))
    seen = alone.on_mesh(mesh, {})
    for group in (seen, seen.axis("a"), seen.subgroup([3])):
        assert (group.rank, group.process_group, group.device_type) == (3, "a process group", "cuda")
    assert seen.mesh == mesh and seen.axis("a").mesh is None and seen.subgroup([3]).mesh is None


def check_twins() -> None:
    group = as_group()
    twin = group.with_new_communicator()
    assert twin is group.with_new_communicator() and twin is not group and list(twin.ranks) == list(group.ranks)
    first, second = torch.ones(2), torch.full((2,), 2.0)
    started = twin.all_reduce_async(second) if group.index else group.all_reduce_async(first)
    other = group.all_reduce_async(first) if group.index else twin.all_reduce_async(second)
    started.wait(), other.wait()
    assert (first[0], second[0]) == (group.size, 2 * group.size)
    back = dist.new_group([0, 2, 1], use_local_synchronization=True)
    assert list(as_group(back).ranks) == [0, 1, 2], "torch orders what it makes"


def test_a_twin_meets_beside_its_group(world):
    world(check_twins, 3)


def test_a_twin_of_ranks_in_another_order_is_the_group_itself():
    """A new group would have them in ascending order."""
    group = object.__new__(TorchGroup)
    group.support, group.ranks, group._twin = BackendSupport.of_backends("cpu:gloo", None), (0, 2, 1), None
    assert group.with_new_communicator() is group
    group.support, group.ranks = BackendSupport.of_backends("cpu:fake", None), (0, 1, 2)
    assert group.with_new_communicator() is group, "pretended ranks have no communicators"


def check_parts() -> None:
    group = as_group()
    rank = group.rank
    grid = group.on_mesh(Mesh((("dp", 2), ("tp", 2))), {})
    other = group.on_mesh(Mesh((("a", 1), ("dp", 2), ("b", 2))), {("dp",): grid.axis("dp")})
    assert other.axis("dp") is grid.axis("dp") is group.subgroup([rank % 2 + 2, rank % 2])
    assert other.axis("b") is grid.axis("tp")
    made = group.subgroup([0, 1] if rank < 2 else [2, 3])
    given = group.on_mesh(Mesh((("x", 2), ("y", 2))), {("y",): made})
    assert given.axis("y") is given.subgroup(made.ranks) is group.subgroup(made.ranks) is made
    assert grid.axis("dp", "tp").mesh is None and list(grid.axis("dp", "tp").ranks) == [0, 1, 2, 3]
    assert grid.subgroup(range(4)).mesh is None and grid.mesh.names == ("dp", "tp")
    assert group.subgroup([3, 1, 2, 0]) is group.subgroup(range(4))


@pytest.mark.worlds("sim", "gloo")
def test_groups_of_the_same_ranks_are_one(world):
    world(check_parts, 4)


def check_seeded() -> None:
    """A group along an axis that was made before is known by its ranks from then on."""
    group = as_group()
    pair = as_group(dist.new_group([0, 1])) if group.size == 2 else None
    seen = group.on_mesh(Mesh((("a", 2), ("b", 1))), {("a",): pair})
    assert seen.axis("a") is pair is seen.subgroup([0, 1]) is group.subgroup([1, 0])


def test_a_group_that_is_given_for_an_axis_is_used(world):
    world(check_seeded, 2)
