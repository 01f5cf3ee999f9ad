"""Optimizer state: plain tensors for leaves in the inner optimizer, ShardedTensors for parameters outside.

A state tensor with the shape of a leaf is the local tensor of one with the shape of the parameter. A 0-d tensor (a step
count) is equal on every rank and stays plain.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import optim

from shardtensor.comm.group import Group
from shardtensor.layout.layout import Layout, replicated
from shardtensor.optim.flat_groups import FlatGroups
from shardtensor.optim.named_params import ParamRecord
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap


def sharded_value(value: Any, record: ParamRecord) -> Any:
    """Convert a value of a leaf's state to its parameter's state: a local tensor becomes a ShardedTensor over it."""
    is_local = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.dim() > 0
    if record.layout is None or record.group is None or not is_local or value.shape != record.leaf.shape:
        return value
    return wrap(value, record.layout, None, record.group)


@torch.no_grad()
def local_value(value: Any, record: ParamRecord, key: str, options: Mapping[str, Any], *, copies: bool = True) -> Any:
    """Convert a value of a parameter's state to its leaf's state, with the leaf's layout, device and dtype.

    It is a copy; without `copies`, the value itself if it has these already. Collective if `value` is a ShardedTensor
    with another layout. `options` are those of the parameter's group.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if is_scalar(value, record, key):
        return scalar_value(value, record, key, options)
    leaf = record.leaf
    if record.layout is not None:
        assert record.group is not None
        value = local_as(value, record.layout, record.group)
    elif isinstance(value, ShardedTensor):
        value = value.full_tensor()
    dtype = leaf.dtype if leaf.is_floating_point() or leaf.is_complex() else value.dtype
    value = value.detach()
    is_right = (value.dtype, value.device, value.shape) == (dtype, leaf.device, leaf.shape)
    if not copies and is_right and value.stride() == leaf.stride():
        return value
    return torch.empty_like(leaf, dtype=dtype, requires_grad=False).copy_(value)


_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of torch's optimizers for 0-d tensors that are one number for the whole parameter."""


def is_scalar(value: torch.Tensor, record: ParamRecord, key: str) -> bool:
    """Whether a state tensor is one number for the whole parameter; for a 0-d parameter its key decides."""
    if value.dim() or record.param.dim() or record.layout is None:
        return value.dim() == 0
    return not isinstance(value, ShardedTensor) and key in _SCALARS


def scalar_value(value: torch.Tensor, record: ParamRecord, key: str, options: Mapping[str, Any]) -> torch.Tensor:
    """Return a copy of a number for the whole parameter, on the device that the optimizer needs."""
    if isinstance(value, ShardedTensor):
        value = value.full_tensor()
    value = value.detach()
    if key != "step":
        return value.to(record.device, copy=True)
    if options.get("capturable") or options.get("fused"):
        return value.to(record.device, torch.float32, copy=True)
    return value.to("cpu", copy=True)


def redistribute_state(state: MutableMapping[Any, Any], record: ParamRecord) -> None:
    """Adapt the state of a parameter that has changed, in an optimizer that steps the parameter itself; renew the
    record. Collective if its layout changed."""
    was, own = record.renew(), state.get(record.param)
    if own:
        own.update({key: redistributed_value(value, record, was) for key, value in own.items()})


def redistributed_value(value: Any, record: ParamRecord, was: ParamRecord) -> Any:
    """Return a value of a parameter's state, adapted to the parameter's new layout, device and dtype."""
    if isinstance(value, list | tuple | dict):
        return mapped(value, lambda item, _: redistributed_value(item, record, was))
    is_sharded = isinstance(value, ShardedTensor)
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and not is_sharded):
        return value
    dtype = record.dtype if value.dtype == was.dtype else value.dtype
    layout, group = _new_place(value, record, was)
    if layout is None or group is None:
        return (value.full_tensor() if is_sharded else value).to(record.device, dtype)  # type: ignore[attr-defined]
    local = local_as(value, layout, group)
    if local.untyped_storage().nbytes() != local.numel() * local.element_size():
        local = local.clone(memory_format=torch.contiguous_format)  # a view would keep the whole
    return wrap(local.to(record.device, dtype), layout, None, group)


def _new_place(value: torch.Tensor, record: ParamRecord, was: ParamRecord) -> tuple[Layout | None, Group | None]:
    """Return the new layout and group of a state tensor, None for a plain one: those of the parameter if it had the
    parameter's layout; else its own, or replicated if the parameter is on other ranks now."""
    if not isinstance(value, ShardedTensor):
        is_like = was.layout is None and value.shape == record.param.shape
        return (record.layout, record.group) if is_like else (None, None)
    if record.group is None or value._layout == was.layout:
        return record.layout, record.group
    if set(value._group.ranks) == set(record.group.ranks):
        return value._layout, value._group
    return replicated(value._layout.shape, record.group.ranks), record.group


def copied_value(value: Any, record: ParamRecord, key: str, options: Mapping[str, Any], *, copies: bool = True) -> Any:
    """Return a loaded value for an optimizer that steps ShardedTensors, in the parameter's layout: a copy, or without
    `copies` the value itself if it is on the parameter's device."""
    if isinstance(value, list | tuple | dict):
        return mapped(value, lambda item, own: copied_value(item, record, own, options, copies=copies), key)
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if is_scalar(value, record, key):
        return scalar_value(value, record, key, options)
    if record.layout is not None and value.shape == record.param.shape:
        assert record.group is not None
        local = local_as(value, record.layout, record.group)
        return wrap(local.detach().to(record.device, copy=copies), record.layout, None, record.group)
    if isinstance(value, ShardedTensor):
        if value._group is record.group:
            return wrap(value._local.detach().clone(), value._layout, None, value._group)
        value = value.full_tensor()
    return value.detach().to(record.device, copy=copies)


def mapped(value: Any, function: Callable[[Any, str], Any], key: str = "") -> Any:
    """Return a list, tuple or dict with `function` of each item and its key; items of lists have the given key."""
    if isinstance(value, dict):
        return {own: function(item, own) for own, item in value.items()}
    return type(value)(function(item, key) for item in value)


def start_state(
    optimizer: optim.Optimizer, make: Callable[[list[dict[str, Any]]], optim.Optimizer], group: dict[str, Any]
) -> None:
    """Make the state of new leaves for classes that make it in their constructor (Adagrad), which `make` calls."""
    if not group["params"]:
        return
    fresh = make([dict(group)])
    for leaf in group["params"]:
        if leaf in fresh.state:
            optimizer.state[leaf] = fresh.state[leaf]


class ParamState(MutableMapping[Any, Any]):
    """A live view of the state of leaves, keyed by the user's parameters; `records` are by their ids."""

    def __init__(self, flats: FlatGroups, records: Mapping[int, ParamRecord]) -> None:
        self._flats, self._records = flats, records

    def _leaf(self, param: Any) -> Any:
        record = self._records.get(id(param))
        return param if record is None else record.leaf

    def __getitem__(self, param: Any) -> Any:
        if param not in self:
            self._flats.state[self._leaf(param)]  # raises, or makes an entry if it is a defaultdict
        record = self._records.get(id(param))
        return self._flats.state[param] if record is None else ParamStateEntry(self._flats, record)

    def __setitem__(self, param: Any, value: Any) -> None:
        record = self._records.get(id(param))
        if record is not None:
            value = {key: local_value(each, record, key, {}) for key, each in value.items()}
        leaf = self._leaf(param)
        self._flats.split_state(leaf)[leaf] = value

    def __delitem__(self, param: Any) -> None:
        leaf = self._leaf(param)
        del self._flats.split_state(leaf)[leaf]

    def __contains__(self, param: Any) -> bool:
        return self._flats.has_state(self._leaf(param))

    def __iter__(self) -> Iterator[Any]:
        params = {id(record.leaf): record.param for record in self._records.values()}
        return iter([params.get(id(key), key) for key in self._flats.state_keys()])

    def __len__(self) -> int:
        return len(self._flats.state_keys())

    def __repr__(self) -> str:
        return repr(
            {self._records[id(key)].name if id(key) in self._records else key: value for key, value in self.items()}
        )


class ParamStateEntry(MutableMapping[str, Any]):
    """A live view of the state of one parameter, with ShardedTensors over the local tensors."""

    def __init__(self, flats: FlatGroups, record: ParamRecord) -> None:
        self._flats, self._record = flats, record

    def __getitem__(self, key: str) -> Any:
        return sharded_value(self._flats.state_of(self._record.leaf)[key], self._record)

    def __setitem__(self, key: str, value: Any) -> None:
        record = self._record
        if isinstance(value, torch.Tensor) and value.dim() > 0 and record.layout is not None:
            value = local_value(value, record, key, {})
        self._flats.split_state(record.leaf)[record.leaf][key] = value

    def __delitem__(self, key: str) -> None:
        del self._flats.split_state(self._record.leaf)[self._record.leaf][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._flats.state_of(self._record.leaf))

    def __len__(self) -> int:
        return len(self._flats.state_of(self._record.leaf))

    def __repr__(self) -> str:
        return repr(dict(self))
