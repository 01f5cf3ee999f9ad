"""A fully sharded model in a table: what is gathered as one, how large it is, and what stays gathered, and why."""

from __future__ import annotations

from torch import nn

from shardtensor.errors import LayoutError
from shardtensor.fsdp.convoy import travelling
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.unit import Unit, units_in
from shardtensor.plan.match.units import SMALL

_HEAD = ("unit", "class", "parameters", "on a rank", "gathered", "stays gathered", "flats")


def fsdp_summary(module: nn.Module) -> str:
    """Return a table of the units of a module, outer ones first. Sends nothing.

    For each: its name and class, the elements of its parameters, the bytes of this rank's range of them and of the
    gathered whole, padding included, whether it stays gathered from its forward to the end of its backward, and its
    flats: dtype, number of parameters, and the share of padding where it is a hundredth or more.

    A unit that is gathered again in backward costs one more gather of its bytes; one that stays costs memory. So units
    that hold other units stay, since they are in use in all of the time between, and small ones of 64 KiB or less do,
    because such a gather takes longer to start than to run. ``reshard_after_forward`` of True or False says otherwise.
    Small ones over the same ranks and of the same dtypes travel together, as many as have 1 MiB: all are gathered in
    one message when the first is needed, and their gradients are reduced in one when the last are there.

    Raises:
        LayoutError: nothing in the module is fully sharded.

    Example:
        >>> from shardtensor.fsdp import fully_shard
        >>> model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 4, bias=False))
        >>> print(fsdp_summary(fully_shard(model, policy=lambda part: isinstance(part, nn.Linear))))
        3 units, cut over 1 rank
        unit    class       parameters  on a rank   gathered  stays gathered  flats
        (root)  Sequential           0        0 B        0 B  yes: outer      none
        0       Linear          65,536  256.0 KiB  256.0 KiB  no              float32 x 1
        1       Linear           1,024    4.0 KiB    4.0 KiB  yes: small      float32 x 1
    """
    units = list(units_in(module))
    if not units:
        raise LayoutError("nothing in this module is fully sharded", fix="call fully_shard first")
    for _, unit in units:
        if unit.schedule is None:
            unit.settle()
    together = {id(unit): len(members) for members in travelling([unit for _, unit in units]) for unit in members}
    rows = [_HEAD, *(_row(name, unit, together.get(id(unit), 1)) for name, unit in units)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.rjust(width) if 2 <= i <= 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([_title(units[0][1], len(units)), *lines])


def _title(unit: Unit, count: int) -> str:
    domain = unit.domain
    ranks = f"{domain.shard.size} rank{'s' * (domain.shard.size > 1)}"
    copies = "" if domain.replicate is None else f", in {domain.replicate.size} copies"
    return f"{count} unit{'s' * (count > 1)}, cut over {ranks}{copies}"


def _row(name: str, unit: Unit, together: int) -> tuple[str, ...]:
    flats = unit.flats
    kind = type(unit.module)
    plain = kind.__mro__[2] if kind.__name__ == f"FSDP{kind.__mro__[2].__name__}" else kind
    return (
        name or "(root)",
        plain.__name__,
        f"{sum(sum(flat.ranges.lengths) for flat in flats):,}",
        _bytes(sum(flat.ranges.chunk * flat.dtype.itemsize for flat in flats)),
        _bytes(sum(flat.whole_bytes for flat in flats)),
        _stays(unit) + (f", {together} together" if together > 1 else ""),
        ", ".join(map(_flat, flats)) or "none",
    )


def _stays(unit: Unit) -> str:
    if not unit.stays_gathered:
        return "no"
    if unit.is_container:
        return "yes: outer"
    if unit.reshard_after_forward is None and sum(flat.whole_bytes for flat in unit.flats) <= SMALL:
        return "yes: small"
    return "yes: as asked"


def _flat(flat: Flat) -> str:
    dtype = str(flat.dtype).removeprefix("torch.")
    if flat.compute_dtype != flat.dtype:
        dtype += f" as {str(flat.compute_dtype).removeprefix('torch.')}"
    frozen = "" if any(flat.trains) else ", frozen"
    padding = 100 * flat.ranges.waste // max(flat.ranges.total, 1)
    return f"{dtype} x {len(flat.entries)}{frozen}" + (f", {padding}% padding" if padding else "")


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
