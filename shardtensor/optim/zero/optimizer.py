"""`ZeroRedundancyOptimizer`: each rank steps a part of the parameters, holds the state of that part only, and sends the
new values to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import optim
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from shardtensor.comm.agree import agree, call_text
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError, ShardTensorError
from shardtensor.optim import state_dict as saved
from shardtensor.optim.flat_groups import FlatGroups, step_without_hooks
from shardtensor.optim.named_params import params_text
from shardtensor.optim.state import ParamState, start_state
from shardtensor.optim.update_units import UpdateUnit, update_unit
from shardtensor.optim.zero.arguments import OWN_KEYS, as_list, copy_options, members_of
from shardtensor.optim.zero.division import Division
from shardtensor.optim.zero.gradients import PartitionedGradients
from shardtensor.optim.zero.partition import Partition
from shardtensor.optim.zero.state import PartitionedState
from shardtensor.tensor.sharded_tensor import ShardedTensor
from shardtensor.tensor.trees import tensors_in

if TYPE_CHECKING:
    from shardtensor.optim.zero.ddp_hooks import DDPOverlap

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class ZeroRedundancyOptimizer(optim.Optimizer, Joinable):
    """Step parameters that are replicated on all ranks, with the optimizer state partitioned among the ranks.

    Every rank calls `step` with equal gradients, as DistributedDataParallel or `data_parallel` compute them. Each rank
    steps its part with `optimizer_class` and sends the new values to the others. The result is that of
    `optimizer_class` on every rank; the state takes memory once, not once a rank.

    Learning rate schedulers, GradScaler, hooks, ``torch.distributed.algorithms.Join`` and changed hyperparameters in
    ``param_groups`` work as with a torch optimizer.

    Args:
        params: parameters, ``named_parameters()``, or groups: a list of dicts with one of these under ``params``. All
            of one dense type. With names, state dicts are keyed by name.
        optimizer_class: any class; it steps dense parameters that the rank holds whole or, with ranges, parts of them.
        process_group: the ranks; None for the default group. All its ranks call this.
        parameters_as_bucket_view: make the parameters views of one flat buffer for each rank's part, which saves
            copies. Else their memory stays as it is.
        overlap_with_ddp: step in DDP's backward; see `hook_with_zero_step`.
        partition: ``"owners"``: each parameter is stepped by one rank; the largest parameters are assigned first, each
            to the rank with the fewest elements. ``"ranges"``: parameters are views of flat buffers, of which each rank
            steps an equal range, whatever their sizes. A range does not divide what the class updates together: an
            element for torch's elementwise classes, a row or a parameter for others (`update_unit`).
        overlap_gradients: average gradients, too, without DDP: each bucket as soon as backward has computed it, to the
            ranks that step it (ZeRO stage 2). After backward ``grad`` of a parameter is a ShardedTensor; this rank
            holds what it steps. Parameters are views of buckets; their values are copied from the first rank now.
        bucket_mib: the size at which a bucket is full, with ranges or `overlap_gradients`.
        defaults: arguments of `optimizer_class`.

    Attributes:
        optim: this rank's optimizer of class `optimizer_class`, over its part.
        param_groups: all parameters and their hyperparameters, as in a torch optimizer.
        state: the state that this rank holds, by parameter.

    Raises:
        TypeError, ValueError: `params` is empty, or not of a kind listed above, or has several types.
        DisagreementError: (a ValueError) parameters or options differ between ranks.
        RuleError: (a RuntimeError) a parameter is sharded.

    References:
        Rajbhandari et al., ZeRO (arXiv:1910.02054), stage 1.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.5)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, 0.5]
    """

    def __init__(
        self,
        params: Params,
        optimizer_class: Callable[..., optim.Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Partition = "owners",
        overlap_gradients: bool = False,
        bucket_mib: float = 64.0,
        **defaults: Any,
    ) -> None:
        groups = as_list(params)
        self.process_group, self.overlap_with_ddp = process_group, overlap_with_ddp
        self.partition: Partition = partition
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.optimizer_class = optimizer_class
        self._unit: UpdateUnit = update_unit(optimizer_class)
        self._options = defaults
        self._is_built = False
        optim.Optimizer.__init__(self, groups, defaults)
        Joinable.__init__(self)
        self._is_built = True
        self.group: Group = _without_mesh(as_group(process_group))
        self._agree("ZeroRedundancyOptimizer", call_text(optimizer_class, (partition,), defaults), self.param_groups)
        self._division = Division(
            *(self.group, self._unit, partition, bucket_mib * 2**20),
            as_views=parameters_as_bucket_view,
            is_reduced=overlap_gradients,
        )
        self.partitioned = PartitionedState(self.group, by_rows=self._unit == "row")
        self._consolidated: dict[Any, Any] | None = None
        for group in self.param_groups:
            self._divide(group)
        self.optim = self._make([self._inner_group(group) for group in self.param_groups])
        self.defaults = self.optim.defaults
        copy_options(self.optim.param_groups, self.param_groups)
        self._flat_groups = FlatGroups(self.optim)
        self.state = ParamState(self._flat_groups, self.partitioned.records)  # type: ignore[assignment]
        self.overlap: DDPOverlap | None = None  # a hook sets it
        self._gradients: PartitionedGradients | None = None
        if overlap_gradients:
            self._division.copy_from_first()
            self._gradients = PartitionedGradients(self._division.buckets, self.partitioned.records, self.group)

    def _make(self, groups: list[dict[str, Any]]) -> optim.Optimizer:
        return self.optimizer_class(groups, **self._options)

    def _agree(self, call: str, options: str, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise on every rank if options or parameters differ between ranks, or cannot be partitioned."""
        fault: ShardTensorError | None = None
        texts = []
        for group in groups:
            names = group.get("param_names") or [str(i) for i in range(len(group["params"]))]
            pairs = list(zip(names, group["params"], strict=True))
            texts.append(params_text({"params": pairs}))
            sharded = [name for name, param in pairs if isinstance(param, ShardedTensor)]
            if sharded:
                fault = RuleError(
                    "ZeroRedundancyOptimizer steps parameters that every rank holds whole, and some are sharded",
                    {"sharded": ", ".join(sharded[:8])},
                    "step sharded parameters with ShardedOptimizer: it sends nothing",
                )
        agree(self.group, call, {"options": options, "parameters": "\n\n".join(texts)}, fault)

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own. All ranks call it; the others keep their ranks."""
        if self._is_built and isinstance(param_group, dict):
            param_group = {**param_group, "params": members_of(param_group["params"])}
        super().add_param_group(param_group)
        if not self._is_built:  # torch's constructor adds the first groups
            return
        group = self.param_groups[-1]
        try:
            self._agree("add_param_group", call_text(None, (), param_group), [group])
        except ShardTensorError:
            del self.param_groups[-1]
            raise
        self._flat_groups.split_all()
        self._divide(group)
        self.optim.add_param_group(self._inner_group(group))
        start_state(self.optim, self._make, self.optim.param_groups[-1])
        copy_options(self.optim.param_groups, self.param_groups)

    def _divide(self, group: Mapping[str, Any]) -> None:
        """Decide which rank steps which parameter of a group, and how their new values are sent."""
        params, first = group["params"], len(self.partitioned.records)
        names = group.get("param_names") or [str(first + i) for i in range(len(params))]
        parts = self._division.divide(params)
        for i, (name, param) in enumerate(zip(names, params, strict=True)):
            self.partitioned.add(name, param, parts.leaves.get(i), parts.owners[i], parts.sizes[i])

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        leaves = [self.partitioned.leaf_of(param) for param in group["params"]]
        options = {key: value for key, value in group.items() if key not in OWN_KEYS}
        return {**options, "params": [leaf for leaf in leaves if leaf is not None]}

    # -- the step ---------------------------------------------------------------------------------------------------

    @untraced("an optimizer step cannot be compiled: compile the forward")
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update all parameters that have a gradient, on all ranks; return the closure's loss, or None.

        All ranks call it, with equal gradients.

        Args:
            closure: computes the gradients and returns the loss.
            kwargs: further arguments of the class's ``step``.

        Raises:
            StaleParameterError: a parameter that is a view of a buffer was converted; nothing was stepped.
            AbsentRankError: another rank did not call it.
        """
        Join.notify_join_context(self)
        return self.step_again(closure, **kwargs)

    def step_again(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step as `step` does; for a rank without inputs left, which has joined already."""
        if self.overlap is not None:
            self.overlap.begin()
            return None
        self._division.attach()
        if self._gradients is not None:
            self._gradients.refresh()
        loss = self._step_part(closure, kwargs)
        self._division.drop_gradients()
        self._division.send()
        return loss

    def _step_part(self, closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]) -> Any:
        """Step this rank's part."""
        copy_options(self.param_groups, self.optim.param_groups)
        step = partial(step_without_hooks, self.optim, **kwargs)
        if self._unit == "element" and self._division.buckets:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._division.set_gradients()
            self._flat_groups.step(self.optim.param_groups, step)
        elif closure is None:
            self._division.set_gradients()
            loss = step()
        else:
            loss = step(closure=partial(self._closure, closure) if callable(closure) else closure)
        copy_options(self.optim.param_groups, self.param_groups)
        return loss

    def step_with(self, grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step this rank's parameters among those that have a gradient here, with that gradient."""
        own = {param: param.grad for param in grads if self.partitioned.leaf_of(param) is not None}
        groups = self.optim.param_groups
        params = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [param for param in group["params"] if param in own]
            for param in own:
                param.grad = grads[param]
            self._step_part(None, {})
        finally:
            for group, members in zip(groups, params, strict=True):
                group["params"] = members
            for param, grad in own.items():
                param.grad = grad

    def _closure(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._division.set_gradients()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or set them to zero."""
        if self.overlap is not None:
            self.overlap.begin()
        super().zero_grad(set_to_none)
        if self._gradients is not None:
            self._gradients.refresh()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward accumulate gradients without reducing them, with `overlap_gradients`.

        The next backward outside reduces their sum.
        """
        gradients = self._gradients
        if gradients is None:
            raise RuleError(
                "this optimizer does not reduce gradients",
                fix="use no_sync of DistributedDataParallel or data_parallel, or pass overlap_gradients=True",
            )
        before, gradients.is_on = gradients.is_on, False
        try:
            yield
        finally:
            gradients.is_on = before

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> dict[int, str]:
        """The name of each parameter by its id: the user's, or its number as text."""
        return {key: record.name for key, record in self.partitioned.records.items()}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send all state to one rank, which `state_dict` returns there. All ranks call it.

        Args:
            to: the rank in the process group; it holds all state on the CPU.
        """
        agree(self.group, "consolidate_state_dict", {"to": str(to)})
        copy_options(self.param_groups, self.optim.param_groups)
        self._consolidated = self.partitioned.consolidated(self._flat_groups, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters.

        After `consolidate_state_dict`, on its rank: the state dict of `optimizer_class`, keyed by number, with full
        tensors on the CPU, as of that call. Else, for named parameters: keyed by name, with ShardedTensors of which
        each rank holds its part; all ranks call it then.

        Raises:
            RuntimeError: the state is not consolidated on this rank, and the parameters have no names.
        """
        if self._consolidated is None:
            if all("param_names" in group for group in self.param_groups):
                return self.state_by_name(self.names)
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. "
                f"Please call `consolidate_state_dict(to={self.group.index})` on "
                "all ranks beforehand if you meant to save the global state."
            )
        state, self.state = self.state, self._consolidated  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = state

    def state_by_name(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the state dict keyed by name, with ShardedTensors; `names` maps the id of each parameter to its name.

        All ranks call it; it sends only the shapes and dtypes of the state.
        """
        groups = [
            {
                **{k: v for k, v in group.items() if k not in OWN_KEYS},
                "params": [names[id(p)] for p in group["params"]],
            }
            for group in self.param_groups
        ]
        state = self.partitioned.sharded(self._flat_groups)
        renamed = {own: names[key] for key, own in self.names.items()}
        return {"state": {renamed[name]: values for name, values in state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict. All ranks call it.

        Args:
            state_dict: of this class or another optimizer, for any number of ranks: keyed by number, or by name if the
                parameters have names; its tensors full or sharded. It is not changed.

        Raises:
            LayoutError: (a ValueError) the state dict is of other parameters or shapes; nothing has been loaded.
        """
        loaded: dict[str, Any] = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = pre_hook(self, loaded) or loaded
        loaded["state"] = {key: values for key, values in loaded["state"].items() if values is not None}
        shapes = None
        if self._unit == "element":
            shapes = {record.name: tuple(record.param.shape) for record in self.partitioned.records.values()}
        names = self.names
        own = [[names[id(param)] for param in group["params"]] for group in self.param_groups]
        state, options, fault = saved.match_and_check(loaded, own, {}, shapes)
        sharded = {key: x for key, x in state.items() if any(isinstance(t, ShardedTensor) for t in tensors_in(x))}
        agree(self.group, "load_state_dict", {"state": saved.outline(sharded)}, fault)
        for group, new in zip(self.param_groups, options, strict=True):
            group.update(new)
        copy_options(self.param_groups, self.optim.param_groups)
        self._flat_groups.split_all()
        self._consolidated = None
        self.partitioned.load(self.optim, state, self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # -- uneven inputs ----------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook by which a rank without inputs left takes part in the steps of the others."""
        return _StepHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._all_params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group of the ranks."""
        return self.group.process_group


class _StepHook(JoinHook):
    """Steps on a rank without inputs left; the caller has set the gradients."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Step once."""
        self._optimizer.step_again()


def _without_mesh(group: Group) -> Group:
    """Return the group as one axis of ranks."""
    return group if group.mesh is None else group.subgroup(list(group.ranks))
