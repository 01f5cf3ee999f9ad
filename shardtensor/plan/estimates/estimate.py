"""Estimate the time of a plan's training step on a machine, from what a rank sends and computes in it.

A run of one rank on meta tensors (`shardtensor.trace`) counts that; this module computes the time. Arithmetic takes its
FLOPs divided by the rate that products reach; the optimizer is bound by memory. Collectives in modules stop the
arithmetic around them. Those along data axes alone, which gather and reduce parameters, overlap with it, so only the
time beyond the arithmetic counts.
"""

from __future__ import annotations

import math
from typing import Literal

import attrs

from shardtensor.cost.profile import Profile, ranks_in_node, seconds
from shardtensor.plan.estimates.memory import RankBytes
from shardtensor.plan.resolved import Resolved


@attrs.frozen
class Batch:
    """The samples of one step.

    Attributes:
        samples: of all ranks together.
        seq: tokens of a sample.
        dtype: in which modules compute.
    """

    samples: int
    seq: int
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """The tokens of all ranks together."""
        return self.samples * self.seq


@attrs.frozen
class Collective:
    """A collective of a rank, with the number of equal calls.

    Attributes:
        axes: of the plan's mesh, along which the ranks of its group differ.
        sent_bytes, received_bytes: by this rank in one call, if reductions and gathers run as rings.
        where: the path of the module whose forward or backward calls it; numbers of layers as ``*``.
        calls: how often it is called in a step.
    """

    phase: Literal["forward", "backward"]
    kind: str
    axes: tuple[str, ...]
    group_size: int
    sent_bytes: int
    received_bytes: int
    where: str
    calls: int = 1


@attrs.frozen
class TracedStep:
    """What one rank does in a training step.

    Attributes:
        flops: of forward and backward; products, attention and convolutions count.
        activation_bytes: that autograd saves from forward to backward, without parameters; and those that it saves to
            recompute one checkpointed module.
        recomputed_flops: those of `flops` that recompute checkpointed modules.
        kept: the bytes that autograd saves in forward, by module, the most first; numbers of layers as ``*``.
        peak_bytes: the most bytes at one time of all tensors that forward and backward make, gradients too.
    """

    collectives: tuple[Collective, ...]
    flops: float
    activation_bytes: int
    recomputed_flops: float = 0.0
    kept: tuple[tuple[str, int], ...] = ()
    peak_bytes: int = 0


@attrs.frozen
class StepSeconds:
    """The parts of a step, in seconds.

    Attributes:
        compute: arithmetic of forward and backward.
        optimizer: reading and writing parameters, gradients and state once.
        inside: collectives that modules wait for.
        beside: collectives along data axes, which overlap with the arithmetic.
    """

    compute: float
    optimizer: float
    inside: float
    beside: float

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return max(self.compute, self.beside) + self.inside + self.optimizer


def data_ranks(resolved: Resolved) -> int:
    """Return the number of parts into which a batch is split."""
    axes = resolved.plan.axes
    return math.prod(axes.size(name) for name in axes.data)


def collective_seconds(resolved: Resolved, collective: Collective, profile: Profile) -> float:
    """Return the estimated seconds of one call of a collective of a step."""
    mesh = resolved.plan.axes.mesh
    leaves = resolved.plan.axes.leaves(collective.axes) or mesh.names  # of a group along no axes, anywhere
    numbers = tuple(mesh.names.index(leaf) for leaf in leaves)
    near = ranks_in_node(mesh.sizes, numbers, profile.ranks_per_node)
    return seconds(collective.kind, collective.received_bytes, collective.group_size, profile, near)


def model_flops_utilisation(step: TracedStep, spent: StepSeconds, profile: Profile, dtype: str) -> float:
    """Return the FLOPs of a step without recomputed ones, as a fraction of what the rank's peak is in its seconds.

    Args:
        dtype: in which modules compute.

    Example:
        >>> from shardtensor.cost.profile import read_profile
        >>> h100, step = read_profile("h100"), TracedStep((), 4e14, 0, recomputed_flops=1e14)
        >>> spent = StepSeconds(compute=step.flops / h100.flops("bfloat16"), optimizer=0.0, inside=0.0, beside=0.0)
        >>> round(model_flops_utilisation(step, spent, h100, "bfloat16") / h100.efficiency, 4)
        0.75
    """
    possible = spent.total * profile.flops(dtype) / profile.efficiency
    return (step.flops - step.recomputed_flops) / possible if possible else 0.0


def step_seconds(resolved: Resolved, step: TracedStep, profile: Profile, dtype: str, held: RankBytes) -> StepSeconds:
    """Return the estimated seconds of a training step.

    Args:
        dtype: in which modules compute.
        held: by the rank, as `rank_bytes` returns it.
    """
    axes = resolved.plan.axes
    data = set(axes.leaves(axes.data))
    inside = beside = 0.0
    for collective in step.collectives:
        spent = collective.calls * collective_seconds(resolved, collective, profile)
        if data.issuperset(axes.leaves(collective.axes)):
            beside += spent
        else:
            inside += spent
    stepped = 2 * (held.parameters + held.optimizer + held.master_weights) + held.gradients
    return StepSeconds(
        compute=step.flops / profile.flops(dtype),
        optimizer=stepped / profile.memory_bytes_per_s,
        inside=inside,
        beside=beside,
    )
