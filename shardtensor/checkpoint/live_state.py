"""The state of optimizers while a module changes its layouts and ranks: it moves parameter by parameter.

A rank that joins has no state yet. It gets a description of it from the ranks that have it, as `TensorPart` in place of
each sharded tensor; other values are in the description itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import optim
from torch.utils._pytree import tree_leaves

from shardtensor.comm.group import Group
from shardtensor.errors import RuleError, StaleParameterError
from shardtensor.layout.layout import Layout
from shardtensor.optim.named_params import ParamRecord, changed
from shardtensor.optim.sharded_optimizer import ShardedOptimizer
from shardtensor.optim.state import mapped, redistribute_state
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of, wrap


@attrs.frozen
class TensorPart:
    """A tensor that a rank has a part of, without its elements. A layout of None is a plain tensor's; of a value of a
    parameter's state, the parameter's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} {'' if self.layout is None else self.layout}"


@attrs.frozen
class PlainTensor:
    """A tensor that is equal on all ranks, such as a step count: its value, on the CPU."""

    value: torch.Tensor
    is_cuda: bool


@attrs.frozen
class StateOutline:
    """The state of one optimizer: the options of its groups, and the values by the names of parameters."""

    options: tuple[dict[str, Any], ...]
    values: Mapping[str, Mapping[str, Any]]

    def __str__(self) -> str:
        entries = [(f"{name}.{key}", each) for name, values in self.values.items() for key, each in values.items()]
        return "\n".join(f"{name} {each}" if isinstance(each, TensorPart) else name for name, each in sorted(entries))


class FollowingOptimizer:
    """An optimizer and those of a module's parameters that it steps.

    Args:
        optimizer: a `ShardedOptimizer`, or any torch optimizer over the parameters themselves.
        names: from the ids of the module's tensors to their names.

    Raises:
        RuleError: it is of a class whose state cannot move with its parameters.
        StaleParameterError: it steps no parameter of the module, or one that was replaced.
    """

    def __init__(self, optimizer: optim.Optimizer, names: Mapping[int, str]) -> None:
        kind = type(optimizer).__name__
        params = [param for group in getattr(optimizer, "param_groups", ()) for param in group["params"]]
        is_partitioned = "ZeroRedundancyOptimizer" in {cls.__name__ for cls in type(optimizer).__mro__}  # torch's, too
        if not isinstance(optimizer, optim.Optimizer) or is_partitioned:
            raise RuleError(
                f"the state of a {kind} does not move with its parameters",
                fix="leave it out, and load its state_dict() into a ShardedOptimizer that is made afterwards",
            )
        if not any(id(param) in names for param in params):
            raise StaleParameterError(
                f"the {kind} steps no parameter of this module",
                {"its parameters": len(params)},
                "pass the optimizers that were made from parameters of this module",
            )
        if isinstance(optimizer, ShardedOptimizer):
            optimizer._sync()
            optimizer._flat_groups.split_all()
        own = optimizer._records if isinstance(optimizer, ShardedOptimizer) else {}
        self.optimizer, self.names = optimizer, names
        self.records: dict[int, ParamRecord] = {
            id(p): own[id(p)] if id(p) in own else ParamRecord.of(names[id(p)], p) for p in params if id(p) in names
        }

    def outline(self) -> StateOutline:
        """Return what this rank's state has, for the ranks that have none."""
        groups = self.optimizer.param_groups
        options = tuple({k: x for k, x in group.items() if k not in ("params", "param_names")} for group in groups)
        values = {}
        for key, record in self.records.items():
            if record.param in self.optimizer.state:
                own = dict(self.optimizer.state[record.param])
                values[self.names[key]] = {name: _outlined(value, record) for name, value in own.items()}
        return StateOutline(options, values)

    def groups_text(self) -> str:
        """Return the class of the optimizer and the names in its groups."""
        groups = [
            [self.names.get(id(p), "(another)") for p in group["params"]] for group in self.optimizer.param_groups
        ]
        return f"{type(self.optimizer).__name__} of " + " | ".join(map(", ".join, groups))

    def join(self, outline: StateOutline, group: Group) -> None:
        """Take the options and the state of the ranks of `group`, of which this rank is none: its parts are empty."""
        for own, options in zip(self.optimizer.param_groups, outline.options, strict=True):
            own.update(options)
        for key, record in self.records.items():
            self.optimizer.state.pop(record.param, None)
            record.renew()
            values = outline.values.get(self.names[key])
            if values is None:
                continue
            optimizer, on = self.optimizer, record.param
            made = {name: _empty(value, record, group) for name, value in values.items()}
            state: Any = optimizer.state
            if isinstance(optimizer, ShardedOptimizer):
                state = optimizer._inner.state
                if optimizer._on_leaves:
                    on, made = record.leaf, {name: local_of(value) for name, value in made.items()}
            state[on] = made

    def follow(self, param: torch.Tensor) -> None:
        """Move the state of a parameter that has changed. Collective if its layout changed."""
        record = self.records.get(id(param))
        if record is None:
            return
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer._move_state(record)
        else:
            redistribute_state(self.optimizer.state, record)

    def relabel(self, param: torch.Tensor) -> None:
        """Give the state of a parameter its layout and group, which are new names of where its elements are."""
        record = self.records.get(id(param))
        if record is None:
            return
        was = record.renew()
        assert record.layout is not None and record.group is not None, "it is sharded"
        for value in tree_leaves(getattr(self.optimizer, "_inner", self.optimizer).state.get(param)):
            if isinstance(value, ShardedTensor) and value._layout == was.layout:
                value._layout, value._group, value._spec = record.layout, record.group, None

    def finish(self) -> None:
        """Follow parameters that `fully_shard` has changed since, and step the parameters as they are now."""
        for record in changed(self.records.values()):
            self.follow(record.param)
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer._list_leaves()


def _outlined(value: Any, record: ParamRecord) -> Any:
    if isinstance(value, list | tuple | dict):
        return mapped(value, lambda item, _: _outlined(item, record))
    if isinstance(value, ShardedTensor):
        return TensorPart(tuple(value.shape), value.dtype, None if value._layout == record.layout else value._layout)
    if not isinstance(value, torch.Tensor):
        return value
    if record.layout is None and value.dim() and value.shape == record.param.shape:
        return TensorPart(tuple(value.shape), value.dtype, None)
    return PlainTensor(value.detach().cpu(), value.is_cuda)


def _empty(value: Any, record: ParamRecord, group: Group) -> Any:
    """Return a value of the outline as a rank outside of `group` has it."""
    if isinstance(value, list | tuple | dict):
        return mapped(value, lambda item, _: _empty(item, record, group))
    if isinstance(value, PlainTensor):
        return value.value.to(record.device if value.is_cuda else "cpu", copy=True)
    if not isinstance(value, TensorPart):
        return value
    layout = record.layout if value.layout is None else value.layout
    assert layout is not None, "a parameter of a rank outside is sharded"
    return wrap(
        torch.empty(layout.local_shape(group.rank), dtype=value.dtype, device=record.device), layout, None, group
    )
