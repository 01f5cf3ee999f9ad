"""The text of a compiled step: what each value is, the user's line that computes it, and what ranks send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardtensor.comm.group import Group
from shardtensor.cost.profile import Profile, received_share, seconds
from shardtensor.rules.batch import BatchValue
from shardtensor.spmd.local_graph import LocalGraph
from shardtensor.spmd.markers import Node
from shardtensor.spmd.sizes import BatchPart

c10d: Any = torch.ops._c10d_functional
_KINDS = {
    c10d.all_reduce.default: "all_reduce",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.broadcast.default: "broadcast",
    c10d.all_to_all_single.default: "all_to_all",
}


@attrs.frozen
class Sent:
    """A collective of a compiled step.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ...
        ranks: of its group.
        received_bytes: by one rank.
        where: the user's line that it belongs to.
    """

    kind: str
    ranks: int
    received_bytes: int
    where: str

    def seconds(self, profile: Profile) -> float:
        """Return the estimated time on an idle machine."""
        return seconds(self.kind, self.received_bytes, self.ranks, profile)


@attrs.frozen(eq=False)
class Explanation:
    """A rank's graph, with the value of each node.

    Attributes:
        part: this rank's part of the batch.
        rows: for each operation its name, what its result is, and the user's line.
        sent: the collectives, in order.
    """

    part: BatchPart
    rows: Sequence[tuple[str, str, str]]
    sent: Sequence[Sent]

    @classmethod
    def of(
        cls,
        graph: fx.Graph,
        values: Mapping[Node, BatchValue],
        part: BatchPart,
        inputs: Mapping[Node, str],
        shapes: Mapping[Node, torch.Tensor],
        ranks: Mapping[str, int],
    ) -> Explanation:
        """Describe a graph.

        Args:
            inputs: names of inputs.
            shapes: a tensor like the operand of each collective.
            ranks: the number of ranks of each group, by its name; collectives of other groups are not listed.
        """
        rows, sent = [], []
        for node in graph.nodes:
            where = str((node.meta.get("custom") or {}).get("where", ""))
            if node.op != "output":
                name = inputs.get(node, node.name) if node.op != "call_function" else _name(node)
                rows.append((name, str(values.get(node, "")), where))
            if node.target in _KINDS and node.args[-1] in ranks:
                size = ranks[node.args[-1]]
                x = shapes[node.args[0]]
                kind, whole = _KINDS[node.target], x.numel() * x.element_size()
                whole *= size if kind == "all_gather" else 1
                sent.append(Sent(kind, size, round(received_share(kind, size) * whole), where))
        return cls(part, rows, sent)

    def priced(self, profile: Profile) -> str:
        """Return a line for each kind of collective: how many, the bytes that a rank receives, the estimated time."""
        lines = []
        for kind in dict.fromkeys(each.kind for each in self.sent):
            own = [each for each in self.sent if each.kind == kind]
            mib, ms = sum(e.received_bytes for e in own) / 2**20, sum(e.seconds(profile) for e in own) * 1e3
            lines.append(f"{len(own):4} {kind:<15} {mib:10.2f} MiB received {ms:10.3f} ms on {profile.name}")
        return "\n".join(lines) or "   0 collectives"

    def __str__(self) -> str:
        part = self.part
        widths = [max((len(row[i]) for row in self.rows), default=0) for i in (0, 1)]
        head = f"samples {part.start} to {part.start + part.own - 1} of {part.total}, on one of {part.ranks} ranks"
        return "\n".join([head, *(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in self.rows)])


@attrs.frozen(eq=False)
class Built:
    """A program's graph before it was split and compiled, for `explain`.

    Attributes:
        inputs: for each input of the graph, its name and a tensor like it.
        groups: by name, those that the program sends in.
    """

    local: LocalGraph
    part: BatchPart
    attributes: nn.Module
    inputs: Sequence[tuple[str, torch.Tensor]]
    groups: Mapping[str, Group]

    def explanation(self) -> Explanation:
        """Describe the graph."""
        graph = self.local.graph
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for _, x in self.inputs]
            shapes = _Values(fx.GraphModule(self.attributes, graph, "explained"))
            shapes.run(*fakes)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        names = {node: name for node, (name, _) in zip(placeholders, self.inputs, strict=True)}
        ranks = {name: group.size for name, group in self.groups.items()}
        return Explanation.of(graph, self.local.values, self.part, names, shapes.found, ranks)


class _Values(fx.Interpreter):
    """Keeps what each node returns."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.found[n] = super().run_node(n)
        return self.found[n]


def _name(node: Node) -> str:
    return (
        getattr(node.target, "__name__", "")
        if "getitem" in str(node.target)
        else str(node.target).removeprefix("aten.")
    )
