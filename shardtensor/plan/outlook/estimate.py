"""How long a training step of a plan takes on a machine, as far as can be told before it runs.

Arithmetic is FLOPs by the rate that products reach; the optimizer is bound by memory. Collectives in modules stop the
arithmetic around them. Those along data axes alone, which gather and reduce parameters, run beside it, and only what
is longer than the arithmetic shows.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from shardtensor.cost.profile import Profile
from shardtensor.cost.seconds import ranks_in_node, seconds
from shardtensor.plan.outlook.memory import RankBytes, rank_bytes
from shardtensor.plan.outlook.work import Batch, data_ranks, step_flops
from shardtensor.plan.resolved import Resolved
from shardtensor.plan.traffic.collectives import Collective, step_collectives


@attrs.frozen
class StepSeconds:
    """What a step is made of, in seconds.

    Attributes:
        compute: arithmetic of forward and backward.
        optimizer: reading and writing parameters, gradients and state once.
        inside: collectives that modules wait for.
        beside: collectives along data axes, which run beside the arithmetic.
    """

    compute: float
    optimizer: float
    inside: float
    beside: float

    @property
    def total(self) -> float:
        """Of the step."""
        return max(self.compute, self.beside) + self.inside + self.optimizer


def collective_seconds(resolved: Resolved, collective: Collective, profile: Profile) -> float:
    """Estimate one call of a collective of a step."""
    axes = resolved.plan.axes
    leaves = axes.leaves(collective.axes)
    if not set(leaves) <= {*axes.mesh.names}:  # of a layout with a grid of its own, its ranks are anywhere
        leaves = axes.mesh.names
    numbers = tuple(axes.mesh.names.index(leaf) for leaf in leaves)
    near = ranks_in_node(axes.mesh.sizes, numbers, profile.ranks_per_node)
    return seconds(collective.kind, collective.received_bytes, collective.group_size, profile, near)


def step_seconds(
    resolved: Resolved,
    batch: Batch,
    profile: Profile,
    *,
    optimizer: str = "adamw",
    collectives: Iterable[Collective] | None = None,
    held: RankBytes | None = None,
) -> StepSeconds:
    """Estimate a training step.

    Args:
        collectives, held: what `step_collectives` and `rank_bytes` said, where it is known already.
    """
    if collectives is None:
        each = batch.samples // data_ranks(resolved)
        collectives = step_collectives(resolved, batch=each, seq=batch.seq, dtype=batch.dtype)
    if held is None:
        held = rank_bytes(resolved, resolved.plan.axes.mesh.ranks[0], optimizer=optimizer)
    axes = resolved.plan.axes
    data = set(axes.leaves(axes.data))
    inside = beside = 0.0
    for collective in collectives:
        spent = collective.count * collective_seconds(resolved, collective, profile)
        if data.issuperset(axes.leaves(collective.axes)):
            beside += spent
        else:
            inside += spent
    return StepSeconds(
        compute=step_flops(resolved, batch) / profile.flops(batch.dtype),
        optimizer=(2 * held.parameters + held.gradients + 2 * held.optimizer) / profile.memory_bytes_per_s,
        inside=inside,
        beside=beside,
    )
