"""A fingerprint is that of the dense tensors, whatever the layouts and the world, and any change changes it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import product

import pytest
import torch
from harness import device, every_size
from harness.examples import examples
from harness.law import grids, layouts
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import shardtensor
from shardtensor.checkpoint import checksums
from shardtensor.checkpoint.checksums import fingerprints
from shardtensor.checkpoint.items import item_of
from shardtensor.comm.group import Group, SingleRankGroup
from shardtensor.comm.process_group import as_group
from shardtensor.errors import CheckpointError
from shardtensor.layout.box import Box

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
)


def fingerprint_of(tensors: Mapping[str, torch.Tensor], group: Group, key: str = "") -> str:
    """The fingerprint of named tensors: sharded ones, and plain ones that are equal on all ranks."""
    return fingerprints({"": [item_of(name, tensor, group) for name, tensor in tensors.items()]}, group, key)[""]


def of(**tensors: torch.Tensor) -> str:
    """The fingerprint of plain tensors in one process."""
    return fingerprint_of(tensors, SingleRankGroup())


# -- an oracle: integers of Python, element by element -----------------------------------------------------------------


@lru_cache
def table(dim: int, level: int, lane: int) -> list[int]:
    data = hashlib.shake_128(f"{dim} {level}".encode()).digest(2 * 1024 * 8)[lane * 8192 :][:8192]
    odd = [int.from_bytes(data[i : i + 8], "little") | 1 for i in range(0, 8192, 8)]
    return odd if level == 0 else [1, *odd[1:]]


def weight(index: tuple[int, ...], lane: int) -> int:
    found = 1
    for dim, i in enumerate(index):
        level = 0
        while level == 0 or i:
            i, digit = divmod(i, 1024)
            found, level = found * table(dim, level, lane)[digit] % 2**64, level + 1
    return found


def spread(bits: int, is_long: bool, lane: int) -> int:
    word = bits % 2**64
    word ^= (word >> 32) * is_long
    word = word * 0x9E3779B97F4A7C15 % 2**64
    word ^= word >> 32
    signed = word - 2**64 * (word >= 2**63)
    return (word ^ (signed >> 29) * lane) % 2**64


def summed(tensor: torch.Tensor, offsets: tuple[int, ...], lane: int) -> int:
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor.reshape(tensor.shape or (1,))
    offsets = (*offsets, *(0,) * (parts.dim() - len(offsets)))
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parts.element_size()]
    words = parts.contiguous().view(kind)
    where = product(*(range(start, start + size) for start, size in zip(offsets, parts.shape, strict=True)))
    values = zip(where, words.flatten().tolist(), strict=True)
    return sum(spread(bits, kind == torch.int64, lane) * weight(index, lane) for index, bits in values) % 2**64


def expected(tensors: dict[str, torch.Tensor], key: str = "") -> str:
    totals = [0, 0]
    for name, tensor in tensors.items():
        about = hashlib.blake2b(repr((key, name, str(tensor.dtype), tuple(tensor.shape))).encode(), digest_size=32)
        numbers = [int.from_bytes(about.digest()[i : i + 8], "little") for i in range(0, 32, 8)]
        for lane in range(2):
            totals[lane] += (numbers[lane] | 1) * summed(tensor, (0,) * tensor.dim(), lane) + numbers[2 + lane]
    return "".join(f"{total % 2**64:016x}" for total in totals)


# -- values ------------------------------------------------------------------------------------------------------------


def of_random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits, so also those of NaNs; a bool has 0 or 1."""
    if dtype == torch.bool:
        return of_random_bits(shape, torch.uint8, seed) > 127
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, as a view of two dims."""
    return tensor.view(-1).view(torch.uint8).view(tensor.numel(), -1)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
full_shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple).filter(lambda shape: math.prod(shape) > 1)
dtypes = st.sampled_from(DTYPES)


@examples(200)
@given(st.dictionaries(st.text(max_size=3), st.tuples(shapes, dtypes, st.integers(0, 9)), max_size=3), st.text())
def test_it_is_the_sum_that_the_oracle_computes(made, key):
    tensors = {name: of_random_bits(*each) for name, each in made.items()}
    assert fingerprint_of(tensors, SingleRankGroup(), key) == expected(tensors, key)
    backwards = dict(reversed(tensors.items()))
    assert fingerprint_of(backwards, SingleRankGroup(), key) == expected(tensors, key)


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 9)), min_size=1, max_size=3))
@pytest.mark.parametrize("most", [3, 64])
def test_a_box_of_a_large_tensor_and_its_chunks_have_the_sum_of_the_oracle(most, spans):
    near = [(start - start % 1024**2 * (start % 2), size) for start, size in spans]  # half of them at a carry
    box = Box(tuple(max(start - 4, 0) for start, _ in near), tuple(size for _, size in near))
    part = of_random_bits(box.sizes, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "_CHUNK", {"cpu": most})
        found = checksums._sum(part, box).tolist()
    assert [value % 2**64 for value in found] == [summed(part, box.offsets, lane) for lane in range(2)]


@pytest.mark.parametrize("change", [lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x.expand(2, *x.shape)])
def test_strides_do_not_count(change):
    x = change(of_random_bits((40, 30), torch.float32))
    assert of(x=x) == of(x=x.contiguous())


def test_lazy_conjugates_and_negatives_count_as_their_values():
    x = torch.randn(3, 4, dtype=torch.complex64)
    for lazy in (x.conj(), x.conj().imag):
        assert of(x=lazy) == of(x=lazy.resolve_conj().resolve_neg().clone())


# -- changes -----------------------------------------------------------------------------------------------------------


@examples(300)
@given(full_shapes, dtypes, st.data())
def test_a_changed_bit_changes_both_lanes(shape, dtype, data):
    x = of_random_bits(shape, dtype)
    y = x.clone()
    held = bytes_of(y)
    i, byte = data.draw(st.integers(0, held.shape[0] - 1)), data.draw(st.integers(0, held.shape[1] - 1))
    held[i, byte] ^= 1 << data.draw(st.integers(0, 7)) if dtype != torch.bool else 1
    before, after = of(x=x), of(x=y)
    assert before[:16] != after[:16]
    assert before[16:] != after[16:]


@examples(300)
@given(full_shapes, dtypes, st.data())
def test_moved_values_change_it(shape, dtype, data):
    """Two elements that differ change places; elements are rotated, or reversed."""
    x = of_random_bits(shape, dtype, data.draw(st.integers(0, 99)))
    places = st.integers(0, x.numel() - 1)
    i, j = data.draw(places), data.draw(places)
    swapped, rotated, reversed_ = x.clone(), x.clone(), x.clone()
    bytes_of(swapped)[[i, j]] = bytes_of(x)[[j, i]]
    bytes_of(rotated).copy_(bytes_of(x).roll(1, 0))
    bytes_of(reversed_).copy_(bytes_of(x).flip(0))
    for y in (swapped, rotated, reversed_):
        assert (of(x=x) == of(x=y)) == torch.equal(bytes_of(x), bytes_of(y))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point])
def test_signs_of_any_elements_and_of_zeros_count(dtype):
    x = torch.ones(64, dtype=torch.float32).to(dtype)
    sign = x.element_size() - 1
    seen = {of(x=x), of(x=torch.zeros_like(x))}
    for i, j in product(range(64), repeat=2):
        y = x.clone()
        bytes_of(y)[[i, j], sign] ^= 128
        seen.add(of(x=y))
    seen.add(of(x=torch.zeros(64).neg().to(dtype)))
    assert len(seen) == 3 + 64 * 65 // 2


def test_payloads_of_nan_count():
    words = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -1], dtype=torch.int32)
    assert len({of(x=word.view(torch.float32)) for word in words}) == 4


def test_names_dtypes_shapes_and_the_key_count():
    x = torch.arange(12, dtype=torch.int32)
    forms = [x, x.view(3, 4), x.view(4, 3), x.view(1, 12), x.view(torch.float32), x.long(), x[:0], x[:0].view(0, 3)]
    found = [of(x=form) for form in forms]
    found += [of(y=x), of(x=x, y=x), of(x=x, y=x[:0]), of(), fingerprint_of({"x": x}, SingleRankGroup(), "key")]
    found += [of(x=x, y=x + 1), of(x=x + 1, y=x)]
    assert len(set(found)) == len(found)
    assert all(len(text) == 32 and int(text, 16) >= 0 for text in found)
    assert of(x=x.to(torch.bfloat16)) != of(x=x.to(torch.bfloat16).half())


# -- layouts -----------------------------------------------------------------------------------------------------------

SHAPES = ((5, 6), (7,), (3, 2, 4), (0, 3), ())


def fingerprints_of_layouts() -> dict[str, tuple[str, str]]:
    """Fingerprints of a tensor in each layout, and of all layouts together as one state, with those of dense ones."""
    group, alone, found = as_group(), SingleRankGroup(), {}
    state: dict[str, torch.Tensor] = {}
    for place, shape in enumerate(SHAPES):
        for i, (name, make) in enumerate([*layouts(shape), *(grids(shape) if group.size == 4 else [])]):
            if "partial" not in name:
                x = of_random_bits(shape, DTYPES[(i + place) % len(DTYPES)], i).to(device())
                state[f"{shape} {name} {i}"] = make(x)
                found[f"{shape} {name} {i}"] = (
                    fingerprint_of({"x": make(x)}, group),
                    fingerprint_of({"x": x}, alone),
                )
    dense = {name: x.full_tensor() if isinstance(x, shardtensor.ShardedTensor) else x for name, x in state.items()}
    found["all"] = (fingerprint_of(state, group, "k"), fingerprint_of(dict(reversed(dense.items())), alone, "k"))
    return found


@pytest.mark.worlds("sim")
@every_size
def test_it_does_not_depend_on_layouts(world, size):
    every = world(fingerprints_of_layouts, size)
    assert every == [every[0]] * size
    assert {name: pair for name, pair in every[0].items() if pair[0] != pair[1]} == {}
    assert len(every[0]) > 12


def fingerprint_of_text(spec: str, dense: torch.Tensor) -> str:
    return fingerprint_of({"x": shardtensor.distribute(dense, spec)}, as_group())


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("[tp blocks(2), dp]", (8, 6)),
        ("[-, tp blocks(2)] flat(dp)", (5, 8)),
        ("[dp, -] flat(tp, unit=3)", (8, 5)),
        ("flat(dp*tp, sizes=(0, 5, 1, 14))", (4, 5)),
        ("[dp, -] only(tp, 1)", (4, 3)),
        ("replicate only(tp, 1)", ()),
        ("replicate only(dp, 0)", ()),
        ("[tp*dp balanced]", (3,)),
    ],
)
def test_it_does_not_depend_on_a_spec(spec, shape):
    dense = of_random_bits(shape, torch.bfloat16)
    assert shardtensor.simulate("dp=2, tp=2", fingerprint_of_text, spec, dense) == [of(x=dense)] * 4


def fingerprint_of_stages(first: torch.Tensor, last: torch.Tensor) -> str:
    """A tensor on the first two ranks, and one on the last two: each rank passes its own."""
    group = as_group()
    half = group.subgroup((0, 1) if group.rank < 2 else (2, 3))
    name, x = ("first", first) if group.rank < 2 else ("last", last)
    return fingerprint_of({name: shardtensor.distribute(x, "[tp balanced]", process_group=half)}, group)


def test_tensors_may_be_on_some_of_the_ranks():
    first, last = torch.arange(5.0), torch.empty(0)
    assert shardtensor.simulate(4, fingerprint_of_stages, first, last) == [of(first=first, last=last)] * 4


def fingerprint_of_partials() -> None:
    x = shardtensor.init_from_local_tensor(torch.ones(3), "[-] partial(tp)", 3)
    with pytest.raises(CheckpointError, match=r'tensor "w" is a partial sum') as caught:
        fingerprint_of({"w": x}, as_group())
    assert "reshard" in str(caught.value)


def test_partial_tensors_are_refused_on_all_ranks():
    shardtensor.simulate(2, fingerprint_of_partials)


# -- memory ------------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest memory that a function allocates."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.known, self.bytes = {x.untyped_storage().data_ptr() for x in inputs}, 0

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("shape", [(5_000_000,), (2_500_000, 2), (2, 2_500_000), (500, 100, 100)])
def test_memory_does_not_grow_with_the_tensor(shape):
    x = torch.zeros(shape, dtype=torch.bfloat16)
    with LargestTensor([x]) as largest:
        of(x=x)
    assert 0 < largest.bytes <= 2 * 8 * (checksums._CHUNK["cpu"] + 2 * 1024)
