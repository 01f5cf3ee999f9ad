"""`ShardedOptimizer`: any torch optimizer over named parameters, sharded and plain.

People see sharded parameters in ``param_groups`` and ``state``. Classes that treat every element alone step this rank's
leaves inside, at the speed of plain tensors and without a message between ranks; leaves that lie end to end, as those
of fully sharded modules, in one piece. All other classes step the ShardedTensors themselves, so that a norm or a
product of whole matrices is the global one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn, optim

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.comm.untraced import untraced
from shardtensor.errors import LayoutError, ShardTensorError
from shardtensor.optim import state_dict as saved
from shardtensor.optim.facts import say_group, say_options
from shardtensor.optim.named_params import Held, Watch, changed, read_groups, read_pairs, stale_error
from shardtensor.optim.runs import ELEMENTWISE, Runs
from shardtensor.optim.state import ShownState, adopted, fitted, moved, shown
from shardtensor.tensor.copied import stepped
from shardtensor.tensor.gradient import forget
from shardtensor.tensor.sharded_tensor import ShardedTensor

NamedParams = nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class ShardedOptimizer(optim.Optimizer):
    """Step named parameters, any mix of sharded and plain ones, with any `torch.optim` class.

    The result is the one that the class gives on whole tensors. Schedulers, GradScaler, hooks, `add_param_group` work
    as with a torch optimizer; a change of a hyperparameter in ``param_groups`` holds from the next step on. A parameter
    under two names is held once, under the first.

    Before each step it looks at its parameters. Where a shard's tensor, a device, a dtype or a layout was changed, it
    follows and takes the state along. Given a module, it also notices parameters that were *replaced*
    (``assign=True``, ``to_empty``, ``module.weight = ...``) and refuses to step; given names and tensors alone it
    cannot know of that, as torch cannot.

    Args:
        named_params: a module, a dict, ``module.named_parameters()``, or groups: a list of dicts with one of these
            under ``params`` and hyperparameters beside it.
        optimizer_class: the class, or a `functools.partial` of it.
        args, kwargs: what it takes after its parameters.

    Attributes:
        named_params: name -> parameter.
        param_groups: the groups, with the parameters as given.
        state: keyed by the parameters as given; tensors of a sharded parameter's state are ShardedTensors.

    Raises:
        DisagreementError: ranks brought other names, shapes, dtypes, classes or options. All ranks of the parameters'
            group create it together; nothing else here is collective for elementwise classes but a load that has to
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
        self,
        named_params: NamedParams,
        optimizer_class: Callable[..., optim.Optimizer],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups = read_groups(named_params)
        self._recipe = (optimizer_class, args, kwargs)
        self._on_leaves = getattr(optimizer_class, "func", optimizer_class) in ELEMENTWISE
        self._held: dict[int, Held] = {}
        self._aliases: dict[str, str] = {}
        named, fault = self._enrol(groups)
        self._agree("ShardedOptimizer", groups, say_options(optimizer_class, args, kwargs), fault)
        self._inner = self._make([{**group, "params": self._stepped(params)} for group, params in named])
        self._is_built = False
        super().__init__(
            [{**own, "params": params} for own, (_, params) in zip(self._inner.param_groups, named, strict=True)],
            self._inner.defaults,
        )
        self._is_built = True
        self.state: MutableMapping[Any, Any]  # type: ignore[assignment]
        self._runs = Runs(self._inner)
        if self._on_leaves:
            self.state = ShownState(self._runs, self._held)
        else:
            self.state, self.param_groups = self._inner.state, self._inner.param_groups
        self._watch = Watch(named_params, self._held.values()) if isinstance(named_params, nn.Module) else None

    def _make(self, groups: list[dict[str, Any]]) -> optim.Optimizer:
        optimizer_class, args, kwargs = self._recipe
        return optimizer_class(groups, *args, **kwargs)

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def named_params(self) -> dict[str, torch.Tensor]:
        """The parameters by name, each once."""
        return {held.name: held.param for held in self._held.values()}

    def _enrol(
        self, groups: list[dict[str, Any]]
    ) -> tuple[list[tuple[dict[str, Any], list[torch.Tensor]]], ShardTensorError | None]:
        """Hold what is new in `groups`; return each group's options and parameters, ties once, and what is wrong."""
        names = {held.name: held.param for held in self._held.values()}
        leaves = {id(held.leaf): held for held in self._held.values()}
        named = []
        fault: ShardTensorError | None = None
        for group in groups:
            params: list[torch.Tensor] = []
            for name, param in group["params"]:
                held = Held.of(name, param)
                if names.get(name, param) is not param:
                    fault = fault or LayoutError(f'two parameters are called "{name}"', fix="give each its own name")
                if not (held.leaf.is_leaf or held.leaf.retains_grad or self._recipe[2].get("differentiable")):
                    fault = fault or LayoutError(
                        f'parameter "{name}" is the result of an operation, not a leaf', fix="detach() it first"
                    )
                names[name] = param
                known = leaves.get(id(held.leaf))
                if known is not None:
                    self._aliases[name] = known.name
                    continue
                leaves[id(held.leaf)] = self._held[id(param)] = held
                params.append(param)
            named.append(({key: value for key, value in group.items() if key != "params"}, params))
        return named, fault

    def _stepped(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What the inner optimizer holds for parameters: their leaves, or themselves."""
        return [self._held[id(param)].leaf if self._on_leaves else param for param in params]

    def _groups_of_ranks(self) -> list[Group]:
        found = {id(held.group): held.group for held in self._held.values() if held.group is not None}
        return [group for group in found.values() if group.index >= 0]

    def _agree(
        self, call: str, groups: list[dict[str, Any]], options: str, fault: ShardTensorError | None = None
    ) -> None:
        ranks = self._groups_of_ranks()
        if fault is not None and not ranks:
            raise fault
        facts = {"options": options, "parameters": "\n".join(say_group(group) for group in groups)} if ranks else {}
        for group in ranks:
            agree(group, call, facts, fault)

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add named parameters with hyperparameters of their own. All ranks of the parameters' group call it.

        Args:
            param_group: ``{"params": <a dict, pairs or a module>, "lr": ...}``; what it lacks has the default.
        """
        if not self._is_built:  # torch's own constructor lists the first groups
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        before, aliases = dict(self._held), dict(self._aliases)
        try:
            group = {**param_group, "params": read_pairs(param_group["params"])}
            [(options, params)], fault = self._enrol([group])
            again = sorted(name for name in self._aliases.keys() - aliases.keys())
            if again and fault is None:
                fault = LayoutError(f"some parameters are in another group already: {', '.join(again)}")
            self._agree("add_param_group", [group], say_options(None, (), options), fault)
            stepped = self._stepped(params)
            self._runs.dissolve()
            self._inner.add_param_group({**options, "params": stepped})
        except BaseException:
            self._held.clear()
            self._held.update(before)
            self._aliases = aliases
            raise
        if self._on_leaves:
            own = self._inner.param_groups[-1]
            self._start_state(own)
            super().add_param_group({**own, "params": params})

    def _start_state(self, group: dict[str, Any]) -> None:
        """Give new leaves the state that some classes make for their first parameters only (Adagrad)."""
        if not group["params"]:
            return
        fresh = self._make([dict(group)])
        for leaf in group["params"]:
            if leaf in fresh.state:
                self._inner.state[leaf] = fresh.state[leaf]

    # -- the step ---------------------------------------------------------------------------------------------------

    @untraced("leaves and state are followed between steps, not in a graph: compile the forward")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return the closure's loss, or None.

        Sends nothing for elementwise classes; for others all ranks of the parameters' group call it.

        Raises:
            StaleParameterError: the module holds other tensors under some names; nothing was stepped.
        """
        if not self._on_leaves:
            self._follow()
            return self._inner_step() if closure is None else self._inner_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        self._runs.step(self.param_groups, self._inner_step)
        stepped(self._inner, (held.param for held in self._held.values()))
        return loss

    def _inner_step(self, *closure: Any) -> Any:
        """Step without torch's hook wrapper: hooks run once, around this optimizer's step, and see its parameters."""
        step = type(self._inner).step
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self._inner, *closure)  # type: ignore

    def _follow(self) -> None:
        """Make leaves and state those of the parameters as they are now."""
        if self._watch is not None:
            self._watch.check()
        found = changed(self._held.values())
        if not found:
            return
        unfit = [held.name for held in found if not (held.now.is_leaf or self.defaults.get("differentiable"))]
        if unfit:
            raise stale_error(unfit, "their shards were set to results of operations, which are no leaves")
        self._runs.dissolve()
        with torch.no_grad():
            for held in found:
                self._carry(held)
        if self._on_leaves:
            for group, own in zip(self.param_groups, self._inner.param_groups, strict=True):
                own["params"][:] = self._stepped(group["params"])

    def _carry(self, held: Held) -> None:
        """Take the state of one parameter along to what the parameter is now. Collective when its layout changed."""
        was, now = held, Held.of(held.name, held.param)
        if not self._on_leaves:
            state = self._inner.state.get(held.param)
            if state:
                state.update({key: moved(value, now, was) for key, value in state.items()})
        elif was.leaf in self._inner.state:
            state = self._inner.state.pop(was.leaf)
            if (now.dtype, now.device) != (was.dtype, was.device) or now.layout != was.layout:
                options = self._options_of(held.param)
                state = {key: fitted(shown(value, was), now, key, options) for key, value in state.items()}
            self._inner.state[now.leaf] = state
        held.leaf, held.layout, held.group = now.leaf, now.layout, now.group
        held.dtype, held.device = now.dtype, now.device

    def _options_of(self, param: torch.Tensor) -> dict[str, Any]:
        return next((g for g in self.param_groups if any(p is param for p in g["params"])), {})

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        grads = []
        for held in self._held.values():
            leaf = held.now
            if isinstance(held.param, ShardedTensor):
                forget(held.param)
            if leaf.grad is None:
                continue
            if set_to_none:
                leaf.grad = None
                continue
            if leaf.grad.grad_fn is not None:
                leaf.grad.detach_()
            else:
                leaf.grad.requires_grad_(False)
            grads.append(leaf.grad)
        for grad in grads:
            grad.zero_()

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
        names = {id(held.param): held.name for held in self._held.values()}
        state_dict: dict[str, Any] = {
            "state": {names.get(id(key), key): dict(value) for key, value in self.state.items() if len(value)},
            "param_groups": [
                {**group, "params": [names[id(param)] for param in group["params"]]} for group in self.param_groups
            ],
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = _or(post_hook(self, state_dict), state_dict)
        return state_dict

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take state and hyperparameters, matched by parameter name; the order of groups and names does not matter.

        All ranks of the parameters' group call it; it moves data only where a state has another layout.

        Args:
            state_dict: of a ShardedOptimizer with any layouts or of a plain run: state tensors may be sharded or whole.
                One of a torch optimizer, keyed by number, is matched by its ``param_names``, or else by position.

        Raises:
            LayoutError: (a ValueError) names are missing or unknown, shapes differ, or one group's parameters come
                from groups with different hyperparameters. Nothing has been loaded.
        """
        loaded: dict[str, Any] = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = _or(pre_hook(self, loaded), loaded)
        self._follow()
        own = [[self._held[id(param)].name for param in group["params"]] for group in self.param_groups]
        fault: ShardTensorError | None = None
        state: dict[Any, dict[str, Any]] = {}
        options: list[dict[str, Any]] = []
        try:
            state, options = saved.match(loaded, own, self._aliases)
            if self._on_leaves:
                saved.check(state, {held.name: tuple(held.param.shape) for held in self._held.values()})
        except ShardTensorError as error:
            fault = error
        ranks = self._groups_of_ranks()
        if fault is not None and not ranks:
            raise fault
        for group in ranks:
            agree(group, "load_state_dict", {"state": saved.outline(state)} if fault is None else {}, fault)
        self._take(state, options)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _take(self, state: dict[Any, Any], options: list[dict[str, Any]]) -> None:
        for group, new in zip(self.param_groups, options, strict=True):
            group.update(new)
        inner = self._inner
        self._runs.dissolve()
        taken = {}
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    held = self._held[id(param)]
                    if held.name not in state:
                        continue
                    values = state.pop(held.name)
                    if self._on_leaves:
                        taken[held.leaf] = {key: fitted(value, held, key, group) for key, value in values.items()}
                    else:
                        taken[param] = {key: adopted(value, held, key) for key, value in values.items()}
        inner.state.clear()
        inner.state.update(taken)
        inner.state.update(state)
        if self._on_leaves:
            for group, own in zip(self.param_groups, inner.param_groups, strict=True):
                own.update({key: value for key, value in group.items() if key != "params"})
        inner.__setstate__({})  # where classes bring old states up to date

    def __getstate__(self) -> dict[str, Any]:
        self._runs.dissolve()
        return {key: self.__dict__[key] for key in _KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch = None  # a copy holds parameters of no module
        held = list(self._held.values())  # under other ids
        self._held.clear()
        self._held.update((id(h.param), h) for h in held)


_KEPT = (
    *("defaults", "param_groups", "state"),
    *("_recipe", "_on_leaves", "_held", "_aliases", "_inner", "_runs", "_is_built"),
)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
