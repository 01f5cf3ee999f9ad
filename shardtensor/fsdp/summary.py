"""A table of the units of a fully sharded model: their sizes, and which of them stay unsharded, and why."""

from __future__ import annotations

from torch import nn

from shardtensor.errors import LayoutError
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.state import FSDPState, plain_class, states_in
from shardtensor.layout.explain import bytes_text

_HEAD = ("unit", "class", "parameters", "on a rank", "unsharded", "stays unsharded", "parameter groups")


def fsdp_summary(module: nn.Module) -> str:
    """Return a table of the units of a module, outer ones first. Sends nothing.

    For each: its name and class, the elements of its parameters, the bytes of this rank's range of them and of the
    unsharded ones, padding included, whether they stay unsharded from its forward to the end of its backward, and its
    parameter groups: dtype, number of parameters, and the share of padding if it is at least one percent.

    A unit that is gathered again in backward costs one more gather of its bytes; one that stays unsharded costs memory.
    Units that contain other units stay unsharded, because they are in use in between; so do units of 64 KiB or less,
    whose gather takes longer to start than to run. ``reshard_after_forward=True`` or False overrides this.

    Raises:
        LayoutError: nothing in the module is fully sharded.

    Example:
        >>> from shardtensor.fsdp import fully_shard
        >>> model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 4, bias=False))
        >>> print(fsdp_summary(fully_shard(model, policy=lambda part: isinstance(part, nn.Linear))))
        3 units, sharded over 1 rank
        unit    class       parameters  on a rank  unsharded  stays unsharded  parameter groups
        (root)  Sequential           0        0 B        0 B  yes: outer       none
        0       Linear          65,536  256.0 KiB  256.0 KiB  no               float32 x 1
        1       Linear           1,024    4.0 KiB    4.0 KiB  yes: small       float32 x 1
    """
    states = list(states_in(module))
    if not states:
        raise LayoutError("nothing in this module is fully sharded", fix="call fully_shard first")
    for _, state in states:
        if state.runtime is None:
            state.compute_flags()
    rows = [_HEAD, *(_row(name, state) for name, state in states)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.rjust(width) if 2 <= i <= 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([_title(states[0][1], len(states)), *lines])


def _title(state: FSDPState, count: int) -> str:
    data_mesh = state.data_mesh
    ranks = f"{data_mesh.shard.size} rank{'s' * (data_mesh.shard.size > 1)}"
    replicas = "" if data_mesh.replicate is None else f", {data_mesh.replicate.size} replicas"
    return f"{count} unit{'s' * (count > 1)}, sharded over {ranks}{replicas}"


def _row(name: str, state: FSDPState) -> tuple[str, ...]:
    param_groups = state.param_groups
    return (
        name or "(root)",
        plain_class(state.module).__name__,
        f"{sum(sum(group.bucket.ranges.lengths) for group in param_groups):,}",
        bytes_text(sum(group.bucket.chunk * group.dtype.itemsize for group in param_groups)),
        bytes_text(sum(group.unsharded_bytes for group in param_groups)),
        _stays(state),
        ", ".join(map(_group_text, param_groups)) or "none",
    )


def _stays(state: FSDPState) -> str:
    if not state.stays_unsharded:
        return "no"
    if state.is_container:
        return "yes: outer"
    return "yes: small" if state.reshard_after_forward is None else "yes: as asked"


def _group_text(group: ParamGroup) -> str:
    dtype = str(group.dtype).removeprefix("torch.")
    if group.compute_dtype != group.dtype:
        dtype += f" as {str(group.compute_dtype).removeprefix('torch.')}"
    frozen = "" if any(group.trains) else ", frozen"
    padding = 100 * group.bucket.ranges.waste // max(group.bucket.total, 1)
    return f"{dtype} x {len(group.params_info)}{frozen}" + (f", {padding}% padding" if padding else "")
