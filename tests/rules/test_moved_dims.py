"""Layouts that arithmetic gives: what a rank has after a view, an index or a reduction of its part is its part then."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import attrs
import pytest
import torch
from cut_layouts import MESH, OUTSIDE, counted, counted_part, cut_layout, cut_layouts, cut_once, cut_twice, part

from shardtensor.layout.layout import DimCut, MeshLayout
from shardtensor.layout.pieces import Blocked, chunked
from shardtensor.rules.indexing import indexing, normalize
from shardtensor.rules.views import expanded, heads_fit, permuted, repeated, reshaped

TWELVE = [(12,), (3, 4), (4, 3), (2, 6), (6, 2), (2, 3, 2), (12, 1), (1, 12), (2, 1, 6), (1, 3, 4, 1), (3, 2, 1, 2)]
EMPTY = [(0,), (0, 3), (3, 0), (2, 0, 3)]
ONES = [(), (1,), (1, 1)]


def held_alike(layout: MeshLayout, found: MeshLayout, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What `view` makes of a rank's part is the rank's part of what it makes of the whole."""
    want = view(counted(layout.shape))
    assert found.shape == want.shape
    assert found.ranks == layout.ranks and found.grid == layout.grid
    for rank in MESH.ranks:
        mine = view(counted_part(layout, rank))
        assert torch.equal(mine, part(want, found, rank)), (layout, found, rank)


def test_a_reshaped_tensor_has_every_element_where_it_was():
    for shapes in (TWELVE, EMPTY, ONES):
        for layout, new in ((layout, new) for shape in shapes for layout in cut_layouts(shape) for new in shapes):
            found = reshaped(layout, new)
            if found is None:
                continue
            assert found.shape == new
            assert found.sharding_axes == layout.sharding_axes
            for rank in MESH.ranks:
                mine = counted_part(layout, rank).reshape(found.local_shape(rank))
                assert torch.equal(mine, counted_part(found, rank)), (layout, new)


def one_stretch_each(layout: MeshLayout, new: tuple[int, ...]) -> bool:
    """Whether along one new dim every rank holds one stretch, and all of the other dims; by looking at each element."""
    held = [set(counted_part(layout, rank).flatten().tolist()) for rank in MESH.ranks]
    for dim in range(len(new)):
        index = torch.arange(new[dim]).view(-1, *(1,) * (len(new) - dim - 1)).expand(new)
        for mine in held:
            touched = sorted({int(i) for i in index.flatten()[sorted(mine)]})
            stretch = touched == list(range(touched[0], touched[-1] + 1)) if touched else True
            if not stretch or len(mine) * new[dim] != len(touched) * math.prod(new):
                break
        else:
            return True
    return False


def test_elements_move_only_where_they_have_to():
    for shape, new in itertools.product(TWELVE, TWELVE):
        for layout in cut_once(shape):
            (dim,) = layout.cut_dims
            cut = layout.dims[dim]
            whole = any(layout.numel(rank) == math.prod(shape) for rank in MESH.ranks)
            if shape[dim] > 1 and not isinstance(cut.pieces, Blocked) and not whole:
                assert (reshaped(layout, new) is not None) == one_stretch_each(layout, new), (shape, new, layout)


def test_each_cut_dim_is_reshaped_by_itself():
    for shape, new in itertools.product(TWELVE, TWELVE):
        for layout in cut_twice(shape):
            if any(shape[dim] == 1 for dim in layout.cut_dims):
                continue
            alone = [
                reshaped(cut_layout(shape, *(cut if d == dim else None for d, cut in enumerate(layout.dims))), new)
                for dim in layout.cut_dims
            ]
            found = reshaped(layout, new)
            if None in alone:
                assert found is None
            else:
                each = zip(*(x.dims for x in alone), strict=True)
                assert found.dims == tuple(next(filter(None, cuts), None) for cuts in each)


LAYOUTS = [layout for shape in ((5, 4), (2, 3, 4), (1, 6)) for layout in cut_layouts(shape)]


def test_dims_in_another_order():
    for layout in LAYOUTS:
        for order in itertools.permutations(range(len(layout.shape))):
            held_alike(layout, permuted(layout, order), lambda x, order=order: x.permute(order))


def test_an_expanded_dim_is_a_copy_of_a_whole_one():
    for layout, front in itertools.product(LAYOUTS, ((), (3, 2))):
        shape = layout.shape
        for grown in itertools.product(*((n, 4) if n == 1 else (n,) for n in shape)):
            found = expanded(layout, (*front, *grown))
            if any(cut is not None and n != m for n, m, cut in zip(shape, grown, layout.dims, strict=True)):
                assert found is None
                continue
            sizes = [-1 if n == m else m for n, m in zip(shape, grown, strict=True)]
            held_alike(layout, found, lambda x, front=front, sizes=sizes: x.expand(*front, *sizes))


def test_a_whole_dim_is_repeated():
    for layout, front in itertools.product(LAYOUTS, ((), (3, 2))):
        shape = layout.shape
        for times in itertools.product((1, 2), repeat=len(shape)):
            found = repeated(layout, (*front, *times))
            if any(n > 1 and cut is not None for n, cut in zip(times, layout.dims, strict=True)):
                assert found is None
                continue
            held_alike(layout, found, lambda x, times=(*front, *times): x.repeat(times))


# -- indices -----------------------------------------------------------------------------------------------------------

INDICES = {
    (7,): [2, -1, slice(None), slice(1, 6), slice(0, 7, 3), slice(5, 2), slice(-3, None), (None, 3), (..., None)],
    (5, 6): [
        *itertools.product((0, -2, slice(None), slice(1, 4), slice(1, None, 2), slice(9, 2)), repeat=2),
        (None, 3, None, slice(2, 6, 2)),
        (..., 5),
        (slice(2, 5), None, ...),
        (),
    ],
    (2, 4, 3): [1, (0, 2), (slice(None), -1, slice(1, 3)), (..., 0, None), (1, ..., 2), (1, 2, 0), slice(1, 2)],
}


def test_an_index_takes_what_it_takes_of_the_whole():
    every = (pair for shape, some in INDICES.items() for pair in itertools.product(some, cut_layouts(shape)))
    for index, layout in itertools.islice(every, 0, None, 3):
        shape = layout.shape
        full = counted(shape) + 1
        items = normalize(index, shape)
        want = full[index]
        outside = () if layout.is_replicated else (OUTSIDE,)  # which has none of the first dim then
        found = {rank: indexing(layout, items, rank) for rank in (*MESH.ranks, *outside)}
        if None in found.values():
            assert set(found.values()) == {None}
            assert any(isinstance(cut.pieces, Blocked) for cut in layout.dims if cut is not None)
            continue
        mine = {}
        for rank, each in found.items():
            local = part(full, layout, rank)[each.local]
            mine[rank] = local.sum(each.to_sum) if each.to_sum else local
            assert (each.layout, each.axes) == (found[0].layout, found[0].axes)
        assert not any(mine[rank].any() for rank in outside)
        assert each.layout.shape == want.shape
        for rank in MESH.ranks:
            total = sum(mine[other] for other in MESH.ranks_along(rank, each.axes))
            assert torch.equal(total, part(want, each.layout, rank)), (index, layout, rank)


def test_only_a_slice_across_blocks_needs_another_way():
    pieces = Blocked((chunked(4, 2), chunked(4, 2)))
    layout = cut_layout((8, 5), DimCut((0,), pieces), DimCut((1,), chunked(5, 3)))
    for index in (slice(None), 3, (slice(None), slice(1, 3)), (-1, 2), (None, slice(0, 8), 1)):
        assert indexing(layout, normalize(index, (8, 5)), 0) is not None
    for index in (slice(1, 8), slice(0, 8, 2), (slice(0, 7), 2)):
        assert indexing(layout, normalize(index, (8, 5)), 0) is None


def test_indices_are_read_as_torch_reads_them():
    full = counted((4, 5, 6))
    every = [0, 3, -1, -4, slice(None), slice(1, 9), slice(-2, None, 2), slice(3, 1), None, ...]
    for index in itertools.chain(((i,) for i in every), itertools.product(every, repeat=2), [(1, ..., -1, None, 2)]):
        items = normalize(index, full.shape)
        if sum(i is ... for i in index) > 1:
            assert items is None
            continue
        taken = tuple(slice(*item) if isinstance(item, tuple) else item for item in items)
        assert torch.equal(full[taken], full[index]), index
        assert sum(item is not None for item in items) == 3
        assert all(item >= 0 for item in items if isinstance(item, int))
        assert all(0 <= start <= stop <= 6 and step >= 1 for start, stop, step in filter(_is_slice, items))


def _is_slice(item: object) -> bool:
    return isinstance(item, tuple)


@pytest.mark.parametrize("index", [4, (0, -6), (0, 0, 6), (..., -7), (1, 1, 1, 1), (0, None, 0, 0, 0)], ids=str)
def test_an_index_that_torch_refuses_is_refused_alike(index):
    with pytest.raises(IndexError):
        counted((4, 5, 6))[index]
    with pytest.raises(IndexError):
        normalize(index, (4, 5, 6))


def test_a_slice_goes_forward():
    for index in (slice(None, None, -1), (0, slice(3, 0, -2))):
        with pytest.raises(ValueError, match="step must be greater than zero"):
            normalize(index, (4, 5))
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        normalize(slice(None, None, 0), (4,))


@pytest.mark.parametrize(
    "index", [True, [0, 1], torch.tensor(1), (0, False), (slice(None), torch.tensor([0]))], ids=str
)
def test_tensors_lists_and_bools_are_no_basic_indices(index):
    assert normalize(index, (4, 5)) is None


# -- heads -------------------------------------------------------------------------------------------------------------


@cache
def held_heads(layout: MeshLayout, rank: int) -> tuple[set[tuple[int, int]], tuple[int, ...]]:
    """The batches and heads of which a rank has anything, and the sizes of the two dims behind them."""
    heads = counted(layout.shape[:-2])[..., None, None].expand(layout.shape)
    mine = part(heads, layout, rank)
    return {divmod(int(i), layout.shape[-3]) for i in mine.flatten()}, tuple(mine.shape[-2:])


def cut_heads(shape: tuple[int, ...]) -> list[MeshLayout]:
    """Layouts of queries, keys or values: every dim cut in turn, and batches and heads together."""
    kinds: list[dict[int, DimCut]] = [{}]
    for dim, axes in itertools.product(range(len(shape)), ((0,), (1,), (1, 0), (0, 1))):
        kinds.append({dim: DimCut(axes, chunked(shape[dim], math.prod(MESH.sizes[axis] for axis in axes)))})
    heads = len(shape) - 3
    for dim in range(heads):
        kinds.append({dim: DimCut((0,), chunked(shape[dim], 2)), heads: DimCut((1,), chunked(shape[heads], 3))})
    return [cut_layout(shape, *(kind.get(dim) for dim in range(len(shape)))) for kind in kinds]


@pytest.mark.parametrize("batch", [(), (2,), (3, 2)], ids=str)
def test_grouped_heads_fit_where_every_rank_has_the_heads_of_its_keys(batch):
    groups = 2
    values = cut_heads((*batch, 4, 5, 2))
    for query, (k, key) in itertools.product(cut_heads((*batch, 8, 3, 2)), enumerate(values)):
        fits = True
        for rank in MESH.ranks:
            (mine, sizes), (other, other_sizes) = held_heads(query, rank), held_heads(key, rank)
            fits &= {(b, h // groups) for b, h in mine} == other and len(mine) == groups * len(other)
            fits &= (sizes, other_sizes) == ((3, 2), (5, 2))
        assert heads_fit(query, key, key, groups) == fits, (query, key)
        assert not heads_fit(query, key, values[k - 1], groups)


def test_grouped_heads_do_not_fit_partials_nor_another_grid():
    query, key = cut_layout((2, 4, 3, 2), *(None,) * 4), cut_layout((2, 2, 5, 2), *(None,) * 4)
    assert heads_fit(query, key, key, 2)
    for place, change in itertools.product(
        range(3), ({"partial": ((0, "sum"),)}, {"grid": (3, 2)}, {"ranks": range(6)})
    ):
        each = [query, key, key]
        each[place] = attrs.evolve(each[place], **change)
        assert not heads_fit(*each, 2)
