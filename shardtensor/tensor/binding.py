"""From what a user passes (a spec or text, a shape, a process group) to a spec, a group and a layout."""

from __future__ import annotations

from typing import Any

from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import Layout
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.placing import mesh_of


def bind_to(
    spec: ShardingSpec | str,
    shape: tuple[int, ...],
    process_group: Any = None,
    dim_names: tuple[str, ...] | None = None,
) -> tuple[ShardingSpec, Group, Layout]:
    """Read the spec, find the group and bind them to a shape. Sends nothing.

    Raises:
        SpecError, LayoutError: the text is wrong, or does not fit the ranks or the shape.
    """
    spec = as_spec(spec)
    group = as_group(process_group)
    if not group.size and isinstance(spec, Spec):
        raise LayoutError(
            f"rank {group.rank} is not a member of the process group, so what the axes of the spec mean is unknown here",
            {"spec": str(spec)},
            ["call this on the members only", "use a spec that names its ranks, such as chunk(...)"],
        )
    return spec, group, bind(spec, shape, mesh_of(group), dim_names)
