"""A checkpoint loads under any layout in any world: every value bit for bit, and the next step is that of a run that
was never interrupted."""

from __future__ import annotations

import math
import tempfile
from random import Random
from typing import Any

import pytest
import torch
from harness import FULL, device
from harness.examples import examples
from harness.law import grids, layouts
from harness.quick import sampled
from hypothesis import given
from hypothesis import strategies as st
from programs.layouts import random_spec
from trained import BESIDE_TP, CLASSES, KINDS, RUNS, assert_same, dense, run_of, step, values, whole

import shardtensor
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import read_mesh

pytestmark = [pytest.mark.worlds("sim"), pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")]
FILES = ("whole", "as is")
ROUNDED = {"rtol": 1e-12, "atol": 1e-12}


# -- training runs -----------------------------------------------------------------------------------------------------


def saved_after_two_steps(path: str, kind: str, cls: str, layout: str) -> None:
    model, optimizer = run_of(kind, cls=cls)
    for number in range(2):
        step(model, optimizer, number)
    optimizer.param_groups[0]["lr"] *= 0.5
    shardtensor.save(path, model=model, optimizer=optimizer, layout=layout)


def loaded_and_stepped(path: str, kind: str, cls: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every value after the load, and after one step more."""
    model, optimizer = run_of(kind, seed=50, cls=cls)
    shardtensor.load(path, model=model, optimizer=optimizer)
    before = values(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == CLASSES[cls]["lr"] / 2
    step(model, optimizer, 2)
    return before, values(model, optimizer)


def uninterrupted(cls: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = dense(cls=cls)
    for number in range(2):
        step(model, optimizer, number)
    optimizer.param_groups[0]["lr"] *= 0.5
    before = values(model, optimizer)
    step(model, optimizer, 2)
    return before, values(model, optimizer)


def check_loads(world: Any, path: str, cls: str, runs: list[tuple[str, int]], **close: float) -> None:
    want = uninterrupted(cls)
    for kind, size in runs:
        for found in world(loaded_and_stepped, size, path=path, kind=kind, cls=cls):
            for got, expected in zip(found, want, strict=True):
                assert_same(got, expected, **close)


def of_each_kind(place: int) -> list[tuple[str, int]]:
    """Each kind in one of its worlds, in turns."""
    return [(name, kind.worlds[place % len(kind.worlds)]) for name, kind in KINDS.items() if kind.worlds]


@pytest.mark.parametrize(("kind", "size"), RUNS)
def test_a_run_goes_on_under_any_layout(world, tmp_path, kind, size):
    """In whole numbers, so that steps are exact."""
    place = RUNS.index((kind, size))
    layout, path = FILES[place % 2], str(tmp_path / "step-2")
    world(saved_after_two_steps, size, path=path, kind=kind, cls="SGD", layout=layout)
    check_loads(world, path, "SGD", sampled([(kind, size), *of_each_kind(place)], 3))


@pytest.mark.parametrize("layout", FILES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_plain_parameters_that_each_rank_of_a_pair_shards_with_its_own_data_ranks(world, tmp_path, size, layout):
    """Both ways: into it from a plain run, and from it."""
    paths = str(tmp_path / "one"), str(tmp_path / "other")
    world(saved_after_two_steps, 1, path=paths[0], kind="plain", cls="SGD", layout="whole")
    check_loads(world, paths[0], "SGD", [(BESIDE_TP, size)])
    world(saved_after_two_steps, size, path=paths[1], kind=BESIDE_TP, cls="SGD", layout=layout)
    check_loads(world, paths[1], "SGD", [("plain", 1), ("rows", 3), (BESIDE_TP, size)])


@pytest.mark.parametrize("cls", ["AdamW", "Adagrad"])
@pytest.mark.parametrize(("kind", "size"), RUNS)
def test_state_of_several_tensors_goes_on_under_any_layout(world, tmp_path, kind, size, cls):
    place = RUNS.index((kind, size))
    path = str(tmp_path / "step-2")
    world(saved_after_two_steps, size, path=path, kind=kind, cls=cls, layout=FILES[(place + 1) % 2])
    others = of_each_kind(place)
    check_loads(world, path, cls, others if FULL else [others[place % len(others)]], **ROUNDED)


def same_again(path: str, kind: str, cls: str) -> None:
    """The run that was saved, and one that loads it, take the same bits of steps."""
    model, optimizer = run_of(kind, cls=cls)
    for number in range(2):
        step(model, optimizer, number)
    shardtensor.save(path, model=model, optimizer=optimizer)
    fresh, its = run_of(kind, seed=50, cls=cls)
    shardtensor.load(path, model=fresh, optimizer=its)
    for number in range(2, 4):
        step(model, optimizer, number)
        step(fresh, its, number)
        assert_same(values(fresh, its), values(model, optimizer))


@pytest.mark.parametrize("cls", ["AdamW", "Adagrad"])
@pytest.mark.parametrize(("kind", "size"), RUNS)
def test_under_the_same_layout_all_later_steps_have_the_same_bits(world, tmp_path, kind, size, cls):
    world(same_again, size, path=str(tmp_path / "step-2"), kind=kind, cls=cls)


# -- tensors under every layout of the law -----------------------------------------------------------------------------

SHAPES = ((8,), (7, 3), (4, 4), (1, 5), (0, 4), (2, 3, 4), ())


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(math.prod(shape)), device=device()).view(shape) + 1


def makers(shape: tuple[int, ...]) -> dict[str, Any]:
    """The layouts of a shape in this world."""
    found = [*layouts(shape), *(grids(shape) if as_group().size == 4 else [])]
    return {name: make for name, make in found if name != "partial"}


def save_all(path: str, layout: str) -> None:
    """The same values under every layout."""
    tensors = {
        f"{shape}/{i}": make(numbers(shape)) for shape in SHAPES for i, make in enumerate(makers(shape).values())
    }
    shardtensor.save(path, model=tensors, layout=layout)


def load_all(path: str, names: dict[tuple[int, ...], int]) -> None:
    """Each saved tensor under each layout of this world, or under some."""
    for k in sampled(range(max(names.values())), 3):
        into: dict[str, torch.Tensor] = {}
        for shape, count in names.items():
            here = list(makers(shape).values())
            into |= {f"{shape}/{i}": here[(i + k) % len(here)](torch.zeros_like(numbers(shape))) for i in range(count)}
        shardtensor.load(path, model=into)
        for name, tensor in into.items():
            assert torch.equal(whole(tensor), numbers(tuple(tensor.shape))), (name, str(tensor))


def counts() -> dict[tuple[int, ...], int]:
    return {shape: len(makers(shape)) for shape in SHAPES}


@pytest.mark.parametrize("layout", FILES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_tensor_loads_under_each_layout(world, tmp_path, size, layout):
    path = str(tmp_path / "tensors")
    world(save_all, size, path=path, layout=layout)
    names = world(counts, size)[0]
    for other in (1, 2, 3, 4):
        world(load_all, other, path=path, names=names)


# -- random layouts, shapes and dtypes ---------------------------------------------------------------------------------

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.bool, torch.complex64),
    *(torch.complex32, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
MESHES = ("a=1", "a=2", "a=3", "a=2, b=2", "a=2, b=3", "a=8")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, so also those of NaNs; a bool has 0 or 1."""
    if dtype == torch.bool:
        return random_bits(shape, torch.uint8, seed) > 127
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and bits(x) == bits(y)


def bits(x: torch.Tensor) -> bytes:
    return bytes(x.detach().contiguous().view(-1).view(torch.uint8).tolist())


Tensors = dict[str, torch.Tensor]


def made(tensors: Tensors, mesh: str, seed: int) -> Tensors:
    """The tensors in random layouts; some of them plain."""
    rng, axes = Random(seed), read_mesh(mesh)
    return {
        name: x.clone()
        if rng.random() < 0.1
        else shardtensor.distribute(x, random_spec(rng, tuple(x.shape), axes, partial=False))
        for name, x in tensors.items()
    }


def save_random(path: str, tensors: Tensors, mesh: str, seed: int, layout: str) -> None:
    shardtensor.save(path, model=made(tensors, mesh, seed), layout=layout)


def load_random(path: str, tensors: Tensors, mesh: str, seed: int) -> None:
    into = made({name: torch.zeros_like(x) for name, x in tensors.items()}, mesh, seed)
    shardtensor.load(path, model=into)
    for name, x in into.items():
        assert same_bits(whole(x), tensors[name]), (name, getattr(x, "_layout", "plain"))


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
tensors = st.dictionaries(st.text(min_size=1, max_size=4), st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@examples(300)
@given(tensors, st.sampled_from(MESHES), st.sampled_from(MESHES), st.sampled_from(FILES), st.integers(0, 10**6))
def test_random_tensors_load_under_random_layouts(outlines, mesh, other, layout, seed):
    given_ = {name: random_bits(*outline, seed + i) for i, (name, outline) in enumerate(outlines.items())}
    with tempfile.TemporaryDirectory() as folder:
        shardtensor.simulate(mesh, save_random, f"{folder}/c", given_, mesh, seed, layout)
        shardtensor.simulate(other, load_random, f"{folder}/c", given_, other, seed + 1)
