"""Every collective of a group against its definition on the whole data, for any sizes, dtypes and strides."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size

from shardtensor.comm.process_group import as_group
from shardtensor.comm.torch_group import TorchGroup
from shardtensor.errors import RuleError

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
            assert same(group.scatter(parts if me == 0 else None, counts[me], 0, full), mine)

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
    assert mixed.wire.backends == {"cpu": "gloo", "cuda": "nccl"}
    for where in ("cpu", device()):
        assert same(mixed.all_reduce(torch.ones(3, device=where)), torch.full((3,), float(n), device=where))
        assert same(mixed.all_gather(torch.ones(3, device=where).bool()), torch.ones(3 * n, device=where).bool())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_gloo_moves_what_stands_on_a_gpu(gpu_world, size):
    gpu_world(check_gloo_moves_what_stands_on_a_gpu, size)


def test_a_rank_that_is_alone_along_an_axis_keeps_its_kind_of_device():
    group = object.__new__(TorchGroup)
    group.rank, group.size, group.device_type = 2, 4, "cuda"
    assert group._make_subgroup((2,)).device_type == "cuda"
