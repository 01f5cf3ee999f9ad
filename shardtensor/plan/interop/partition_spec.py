"""PartitionSpec-like tuples and logical axis rules, as JAX writes them, <-> specs. JAX itself is not needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any

from shardtensor.errors import SpecError
from shardtensor.spec.nodes import Cut, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec

Entry = str | tuple[str, ...] | None


def spec_from_partition(partition: Iterable[Any] | None, ndim: int | None = None) -> Spec:
    """Return the spec that a PartitionSpec says: an axis, a tuple of axes (major to minor) or None for each dim.

    Args:
        partition: a tuple, or a PartitionSpec, which is read as one; None: nothing is cut. Axes of its `unreduced` hold
            addends. Dims after the last entry are whole.
        ndim: of the tensor, where the spec shall have one entry a dim; else it ends in ``...``.

    Raises:
        SpecError: an entry is none of these, an axis stands twice, or there are more entries than dims.

    Example:
        >>> print(spec_from_partition(("tp", None)), spec_from_partition((("dp", "tp"), None), ndim=2))
        [tp, ...] [dp*tp, -]
        >>> print(spec_from_partition((None, "tp"), ndim=3), spec_from_partition(None), spec_from_partition(()))
        [-, tp, -] replicate replicate
    """
    entries = [_entry(entry, partition) for entry in (() if partition is None else partition)]
    if ndim is not None and len(entries) > ndim:
        raise SpecError(
            f"the partition has {len(entries)} entries, the tensor has {ndim} dims",
            {"partition": repr(partition)},
            "give at most one entry for each dim",
            code="E202",
        )
    while entries and entries[-1] is None:
        entries.pop()
    if entries:
        spec = Spec(*entries, ...) if ndim is None else Spec(*entries, *[None] * (ndim - len(entries)))
    else:
        spec = Spec()
    unreduced = sorted(getattr(partition, "unreduced", None) or ())
    return spec.partial(*unreduced) if unreduced else spec


def partition_from_spec(spec: ShardingSpec | str, ndim: int | None = None) -> tuple[Entry, ...]:
    """Return the entries of the PartitionSpec that says a spec: ``jax.sharding.PartitionSpec(*entries)``.

    A `unit` is left out: cut evenly, the pieces are the same, and what is lost is the check.

    Args:
        spec: in mesh axes, one entry for each dim.
        ndim: of the tensor; needed where dims follow ``...``.

    Raises:
        SpecError: a PartitionSpec cannot say it.

    Example:
        >>> partition_from_spec("[dp*tp, -]"), partition_from_spec("[..., tp]", ndim=3)
        ((('dp', 'tp'), None), (None, None, 'tp'))
        >>> partition_from_spec("replicate")
        ()
        >>> partition_from_spec("[tp blocks(3), -]")
        Traceback (most recent call last):
        shardtensor.errors.SpecError: a PartitionSpec cannot say `blocks`
          spec  [tp blocks(3), -]
          fix   keep each block as a tensor of its own
    """
    read = as_spec(spec)
    if not isinstance(read, Spec):
        raise _cannot(read, "placements", "write the spec in mesh axes")
    if read.named:
        raise _cannot(read, "names of dims", "write one entry for each dim, in order")
    if read.flat_part or read.only_part or read.partial_parts:
        part = read.flat_part or read.only_part or read.partial_parts[0]
        raise _cannot(read, str(part), "take the suffix off: the rest of the spec can be said")
    dims = read.dims
    if ... in dims:
        at = dims.index(...)
        if ndim is None and at < len(dims) - 1:
            raise _cannot(read, "`...` before other dims, with any number of dims", "pass ndim=")
        whole: tuple[None, ...] = (None,) * (0 if ndim is None else max(ndim - len(dims) + 1, 0))
        dims = (*dims[:at], *whole, *dims[at + 1 :])
    if ndim is not None and dims and len(dims) != ndim:
        raise SpecError(
            f"the spec has {len(dims)} dims, the tensor has {ndim}",
            {"spec": str(read)},
            "write `...` for the dims that are whole",
            code="E202",
        )
    return tuple(_axes(dim, read) for dim in dims)


def spec_from_axis_rules(names: Sequence[str | None], rules: Iterable[tuple[str, Any]]) -> Spec:
    """Return the spec of a tensor whose dims have logical names, by rules from such names to mesh axes.

    As in flax and T5X, the first rule of a name counts whose axes no other dim of the tensor has taken, dims from left
    to right. Unlike there, nothing is dropped in silence: a name without a rule, and a name all of whose rules are
    taken, is an error.

    Args:
        names: of the tensor's dims; None: whole.
        rules: such as ``("mlp", "tp")``, ``("embed", None)``, ``("batch", ("dp", "fsdp"))``, in order.

    Returns:
        the spec with its dims named; with one entry a dim where a name stands twice.

    Raises:
        SpecError: a name has no rule that can be followed.

    Example:
        >>> rules = [("embed", None), ("mlp", "tp"), ("heads", "tp"), ("batch", ("dp", "fsdp"))]
        >>> print(spec_from_axis_rules(("embed", "mlp"), rules))
        [mlp: tp]
        >>> print(spec_from_axis_rules(("batch", "embed"), rules))
        [batch: dp*fsdp]
        >>> spec_from_axis_rules(("heads", "mlp"), rules)
        Traceback (most recent call last):
        shardtensor.errors.SpecError: every axis for the dim `mlp` is taken by another dim
          dims   heads, mlp
          rules  mlp -> tp
          taken  tp by heads
          fix    add the rule ("mlp", None) after it, to leave the dim whole
    """
    rules = list(rules)
    taken: dict[str, str] = {}
    entries: list[Entry] = []
    for name in names:
        if name is None:
            entries.append(None)
            continue
        choices = [_entry(axes, axes) for key, axes in rules if key == name]
        if not choices:
            raise SpecError(
                f"no rule says where the dim `{name}` goes",
                {"dims": ", ".join(map(str, names)), "rules for": ", ".join(dict.fromkeys(key for key, _ in rules))},
                f'add ("{name}", None) to leave it whole',
                code="E203",
            )
        free = next((axes for axes in choices if not taken.keys() & set(_tuple(axes))), ...)
        if isinstance(free, EllipsisType):
            raise SpecError(
                f"every axis for the dim `{name}` is taken by another dim",
                {
                    "dims": ", ".join(map(str, names)),
                    "rules": ", ".join(f"{name} -> {'*'.join(_tuple(axes))}" for axes in choices),
                    "taken": ", ".join(f"{axis} by {by}" for axis, by in taken.items()),
                },
                f'add the rule ("{name}", None) after it, to leave the dim whole',
                code="E204",
            )
        taken |= dict.fromkeys(_tuple(free), name)
        entries.append(free)
    if len(set(names)) < len(names):
        return Spec(*entries) if any(entries) else Spec()
    return Spec(**{str(name): axes for name, axes in zip(names, entries, strict=True) if axes is not None})


def _entry(entry: Any, partition: Any) -> Entry:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return (entry[0] if len(entry) == 1 else tuple(entry)) if entry else None
    raise SpecError(
        f"`{entry}` is no entry of a partition",
        {"partition": repr(partition)},
        "write an axis, a tuple of axes, or None for a dim that is whole",
        code="E102",
    )


def _tuple(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _axes(dim: Cut | EllipsisType | None, spec: Spec) -> Entry:
    if dim is None:
        return None
    assert isinstance(dim, Cut)
    even = "choose a length that the axes divide"
    ways = {
        "blocks": (dim.blocks != 1, "keep each block as a tensor of its own"),
        "pad": (dim.pad is not None, "pad the tensor itself, to a length that the axes divide"),
        "balanced": (dim.balanced, even),
        "sizes": (dim.sizes is not None, even),
    }
    for word, (is_there, fix) in ways.items():
        if is_there:
            raise _cannot(spec, f"`{word}`", fix)
    return dim.axes[0] if len(dim.axes) == 1 else dim.axes


def _cannot(spec: ShardingSpec, what: str, fix: str) -> SpecError:
    return SpecError(f"a PartitionSpec cannot say {what}", {"spec": str(spec)}, fix)
