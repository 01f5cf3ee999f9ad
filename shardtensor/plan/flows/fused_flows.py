"""Blocks laid end to end, such as a fused q, k and v, that are cut as if they were one (E206).

Code takes the blocks apart by their lengths. Where a plan lets a rank's own piece reach that code, the piece has to
hold a share of each block. A `ShardedTensor`, or a value that is gathered on the way out, is the whole: cut it anyhow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.places import origin_of
from shardtensor.plan.flows.flow import Flow, cut_axes
from shardtensor.plan.flows.modules import Modules, Stated, flow_finding
from shardtensor.plan.match.misfit import shape_text
from shardtensor.plan.resolved import Placed
from shardtensor.spec.nodes import Cut, Spec


def fused_findings(modules: Modules) -> Iterator[Finding]:
    """Parameters of blocks, known from `dims` lines or a class, that a rank's code would take apart wrongly."""
    for path, params in modules.owned.items():
        stated = modules.stated.get(path)
        if stated is None or not (stated.ins or stated.outs):
            continue
        for placed in params.values():
            dims, spec = placed.tensor.dims or (), placed.spec
            for dim, lengths in modules.resolved.model.blocks(placed.tensor.name).items():
                cut = spec.dims[dims.index(dim)] if isinstance(spec, Spec) and len(spec.dims) == len(dims) else None
                if not isinstance(cut, Cut) or set(accumulate(lengths)) <= set(_ends(cut, sum(lengths))):
                    continue
                if _is_met_cut(cut, dim, path, stated, modules):
                    yield _told(placed, dim, lengths, cut)


def _is_met_cut(cut: Cut, dim: str, path: str, stated: Stated, modules: Modules) -> bool:
    """Whether code meets pieces of this dim, not the whole."""
    axes = set(modules.leaves(cut.axes))
    layer = modules.layers.get(path)
    if layer is None or layer.kind.name != "linear" or dim not in ("in", "out"):
        return bool(axes)
    flow: Flow | None = stated.out if dim == "out" else stated.ins.get("")
    if flow is None:
        return bool(axes)
    return bool(axes & set(cut_axes(flow.after if dim == "out" else flow.before)))


def _ends(cut: Cut, length: int) -> list[int]:
    """Where the blocks end in which a dim is cut."""
    shares = (1,) * cut.blocks if isinstance(cut.blocks, int) else cut.blocks
    return [length * end // sum(shares) for end in accumulate(shares)]


def _told(placed: Placed, dim: str, lengths: Sequence[int], cut: Cut) -> Finding:
    tensor, origin = placed.tensor, origin_of(placed.line)
    shares = [length // math.gcd(*lengths) for length in lengths]
    said = str(len(lengths)) if len(set(shares)) == 1 else ", ".join(map(str, shares))
    call = re.fullmatch(r"(colwise\(.*?)(?:,\s*blocks\s*=\s*\w+)?(\s*\))", origin.text, re.DOTALL) if origin else None
    written = f"`blocks({said})` after `{'*'.join(cut.axes)}`"
    if call is not None and said.isdecimal():
        written = f"`{call[1]}, blocks={said}{call[2]}`"
    as_what = "one" if cut.blocks == 1 else f"{len(_ends(cut, sum(lengths)))} others"
    return flow_finding(
        "E206", f"dim `{dim}` is {len(lengths)} blocks laid end to end, and is cut as {as_what}", placed.line,
        f"{tensor.name} is {shape_text(tensor.shape, tensor.dims)}, and {dim} = {' + '.join(map(str, lengths))}: code "
        "that takes the blocks apart would find other shares of them on each rank",
        f"write {written}", tensor.name, "layout",
    )  # fmt: skip
