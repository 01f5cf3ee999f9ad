"""`ShardedOptimizer`: any torch optimizer over named parameters, sharded and plain.

Users see sharded parameters in ``param_groups`` and ``state``. Inside, elementwise classes step local tensors, at the
speed of plain tensors and without communication; those that are adjacent in memory, as in fully sharded modules, are
stepped as one. All other classes step the ShardedTensors themselves, so that norms and matrix products are global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from shardtensor.comm.agree import agree_in_groups, call_text
from shardtensor.comm.untraced import untraced
from shardtensor.errors import LayoutError, ShardTensorError
from shardtensor.optim import state_dict as saved
from shardtensor.optim.flat_groups import FlatGroups, step_without_hooks
from shardtensor.optim.named_params import (
    ParamRecord,
    StalenessCheck,
    changed,
    params_text,
    read_groups,
    read_pairs,
    record_groups,
    stale_error,
)
from shardtensor.optim.state import (
    ParamState,
    copied_value,
    local_value,
    redistribute_state,
    sharded_value,
    start_state,
)
from shardtensor.optim.update_units import update_unit
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of

NamedParams = nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]
NamedGroups = list[tuple[dict[str, Any], list[torch.Tensor]]]


class ShardedOptimizer(optim.Optimizer):
    """Step named parameters, any mix of sharded and plain ones, with any `torch.optim` class.

    The result is that of the class on full tensors. Schedulers, GradScaler, hooks and `add_param_group` work as with a
    torch optimizer; a changed hyperparameter in ``param_groups`` is used from the next step on. A parameter with two
    names is stepped once, with the first name.

    Before each step it checks its parameters. If a local tensor, a device, a dtype or a layout has changed, it moves
    the state with it. If it was made from a module, it also raises if parameters were *replaced* (``assign=True``,
    ``to_empty``, ``module.weight = ...``); from names and tensors alone, neither it nor torch's can detect that.

    Args:
        named_params: a module, a dict, ``module.named_parameters()``, or groups: a list of dicts with one of these
            under ``params`` and hyperparameters beside it.
        optimizer_class: the class, or a `functools.partial` of it.
        args, kwargs: its further arguments.

    Attributes:
        named_params: name -> parameter.
        param_groups: the groups, with the parameters as given.
        state: keyed by the parameters as given; tensors of a sharded parameter's state are ShardedTensors.

    Raises:
        DisagreementError: names, shapes, dtypes, classes or options differ between ranks. All ranks of the parameters'
            group create it together. For elementwise classes no other method is collective, except a load that has to
            change layouts.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = ShardedOptimizer({"weight": weight}, torch.optim.SGD, lr=0.5)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.tolist(), optimizer.state_dict()["param_groups"][0]["params"]
        ([0.5, 0.5], ['weight'])
    """

    def __init__(
        self, named_params: NamedParams, optimizer_class: Callable[..., optim.Optimizer], *args: Any, **kwargs: Any
    ) -> None:
        groups = read_groups(named_params)
        self._constructor = (optimizer_class, args, kwargs)
        self._on_leaves = update_unit(optimizer_class) == "element"
        self._records: dict[int, ParamRecord] = {}
        named, self._records, self._aliases, fault = self._read_records(groups)
        options = call_text(optimizer_class, args, kwargs)
        facts = {"options": options, "parameters": "\n".join(map(params_text, groups))}
        agree_in_groups(record_groups(self._records), "ShardedOptimizer", facts, fault)
        self._inner = self._make([{**group, "params": self._inner_params(params)} for group, params in named])
        self._is_built = False
        super().__init__(
            [{**own, "params": params} for own, (_, params) in zip(self._inner.param_groups, named, strict=True)],
            self._inner.defaults,
        )
        self._is_built = True
        self.state: MutableMapping[Any, Any]  # type: ignore[assignment]
        self._flat_groups = FlatGroups(self._inner)
        if self._on_leaves:
            self.state = ParamState(self._flat_groups, self._records)
        else:
            self.state, self.param_groups = self._inner.state, self._inner.param_groups
        module = named_params if isinstance(named_params, nn.Module) else None
        self._staleness = None if module is None else StalenessCheck(module, self._records.values())

    def _make(self, groups: list[dict[str, Any]]) -> optim.Optimizer:
        optimizer_class, args, kwargs = self._constructor
        return optimizer_class(groups, *args, **kwargs)

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def named_params(self) -> dict[str, torch.Tensor]:
        """The parameters by name, each once."""
        return {record.name: record.param for record in self._records.values()}

    def _read_records(
        self, groups: list[dict[str, Any]]
    ) -> tuple[NamedGroups, dict[int, ParamRecord], dict[str, str], ShardTensorError | None]:
        """Return each group's options and parameters, without ties; the new records and tied names; and the error."""
        records: dict[int, ParamRecord] = {}
        aliases: dict[str, str] = {}
        names = self.named_params
        leaves = {id(record.leaf): record for record in self._records.values()}
        named: NamedGroups = []
        fault: ShardTensorError | None = None
        for group in groups:
            params: list[torch.Tensor] = []
            for name, param in group["params"]:
                record = ParamRecord.of(name, param)
                if names.get(name, param) is not param:
                    fault = fault or LayoutError(f'two parameters are called "{name}"', fix="give each its own name")
                if not (record.leaf.is_leaf or record.leaf.retains_grad or self._constructor[2].get("differentiable")):
                    fault = fault or LayoutError(
                        f'parameter "{name}" is the result of an operation, not a leaf', fix="detach() it first"
                    )
                names[name] = param
                first = leaves.setdefault(id(record.leaf), record)
                if first is not record:
                    aliases[name] = first.name
                    continue
                records[id(param)] = record
                params.append(param)
            named.append(({key: value for key, value in group.items() if key != "params"}, params))
        return named, records, aliases, fault

    def _inner_params(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that the inner optimizer steps: the leaves of parameters, or the parameters."""
        return [local_of(param) if self._on_leaves else param for param in params]

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add named parameters with hyperparameters of their own. All ranks of the parameters' group call it.

        Args:
            param_group: ``{"params": <a dict, pairs or a module>, "lr": ...}``; missing keys have the defaults.
        """
        if not self._is_built:  # torch's constructor adds the first groups
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        group = {**param_group, "params": read_pairs(param_group["params"])}
        [(options, params)], records, again, fault = self._read_records([group])
        if again and fault is None:
            fault = LayoutError(f"some parameters are in another group already: {', '.join(sorted(again))}")
        facts = {"options": call_text(None, (), options), "parameters": params_text(group)}
        agree_in_groups(record_groups(self._records | records), "add_param_group", facts, fault)
        self._flat_groups.split_all()
        self._inner.add_param_group({**options, "params": self._inner_params(params)})
        self._records.update(records)
        if self._on_leaves:
            own = self._inner.param_groups[-1]
            start_state(self._inner, self._make, own)
            super().add_param_group({**own, "params": params})

    # -- the step ---------------------------------------------------------------------------------------------------

    @untraced("an optimizer step cannot be compiled: compile the forward")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return the closure's loss, or None.

        Sends nothing for elementwise classes; for others all ranks of the parameters' group call it.

        Raises:
            StaleParameterError: the module has other tensors under some names; nothing was stepped.
        """
        if not self._on_leaves:
            self._sync()
            return step_without_hooks(self._inner, *(() if closure is None else (closure,)))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._sync()
        self._flat_groups.step(self.param_groups, partial(step_without_hooks, self._inner))
        for group in self._inner.param_groups:
            if group.get("fused"):  # its kernels do not increment versions, which autograd and `fully_shard` read
                torch._C._increment_version(group["params"])
        return loss

    def check_not_replaced(self) -> None:
        """Raise StaleParameterError if the module has other tensors under the names of these parameters."""
        if self._staleness is not None:
            self._staleness.check()

    def _sync(self) -> None:
        """Update leaves and state to the parameters as they are now."""
        self.check_not_replaced()
        found = changed(self._records.values())
        if not found:
            return
        non_leaf = [record.name for record in found if not (record.now.is_leaf or self.defaults.get("differentiable"))]
        if non_leaf:
            raise stale_error(non_leaf, "their shards were set to results of operations, which are no leaves")
        self._flat_groups.split_all()
        for record in found:
            self._move_state(record)
        self._list_leaves()

    @torch.no_grad()
    def _move_state(self, record: ParamRecord) -> None:
        """Update the state of one parameter that has changed. Collective if its layout changed."""
        if not self._on_leaves:
            redistribute_state(self._inner.state, record)
            return
        was, now = record.renew(), record
        if was.leaf in self._inner.state:
            state = self._inner.state.pop(was.leaf)
            if (now.dtype, now.device) != (was.dtype, was.device) or now.layout != was.layout:
                options = next((g for g in self.param_groups if any(p is record.param for p in g["params"])), {})
                state = {key: local_value(sharded_value(value, was), now, key, options) for key, value in state.items()}
            self._inner.state[now.leaf] = state

    def _list_leaves(self) -> None:
        """Give the inner optimizer the leaves that the parameters have now."""
        if self._on_leaves:
            for group, own in zip(self.param_groups, self._inner.param_groups, strict=True):
                own["params"][:] = self._inner_params(group["params"])

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        for record in self._records.values():
            leaf = record.now
            if isinstance(record.param, ShardedTensor):
                record.param._grad_wrapper = None
            if set_to_none:
                leaf.grad = None
            elif leaf.grad is not None:
                leaf.grad.detach_() if leaf.grad.grad_fn is not None else leaf.grad.requires_grad_(False)
                leaf.grad.zero_()

    # -- state by name ----------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the state and the groups, keyed by parameter name. Sends nothing.

        Returns:
            ``{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], "lr": ..., ...}]}``. A tensor of
            a sharded parameter's state is a ShardedTensor; all share memory with the optimizer, as torch's do. Names
            without an entry in ``state`` were never stepped.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        names = {id(record.param): record.name for record in self._records.values()}
        state_dict = saved.by_name(self, names)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = _or(post_hook(self, state_dict), state_dict)
        return state_dict

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: Mapping[str, Any], *, copies: bool = True) -> None:
        """Load state and hyperparameters, matched by parameter name; the order of groups and names does not matter.

        All ranks of the parameters' group call it; it sends only state that has another layout.

        Args:
            state_dict: of any ShardedOptimizer or torch optimizer: state tensors may be sharded or full. If it is keyed
                by number, it is matched by its ``param_names``, or by position without them.
            copies: False if the state dict is not used any more: the optimizer then keeps its tensors where their
                layout, dtype and device are right, as torch's optimizers do.

        Raises:
            LayoutError: (a ValueError) names are missing or unknown, shapes differ, or one group's parameters were
                saved in groups with different hyperparameters. Nothing has been loaded.
        """
        loaded: dict[str, Any] = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = _or(pre_hook(self, loaded), loaded)
        self._sync()
        own = [[self._records[id(param)].name for param in group["params"]] for group in self.param_groups]
        shapes = {name: tuple(param.shape) for name, param in self.named_params.items()} if self._on_leaves else None
        state, options, fault = saved.match_and_check(loaded, own, self._aliases, shapes)
        agree_in_groups(record_groups(self._records), "load_state_dict", {"state": saved.outline(state)}, fault)
        self._load(state, options, copies)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, state: dict[Any, Any], options: list[dict[str, Any]], copies: bool) -> None:
        for group, new in zip(self.param_groups, options, strict=True):
            group.update(new)
        inner = self._inner
        self._flat_groups.split_all()
        taken = {}
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    record = self._records[id(param)]
                    if record.name not in state:
                        continue
                    values = state.pop(record.name)
                    key, convert = (record.leaf, local_value) if self._on_leaves else (param, copied_value)
                    taken[key] = {
                        name: convert(value, record, name, group, copies=copies) for name, value in values.items()
                    }
        inner.state.clear()
        inner.state.update(taken)
        inner.state.update(state)
        if self._on_leaves:
            for group, own in zip(self.param_groups, inner.param_groups, strict=True):
                own.update({key: value for key, value in group.items() if key != "params"})
        inner.__setstate__({})  # some classes convert old states there

    def __getstate__(self) -> dict[str, Any]:
        self._flat_groups.split_all()
        names = "_constructor _on_leaves _records _aliases _inner _flat_groups _is_built".split()
        return {key: self.__dict__[key] for key in ("defaults", "param_groups", "state", *names)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._staleness = None  # a copy has other parameters than the module
        records = list(self._records.values())  # their parameters have new ids
        self._records.clear()
        self._records.update((id(record.param), record) for record in records)


def inner_optimizer(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return the optimizer that one of this library, or torch's ZeroRedundancyOptimizer, steps inside; else itself."""
    inner = getattr(optimizer, "_inner", None) or getattr(optimizer, "optim", None)
    return inner if isinstance(inner, optim.Optimizer) else optimizer


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
