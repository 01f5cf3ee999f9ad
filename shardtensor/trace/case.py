"""A small model of the configuration of a large one, and the plan for it, so that all ranks run in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
from torch import nn

from shardtensor.errors import NotTraced, ShardTensorError
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.findings.checking import OF_FLOWS, errors_of
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.reading import read_plan
from shardtensor.trace.example import with_noise
from shardtensor.trace.layers import kind_of_layer, lists_of_layers
from shardtensor.trace.small import small_configs, with_layers

MOST = 1 << 26
"""The largest number of parameters of a small model: in float64, it, its gradients and all shards take 2 GB."""

RANKS = 32
"""The largest number of ranks in one process."""

Build = Callable[..., nn.Module]
"""Returns the module of a configuration, on the meta device or, with a second argument, on another one."""


@attrs.frozen(eq=False)
class Case:
    """A module whose step can run on all ranks in this process.

    Attributes:
        plan: read for the module and for few ranks.
        make: returns the module, or the module and its step.
        text: what runs, in words.
    """

    plan: Plan
    make: Callable[[], Any]
    text: str


def small_case(path: Any, plan: Plan, config: Mapping[str, Any], build: Build) -> Case:
    """Return a small model of a configuration under the plan at `path`, with the same numbers of heads and experts.

    Args:
        plan: that of `path` for `config`, the configuration of the large model.
        build: makes the module of a configuration.

    Raises:
        NotTraced: no small model is accepted by the model's code and by the plan.
    """
    why = ""
    for axes in _few_ranks(path, plan, config):
        for small, divisor in small_configs(config, axes.world):
            try:
                module = build(small)
            except ValueError as error:
                why = why or str(error).partition("\n")[0]
                continue
            for keys, layers in few_layers_of(module, small):
                try:
                    module = build(keys)
                    case = read_plan(path, config=keys, world=axes.world, params=axes.params)
                    model = model_info(module)
                    errors = [each for each in errors_of(resolve(case, model)) if each.code not in OF_FLOWS]
                except (ValueError, ShardTensorError) as error:
                    why = why or str(error).partition("\n")[0]
                    continue
                if errors:
                    why = why or errors[0].fault
                elif sum(tensor.numel for tensor in model.tensors) > MOST:
                    why = why or "it is too large for one process"
                else:
                    parts = [f"a {type(module).__name__}", f"with {layers} layers" if layers else ""]
                    parts += [f"and widths divided by {divisor}" if divisor > 1 else "", f"on {case.axes.mesh}"]
                    return Case(case, partial(small_module, build, keys), " ".join(filter(None, parts)))
    raise NotTraced(f"no small model of this configuration runs under the plan: {why}")


def small_module(build: Build, keys: Mapping[str, Any]) -> nn.Module:
    """Return the module of a configuration with values, none of which are zeros that would hide mistakes."""
    return with_noise(build(keys, "cpu"))


def own_case(path: Any, plan: Plan, config: Mapping[str, Any], make: Callable[[], Any]) -> Case:
    """Return the user's module under the plan at `path`, on few ranks.

    Raises:
        NotTraced: it is too large, or its tensors have no values.
    """
    made = make()
    module = made[0] if isinstance(made, tuple) else made
    if any(parameter.is_meta for parameter in module.parameters()):
        raise NotTraced("the module is on the meta device: its tensors have no values")
    case = next(_few_ranks(path, plan, config), plan)
    size = sum(parameter.numel() for parameter in module.parameters())
    if size > MOST or case.world > RANKS:
        raise NotTraced(f"{size:,} parameters on {case.world:,} ranks are too many for one process")
    return Case(case, make, f"{type(module).__name__} on {case.axes.mesh}")


def _few_ranks(path: Any, plan: Plan, config: Mapping[str, Any]) -> Iterator[Plan]:
    """Yield the plan for two ranks along its data axes, or one; with smaller parameters if those are too many ranks."""
    params = dict(plan.params)
    while True:
        sizes = dict(plan.axes.mesh.axes)
        data = plan.axes.leaves(plan.axes.data)
        work, samples = 1, 1
        for name, size in sizes.items():
            work, samples = (work, samples * size) if name in data else (work * size, samples)
        for count in dict.fromkeys((2 if samples % 2 == 0 else samples, samples, 1)):
            if count <= samples and work * count <= RANKS:
                try:
                    yield read_plan(path, config=config, world=work * count, params=params)
                except ShardTensorError:
                    continue
        large = [name for name, value in params.items() if type(value) is int and value > 2 and value % 2 == 0]
        if not large or work <= RANKS:
            return
        name = max(large, key=lambda name: params[name])
        params = {**params, name: params[name] // 2}
        try:
            plan = read_plan(path, config=config, world=plan.world, params=params)
        except ShardTensorError:
            return


def few_layers_of(module: nn.Module, config: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the configuration with the first layers, among them one of each kind and at least two; then with all."""
    counts: dict[int, int] = {}
    for _, layers in lists_of_layers(module):
        values = [value for value in _lists(config) if len(value) == len(layers)]
        kinds = [(kind_of_layer(layer), *(str(each[i]) for each in values)) for i, layer in enumerate(layers)]
        kept = max(2, 1 + max((kinds.index(kind) for kind in kinds), default=0))
        counts[len(layers)] = max(counts.get(len(layers), 0), min(kept, len(layers)))
    few = dict(config)
    for count, kept in counts.items():
        few = with_layers(few, count, kept)
    if few != config:
        yield few, max(counts.values())
    yield dict(config), max(counts, default=0)


def _lists(config: Mapping[Any, Any]) -> Iterator[list[Any]]:
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _lists(value)
        elif isinstance(value, list):
            yield value
