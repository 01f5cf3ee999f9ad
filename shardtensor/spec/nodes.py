"""Specs in mesh axes: ``[tp, -]``. They are frozen values; ``str`` gives the canonical text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from types import EllipsisType
from typing import Any, Literal

import attrs

from shardtensor.errors import SpecError
from shardtensor.spec.parts import Cut, Flat, Only, Partial, name


class ShardingSpec:
    """How one tensor is sharded over ranks; the base of every spec. Users may subclass it, as in torch.

    A user's subclass returns its shards in `build_metadata`, and may move data in `shard`.
    """

    __slots__ = ()

    def build_metadata(self, tensor_sizes: Sequence[int], tensor_properties: Any) -> Any:
        """Return the ``ShardedTensorMetadata`` of a tensor of global size `tensor_sizes`."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its shards lie: define build_metadata")

    def shard(self, tensor: Any, src_rank: int = 0, process_group: Any = None) -> Any:
        """Return the `tensor` of rank `src_rank` of the group, sharded. Every rank of the group must call this."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to shard a tensor: define shard")


Dim = Cut | EllipsisType | None


@lru_cache(maxsize=1024)
def _cut_over(axes: str | tuple[str, ...]) -> Cut:
    return Cut(axes)


def _dim(value: Any) -> Dim:
    if value is None or value is ... or isinstance(value, Cut):
        return value
    try:
        return _cut_over(value)  # the same names are used often, so their cuts are cached
    except TypeError:  # not hashable
        return Cut(value)


@attrs.frozen(init=False, repr=False)
class Spec(ShardingSpec):
    """One entry per dim of the tensor, in mesh axes.

    An entry is an axis, a tuple of axes (major to minor), a `Cut`, None (the dim is whole) or ``...`` (any number of
    whole dims). Dims may be named instead; those not named are whole. With no entry at all every dim is whole.

    Raises:
        SpecError: an entry is none of these, or an axis is used twice.

    Example:
        >>> str(Spec("tp", None)), str(Spec(..., ("tp", "dp"))), str(Spec(out=Cut("tp", unit=128)))
        ('[tp, -]', '[..., tp*dp]', '[out: tp unit(128)]')
        >>> str(Spec("tp", None).flat("dp")), str(Spec("dp", None).partial("tp", op="max"))
        ('[tp, -] flat(dp)', '[dp, -] partial(tp, op=max)')
    """

    dims: tuple[Dim, ...]
    named: tuple[tuple[str, Cut], ...]
    flat_part: Flat | None
    only_part: Only | None
    partial_parts: tuple[Partial, ...]
    axis_names: frozenset[str] = attrs.field(eq=False)
    _hash: int = attrs.field(eq=False)

    def __new__(cls, /, *dims: Any, **named: Any) -> Spec:
        return object.__new__(Replicate if cls is Spec and not dims and not named else cls)

    def __init__(self, /, *dims: Any, **named: Any) -> None:
        self._fill(tuple(map(_dim, dims)), tuple((name(key, "a dim"), _dim(value)) for key, value in named.items()))

    def _fill(
        self,
        dims: tuple[Dim, ...],
        named: tuple[tuple[str, Any], ...] = (),
        flat: Flat | None = None,
        only: Only | None = None,
        partial: tuple[Partial, ...] = (),
    ) -> None:
        if named and dims:
            raise SpecError("dims are named or in order, not both", fix="name all the cut dims, or none", code="E102")
        if dims.count(...) > 1:
            raise SpecError("`...` stands twice", {"why": "it means all other dims"}, "keep one", code="E102")
        for key, cut in named:
            if not isinstance(cut, Cut):
                raise SpecError(f"the dim {key} is named but not cut", fix="leave it out: it is whole", code="E102")
        axes = [axis for cut in dims if isinstance(cut, Cut) for axis in cut.axes]
        axes += [axis for _, cut in named for axis in cut.axes]
        axes += flat.axes if flat else ()
        axes += (only.axis,) if only else ()
        axes += [axis for part in partial for axis in part.axes]
        used = frozenset(axes)
        parts = (dims, named, flat, only, partial)
        self.__attrs_init__(*parts, used, hash(parts))
        if len(used) < len(axes):
            twice = next(axis for axis, count in Counter(axes).items() if count > 1)
            raise SpecError(
                f"axis `{twice}` is used twice in one spec",
                {"why": f"each rank has a single {twice} coordinate"},
                "keep one of the two, or make the mesh of two axes",
                code="E204",
            )

    @classmethod
    def of(
        cls,
        dims: tuple[Dim, ...],
        named: tuple[tuple[str, Cut], ...] = (),
        flat: Flat | None = None,
        only: Only | None = None,
        partial: tuple[Partial, ...] = (),
    ) -> Spec:
        """Return the spec of these parts, which are its attributes in order."""
        bare = not (dims or named or flat or only or partial)
        spec = object.__new__(Replicate if bare else Spec)
        spec._fill(dims, named, flat, only, partial)
        return spec

    def _with(self, **changes: Any) -> Spec:
        parts = {"flat": self.flat_part, "only": self.only_part, "partial": self.partial_parts} | changes
        return Spec.of(self.dims, self.named, **parts)

    def flat(self, *axes: str, unit: int | Literal["row"] = 1, sizes: Sequence[int] | None = None) -> Spec:
        """Return this spec with each rank's local tensor flattened and sharded over `axes` into ranges."""
        return self._with(flat=Flat(axes, unit, sizes))

    def only(self, axis: str, index: int) -> Spec:
        """Return this spec for a tensor that exists only at coordinate `index` of `axis`."""
        return self._with(only=Only(axis, index))

    def partial(self, *axes: str, op: str = "sum") -> Spec:
        """Return this spec for a value that is partial: each rank along `axes` holds a partial sum of it."""
        return self._with(partial=(*self.partial_parts, Partial(axes, op)))

    def __str__(self) -> str:
        suffixes = [str(part) for part in (self.flat_part, self.only_part, *self.partial_parts) if part is not None]
        entries = ["..." if dim is ... else "-" if dim is None else str(dim) for dim in self.dims]
        entries += [f"{key}: {cut}" for key, cut in self.named]
        if entries:
            return " ".join([f"[{', '.join(entries)}]", *suffixes])
        return " ".join(suffixes if self.flat_part else ["replicate", *suffixes])

    def __repr__(self) -> str:
        return f"parse_spec({str(self)!r})"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec.of, (self.dims, self.named, self.flat_part, self.only_part, self.partial_parts)


class Replicate(Spec):
    """A full copy on every rank; ``Spec()`` returns it.

    Example:
        >>> str(Replicate()), Spec() == Replicate(), str(Replicate().partial("tp"))
        ('replicate', True, 'replicate partial(tp)')
    """

    __slots__ = ()

    def __init__(self) -> None:
        self._fill(())
