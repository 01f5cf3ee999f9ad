"""What parts parameters from their flat, found and mended before the next forward.

A conversion (``module.half()``), ``to_empty``, a load that assigns, ``param.data = ...`` or ``module.weight = ...``
leaves a module with other parameters, or parameters with leaves of their own. What is there counts, as for a plain
module: the flat takes it in. What follows for all ranks (other dtypes, other parameters to train) is found from what
all ranks do alike, never from where memory lies, which differs where a rank holds nothing of a parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from shardtensor.errors import LayoutError, RuleError
from shardtensor.fsdp.entry import Entry
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.outside import join, part_from_flat
from shardtensor.fsdp.unit import Unit, unit_of
from shardtensor.parallel.loading import laid_out_as
from shardtensor.parallel.memory import become
from shardtensor.tensor.sharded_tensor import ShardedTensor

_changes, _local, _pointer = attrgetter("changes"), attrgetter("_local"), torch.Tensor.data_ptr


class Upkeep:
    """Whether the parameters of units are still as when this was made; half a microsecond a module to ask."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._flats = [flat for unit in units for flat in unit.flats]
        homes = (home for flat in self._flats for entry in flat.entries for home in entry.homes)
        self._places = list({id(owner): owner._parameters for owner, _ in homes}.values())
        self._held = [param for place in self._places for param in place.values()]
        self._shells = [shell for flat in self._flats for shell in flat.shells]
        self._changes, self._pointers = self._count(), self._point()

    def holds(self) -> bool:
        """Whether nothing has changed but values."""
        return (
            self._count() == self._changes
            and all(map(is_, chain.from_iterable(map(dict.values, self._places)), self._held))
            and self._point() == self._pointers
        )

    def _count(self) -> int:
        return sum(map(_changes, self._flats))

    def _point(self) -> list[int]:
        return list(map(_pointer, map(_local, self._shells)))


def take_in(unit: Unit) -> None:
    """Let the flats of a unit have the parameters that its modules have now, in one range again.

    It sends nothing, but that a parameter that was put in place in another layout is laid out anew.

    Raises:
        RuleError: a parameter is gone, has another shape, or dtypes in a flat differ.
    """
    for flat in unit.flats:
        _take_in(flat)


def take_in_if_ready(unit: Unit) -> None:
    """Do so already, where what is done to the unit's modules is complete; else the next forward does, or says why not.

    It is called after each of the unit's modules was converted or loaded, and another may be still to come.
    """
    with contextlib.suppress(RuleError):
        take_in(unit)


def _take_in(flat: Flat) -> None:
    for i, entry in enumerate(flat.entries):
        found = _present(entry, flat.global_shapes[i])
        if found is not flat.shells[i]:
            _adopt(flat, i, found)
    leaves = [shell._local for shell in flat.shells]
    if len({(leaf.dtype, leaf.device) for leaf in leaves}) > 1:
        raise _mixed_error(flat)
    trains = tuple(leaf.requires_grad for leaf in leaves)
    pieces = flat._pieces(flat.shard)
    if not flat.is_packed or any(
        leaf.data_ptr() != piece.data_ptr() or leaf.dtype != flat.dtype or shell._flat is not flat
        for shell, leaf, piece in zip(flat.shells, leaves, pieces, strict=True)
    ):
        flat.repack()
    else:
        flat.trains = trains
        flat.settle_dtypes()


def _present(entry: Entry, shape: tuple[int, ...]) -> torch.Tensor:
    """The parameter that an entry's modules have now, under all its names."""
    present = [owner._parameters.get(name) for owner, name in entry.homes]
    first = next((param for param in present if param is not entry.param), entry.param)
    if first is None or any(param is None for param in present):
        raise RuleError(f'"{entry.name}" was taken out of a fully sharded module', fix=_AGAIN)
    if tuple(first.shape) != shape:
        raise RuleError(
            f'"{entry.name}" of a fully sharded module was replaced by a tensor of another shape',
            {"was": shape, "is": tuple(first.shape)},
            _AGAIN,
        )
    others = [param for param in present if param is not first and param is not entry.param]
    if others and not all(_is_same(first, other) for other in others if other is not None):
        raise RuleError(
            f'"{entry.name}" has {len(entry.homes)} names, under which there are different tensors now',
            fix="put one tensor under all names of a tied parameter",
        )
    for owner, name in entry.homes:
        owner._parameters[name] = first  # type: ignore[assignment]
    return first


_AGAIN = "change modules before fully_shard"


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal values, on all ranks. Collective."""
    if isinstance(a, ShardedTensor) or isinstance(b, ShardedTensor):
        return torch.equal(a, b)
    return torch.equal(a.detach(), b.detach())


def _adopt(flat: Flat, i: int, param: Any) -> None:
    """Have another object as a parameter: a ShardedTensor, of any layout, or a whole tensor that all ranks have."""
    old = flat.shells[i]
    if not isinstance(param, ShardedTensor) or param._layout != old._layout:
        value = laid_out_as(param, old)
        value.requires_grad_(param.requires_grad)
        become(param, value)
    flat.shells[i] = flat.entries[i].param = param
    join(param, flat, i)
    flat.leaf_changed(is_replaced=True)
    if old is not param:
        part_from_flat(old)


def _mixed_error(flat: Flat) -> RuleError:
    by_kind: dict[str, list[str]] = {}
    for entry, shell in zip(flat.entries, flat.shells, strict=True):
        by_kind.setdefault(f"{shell.dtype} on {shell.device.type}", []).append(entry.name)
    return RuleError(
        "parameters that are gathered together have become of different dtypes or devices",
        {kind: ", ".join(names[:6]) for kind, names in by_kind.items()},
        "convert the whole module that fully_shard was called on, or convert parts of it before",
    )


def check_place(units: Iterable[Unit]) -> None:
    """Refuse to run units whose shards are not where they are gathered.

    Raises:
        LayoutError: they are on the meta device, or on another than that of their group.
    """
    for unit in units:
        for flat in unit.flats:
            found = flat.shard.device
            if found.type == flat.device.type:
                continue
            names = ", ".join(entry.name for entry in flat.entries[:4])
            if found.type == "meta":
                raise LayoutError(
                    "parameters of a fully sharded module are on the meta device, without values",
                    {"module": f"{unit.name} ({type(unit.module).__name__})".strip(), "parameters": names},
                    ["materialize(model)", 'model.to_empty(device="cpu"), then set or load values'],
                )
            raise LayoutError(
                f"parameters of a fully sharded module are on {found}, and gathered on {flat.device}",
                {"parameters": names},
                f'move the module back: module.to("{flat.device}")',
            )


def after_load(module: nn.Module, keys: Any) -> None:
    """A hook for after ``load_state_dict``."""
    unit = unit_of(module)
    if unit is not None:
        take_in_if_ready(unit)
