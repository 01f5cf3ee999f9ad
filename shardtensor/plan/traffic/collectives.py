"""The collectives of one training step of a plan: which, over which axes, of how many bytes, where and why.

What is listed is what runs: tests shard small models and compare call by call. A step is one after the first, in which
ranks learn what to expect of each other.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from shardtensor.layout.explain import say_bytes
from shardtensor.plan.flows.gradients import flows_of
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.resolved import Resolved
from shardtensor.plan.traffic.collective import Collective
from shardtensor.plan.traffic.data_traffic import DataTraffic
from shardtensor.plan.traffic.sharded_layers import Uncounted
from shardtensor.plan.traffic.value_traffic import ValueTraffic


def step_collectives(
    resolved: Resolved,
    *,
    batch: int,
    seq: int,
    dtype: str = "bfloat16",
    training: bool = True,
    clipping: bool = False,
    rank: int | None = None,
) -> tuple[Collective, ...]:
    """List the collectives of one step of a plan, in the order in which they run where that is fixed.

    Those of modules that differ in the number of a layer alone are one, with their count, where the first stands.
    Modules are taken to run in the order of the model, once each. What depends on data, the tokens that
    choose an expert, is listed as if all were chosen as often, and its reason says so. What is not known is not listed,
    and `uncounted` tells where.

    Args:
        resolved: without errors.
        batch: samples of one data rank.
        seq: tokens of a sample.
        dtype: that values are computed in. Parameters and their gradients have their own.
        training: with a backward.
        clipping: with a global norm of the gradients before the optimizer's step.
        rank: whose bytes are told; the first by default. They differ where pieces are uneven.

    Example:
        >>> from shardtensor.plan.loading import load_plan
        >>> from shardtensor.plan.models.model import Model, TensorInfo
        >>> from shardtensor.plan.match.resolve import resolve
        >>> text = 'shard 1\\ninclude "std/styles.shard"\\nmesh (tp = world)\\nfc: rowwise(tp)\\n'
        >>> model = Model((TensorInfo("fc.weight", (8, 4), ("out", "in")),))
        >>> for each in step_collectives(resolve(load_plan(text, world=2), model), batch=1, seq=4):
        ...     print(each)
        all_reduce over tp=2 of 64 B bfloat16: fc: its addends are summed
    """
    flows = flows_of(resolved)
    rank = resolved.plan.axes.mesh.ranks[0] if rank is None else rank
    values = ValueTraffic(flows, batch, seq, dtype, rank)
    data = DataTraffic(resolved, flows.modules, rank)
    found = [*data.forward(), *values.forward()]
    if training:
        found += [*values.backward(), *data.backward()]
        if clipping:
            found += data.clipping()
    return folded(found)


def uncounted(resolved: Resolved) -> tuple[Uncounted, ...]:
    """What `step_collectives` cannot list, each module of alike ones once: where operators that no plan sees compute
    with ShardedTensors. Empty where every value passes by a flow, or from one known layer to the next.

    Example:
        >>> from shardtensor.plan.loading import load_plan
        >>> from shardtensor.plan.models.model import Model, TensorInfo
        >>> from shardtensor.plan.match.resolve import resolve
        >>> model = Model((TensorInfo("fc.weight", (8, 4), ("out", "in")),))
        >>> plan = load_plan("shard 1\\nmesh (tp = world)\\nfc.weight: [tp, -]\\n", world=2)
        >>> for each in uncounted(resolve(plan, model)):
        ...     print(each)
        fc: its result stays cut, [-, -, tp], for operators of the model's own code
    """
    values = ValueTraffic(flows_of(resolved), 1, 1, "float32", resolved.plan.axes.mesh.ranks[0])
    return tuple(dict.fromkeys(attrs.evolve(each, where=starred(each.where)) for each in values.uncounted))


def folded(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Make one of those that differ in the numbers of modules alone."""
    found: dict[Collective, int] = {}
    for each in collectives:
        key = attrs.evolve(each, where=starred(each.where), count=1)
        found[key] = found.get(key, 0) + each.count
    return tuple(attrs.evolve(key, count=count) for key, count in found.items())


def describe(collectives: Iterable[Collective]) -> str:
    """Collectives as lines of a table: when, how often, over which axes, how many bytes, where and why.

    Example:
        >>> from shardtensor.plan.traffic.collective import all_reduce
        >>> print(describe([all_reduce("forward", ("tp",), 4, 512, 2, dtype="bfloat16", where="mlp", why="sum")]))
        forward  1 x all_reduce  tp=4  1.0 KiB  mlp: sum
    """
    rows = [
        (
            each.phase,
            f"{each.count} x {each.kind}",
            f"{'*'.join(each.axes)}={each.group_size}",
            say_bytes(each.bytes),
            f"{each.where or 'the model'}: {each.why}",
        )
        for each in collectives
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    lines = []
    for *cells, last in rows:
        shown = [
            f"{cell:>{w}}" if i == 3 else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join([*shown, last]))
    return "\n".join(lines)
