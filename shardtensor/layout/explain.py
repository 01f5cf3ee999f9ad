"""Print the steps of a reshard with their bytes, without running it: on any machine, without torch."""

from __future__ import annotations

import re
from typing import Any

from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import Layout, Shape
from shardtensor.layout.route import Step, route
from shardtensor.mesh import Mesh, read_mesh
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import as_spec

_SHOWN_RANKS = 4096  # with more, bytes are computed for the first and the last ones only


def explain_reshard(
    source: Any,
    target: Any,
    *,
    shape: Shape | None = None,
    mesh: Mesh | str | None = None,
    dtype: Any = "float32",
) -> None:
    """Print the steps of ``reshard(source, target)``, and the bytes that a rank receives in each. Sends nothing.

    Args:
        source: a ShardedTensor, a spec, or its text.
        target: a spec, its text, or a ShardedTensor.
        shape: the global shape, if neither is a tensor.
        mesh: the ranks, as ``"dp=2, tp=4"`` or a Mesh, if neither is a tensor.
        dtype: of the elements, if neither is a tensor.

    Raises:
        SpecError, LayoutError: a spec is wrong or does not fit, or shape or mesh is missing.

    Example:
        >>> explain_reshard("[tp, -]", "[-, tp]", shape=(4096, 4096), mesh="tp=4")
        [tp, -] -> [-, tp]   4096 x 4096 float32 on 4 ranks
          all_to_all over tp=4   12.0 MiB received by each rank
        >>> explain_reshard("replicate partial(tp)", "[-, tp]", shape=(8, 8), mesh="dp=2, tp=2")
        replicate partial(tp) -> [-, tp]   8 x 8 float32 on 4 ranks
          reduce_scatter over tp=2   128 B received by each rank
    """
    tensor = next((x for x in (source, target) if hasattr(x, "_layout")), None)
    if tensor is not None:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        mesh = tensor._group.mesh or Mesh((("*", tensor._group.size),), tensor._group.ranks)
    if shape is None or mesh is None:
        raise LayoutError(
            "specs alone do not determine what is sent",
            {"missing": ", ".join(name for name, x in (("shape", shape), ("mesh", mesh)) if x is None)},
            'pass shape=(rows, columns) and mesh="tp=4", or a ShardedTensor',
        )
    mesh = read_mesh(mesh)
    (one, before), (other, after) = (_bound(x, tuple(shape), mesh) for x in (source, target))
    name = dtype_name(dtype)
    size = " x ".join(map(str, shape)) or "scalar"
    print(f"{one} -> {other}   {size} {name} on {len({*before.ranks, *after.ranks})} ranks")
    steps = route(before, after)
    for step in steps:
        print(f"  {step_text(step, item_bytes(name))}")
    if not steps:
        print("  nothing moves: both say the same")


def step_text(step: Step, size_bytes: int) -> str:
    """Return the text of a step with the bytes received, for elements of `size_bytes`."""
    if step.kind in ("slice", "split"):
        return f"{step.kind}   nothing is sent"
    ranks = sorted({*step.source.ranks, *step.target.ranks})
    if len(ranks) > _SHOWN_RANKS:
        ranks = [*ranks[:8], *ranks[-8:]]
    counts = sorted({step.received(rank) * size_bytes for rank in ranks})
    each = bytes_text(counts[-1]) if len(counts) == 1 else f"{bytes_text(counts[0])} to {bytes_text(counts[-1])}"
    how = f" ({step.op})" if step.op not in ("", "sum") else ""
    return f"{step.kind}{how} over {step.where}   {each} received by each rank"


def bytes_text(count: int, digits: int = 1) -> str:
    """Return a number of bytes as text with a unit, such as ``6.0 MiB``; exact below a KiB: ``96 B``."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{amount:.{digits}f} {units[0]}"


def dtype_name(dtype: Any) -> str:
    """Return the name of a torch dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype, by the dtype's name: ``bfloat16``, ``complex64``, ``bool``."""
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) // 8 if bits else 1


def _bound(given: Any, shape: Shape, mesh: Mesh) -> tuple[str, Layout]:
    if hasattr(given, "_layout"):
        return str(given.sharding_spec()), given._layout
    spec: ShardingSpec = as_spec(given)
    return str(spec), bind(spec, shape, mesh)
