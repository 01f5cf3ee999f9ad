"""Sharded tensors made of what ranks hold: right, or the same error on every rank, and never a rank left waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import device, every_size
from torch.distributed.device_mesh import init_device_mesh

import shardtensor as st


def place(rank: int | None = None) -> str:
    rank = dist.get_rank() if rank is None else rank
    return f"rank:{rank}/{device(rank)}"


def shard(offsets: list[int], sizes: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> st.Shard:
    """A shard of this rank whose elements are all its rank."""
    values = torch.full(sizes, dist.get_rank(), dtype=dtype, device=device(), **options)
    return st.Shard(values, st.ShardMetadata(offsets, sizes, place()))


def error_of(make: Any) -> tuple[str, str]:
    """The type and the text of what `make` raises; this rank's group still works afterwards."""
    with pytest.raises(Exception) as caught:
        make()
    total = torch.ones(1, device=device())
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return type(caught.value).__name__, str(caught.value)


def only(found: list[tuple[str, str]]) -> tuple[str, str]:
    """The one error that all ranks raised."""
    assert len(set(found)) == 1, "\n\n".join(text for _, text in found)
    return found[0]


# -- shards ----------------------------------------------------------------------------------------------------------


def rows() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = shard([2 * rank, 0], [2, 3], requires_grad=True)
    x = st.init_from_local_shards([mine], 2 * size, 3)
    assert x.local_tensor() is mine.tensor
    assert x.requires_grad
    assert x.is_leaf
    assert x.shape == (2 * size, 3)
    expected = torch.arange(size, device=device(), dtype=torch.float32).repeat_interleave(2)[:, None].expand(-1, 3)
    assert torch.equal(x.full_tensor(), expected)
    x.full_tensor().sum().backward()
    assert torch.equal(mine.tensor.grad, torch.ones(2, 3, device=device()))
    assert [str(m.placement) for m in x.metadata().shards_metadata] == [place(r) for r in range(size)]
    assert x.metadata().size == (2 * size, 3)
    for spelled in ([2 * size, 3], torch.Size([2 * size, 3])):
        assert st.init_from_local_shards([mine], spelled).shape == x.shape


@every_size
def test_a_single_shard_becomes_the_leaf(world, size):
    world(rows, size)


def scattered() -> None:
    """Rank 0 holds both ends, rank 1 the middle, rank 2 nothing: given in no order."""
    rank = dist.get_rank()
    pieces = {0: [([4], [2]), ([0], [1])], 1: [([1], [3])], 2: []}[rank]
    shards = [st.Shard(torch.arange(o[0], o[0] + n[0], dtype=torch.float32, device=device()).requires_grad_(),
                       st.ShardMetadata(o, n, place())) for o, n in pieces]  # fmt: skip
    x = st.init_from_local_shards(shards, 6)
    assert torch.equal(x.full_tensor(), torch.arange(6.0, device=device()))
    assert x.requires_grad
    assert x._local.is_leaf
    assert x._local.shape == ({0: 3, 1: 3, 2: 0}[rank],)
    assert x._local.device == torch.zeros(0, device=device()).device
    assert [s.metadata.shard_offsets for s in x.local_shards()] == [[[0], [4]], [[1]], []][rank]
    (x.full_tensor() * torch.arange(6, device=device())).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.arange(6.0, device=device()))
    again = st.distribute(torch.arange(6.0, device=device()), x.sharding_spec())
    assert again._layout == x._layout
    assert torch.equal(again._local, x._local)


def test_several_shards_of_a_rank_are_packed_and_ranks_may_have_none(world):
    world(scattered, 3)


def in_graph() -> None:
    rank = dist.get_rank()
    source = torch.ones(4, device=device(), requires_grad=True)
    parts = [source[:1] * 2, source[1:] * 3]
    offsets = [rank * 4, rank * 4 + 1]
    shards = [st.Shard(t, st.ShardMetadata([o], [len(t)], place())) for t, o in zip(parts, offsets, strict=True)]
    x = st.init_from_local_shards(shards, 8)
    x.full_tensor().sum().backward()
    assert source.grad.tolist() == [2, 3, 3, 3]


def test_results_of_a_graph_stay_in_it(world):
    world(in_graph, 2)


def reused() -> list[list[int]]:
    """Case B06: one metadata object, used and changed again."""
    rank = dist.get_rank()
    metadata = st.ShardMetadata([0, 0], [1, 4], place())
    metadata.shard_offsets[0] = rank
    x = st.init_from_local_shards([st.Shard(torch.ones(1, 4, device=device()), metadata)], 2, 4)
    metadata.shard_offsets[:] = [7, 7]
    metadata.placement = None
    x.metadata().shards_metadata[0].shard_offsets[0] = 9
    assert x.local_shards()[0].metadata.shard_offsets == [rank, 0]
    return [shard.shard_offsets for shard in x.metadata().shards_metadata]


def overlapping() -> tuple[str, str]:
    return error_of(lambda: st.init_from_local_shards([shard([0, 0], [1, 4])], 2, 4))


def test_b06_metadata_is_copied_and_the_overlap_message_is_true(world):
    assert world(reused, 2) == [[[0, 0], [1, 0]]] * 2
    kind, text = only(world(overlapping, 2))
    assert kind == "LayoutError"
    assert text == (
        "Shards [0:1, 0:4] of rank 0 and [0:1, 0:4] of rank 1 overlap\n"
        "  both  hold [0:1, 0:4]\n"
        "  and   no shard holds element (1, 0)\n"
        "  fix   give each element to one shard"
    )


def along(dim: int, *, given: tuple[int | None, ...]) -> tuple[tuple[int, ...], list[int]]:
    """The shape, and where the shards start along a dim, of pieces that all say they start at 0."""
    sizes = [2, 2]
    sizes[dim] = [3, 3, 3, 1][dist.get_rank()]
    mine = shard([0, 0], sizes)
    x = st.init_from_local_shards([mine], *given)
    assert mine.metadata.shard_offsets == [0, 0]
    return tuple(x.shape), [piece.shard_offsets[dim] for piece in x.metadata().shards_metadata]


def without_a_size() -> tuple[str, str]:
    return error_of(lambda: along(0, given=()))


def test_b03_the_global_size_is_true_on_every_rank(world):
    for given in ((None, None), (None, 2)):
        assert world(along, 4, dim=0, given=given) == [((10, 2), [0, 3, 6, 9])] * 4
    assert world(along, 4, dim=1, given=(2, None)) == [((2, 10), [0, 3, 6, 9])] * 4
    kind, text = only(world(without_a_size, 4))
    assert kind == "LayoutError"
    fix = "  fix  pass it after the shards, or None for the dim along which they add up"
    assert text == f"the global size is not given\n{fix}"


WIDTHS = [2, 3, 4, 5]


def columns(shape: tuple[int, int], offsets: list[int]) -> list[float]:
    rank = dist.get_rank()
    width = WIDTHS[rank]
    values = torch.arange(2 * width, device=device(), dtype=torch.float32).view(2, width) + 100 * rank
    piece = st.Shard(values, st.ShardMetadata([0, offsets[rank]], [2, width], place()))
    x = st.init_from_local_shards([piece], shape)
    assert [s.shard_offsets[1] for s in x.metadata().shards_metadata] == offsets
    out = torch.empty(shape, device=device()) if rank == 0 else None
    x.gather(0, out)
    if out is not None:
        assert torch.equal(out, x.full_tensor())
    else:
        x.full_tensor()
    return x.full_tensor()[0].tolist()


def bad_columns(shape: tuple[int, int], offsets: list[int]) -> tuple[str, str]:
    return error_of(lambda: columns(shape, offsets))


def test_b05_uneven_column_shards(world):
    row = [0, 1, 100, 101, 102, 200, 201, 202, 203, 300, 301, 302, 303, 304]
    assert world(columns, 4, shape=(2, 14), offsets=[0, 2, 5, 9]) == [row] * 4
    kind, text = only(world(bad_columns, 4, shape=(2, 15), offsets=[0, 2, 5, 9]))
    assert kind == "LayoutError"
    assert text == (
        "the shards do not cover the entire tensor: no shard holds element (0, 14)\n"
        "  shape   (2, 15)\n"
        "  volume  28 of the shards does not match tensor volume 30\n"
        "  fix     add a shard that starts at (0, 14), or give the true global size"
    )
    kind, text = only(world(bad_columns, 4, shape=(2, 14), offsets=[0, 2, 4, 9]))
    assert kind == "LayoutError"
    assert text == (
        "Shards [0:2, 2:5] of rank 1 and [0:2, 4:8] of rank 2 overlap\n"
        "  both  hold [0:2, 4:5]\n"
        "  and   no shard holds element (0, 8)\n"
        "  fix   give each element to one shard"
    )


# -- faults ----------------------------------------------------------------------------------------------------------


def fault(name: str) -> tuple[str, str]:
    rank = dist.get_rank()
    odd = rank == 1
    good = shard([2 * rank, 0], [2, 3])
    size: tuple[Any, ...] = (6, 3)
    shards: Any = [good]
    if name == "no shards":
        shards = []
    elif name == "sparse":
        shards = [st.Shard(torch.zeros(2, 3).to_sparse(), good.metadata)] if odd else [good]
    elif name == "transposed":
        shards = [st.Shard(torch.zeros(3, 2, device=device()).t(), good.metadata)] if odd else [good]
    elif name == "another rank":
        shards = [st.Shard(good.tensor, st.ShardMetadata([2, 0], [2, 3], place(0)))] if odd else [good]
    elif name == "no placement":
        shards = [st.Shard(good.tensor, st.ShardMetadata([2, 0], [2, 3]))] if odd else [good]
    elif name == "grew":
        good.tensor = torch.zeros(3, 3, device=device()) if odd else good.tensor
    elif name == "dtype":
        shards = [shard([2 * rank, 0], [2, 3], torch.float64 if odd else torch.float32)]
    elif name == "local dtypes":
        shards = [shard([2, 0], [1, 3], torch.float64), shard([3, 0], [1, 3])] if odd else [good]
    elif name == "requires_grad":
        shards = [shard([2 * rank, 0], [2, 3], requires_grad=odd)]
    elif name == "size":
        size = (6, 4) if odd else (6, 3)
    elif name == "no size on one":
        size = () if odd else (6, 3)
    elif name == "size of words":
        size = ("six", 3) if odd else (6, 3)
    elif name == "negative size":
        size = (-6, 3) if odd else (6, 3)
    elif name == "too small":
        size = (5, 3)
    elif name == "too few dims":
        size = (6,)
    elif name == "too few dims of None":
        size = (None,)
    elif name == "not shards":
        shards = [torch.ones(2, 3)] if odd else [good]
    elif name == "not a list":
        shards = None if odd else [good]
    return error_of(lambda: st.init_from_local_shards(shards, *size))


FROM_RANK_1 = "init_from_local_shards: rank 1 has a fault, so nothing was done on any rank\n  rank 1  "
MISMATCH = "  fix  pass the same on every rank; nothing was made on any rank"
FAULTS = {
    "no shards": (
        "LayoutError",
        "ShardedTensor have no local shards on all ranks!\n  fix  pass at least one shard",
    ),
    "sparse": (
        "LayoutError",
        FROM_RANK_1 + "Only torch.strided layout is currently supported, but found torch.sparse_coo on rank:1!\n"
        "            fix  call to_dense() first",
    ),
    "transposed": (
        "LayoutError",
        FROM_RANK_1 + "Only torch.contiguous_format memory_format is currently supported!\n"
        "            fix  call contiguous() first",
    ),
    "another rank": (
        "LayoutError",
        FROM_RANK_1 + "Local shard metadata's rank does not match with the rank in its process group!\n"
        "            this rank  1\n"
        "            placement  rank:0/{device0}\n"
        "            fix        name this rank in the placement of its shards",
    ),
    "no placement": (
        "LayoutError",
        FROM_RANK_1 + "Local shard metadata's rank does not match with the rank in its process group!\n"
        "            this rank  1\n"
        "            placement  None\n"
        "            fix        name this rank in the placement of its shards",
    ),
    "grew": (
        "LayoutError",
        FROM_RANK_1 + "Shard tensor size does not match with metadata.shard_lengths!\n"
        "            tensor    3 x 3\n"
        "            metadata  2 x 3\n"
        "            fix       give the metadata the sizes of the tensor",
    ),
    "local dtypes": (
        "LayoutError",
        FROM_RANK_1 + "Local shards' tensor dtype property need to be the same on rank:1!\n"
        "            found  torch.float32 and torch.float64\n"
        "            fix    convert them to one",
    ),
    "dtype": (
        "LayoutError",
        "ShardedTensor dtype property does not match from different ranks! "
        "Found dtype=torch.float32 on rank:0, and dtype=torch.float64 on rank:1.\n" + MISMATCH,
    ),
    "requires_grad": (
        "LayoutError",
        "ShardedTensor requires_grad property does not match from different ranks! "
        "Found requires_grad=False on rank:0, and requires_grad=True on rank:1.\n" + MISMATCH,
    ),
    "size": (
        "LayoutError",
        "ShardedTensor global_size property does not match from different ranks! "
        "Found global_size=(6, 3) on rank:0, and global_size=(6, 4) on rank:1.\n" + MISMATCH,
    ),
    "no size on one": (
        "LayoutError",
        FROM_RANK_1 + "the global size is not given\n"
        "            fix  pass it after the shards, or None for the dim along which they add up",
    ),
    "size of words": (
        "LayoutError",
        FROM_RANK_1 + "TypeError: 'str' object cannot be interpreted as an integer",
    ),
    "negative size": (
        "LayoutError",
        FROM_RANK_1 + "a tensor cannot have the size -6 x 3\n            fix  give the number of elements of each dim",
    ),
    "too small": (
        "LayoutError",
        "Shard offset 4 and length 2 exceeds tensor dim: 5\n"
        "  shape  (5, 3)\n"
        "  shard  [4:6, 0:3] of rank 2\n"
        "  fix    give the true global size, or a shard that ends inside it",
    ),
    "too few dims": (
        "LayoutError",
        "Rank of tensor is 1, but shards rank is 2\n"
        "  shape  (6)\n"
        "  shard  [0:2, 0:3] of rank 0\n"
        "  fix    give every shard one offset and one size for each dim",
    ),
    "too few dims of None": (
        "LayoutError",
        "Rank of tensor is 1, but shards rank is 2\n"
        "  global size    None\n"
        "  shard of size  2 x 3\n"
        "  fix            give one number or None for each dim of the shards",
    ),
    "not shards": (
        "LayoutError",
        FROM_RANK_1 + "AttributeError: 'Tensor' object has no attribute 'tensor'",
    ),
    "not a list": (
        "LayoutError",
        FROM_RANK_1 + "TypeError: 'NoneType' object is not iterable",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_error_on_every_rank(world, name):
    kind, text = FAULTS[name]
    assert only(world(fault, 3, name=name)) == (kind, text.replace("{device0}", str(device(0))))


# -- one tensor a rank -----------------------------------------------------------------------------------------------


def parts(text: str, shape: tuple[int, ...], given: tuple[Any, ...]) -> None:
    """What distribute gives each rank, given back, is the tensor."""
    full = torch.arange(torch.Size(shape).numel(), device=device(), dtype=torch.float32).view(shape)
    source = st.distribute(full, text)
    local = source._local.clone().requires_grad_()
    x = st.init_from_local_tensor(local, text, *given)
    assert x._local is local
    assert x.shape == shape
    assert x._layout == source._layout
    assert torch.equal(x.full_tensor(), full)


@every_size
@pytest.mark.parametrize("is_given", [True, False])
def test_local_tensors_under_a_spec(world, size, is_given):
    for text, shape in (
        ("[tp balanced, -]", (7, 3)),
        ("[-, tp pad(4)]", (2, 5)),
        ("replicate", (3, 2)),
        (f'chunk(dim=0, placements=["rank:0-{size - 1}/{device().type}"])', (5, 2)),
    ):
        world(parts, size, text=text, shape=shape, given=(shape,) if is_given else ())
    world(parts, size, text="flat(tp)", shape=(5, 3), given=(5, 3))


def on_mesh() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(24.0, device=device()).view(6, 4)
    for text in ("[dp, tp]", "[tp, -]", "[-, dp]", "[dp*tp balanced, -]"):
        source = st.distribute(full, text, process_group=mesh)
        for size in ((), (None, 4), (6, 4)):
            x = st.init_from_local_tensor(source._local.clone(), text, *size, process_group=mesh)
            assert torch.equal(x.full_tensor(), full)


def test_the_size_follows_along_the_axes_of_a_mesh(world):
    world(on_mesh, 4)


def partials() -> None:
    mine = torch.full((2, 3), dist.get_rank() + 1.0, device=device())
    x = st.init_from_local_tensor(mine, "replicate partial(tp)", 2, 3)
    assert torch.equal(x.full_tensor(), torch.full((2, 3), 6.0, device=device()))
    assert st.init_from_local_tensor(mine, "replicate partial(tp)").shape == (2, 3)


def test_partials(world):
    world(partials, 3)


def tensor_fault(name: str) -> tuple[str, str]:
    odd = dist.get_rank() == 1
    local = torch.ones(2, 3, device=device())
    spec: Any = "[tp, -]"
    size: tuple[Any, ...] = (6, 3)
    if name == "shape":
        local = torch.ones(1, 3, device=device()) if odd else local
    elif name == "no size":
        local, size = (torch.ones(1, 3, device=device()) if odd else local), ()
    elif name == "transposed":
        local = torch.ones(3, 2, device=device()).t() if odd else local
    elif name == "spec":
        spec = "[-, tp]" if odd else spec
        local = torch.ones(6, 1, device=device()) if odd else local
    elif name == "text":
        spec = "[tp, -" if odd else spec
    elif name == "dtype":
        local = local.double() if odd else local
    elif name == "not a tensor":
        local = [1.0] if odd else local
    elif name == "hole":
        kind = device().type
        boxes = [st.ShardMetadata([2 * r, 0], [2, 3], f"rank:{r}/{kind}") for r in range(3)]
        spec, size = st.EnumerableShardingSpec(boxes), (7, 3)
    return error_of(lambda: st.init_from_local_tensor(local, spec, *size))


FROM_RANK_1_TENSOR = "init_from_local_tensor: rank 1 has a fault, so nothing was done on any rank\n  rank 1  "
TENSOR_FAULTS = {
    "shape": (
        "LayoutError",
        FROM_RANK_1_TENSOR + "the local tensor of rank 1 is 1 x 3, the spec gives it 2 x 3\n"
        "            spec         [tp, -]\n"
        "            global size  6 x 3\n"
        "            fix          pass the true global size, or a spec with sizes(...) that says how the ranks differ",
    ),
    "no size": (
        "LayoutError",
        "the global size does not follow from the local shapes\n"
        "  spec    [tp, -]\n"
        "  rank 0  2 x 3\n"
        "  rank 1  1 x 3\n"
        "  rank 2  2 x 3\n"
        "  fix     pass the global size after the spec; or sizes(...) in the spec where the parts are uneven",
    ),
    "transposed": (
        "LayoutError",
        FROM_RANK_1_TENSOR + "local_tensor is not a contiguous Tensor.\n            fix  call contiguous() first",
    ),
    "spec": (
        "DisagreementError",
        "init_from_local_tensor: sharding_spec of rank 0 does not match with sharding_spec of rank 1; "
        "nothing was moved\n"
        "  sharding_spec  ranks 0, 2  [tp, -]\n"
        "                 rank 1      [-, tp]\n"
        "  fix            give every rank of the group the same sharding_spec",
    ),
    "dtype": (
        "DisagreementError",
        "init_from_local_tensor: dtype of rank 0 does not match with dtype of rank 1; nothing was moved\n"
        "  dtype  ranks 0, 2  torch.float32\n"
        "         rank 1      torch.float64\n"
        "  fix    give every rank of the group the same dtype",
    ),
    "not a tensor": (
        "LayoutError",
        FROM_RANK_1_TENSOR + "local_tensor is a list, not a plain tensor\n"
        "            fix  pass this rank's part as a tensor",
    ),
    "hole": (
        "LayoutError",
        "the shards do not cover the entire tensor: no shard holds element (6, 0)\n"
        "  shape   (7, 3)\n"
        "  volume  18 of the shards does not match tensor volume 21\n"
        "  fix     add a shard that starts at (6, 0), or give the true global size",
    ),
}


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_a_fault_of_a_local_tensor_is_one_error_on_every_rank(world, name):
    assert only(world(tensor_fault, 3, name=name)) == TENSOR_FAULTS[name]


def test_text_that_one_rank_cannot_read_is_an_error_on_all(world):
    kind, text = only(world(tensor_fault, 3, name="text"))
    assert kind == "SpecError"
    assert text.startswith(FROM_RANK_1_TENSOR)
    assert "[tp, -" in text
