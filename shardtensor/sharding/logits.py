"""``use cross_entropy()``: a loss that takes logits as a head leaves them, cut along the classes."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.plan.flows.flow import cut_axes, cuts, partial_axes
from shardtensor.plan.models.layer_kinds import kind_named
from shardtensor.sharding.flows import stretches_of
from shardtensor.sharding.hooks import Site, Use, register_hook
from shardtensor.sharding.settle import takers
from shardtensor.spec.nodes import Cut, Spec
from shardtensor.tensor.binding import bind_named
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.sharded_tensor import wrap
from shardtensor.tensor.untraced import untraced

UNCOMPILED = (
    "`use cross_entropy()` makes one ShardedTensor of the logits, which no graph takes: compile what stands before the "
    "head, as in `model.model.compile(fullgraph=True)`"
)


@register_hook("cross_entropy")
def cross_entropy(site: Site) -> Use:
    """Let logits leave as one ShardedTensor of all classes, each rank holding the columns that its head made.

    So whatever computes the loss sees logits of the dense shape, in the model's own forward or outside of it: views,
    slices and casts of them stay cut, and `F.cross_entropy` and `nn.CrossEntropyLoss` give the dense loss and gradient.
    They cost two all-reduces of the size of the losses; logits are never gathered (``logits.full_tensor()`` would).

    The head is the layer in whose block the hook stands; else those linear layers below that leave their results cut
    along the last dim, where no module that was made later takes such.
    """
    heads = [site.path] if _is_linear(site, site.path) else _heads(site)
    heads = [path for path in heads if path in site.flows and set(cuts(_leaves(site, path))) == {-1}]
    if not heads:
        raise site.refused(
            "`use cross_entropy()` finds no head that leaves its logits cut",
            {"a head is": "a linear layer below, with `out: [..., tp]`, whose result no module made after it takes"},
            ["cut it: `lm_head: vocab_head(tp)`", "write `use cross_entropy()` in the block of the head"],
        )

    def apply() -> list[Any]:
        return [site.root.get_submodule(path).register_forward_hook(_logits(site, path)) for path in heads]

    return Use(apply, tuple(heads))


def _is_linear(site: Site, path: str) -> bool:
    kind = kind_named(type(site.root.get_submodule(path)).__name__)
    return kind is not None and kind.name == "linear" and path in site.flows


def _heads(site: Site) -> list[str]:
    order = {path: i for i, (path, _) in enumerate(site.root.named_modules())}
    takes = [
        (order.get(path, 0), set(cut_axes(flow.before))) for path, flow in takers(site.root, site.flows, site.tensors)
    ]
    found = []
    for path, flows in site.flows.items():
        if not _is_linear(site, path) or flows.out is None or (site.path and not path.startswith(f"{site.path}.")):
            continue
        gone = set(cut_axes(flows.out.after))
        if gone and not any(place > order.get(path, 0) and gone <= axes for place, axes in takes):
            found.append(path)
    return found


def _leaves(site: Site, path: str) -> Spec:
    out = site.flows[path].outs[0]
    return Spec() if partial_axes(out.after) else out.after


@attrs.frozen(eq=False)
class Logits:
    """A forward hook: makes one tensor of the columns that the ranks of a team have."""

    team: Group
    spec: Spec
    classes: int

    @untraced(UNCOMPILED)
    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        layout = bind_named(self.spec, (*output.shape[:-1], self.classes), mesh_of(self.team))
        return wrap(output, layout, self.spec, self.team)

    def __deepcopy__(self, memo: Any) -> Logits:
        return self


def _logits(site: Site, path: str) -> Any:
    cut = cuts(_leaves(site, path))[-1]
    team = site.team(cut.axes)
    if team.size == 1:
        return lambda module, args, output: None
    module, tensors = site.root.get_submodule(path), site.tensors[path]
    sizes = stretches_of(module, tensors, "out")
    axis = cut.axes[0]
    even = len(set(sizes)) == 1
    return Logits(team, Spec(..., Cut(axis) if even else Cut(axis, sizes=sizes)), sum(sizes))
