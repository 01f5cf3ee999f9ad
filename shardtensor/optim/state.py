"""Optimizer state: as the inner optimizer keeps it for leaves, as people see it for sharded parameters, and between.

A state tensor of the leaf's shape is this rank's part of one of the parameter's shape. A 0-d tensor (step counts) is
equal on every rank and stays plain.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from shardtensor.optim.named_params import Held
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap


def shown(value: Any, held: Held) -> Any:
    """A value of a leaf's state as people see it: a ShardedTensor over the same bytes where it is a part."""
    if (
        held.layout is not None
        and isinstance(value, torch.Tensor)
        and not isinstance(value, ShardedTensor)
        and value.dim() > 0
        and value.shape == held.leaf.shape
    ):
        assert held.group is not None
        return wrap(value, held.layout, None, held.group)
    return value


@torch.no_grad()
def fitted(value: Any, held: Held, key: str, options: Mapping[str, Any]) -> Any:
    """A value of a parameter's state as its leaf's state keeps it: own bytes, the leaf's layout, device and dtype.

    Collective when `value` is a ShardedTensor of another layout.

    Args:
        value: a ShardedTensor of any layout, a whole tensor, a number.
        key: its name in the state; ``step`` stays on the CPU unless the optimizer is fused or capturable.
        options: the hyperparameters of the parameter's group.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if is_number(value, held, key):
        return number(value, held, key, options)
    leaf = held.leaf
    if held.layout is not None:
        assert held.group is not None
        value = local_as(value, held.layout, held.group)
    elif isinstance(value, ShardedTensor):
        value = value.full_tensor()
    dtype = leaf.dtype if leaf.is_floating_point() or leaf.is_complex() else value.dtype
    return torch.empty_like(leaf, dtype=dtype, requires_grad=False).copy_(value.detach())


_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys under which torch's optimizers keep 0-d tensors that are no part of the parameter."""


def is_number(value: torch.Tensor, held: Held, key: str) -> bool:
    """Whether a state tensor is one number for the whole parameter; of a 0-d parameter, its name tells."""
    if value.dim() or held.param.dim() or held.layout is None:
        return value.dim() == 0
    return not isinstance(value, ShardedTensor) and key in _NUMBERS


def number(value: torch.Tensor, held: Held, key: str, options: Mapping[str, Any]) -> torch.Tensor:
    """A number for the whole parameter, as a tensor of its own where the optimizer wants it."""
    if isinstance(value, ShardedTensor):
        value = value.full_tensor()
    value = value.detach()
    if key != "step":
        return value.to(held.device, copy=True)
    if options.get("capturable") or options.get("fused"):
        return value.to(held.device, torch.float32, copy=True)
    return value.to("cpu", copy=True)


def moved(value: Any, held: Held, was: Held) -> Any:
    """A value of a ShardedTensor's own state after its parameter got another layout, device or dtype."""
    if isinstance(value, list | tuple):
        return type(value)(moved(item, held, was) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, held, was) for key, item in value.items()}
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    dtype = held.dtype if value.dtype == was.dtype else value.dtype
    if not isinstance(value, ShardedTensor):
        return value.to(held.device, dtype)
    layout, group = value._layout, value._group
    if layout == was.layout and held.layout is not None and held.group is not None:
        layout, group = held.layout, held.group
    return wrap(local_as(value, layout, group).to(held.device, dtype), layout, None, group)


def adopted(value: Any, held: Held, key: str = "") -> Any:
    """A loaded value as the state of a parameter that is stepped whole: own bytes, laid out as the parameter is."""
    if isinstance(value, list | tuple):
        return type(value)(adopted(item, held, key) for item in value)
    if isinstance(value, dict):
        return {key: adopted(item, held, key) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if is_number(value, held, key):
        return (value.full_tensor() if isinstance(value, ShardedTensor) else value).detach().clone()
    if held.layout is not None and value.shape == held.param.shape:
        assert held.group is not None
        local = local_as(value, held.layout, held.group)
        return wrap(local.detach().to(held.device, copy=True), held.layout, None, held.group)
    if isinstance(value, ShardedTensor):
        if value._group is held.group:
            return wrap(value._local.detach().clone(), value._layout, None, value._group)
        value = value.full_tensor()
    return value.detach().to(held.device, copy=True)


class ShownState(MutableMapping[Any, Any]):
    """The state of leaves, keyed by the parameters that people see; a live view.

    Args:
        state: keyed by leaves.
        held: every parameter by the id of what people see; the optimizer keeps it up to date.
    """

    def __init__(self, state: MutableMapping[Any, Any], held: Mapping[int, Held]) -> None:
        self._state, self._held = state, held

    def _key(self, param: Any) -> Any:
        held = self._held.get(id(param))
        return param if held is None else held.leaf

    def __getitem__(self, param: Any) -> Any:
        held = self._held.get(id(param))
        return self._state[param] if held is None else ShownEntry(self._state[held.leaf], held)

    def __setitem__(self, param: Any, value: Any) -> None:
        held = self._held.get(id(param))
        self._state[self._key(param)] = value if held is None else {k: fitted(v, held, k, {}) for k, v in value.items()}

    def __delitem__(self, param: Any) -> None:
        del self._state[self._key(param)]

    def __contains__(self, param: Any) -> bool:
        return self._key(param) in self._state

    def __iter__(self) -> Iterator[Any]:
        params = {id(held.leaf): held.param for held in self._held.values()}
        return iter([params.get(id(key), key) for key in self._state])

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return repr({self._held[id(key)].name if id(key) in self._held else key: value for key, value in self.items()})


class ShownEntry(MutableMapping[str, Any]):
    """The state of one leaf, its tensors as ShardedTensors over the same bytes; a live view."""

    def __init__(self, state: MutableMapping[str, Any], held: Held) -> None:
        self._state, self._held = state, held

    def __getitem__(self, key: str) -> Any:
        return shown(self._state[key], self._held)

    def __setitem__(self, key: str, value: Any) -> None:
        held = self._held
        is_whole = isinstance(value, torch.Tensor) and value.dim() > 0 and held.layout is not None
        self._state[key] = fitted(value, held, key, {}) if is_whole else value

    def __delitem__(self, key: str) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return repr(dict(self))
