"""Boxes of a random tensor are the pieces of the unsharded draw, and the generator ends where that draw ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardtensor.tensor.drawing import (
    PIECE,
    draw_boxes,
    draw_passes,
    find_pass,
    is_exact_in_pieces,
    pass_lengths,
    split_for_indexing,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA card")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)


def dropout_mask(t: Tensor, generator: object) -> Tensor:
    return t.copy_(torch.native_dropout(torch.ones_like(t), 0.3, True)[1])  # always from the default generator


SAMPLERS: dict[str, tuple[Callable, tuple[torch.dtype, ...]]] = {
    "uniform": (lambda t, g: t.uniform_(-1, 2, generator=g), (*FLOATS, torch.complex64)),
    "normal": (lambda t, g: t.normal_(1, 2, generator=g), (*FLOATS, torch.complex64)),
    "exponential": (lambda t, g: t.exponential_(2.0, generator=g), FLOATS),
    "bernoulli": (lambda t, g: t.bernoulli_(0.3, generator=g), (*FLOATS, *INTEGERS, torch.bool)),
    "random": (lambda t, g: t.random_(-3, 100, generator=g), (*FLOATS, *INTEGERS)),
    "random_wide": (lambda t, g: t.random_(0, 2**40, generator=g), (torch.int64,)),
    "random_full": (lambda t, g: t.random_(generator=g), (*INTEGERS, torch.uint8)),
    "cauchy": (lambda t, g: t.cauchy_(generator=g), FLOATS),
    "log_normal": (lambda t, g: t.log_normal_(generator=g), FLOATS),
    "geometric": (lambda t, g: t.geometric_(0.2, generator=g), (*FLOATS, *INTEGERS)),
}
KINDS = [(name, dtype) for name, (_, dtypes) in SAMPLERS.items() for dtype in dtypes]
UNIFORM, NORMAL = SAMPLERS["uniform"][0], SAMPLERS["normal"][0]


def as_bits(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def check(sample, shape, boxes, dtype=torch.float32, device="cpu", generator=None, seed=7) -> list[Tensor]:
    """Assert that the boxes, their memory and the generator's end are those of the unsharded draw."""
    stream = generator or (torch.default_generator if device == "cpu" else torch.cuda.default_generators[0])
    stream.manual_seed(seed)
    if device == "cpu":
        torch.empty(3).normal_(generator=generator)  # an odd count leaves half a pair cached in the generator
    begin = stream.get_state()
    whole = torch.empty(shape, dtype=dtype, device=device)
    sample(whole, generator)
    end = stream.get_state()

    stream.set_state(begin)
    parts = draw_boxes(sample, shape, boxes, dtype=dtype, device=device, generator=generator)
    assert torch.equal(stream.get_state(), end)
    assert len(parts) == len(boxes)
    for (offsets, sizes), part in zip(boxes, parts, strict=True):
        expected = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        assert part.shape == tuple(sizes)
        assert part.dtype == dtype
        assert part.device == whole.device
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
        assert torch.equal(as_bits(part), as_bits(expected))
    return parts


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_every_sampler_and_dtype_is_exact_in_pieces(name, dtype):
    sample = SAMPLERS[name][0]
    check(sample, (2 * PIECE + 37,), [((PIECE - 5,), (6,)), ((2 * PIECE - 1,), (38,))], dtype)
    check(sample, (41, 3203), [((3, 801), (38, 800))], dtype)


@pytest.mark.parametrize(
    "numel", [0, 1, 15, 16, 17, 4099, PIECE - 1, PIECE, PIECE + 1, PIECE + 15, PIECE + 16, 200_000]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sizes_around_the_blocks_of_the_normal_sampler(numel, dtype):
    cut = numel // 3
    boxes = [((0,), (cut,)), ((cut,), (numel - cut,)), ((numel,), (0,))]
    check(NORMAL, (numel,), boxes, dtype)
    check(UNIFORM, (numel,), boxes, dtype)


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        pytest.param((300, 1000), [((75, 0), (75, 1000))], id="rows"),
        pytest.param((300, 1000), [((0, 250), (300, 250))], id="columns"),
        pytest.param((300, 1000), [((150, 500), (150, 500))], id="grid"),
        pytest.param((300, 1000), [((0, 0), (300, 1000))], id="whole"),
        pytest.param((300, 1000), [((i * 20, 0), (10, 1000)) for i in range(15)], id="cyclic rows"),
        pytest.param((300, 1000), [((0, 0), (300, 1000)), ((5, 5), (200, 500))], id="overlap"),
        pytest.param((300, 1000), [], id="no box"),
        pytest.param((300, 1000), [((300, 0), (0, 1000)), ((0, 7), (300, 0))], id="empty boxes"),
        pytest.param((1, 200_001, 1), [((0, 199_999, 0), (1, 2, 1))], id="unit dims"),
        pytest.param((7, 5, 61, 67), [((2, 1, 3, 5), (4, 3, 50, 60))], id="inner box of four dims"),
        pytest.param((7, 5, 61, 67), [((0, 2, 0, 0), (7, 3, 61, 67))], id="second dim"),
        pytest.param((3, 0, 100_000), [((1, 0, 0), (1, 0, 100_000))], id="empty whole"),
        pytest.param((), [((), ())], id="scalar"),
        pytest.param((), [], id="scalar, no box"),
    ],
)
def test_boxes(shape, boxes):
    check(NORMAL, shape, boxes)
    check(UNIFORM, shape, boxes, generator=torch.Generator())


def test_initial_values_equal_the_unsharded_ones_for_every_layout():
    torch.manual_seed(7)
    expected = torch.rand(4, 4)
    torch.testing.assert_close(expected[0], torch.tensor([0.53492254, 0.19880319, 0.65921170, 0.65689027]))
    for dim in (0, 1):
        for world in (1, 2, 4):
            parts = []
            for rank in range(world):
                offsets, sizes = [0, 0], [4, 4]
                offsets[dim], sizes[dim] = rank * 4 // world, 4 // world
                torch.manual_seed(7)
                parts += draw_boxes(
                    lambda t, g: t.uniform_(generator=g), (4, 4), [(offsets, sizes)], dtype=torch.float32, device="cpu"
                )
            assert torch.equal(torch.cat(parts, dim), expected)


@st.composite
def _box(draw, shape):
    lows = [draw(st.integers(0, size)) for size in shape]
    return tuple(lows), tuple(draw(st.integers(0, size - low)) for low, size in zip(lows, shape, strict=True))


@st.composite
def _draws(draw):
    tail = draw(st.lists(st.integers(1, 20), max_size=2))
    numel = draw(st.one_of(st.integers(0, 100), st.integers(PIECE, 3 * PIECE)))
    shape = (numel // math.prod(tail), *tail)
    shape = tuple(draw(st.permutations(shape)))
    return shape, draw(st.lists(_box(shape), max_size=3)), draw(st.sampled_from(KINDS)), draw(st.integers(0, 2**32))


@examples(60)
@given(_draws())
def test_any_boxes_of_any_draw(case):
    shape, boxes, (name, dtype), seed = case
    check(SAMPLERS[name][0], shape, boxes, dtype, seed=seed)


def test_a_sampler_without_a_generator_argument_uses_the_default_one():
    check(dropout_mask, (3 * PIECE + 1,), [((PIECE,), (PIECE,))], torch.float32)
    check(dropout_mask, (3 * PIECE + 1,), [((PIECE,), (PIECE,))], torch.bfloat16)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 4099])
@pytest.mark.parametrize(("factory", "method"), [(torch.rand, "uniform_"), (torch.randn, "normal_")])
def test_factories_are_in_place_draws_on_an_empty_tensor(factory, method, numel, dtype):
    begin = torch.get_rng_state()
    expected = factory(numel, dtype=dtype)
    end = torch.get_rng_state()
    torch.set_rng_state(begin)
    assert torch.equal(as_bits(getattr(torch.empty(numel, dtype=dtype), method)()), as_bits(expected))
    assert torch.equal(torch.get_rng_state(), end)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float32], ids=str)
def test_randint_is_random_on_an_empty_tensor(dtype):
    begin = torch.get_rng_state()
    expected = torch.randint(3, 100, (77,), dtype=dtype)
    end = torch.get_rng_state()
    torch.set_rng_state(begin)
    assert torch.equal(torch.empty(77, dtype=dtype).random_(3, 100), expected)
    assert torch.equal(torch.get_rng_state(), end)


def _recorded(sample):
    drawn: list[int] = []

    def recorded(t, generator):
        drawn.append(t.numel())
        sample(t, generator)

    return recorded, drawn


def test_scratch_is_bounded_whatever_the_size():
    numel = 20 * PIECE + 3
    sample, drawn = _recorded(NORMAL)
    draw_boxes(sample, (numel,), [((17,), (1000,))], dtype=torch.float32, device="cpu")
    assert max(drawn) == PIECE + 3
    assert sum(drawn) < numel + 100  # the proof is small

    sample, drawn = _recorded(NORMAL)
    draw_boxes(sample, (numel,), [((0,), (numel,))], dtype=torch.float32, device="cpu")
    assert drawn == [numel]  # a copy on this rank is drawn where it stays


def test_a_sampler_that_is_not_exact_in_pieces_is_drawn_whole():
    def own_stream(t, generator):
        """Seed a stream of its own with one draw a call, as MKL's samplers do."""
        seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
        t.bernoulli_(1e-9, generator=torch.Generator().manual_seed(int(seed)))

    def shuffled(t, generator):
        t.copy_(torch.randperm(t.numel(), generator=generator).view(t.shape))

    for sample in (own_stream, shuffled):
        check(sample, (2, PIECE), [((1, 3), (1, 999))])
        begin = torch.get_rng_state()
        assert not is_exact_in_pieces(sample, torch.float32, None)
        assert torch.equal(torch.get_rng_state(), begin)


def test_bad_arguments_raise_what_torch_raises_and_draw_nothing():
    begin = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="normal expects std >= 0"):
        draw_boxes(lambda t, g: t.normal_(0, -1), (99_999,), [((0,), (9,))], dtype=torch.float32, device="cpu")
    assert torch.equal(torch.get_rng_state(), begin)


def test_meta_draws_nothing():
    begin = torch.get_rng_state()
    (part,) = draw_boxes(UNIFORM, (10**6, 10**6), [((0, 5), (10**6, 7))], dtype=torch.float32, device="meta")
    assert part.is_meta
    assert part.shape == (10**6, 7)
    assert torch.equal(torch.get_rng_state(), begin)


class ToyPhilox:
    """A counter-based stream with the pass structure of CUDA's samplers: each thread draws ``unroll`` values a pass."""

    def __init__(self, unroll: int, threads: int = 8, max_bytes: int = 10**9) -> None:
        self.offset, self.unroll, self.threads, self.max_bytes = 40, unroll, threads, max_bytes

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def draw(self, count: int, scratch: Tensor | None = None) -> Tensor:
        values = torch.empty(count) if scratch is None else scratch[:count]
        parts = split_for_indexing(count, 4, self.max_bytes)
        if len(parts) > 1:
            self.offset += 4 * -(-count // (self.threads * self.unroll))
        for part in values.split(parts):
            threads = min(self.threads, part.numel())
            index = torch.arange(part.numel())
            number, lane, thread = index // (threads * self.unroll), index // threads % self.unroll, index % threads
            part.copy_(((self.offset + 4 * number) * 1009 + lane * 101 + thread) * 7919 % 65521)
            self.offset += 4 * -(-part.numel() // (threads * self.unroll))
        return values


@pytest.mark.parametrize("unroll", [4, 2])
@pytest.mark.parametrize(("numel", "max_bytes"), [(33, 10**9), (320, 10**9), (1000, 10**9), (1000, 1024), (1001, 2048)])
def test_passes_of_a_counter_based_stream_add_up(unroll, numel, max_bytes):
    whole_stream, stream = ToyPhilox(unroll, max_bytes=max_bytes), ToyPhilox(unroll, max_bytes=max_bytes)
    whole = whole_stream.draw(numel)
    found = find_pass(stream.draw, stream, (32, 16))
    assert found == (8 * unroll, 4)
    assert stream.offset == 40
    for first, last in [(0, numel), (17, 18), (numel - 1, numel), (0, 0)]:
        stream.set_offset(40)
        touched = 0
        pieces = draw_passes(
            stream.draw, stream, numel, lambda a, b, lo=first, hi=last: lo < b and a < hi, *found, 4, max_bytes
        )
        for start, values in pieces:
            assert torch.equal(values, whole[start : start + values.numel()])
            touched += values.numel()
        assert stream.offset == whole_stream.offset
        assert last - first <= touched <= last - first + 2 * found[0]


def test_a_stream_of_another_structure_has_no_pass():
    stream = ToyPhilox(unroll=3)
    assert find_pass(stream.draw, stream, (32, 16)) is None
    assert stream.offset == 40


@needs_cuda
@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_cuda_boxes_are_pieces_of_the_unsharded_draw(name, dtype):
    """Also says which samplers are exact in passes, so that a silent fall back to whole draws is seen."""
    length = max(pass_lengths(0))
    sample, drawn = _recorded(SAMPLERS[name][0])
    check(SAMPLERS[name][0], (3, 5), [((1, 0), (2, 5))], dtype, "cuda")
    check(SAMPLERS[name][0], (length + 1,), [((length - 3,), (4,))], dtype, "cuda")
    columns, rows = ((0, 1000), (1100, 1500)), ((600, 0), (20, 4099))
    check(SAMPLERS[name][0], (1100, 4099), [columns, rows], dtype, "cuda", generator=torch.Generator("cuda"))
    check(SAMPLERS[name][0], (1100, 4099), [], dtype, "cuda")
    draw_boxes(sample, (1100, 4099), [rows], dtype=dtype, device="cuda")
    assert max(drawn) < 1100 * 4099


@needs_cuda
def test_cuda_tensor_beyond_32_bit_indexing():
    numel = 2**29 + 5  # float32: more than 2 GiB, which torch draws in two halves
    check(NORMAL, (numel,), [((2**28 - 7,), (20,)), ((numel - 9,), (9,)), ((12345,), (10,))], device="cuda")


@needs_cuda
def test_cuda_scratch_is_bounded():
    shape = (8192, 8192)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (part,) = draw_boxes(NORMAL, shape, [((0, 0), (1024, 8192))], dtype=torch.float32, device="cuda")
    scratch = torch.cuda.max_memory_allocated() - before - part.untyped_storage().nbytes()
    assert scratch < 8 * max(pass_lengths(0)) * 4
