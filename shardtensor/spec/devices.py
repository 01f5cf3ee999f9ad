"""Specs in devices: torch's own classes of specs, written as their Python calls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple, TypeVar

import attrs

from shardtensor.errors import SpecError
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parts import optional_sizes, quoted, tuple_text, whole_numbers
from shardtensor.spec.placement import Placement, Placements, parse_placement

Extent = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a box."""


def find_overlap(boxes: Sequence[Extent]) -> tuple[int, int] | None:
    """Return the indices of two boxes that share an element, or None. An empty box overlaps nothing.

    Grids, and other boxes made by straight cuts, cost n log n: boxes are split along one dim after another.

    Example:
        >>> find_overlap([((0, 0), (5, 4)), ((5, 0), (5, 4)), ((4, 1), (2, 2))])
        (0, 2)
    """
    live = [i for i, (_, sizes) in enumerate(boxes) if all(sizes)]
    parts = [live]
    while parts:
        part = parts.pop()
        if len(part) < 2:
            continue
        for dim in range(len(boxes[part[0]][0])):
            split = _split(boxes, part, dim)
            if len(split) > 1:
                parts += split
                break
        else:
            pair = _sweep(boxes, part)
            if pair is not None:
                return pair
    return None


def _split(boxes: Sequence[Extent], part: list[int], dim: int) -> list[list[int]]:
    """Split boxes wherever a straight cut across `dim` goes through none of them."""
    groups: list[list[int]] = []
    end = -1
    for i in sorted(part, key=lambda i: boxes[i][0][dim]):
        offsets, sizes = boxes[i]
        if offsets[dim] >= end:
            groups.append([])
        groups[-1].append(i)
        end = max(end, offsets[dim] + sizes[dim])
    return groups


def _sweep(boxes: Sequence[Extent], part: list[int]) -> tuple[int, int] | None:
    """Compare each box with those that begin before it ends."""
    ndim = len(boxes[part[0]][0])
    dim = max(range(ndim), key=lambda d: len({boxes[i][0][d] for i in part}), default=None)
    if dim is None:  # boxes without dims all hold the same element
        return min(part), max(part)
    order = sorted(part, key=lambda i: boxes[i][0][dim])
    for at, i in enumerate(order):
        end = boxes[i][0][dim] + boxes[i][1][dim]
        for later in range(at + 1, len(order)):
            j = order[later]
            if boxes[j][0][dim] >= end:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(*boxes[i], *boxes[j], strict=True)):
                return min(i, j), max(i, j)
    return None


# -- specs of devices --------------------------------------------------------------------------------------------------

T = TypeVar("T", bound=type)


def with_dataclass_fields(*names: str) -> Callable[[T], T]:
    """Decorate an attrs class so that `dataclasses` finds the fields `names`, by default all attributes.

    Example:
        >>> from shardtensor.spec.devices import ChunkShardingSpec
        >>> str(dataclasses.replace(ChunkShardingSpec(0, "rank:0-1/cpu"), dim=1))
        'chunk(dim=1, placements=["rank:0-1/cpu"])'
    """

    def decorate(kind: T) -> T:
        found = names or [attribute.name for attribute in attrs.fields(kind)]
        like = dataclasses.make_dataclass(kind.__name__, found, init=False, repr=False, eq=False)
        kind.__dataclass_fields__ = like.__dataclass_fields__  # type: ignore[attr-defined]
        kind.__dataclass_params__ = like.__dataclass_params__  # type: ignore[attr-defined]
        return kind

    return decorate


class NamedDimError(SpecError, NotImplementedError):
    """A spec in devices names a dim instead of its number; also a NotImplementedError, as in torch."""


class PlacementSpec:
    """The placement of an entity; the base of `DevicePlacementSpec` and of users' classes, as in torch."""

    __slots__ = ()


@with_dataclass_fields()
@attrs.frozen(cache_hash=True)
class DevicePlacementSpec(PlacementSpec):
    """An entity on one device.

    Example:
        >>> str(DevicePlacementSpec("rank:0/cuda:0"))
        'rank:0/cuda:0'
    """

    device: Placement = attrs.field(converter=parse_placement)

    def __str__(self) -> str:
        return str(self.device)


def _extent(values: Any, rule: str) -> list[int]:
    try:
        numbers = [index(value) for value in values]
    except TypeError:
        raise SpecError(f"{rule.split()[0]} needs to be whole numbers, found {values!r}", code="E102") from None
    if any(number < 0 for number in numbers):
        raise SpecError(f"{rule}, found {numbers}", code="E102")
    return numbers


@with_dataclass_fields()
@attrs.define(eq=False)
class ShardMetadata:
    """A box of a tensor and its placement. Mutable, as in torch: a spec copies it.

    Args:
        shard_offsets: the start of the box, one number for each dim.
        shard_sizes: the size of the box, one number for each dim.
        placement: text, or anything `parse_placement` takes, or None.

    Raises:
        SpecError: a number is not whole or is negative, or there is not one offset for each size.

    Example:
        >>> ShardMetadata((0, 5), [2, 5], "rank:0")
        ShardMetadata(shard_offsets=[0, 5], shard_sizes=[2, 5], placement=rank:0/cpu)
    """

    shard_offsets: list[int] = attrs.field(converter=lambda values: _extent(values, "shard_offsets should be >=0"))
    shard_sizes: list[int] = attrs.field(converter=lambda values: _extent(values, "shard_sizes should be >= 0"))
    placement: Placement | None = attrs.field(
        default=None, converter=lambda place: None if place is None else parse_placement(place)
    )

    def __attrs_post_init__(self) -> None:
        if len(self.shard_offsets) != len(self.shard_sizes):
            raise SpecError(
                f"shard_offsets and shard_sizes should have the same number of elements, "
                f"found {len(self.shard_offsets)} and {len(self.shard_sizes)} respectively",
                {"offsets": tuple_text(self.shard_offsets), "sizes": tuple_text(self.shard_sizes)},
                "give one offset and one size for each dim",
                code="E202",
            )

    def _key(self) -> tuple[Any, ...]:
        return tuple(self.shard_offsets), tuple(self.shard_sizes), self.placement

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, ShardMetadata) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


class PlacedBox(NamedTuple):
    """A frozen shard: offsets, sizes and placement."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    placement: Placement | None

    def __str__(self) -> str:
        slices = ", ".join(f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{slices}]" if self.placement is None else f"[{slices}] @ {quoted(str(self.placement))}"

    def order(self) -> tuple[Any, ...]:
        """Return a sort key: by offset, then by size and rank."""
        rank = -1 if self.placement is None or self.placement.rank_ is None else self.placement.rank_
        return self.offsets, self.sizes, rank, str(self.placement)


def _places(value: Any) -> Placements:
    try:
        places = Placements(value)
    except TypeError:
        raise SpecError(f"placements needs to be a list of placements, found {value!r}", code="E501") from None
    if not places:
        raise SpecError("the list of placements is empty", fix='name a place, as in ["rank:0/cuda:0"]', code="E501")
    return places


def _sharding_dim(dim: Any) -> int:
    if isinstance(dim, str):
        raise NamedDimError(
            "ChunkShardingSpec does not support named dimension yet!",
            {"dim": repr(dim)},
            f'Spec({dim}="tp") cuts a dim by name, over a mesh axis' if dim.isidentifier() else "give its number",
        )
    try:
        return index(dim)
    except TypeError:
        raise SpecError(f"Sharding dim needs to be an integer, found: {dim!r}", code="E102") from None


def _assign(spec: Any, attribute: attrs.Attribute, value: Any) -> Any:
    """Convert and check an assigned value as if the spec were made anew."""
    return getattr(attrs.evolve(spec, **{attribute.name: value}), attribute.name)


@with_dataclass_fields()
@attrs.define(unsafe_hash=True, on_setattr=_assign)
class ChunkShardingSpec(ShardingSpec):
    """One dim in one chunk per placement, with the sizes of ``torch.chunk`` (the last ones may be short or empty).

    Its attributes can be assigned, as in torch. Functions copy their spec arguments, so existing tensors do not change.

    Args:
        dim: the dim; negative ones count from the end.
        placements: the holder of each chunk: one text, or a list of texts (ranges too), `Placement` or torch's objects.
        sizes: the size of each chunk, in elements, instead of torch.chunk's.

    Raises:
        SpecError: the dim is not a number, a placement cannot be parsed, or there is not one size for each placement.

    Example:
        >>> str(ChunkShardingSpec(dim=0, placements=["rank:0/cuda:0", "rank:1/cuda:1"]))
        'chunk(dim=0, placements=["rank:0-1/cuda:0-1"])'
    """

    dim: int = attrs.field(converter=_sharding_dim)
    placements: Placements = attrs.field(converter=_places)
    sizes: tuple[int, ...] | None = attrs.field(default=None, converter=optional_sizes)

    def __attrs_post_init__(self) -> None:
        if self.sizes is not None and len(self.sizes) != len(self.placements):
            fault = f"{len(self.sizes)} sizes are given for {len(self.placements)} placements"
            raise SpecError(fault, fix="give one size for each placement", code="E208")

    def __str__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={tuple_text(self.sizes)}"
        return f"chunk(dim={self.dim}, placements={self.placements!r}{sizes})"


@with_dataclass_fields()
@attrs.frozen(cache_hash=True)
class GridShardingSpec(ShardingSpec):
    """Every dim in chunks with the sizes of ``torch.chunk``; the shards go to the placements in row-major order.

    Args:
        splits: the number of chunks of each dim, 1 for a dim that is not sharded.
        placements: the holder of each shard; as many as the product of the splits.

    Example:
        >>> str(GridShardingSpec(splits=(2, 2), placements=["rank:0-3/cuda:0-3"]))
        'grid(splits=(2, 2), placements=["rank:0-3/cuda:0-3"])'
    """

    splits: tuple[int, ...] = attrs.field(converter=lambda values: whole_numbers(values, "splits", 1))
    placements: Placements = attrs.field(converter=_places)

    def __attrs_post_init__(self) -> None:
        pieces = math.prod(self.splits)
        if pieces != len(self.placements):
            fault = f"the grid has {pieces} pieces for {len(self.placements)} placements"
            fix = "name one placement for each piece"
            raise SpecError(fault, {"splits": tuple_text(self.splits)}, fix, code="E208")

    def __str__(self) -> str:
        return f"grid(splits={tuple_text(self.splits)}, placements={self.placements!r})"


@with_dataclass_fields("shards")
@attrs.frozen(init=False, repr=False)
class EnumerableShardingSpec(ShardingSpec):
    """A list of all shards: any boxes that do not overlap.

    Args:
        shards: `ShardMetadata`, or objects with its three attributes; copied.

    Attributes:
        boxes: the shards, frozen and sorted by offset; specs with equal boxes are equal.

    Raises:
        SpecError: there are no shards, they have different numbers of dims, or two overlap.

    Example:
        >>> print(EnumerableShardingSpec([ShardMetadata([5], [5], "rank:1"), ShardMetadata([0], [5], "rank:0")]))
        enum([0:5] @ "rank:0/cpu", [5:10] @ "rank:1/cpu")
    """

    boxes: tuple[PlacedBox, ...]
    _given: tuple[PlacedBox, ...] = attrs.field(eq=False)
    _hash: int = attrs.field(eq=False)

    def __init__(self, shards: Sequence[Any]) -> None:
        boxes = tuple(map(_frozen, shards))
        if not boxes:
            raise SpecError(f"Empty shard list provided: {shards}", fix="list every shard", code="E102")
        ranks = [len(box.offsets) for box in boxes]
        if len(set(ranks)) > 1:
            other = next(rank for rank in ranks if rank != ranks[0])
            why = "every shard of a tensor has one offset and one size for each dim of it"
            fault = f"Found inconsistent ranks for shards: {ranks[0]} and {other}"
            raise SpecError(fault, {"why": why}, code="E202")
        if (pair := find_overlap([box[:2] for box in boxes])) is not None:
            first, second = (boxes[i] for i in pair)
            facts, fix = {"why": "every element of a tensor lies in one shard"}, "give each element to one shard"
            raise SpecError(f"Shards {first} and {second} overlap", facts, fix, code="E209")
        ordered = tuple(sorted(boxes, key=PlacedBox.order))
        self.__attrs_init__(ordered, boxes, hash(ordered))

    def __hash__(self) -> int:
        return self._hash

    @property
    def shards(self) -> list[ShardMetadata]:
        """The shards as `ShardMetadata`: new copies, in the order in which they were given."""
        return [ShardMetadata(*box) for box in self._given]

    def __str__(self) -> str:
        return f"enum({', '.join(map(str, self.boxes))})"

    def __repr__(self) -> str:
        return f"EnumerableShardingSpec({self.shards})"

    def __reduce__(self) -> tuple[Any, ...]:
        return EnumerableShardingSpec, (self.shards,)


def _frozen(shard: Any) -> PlacedBox:
    try:
        copy = ShardMetadata(shard.shard_offsets, shard.shard_sizes, shard.placement)
    except AttributeError:
        raise SpecError(f"not a shard: {shard!r}", fix="make it with ShardMetadata(...)", code="E102") from None
    return PlacedBox(tuple(copy.shard_offsets), tuple(copy.shard_sizes), copy.placement)


def infer_sharding_spec(shards_metadata: Sequence[Any]) -> ShardingSpec:
    """Return the chunk spec that gives exactly these shards, or else the spec that lists them.

    The order of the list does not matter; placements are ordered by offset. A single shard is listed: it has no dim.

    Args:
        shards_metadata: `ShardMetadata` of every shard, or objects with its three attributes.

    Example:
        >>> from shardtensor.spec.devices import ShardMetadata
        >>> print(infer_sharding_spec([ShardMetadata([2], [1], "rank:1"), ShardMetadata([0], [2], "rank:0")]))
        chunk(dim=0, placements=["rank:0-1/cpu"])
    """
    listed = EnumerableShardingSpec(shards_metadata)
    boxes = listed.boxes
    cut_dims = {dim for box in boxes for dim, offset in enumerate(box.offsets) if offset}
    if len(cut_dims) != 1 or any(box.placement is None for box in boxes):
        return listed
    (dim,) = cut_dims
    length, across = sum(box.sizes[dim] for box in boxes), boxes[0].sizes
    chunk = -(-length // len(boxes))
    for i, box in enumerate(boxes):
        start, size = min(chunk * i, length), box.sizes[dim]
        is_chunk = size == min(chunk, length - start) and (not size or box.offsets[dim] == start)
        if not is_chunk or box.sizes[:dim] + box.sizes[dim + 1 :] != across[:dim] + across[dim + 1 :]:
            return listed
    return ChunkShardingSpec(dim, [box.placement for box in boxes])
