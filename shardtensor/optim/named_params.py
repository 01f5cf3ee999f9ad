"""Named parameters: of a module, from the arguments of an optimizer, and their records in an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import StaleParameterError, some
from shardtensor.layout.layout import Layout
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.define(eq=False)
class ParamRecord:
    """A parameter of an optimizer, as it was when its state was made.

    Attributes:
        name: its FQN.
        param: the user's parameter, a ShardedTensor or a plain tensor.
        leaf: its local tensor, which is the leaf for autograd; for a plain parameter, the parameter.
        layout, group: of a sharded parameter; None for a plain one.
        dtype, device: of `leaf`.
    """

    name: str
    param: torch.Tensor
    leaf: torch.Tensor
    layout: Layout | None
    group: Group | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, name: str, param: torch.Tensor) -> ParamRecord:
        """Return the record of `param` as it is now."""
        if isinstance(param, ShardedTensor):
            local = param._local
            return cls(name, param, local, param._layout, param._group, local.dtype, local.device)
        return cls(name, param, param, None, None, param.dtype, param.device)

    def renew(self) -> ParamRecord:
        """Read the parameter as it is now; return the record as it was."""
        was, now = attrs.evolve(self), ParamRecord.of(self.name, self.param)
        self.leaf, self.layout, self.group = now.leaf, now.layout, now.group
        self.dtype, self.device = now.dtype, now.device
        return was

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamRecord:
        return attrs.evolve(self, param=copy.deepcopy(self.param, memo), leaf=copy.deepcopy(self.leaf, memo))

    @property
    def now(self) -> torch.Tensor:
        """The current local tensor of the parameter."""
        return self.param._local if isinstance(self.param, ShardedTensor) else self.param


def changed(records: Iterable[ParamRecord]) -> list[ParamRecord]:
    """Return the records whose parameter has another leaf, layout, device or dtype now; takes 0.2 microseconds each."""
    found = []
    for h in records:
        leaf, param = h.leaf, h.param
        if isinstance(param, ShardedTensor):
            if param._local is not leaf or param._layout is not h.layout:
                found.append(h)
                continue
        elif param is not leaf:  # it was sharded
            found.append(h)
            continue
        if leaf.dtype is not h.dtype or leaf.device != h.device:
            found.append(h)
    return found


def record_groups(records: Mapping[Any, ParamRecord]) -> list[Group | None]:
    """Return the group of each parameter, None for a plain one."""
    return [record.group for record in records.values()]


def read_groups(params: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer's argument; their ``params`` are lists of (name, tensor)."""
    if not isinstance(params, nn.Module | Mapping | torch.Tensor | set):
        params = list(params)
        if params and all(isinstance(group, dict) and "params" in group for group in params):
            return [{**group, "params": read_pairs(group["params"])} for group in params]
    pairs = read_pairs(params)
    if not pairs:
        raise ValueError("optimizer got an empty parameter list")
    return [{"params": pairs}]


def read_pairs(params: Any) -> list[tuple[str, torch.Tensor]]:
    """Return a list of (name, tensor) from a module, a mapping or pairs."""
    if isinstance(params, nn.Module):
        return list(named_params_with_sharded_tensor(params))
    if isinstance(params, set):
        raise TypeError("parameters in a set have no order that all ranks share; use a dict or a list of pairs")
    pairs = [] if isinstance(params, torch.Tensor) else list(params.items() if isinstance(params, Mapping) else params)
    if isinstance(params, torch.Tensor) or not all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise TypeError(
            "ShardedOptimizer needs the name of every parameter, for its state dict: pass module.named_parameters(), a "
            "dict of them, or the module; in a group, {'params': <one of these>, ...}"
        )
    for name, param in pairs:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f'parameter "{name}" is a {type(param).__name__}, not a tensor')
    return pairs


class StalenessCheck:
    """Checks that a module still has the parameters that its optimizer steps, and the submodules that hold them."""

    def __init__(self, module: nn.Module, records: Iterable[ParamRecord]) -> None:
        self._names = [record.name for record in records]
        paths = {name[:i] for name in self._names for i, letter in enumerate(name) if letter == "."}
        self._places: list[tuple[dict[str, Any], str, Any, str]] = []
        for path in [*self._names, *paths]:
            owner_name, _, name = path.rpartition(".")
            owner = module.get_submodule(owner_name)
            places: tuple[dict[str, Any], ...] = (owner._parameters, owner._modules, vars(owner))
            place = next(place for place in places if name in place)
            self._places.append((place, name, place[name], path))

    def check(self) -> None:
        """Raise StaleParameterError if the module has other tensors under some names."""
        stale = {path for place, key, value, path in self._places if place.get(key) is not value}
        if stale:
            prefixes = tuple(f"{path}." for path in stale)
            names = [name for name in self._names if name in stale or name.startswith(prefixes)]
            raise stale_error(names, "the module holds other tensors under these names")


def stale_error(names: Iterable[str], why: str) -> StaleParameterError:
    """Return the error for parameters that were replaced."""
    return StaleParameterError(
        "the optimizer holds parameters that were replaced; nothing was stepped",
        {"parameters": some(names), "because": why},
        "make a new ShardedOptimizer for them and load the old one's state_dict() into it",
    )


def params_text(group: Mapping[str, Any]) -> str:
    """Return the names, global shapes and dtypes of a group's parameters, one for each line."""
    return "\n".join(f"{name} {tuple(param.shape)} {param.dtype}" for name, param in group["params"]) or "(none)"


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter of a module, then every ShardedTensor that it holds as a plain attribute.

    Args:
        module: any module.
        prefix: added before every name, with a dot.
        recurse: include submodules.

    Yields:
        name and tensor; parameters in the order of `named_parameters`; a tensor with two names once.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> [name for name, _ in named_params_with_sharded_tensor(module)]
        ['weight', 'bias']
    """
    seen = set()
    for name, param in module.named_parameters(prefix=prefix, recurse=recurse):
        seen.add(id(param))
        yield name, param
    for owner_name, owner in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(owner).items():
            if isinstance(value, ShardedTensor) and id(value) not in seen:
                seen.add(id(value))
                yield (f"{owner_name}.{name}" if owner_name else name), value
