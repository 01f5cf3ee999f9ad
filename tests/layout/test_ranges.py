"""Ranges tile every parameter, end between its grains, are of one size, and waste little."""

from __future__ import annotations

from itertools import product

from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as some

from shardtensor.layout.bind import bind
from shardtensor.layout.ranges import ALIGNMENT, lay_out, lay_out_alone, lay_out_owned, parameter_groups
from shardtensor.mesh import Mesh
from shardtensor.spec.nodes import Spec


@some.composite
def parameters(draw):
    """Lengths and units: rows, stretches, whole matrices, nothing in particular."""
    lengths, units = [], []
    for rows, columns in draw(some.lists(some.tuples(some.integers(0, 40), some.integers(1, 60)), max_size=7)):
        lengths.append(rows * columns)
        units.append(draw(some.sampled_from([1, columns, max(rows * columns, 1), 16, 7])))
    return lengths, units


def check(ranges, lengths, units, ranks):
    end = 0
    for i, (length, unit) in enumerate(zip(lengths, units, strict=True)):
        pieces = [ranges.piece(i, rank) for rank in range(ranks)]
        held = [piece for piece in pieces if piece[0] < piece[1]]
        assert [low for low, _ in held] == [0, *(high for _, high in held[:-1])][: len(held)]
        assert sum(high - low for low, high in held) == length
        assert all(high == length or high % unit == 0 for _, high in held)
        assert ranges.starts[i] >= end
        assert ranges.starts[i] % ALIGNMENT == 0
        end = ranges.starts[i] + length
    assert end <= ranges.total
    assert sum(ranges.all_cuts()[::2]) == ranges.waste == ranges.total - sum(lengths)
    assert ranges.all_cuts()[1::2] == lengths


@examples(300)
@given(parameters(), some.integers(1, 9))
def test_pieces_tile_parameters_and_keep_grains_whole(given, ranks):
    lengths, units = given
    ranges = lay_out(lengths, ranks, units)
    check(ranges, lengths, units, ranks)
    for rank in range(ranks):  # one contiguous range: its gaps and pieces fill it
        cuts = ranges.cuts(rank)
        assert sum(cuts) == ranges.chunk
        assert min(cuts) >= 0
        assert cuts[1::2] == [ranges.sizes(i)[rank] for i in range(len(lengths))]


@examples(300)
@given(parameters(), some.integers(1, 9))
def test_a_range_is_longer_than_its_share_by_the_longest_parameter_at_most(given, ranks):
    lengths, units = given
    longest = max([ALIGNMENT, *lengths])
    share = -(-sum(lengths) // ranks)
    assert lay_out(lengths, ranks, units).chunk <= share + longest + ALIGNMENT * (1 + len(lengths))


@examples(200)
@given(parameters(), some.integers(1, 9))
def test_without_grains_nothing_is_wasted_but_alignment(given, ranks):
    lengths, _ = given
    assert lay_out(lengths, ranks).waste <= ALIGNMENT * (len(lengths) + ranks)


@examples(200)
@given(some.integers(0, 300), some.integers(1, 300), some.integers(1, 9))
def test_rows_of_a_lone_matrix_are_dealt_as_evenly_as_they_can_be(rows, columns, ranks):
    ranges = lay_out([rows * columns], ranks, [columns])
    share = -(-rows // ranks) * columns
    assert ranges.chunk <= share + max(share // 7, columns * ALIGNMENT)


def test_one_alone_lies_as_a_flat_layout_cuts_it():
    for length, ranks, unit in product(range(20), range(1, 5), range(1, 4)):
        ranges = lay_out_alone(length, ranks, unit)
        flat = bind(Spec(None).flat("x", unit=unit), (length,), Mesh((("x", ranks),)))
        assert [ranges.piece(0, rank) for rank in range(ranks) if ranges.sizes(0)[rank]] == [
            flat.span(rank) for rank in range(ranks) if flat.numel(rank)
        ]
        assert ranges.chunk > 0
        assert unit > 1 or ranges == lay_out_alone(length, ranks)


@examples(200)
@given(some.lists(some.tuples(some.integers(0, 500), some.integers(0, 3)), max_size=8))
def test_owners_hold_what_is_theirs(dealt):
    dealt = sorted(dealt, key=lambda one: one[1])
    lengths, owners = [n for n, _ in dealt], [owner for _, owner in dealt]
    ranges = lay_out_owned(lengths, 4, owners)
    check(ranges, lengths, [max(n, 1) for n in lengths], 4)
    for i, (length, owner) in enumerate(dealt):
        assert ranges.sizes(i) == tuple(length if rank == owner else 0 for rank in range(4))


def test_matrices_of_a_decoder_layer_waste_nearly_nothing_by_rows():
    h, f = 4096, 14336
    matrices = [(h, h), (1024, h), (1024, h), (h, h), (f, h), (f, h), (h, f), (h, 1), (h, 1)]
    lengths, rows = [a * b for a, b in matrices], [b for _, b in matrices]
    for ranks in (2, 3, 4, 8, 64):
        assert lay_out(lengths, ranks, rows).waste <= 0.002 * sum(lengths)


def test_parameters_of_one_kind_are_gathered_together():
    assert parameter_groups(["f32", "bf16", "f32"]) == [[0, 2], [1]]
