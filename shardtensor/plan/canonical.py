"""One text of a plan matched to a model: what all ranks must have alike, and what a checkpoint says of its layout."""

from __future__ import annotations

from collections.abc import Iterator

from shardtensor.mesh import ranks_text
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.devices import ChunkShardingSpec, GridShardingSpec
from shardtensor.spec.nodes import ShardingSpec, Spec


def canonical_lines(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """The mesh, then each tensor: its name; and its dtype and true shape, how it lies, and on which ranks.

    Equal for equal plans, however they were written: styles, fallbacks, order and numbers by name are gone.

    Example:
        >>> from shardtensor.plan.models.model import Model, TensorInfo
        >>> from shardtensor.plan.plan import Plan
        >>> from shardtensor.layout.bind import bind
        >>> plan = Plan.from_rules({"up.weight": "[tp, -]"}, "dp=2, tp=2", data="dp")
        >>> tensor, spec = TensorInfo("up.weight", (8, 4)), plan.lines[0].value
        >>> placed = Placed(tensor, spec, bind(spec, (8, 4), plan.axes.mesh))
        >>> list(canonical_lines(Resolved(plan, Model((tensor,)), {"up.weight": placed}, {})))
        [('mesh (dp=2, tp=2), data dp', ''), ('up.weight', 'float32 8 x 4  [tp, -]  ranks 0-3')]
    """
    axes = resolved.plan.axes
    data = f", data {'*'.join(axes.leaves(axes.data))}" if axes.data else ""
    yield f"mesh {axes.mesh}{data}", ""
    for placed in sorted(resolved.tensors.values(), key=lambda placed: placed.tensor.name):
        tensor = placed.tensor
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        kind = f"{tensor.dtype} {shape}" + (" buffer" if tensor.is_buffer else "")
        yield tensor.name, "  ".join([kind, layout_text(placed, resolved), _devices_text(placed)])


def layout_text(placed: Placed, resolved: Resolved) -> str:
    """How a tensor lies: in the axes of the mesh, dims by position, with what `store` keeps of it and where."""
    spec: ShardingSpec = placed.spec
    if isinstance(spec, Spec):
        spec = resolved.plan.axes.spelled(spec)
        spec = Spec() if placed.layout.is_replicated else spec
    text = str(spec) if not isinstance(spec, Spec) or spec != Spec() else "replicate"
    if placed.stored is None:
        return text
    flat = resolved.plan.axes.spelled(Spec().flat(*placed.stored.axes, unit=placed.stored.unit)).flat_part
    return f"{text} {flat} by {placed.unit or 'the root'}"


def _devices_text(placed: Placed) -> str:
    """The ranks that hold some of a tensor, and their devices where its spec names them."""
    spec = placed.spec
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        return ", ".join(map(str, spec.placements.runs))
    return f"ranks {ranks_text(placed.layout.ranks)}"
