"""What a module that moves holds, and how it would look without a plan: read before anything changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.checkpoint.live_ranks import RankChange
from shardtensor.checkpoint.live_state import FollowingOptimizer, StateOutline, TensorPart
from shardtensor.comm.agree import name_ranks
from shardtensor.errors import PlanError, RuleError, some
from shardtensor.fsdp.state import plain_class
from shardtensor.parallel.job import ShardingJob
from shardtensor.parallel.shard_module import PlanLike, job_of, take_off
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


@attrs.frozen
class Outline:
    """What the old ranks hold: tensors by name, the names of those with a gradient, the state of each optimizer."""

    tensors: Mapping[str, TensorPart]
    with_grad: tuple[str, ...]
    states: tuple[StateOutline, ...]

    def facts(self) -> dict[str, str]:
        """Return the outline as text that must be equal on all ranks."""
        facts = {f"layout of {name}": str(part) for name, part in self.tensors.items()}
        facts |= {f"state of optimizer {i}": str(state) for i, state in enumerate(self.states)}
        return facts | {"with a gradient": ", ".join(self.with_grad)}


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters, buffers and tensor attributes of a module, each by its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, _, key, tensor in _places(module):
        found.setdefault(id(tensor), (f"{path}.{key}" if path else key, tensor))
    return dict(found.values())


def outline_of(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    ranks: RankChange,
    following: Sequence[FollowingOptimizer],
) -> Outline:
    """Return what this rank holds: parameters, buffers that are saved, and what is sharded. Raise if it cannot move."""
    saved = {id(tensor) for tensor in module.parameters()}
    for owner in module.modules():
        saved |= {id(x) for key, x in owner._buffers.items() if key not in owner._non_persistent_buffers_set}
    kept = {name: x for name, x in tensors.items() if id(x) in saved or isinstance(x, ShardedTensor)}
    without = [name for name, x in kept.items() if x.is_meta]
    if without:
        fix = "call materialize(module), or load a checkpoint, first"
        raise RuleError("tensors without values cannot move", {"on the meta device": some(without)}, fix)
    layouts = {name: ranks.layout_of(x) if isinstance(x, ShardedTensor) else None for name, x in kept.items()}
    parts = {name: TensorPart(tuple(x.shape), x.dtype, layouts[name]) for name, x in kept.items()}
    with_grad = tuple(name for name, x in kept.items() if local_of(x).grad is not None)
    return Outline(parts, with_grad, tuple(optimizer.outline() for optimizer in following))


def job_as_dense(
    module: nn.Module, plan: PlanLike, ranks: RankChange
) -> tuple[ShardingJob, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Return what a plan changes in the module as it is without a plan, and the module's tensors.

    The job has meta tensors in their place; the tensors are by the ids of these. The module is unchanged.
    """
    with _as_dense(module) as originals:
        job = job_of(module, plan, ranks.new)
    own = [path for path, _ in job.rules.sharders] + [each.names[0] for each in job.targets if each.layout is None]
    if own:
        raise PlanError(
            "reshard_module takes specs only, and these are sharded by code of their own",
            {"rules for": ", ".join(own)},
            'write a spec, such as "[tp, -]"',
        )
    return job, originals


def facts_of(
    job: ShardingJob,
    outline: Outline,
    following: Sequence[FollowingOptimizer],
    tensors: Mapping[str, torch.Tensor],
    ranks: RankChange,
) -> dict[str, str]:
    """Return what must be equal on all ranks, as text."""
    own = {name: tensors[name] for name in outline.tensors if name in tensors}
    lines = [f"{name} {tuple(x.shape)} {x.dtype} requires_grad={x.requires_grad}" for name, x in own.items()]
    facts = {"tensors": "\n".join(lines), "new ranks": name_ranks(ranks.new.ranks)}
    facts |= {f"optimizer {i}": optimizer.groups_text() for i, optimizer in enumerate(following)}
    return facts | outline.facts() | {f"plan: {key}": text for key, text in job.facts().items()}


def _places(module: nn.Module) -> Iterator[tuple[str, MutableMapping[str, Any], str, torch.Tensor]]:
    """Yield each place of a tensor: the path of the module, the dict, the key, and the tensor."""
    for path, owner in module.named_modules():
        for place in (owner._parameters, owner._buffers, vars(owner)):
            for key, value in list(place.items()):
                if isinstance(value, torch.Tensor):
                    yield path, place, key, value


@contextmanager
def _as_dense(module: nn.Module) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Show a module without the changes of its plan, and with plain meta tensors; afterwards restore it.

    Yields:
        each meta tensor and the module's own, by the id of the first.
    """
    kept = []
    for owner in module.modules():
        dicts = [(each, dict(each)) for each in vars(owner).values() if isinstance(each, dict)]
        kept.append((owner, type(owner), dict(vars(owner)), dicts))
    made: dict[int, torch.Tensor] = {}
    originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        take_off(module)
        for owner in module.modules():
            owner.__class__ = plain_class(owner)
        for _, place, key, tensor in list(_places(module)):
            if id(tensor) not in made:
                twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                is_param = isinstance(tensor, nn.Parameter)
                twin = made[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if is_param else twin
                originals[id(twin)] = twin, tensor
            place[key] = made[id(tensor)]
        yield originals
    finally:
        for owner, kind, attributes, dicts in kept:
            for each, items in dicts:
                each.clear()
                each.update(items)
            vars(owner).clear()
            vars(owner).update(attributes)
            owner.__class__ = kind
