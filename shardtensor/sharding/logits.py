"""``use cross_entropy()``: a loss that takes logits as a head leaves them, cut along the classes."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.comm.untraced import untraced
from shardtensor.plan.flows.flow import cuts
from shardtensor.plan.flows.modules import is_inside
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.sharding.flows import stretches_of
from shardtensor.sharding.hooks import Site, Use, register_hook
from shardtensor.spec.nodes import Cut, Spec
from shardtensor.tensor.binding import bind_named
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.sharded_tensor import wrap

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
    along the last dim, where no other module takes such.
    """
    here = unwrapped(site.path)
    heads = [path for path in site.flows.takers.logits if path == here or is_inside(path, here)]

    def apply() -> list[Any]:
        return [site.modules[path].register_forward_hook(_logits(site, path)) for path in heads]

    return Use(apply, tuple(heads))


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


def _logits(site: Site, path: str) -> Logits:
    out = site.flows.modules.stated[path].out
    assert out is not None, "it leaves logits"
    axes = cuts(out.after)[-1].axes
    sizes = stretches_of(site.flows.modules.layers[path], "out")
    even = len(set(sizes)) == 1
    return Logits(site.team(axes), Spec(..., Cut(axes[0]) if even else Cut(axes[0], sizes=sizes)), sum(sizes))
