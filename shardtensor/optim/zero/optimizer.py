"""`ZeroRedundancyOptimizer`: each rank steps a part of the parameters, holds the state of that part only, and sends the
new values to all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.comm.untraced import untraced
from shardtensor.errors import LayoutError, RuleError, ShardTensorError
from shardtensor.fsdp.backward_reducer import reduced_already
from shardtensor.layout.partition import Partition
from shardtensor.optim.state import start_state
from shardtensor.optim.update_units import UpdateUnit, update_unit
from shardtensor.optim.zero.arguments import (
    OWN_KEYS,
    REDUCED_TWICE,
    agree_on,
    as_groups,
    check_arguments,
    copy_group,
    copy_options,
    one_axis,
    options_text,
)
from shardtensor.optim.zero.division import Division, OffloadedState, PartStep
from shardtensor.optim.zero.gradients import PartitionedGradients
from shardtensor.optim.zero.state import HeldState, PartitionedState, StateDicts
from shardtensor.optim.zero.values import ForwardWaits

if TYPE_CHECKING:
    from shardtensor.optim.zero.ddp_hooks import DDPOverlap

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class ZeroRedundancyOptimizer(StateDicts, Joinable):
    """Step parameters that are replicated on all ranks, with the optimizer state partitioned among the ranks.

    Every rank calls `step` with equal gradients, as DistributedDataParallel or `data_parallel` compute them. Each rank
    updates its partition of the parameters with `optimizer_class`, and all ranks get the new values. The result is that
    of `optimizer_class` in one process; each rank holds the state of its partition only.

    Learning rate schedulers, GradScaler, hooks and changed hyperparameters in ``param_groups`` work as with a torch
    optimizer; ``torch.distributed.algorithms.Join`` as with torch's ZeroRedundancyOptimizer.

    Args:
        params: parameters, ``named_parameters()``, or groups: a list of dicts with one of these under ``params``. All
            of one dense type. With names, state dicts are keyed by name.
        optimizer_class: any class; it steps dense parameters that the rank holds whole or, with ranges, parts of them.
        process_group: the ranks; None for the default group. All its ranks call this.
        parameters_as_bucket_view: make the parameters views of one flat buffer for each rank, which saves copies. Else
            their memory stays as it is. Views are contiguous, also those of channels_last parameters.
        overlap_with_ddp: step in DDP's backward; see `hook_with_zero_step`.
        partition: ``"owners"``: each parameter is stepped by one rank; the largest parameters are assigned first, each
            to the rank with the fewest elements. ``"ranges"``: parameters are views of flat buffers, of which each rank
            steps an equal range, whatever their sizes. A range does not divide what the class updates together: an
            element for torch's elementwise classes, a row or a parameter for others. Your class states it as its
            attribute ``update_unit``: ``"element"``, ``"row"`` or, by default, ``"parameter"``. None: owners;
            ranges for elementwise classes with `overlap_gradients`.
        overlap_gradients: backward averages the gradients over the ranks, without DDP (ZeRO stage 2). It starts a
            reduce-scatter when all gradients of a bucket are computed. Afterwards ``param.grad`` is a ShardedTensor
            with the global shape of the parameter; this rank holds the elements that it steps. Every rank calls
            backward equally often, on a loss that depends on at least one of the parameters; else the others hang. The
            constructor copies the parameters of the group's first rank to all ranks. Buffers of modules are not
            synchronized.
        module: with `overlap_gradients` or ranges, the module that holds the parameters. `step` starts to send the new
            values and returns; before the forward of each submodule this rank waits for the parameters of that
            submodule. Call `wait` before code reads parameters in another way: an average of models, a copy,
            ``F.linear(x, self.child.weight)`` in a module without parameters of its own.
        offload_state: keep the state in pinned memory of the CPU between steps. It is copied to the device for the
            step, with `overlap_gradients` while backward runs, and back while the next forward runs. Call
            `synchronize` before ``state`` is read.
        bucket_mib: the size at which a bucket is full, with ranges or `overlap_gradients`. None: a sixteenth of all
            parameters, between 25 and 256 MiB.
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
        Rajbhandari et al., ZeRO (arXiv:1910.02054), stages 1 and 2.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.5)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, 0.5]
    """

    _is_copy = False  # while it is deep-copied: a rank may copy it alone

    def __init__(
        self,
        params: Params,
        optimizer_class: Callable[..., optim.Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Partition | None = None,
        overlap_gradients: bool = False,
        module: nn.Module | None = None,
        offload_state: bool = False,
        bucket_mib: float | None = None,
        **defaults: Any,
    ) -> None:
        groups = as_groups(params)
        self._arguments = {"optimizer_class": optimizer_class, "process_group": process_group, **defaults} | {
            "parameters_as_bucket_view": parameters_as_bucket_view,
            "overlap_with_ddp": overlap_with_ddp,
            "partition": partition,
            "overlap_gradients": overlap_gradients,
            "module": module,
            "offload_state": offload_state,
            "bucket_mib": bucket_mib,
        }
        self.unit: UpdateUnit = update_unit(optimizer_class)
        if partition is None:
            partition = "ranges" if overlap_gradients and self.unit == "element" else "owners"
        check_arguments(self._arguments, self.unit, partition, groups)
        self.overlap_with_ddp, self.partition = overlap_with_ddp, partition
        self.parameters_as_bucket_view, self.optimizer_class = parameters_as_bucket_view, optimizer_class
        self._options = defaults
        self._is_built = False
        optim.Optimizer.__init__(self, groups, defaults)
        Joinable.__init__(self)
        self._is_built = True
        self.group: Group = one_axis(as_group(process_group))
        self.process_group = self.group.process_group
        self.gradients: PartitionedGradients | None = None
        if not self._is_copy:
            options = options_text(self._arguments, partition, defaults)
            agree_on(self.group, "ZeroRedundancyOptimizer", options, self.param_groups, fault=self._reduced_already())
        starts_with_state = False
        if self.unit == "element":  # some classes make state in their constructor; all check their arguments there
            starts_with_state = bool(self._make([{"params": [torch.zeros(1, requires_grad=True)]}]).state)
        self._division = Division(
            *(self.group, self.unit, partition, None if bucket_mib is None else bucket_mib * 2**20),
            as_views=parameters_as_bucket_view,
            is_reduced=overlap_gradients,
        )
        self.partitioned = PartitionedState(self.group, by_rows=self.unit == "row")
        for group in self.param_groups:
            self._divide(group)
        self.optim = self._make([self._inner_group(group) for group in self.param_groups])
        self.defaults = self.optim.defaults
        copy_options(self.optim.param_groups, self.param_groups)
        self._offloaded = OffloadedState(self.optim, self._all_params[0].device) if offload_state else None
        self._part = PartStep(
            *(self.optim, self._division), is_elementwise=self.unit == "element", offloaded=self._offloaded
        )
        self.flat_groups = self._part.flat_groups
        self.state: HeldState = HeldState(self.flat_groups, self.partitioned.records)  # type: ignore[assignment]
        self.state.is_anywhere = starts_with_state
        self.overlap: DDPOverlap | None = None  # a hook sets it
        self._waits: ForwardWaits | None = None
        if overlap_gradients:
            self.gradients = PartitionedGradients(self.partitioned.records, self.group, self._part.fetch)
        self._hook_buckets()

    def _hook_buckets(self) -> None:
        """Reduce the gradients of all buckets in backward, and wait for their values in forward, from now on."""
        if self.gradients is not None:
            if not self._is_copy:
                self._division.copy_from_first()
            self.gradients.set_buckets(self._division.buckets)
        if self._waits is not None:
            self._waits.remove()
        module, buckets = self._arguments["module"], self._division.buckets
        self._waits = ForwardWaits(module, buckets) if module is not None and buckets else None

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroRedundancyOptimizer:
        self.wait()
        self.synchronize()
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied._is_copy = True
        groups = [copy_group(group, memo) for group in self.param_groups]
        module = copy.deepcopy(self._arguments["module"], memo)
        copied.__init__(groups, **(self._arguments | {"module": module}))  # type: ignore[misc]
        for old, new in zip(self.partitioned.records.values(), copied.partitioned.records.values(), strict=True):
            state = self.flat_groups.state_of(old.leaf)
            if state:
                copied.optim.state[new.leaf] = copy.deepcopy(dict(state), memo)
        with torch.no_grad():  # the module may have been copied before `wait`
            torch._foreach_copy_(copied._all_params, self._all_params)
        copied.state.is_anywhere = self.state.is_anywhere
        copied._is_copy = False
        return copied

    def __reduce__(self) -> Any:
        raise TypeError("a ZeroRedundancyOptimizer cannot be pickled: it has a process group. Save its state_dict()")

    def _make(self, groups: list[dict[str, Any]]) -> optim.Optimizer:
        return self.optimizer_class(groups, **self._options)

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own. All ranks call it; the others keep their ranks."""
        if not self._is_built:  # torch's constructor adds the first groups
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        super().add_param_group(as_groups([param_group])[0])
        group = self.param_groups[-1]
        try:
            agree_on(self.group, "add_param_group", "", [group], self.names.values(), self._reduced_already())
        except ShardTensorError:
            del self.param_groups[-1]
            raise
        self.wait()
        self.flat_groups.split_all()
        self._divide(group)
        self.optim.add_param_group(self._inner_group(group))
        start_state(self.optim, self._make, self.optim.param_groups[-1])
        self._hook_buckets()
        copy_options(self.optim.param_groups, self.param_groups)

    def _reduced_already(self) -> LayoutError | None:
        """Return the error if the gradient of a parameter is reduced by something else."""
        if not self._arguments["overlap_gradients"]:
            return None
        groups = self.param_groups
        names = [name for group in groups for name in group.get("param_names") or [""] * len(group["params"])]
        named = [(name or str(i), param) for i, (name, param) in enumerate(zip(names, self._all_params, strict=True))]
        return reduced_already(named, REDUCED_TWICE, None if self.gradients is None else self.gradients.reducer)

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

        Every rank calls it, with equal gradients, also a rank that steps no parameter. With `overlap_with_ddp` backward
        has stepped already: it does nothing, and does not call `closure`. Elementwise classes with buckets, and those
        with `offload_state`, call `closure` once, before the update.

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
        if self._waits is not None:
            self._waits.check()
        self.wait()
        self._division.attach()
        if self.gradients is not None:
            self.gradients.check()
        self._forget_consolidated()
        try:
            loss = self._part.step(self.param_groups, closure, kwargs)
        finally:
            self._division.drop_gradients()
        if self._waits is None:
            self._division.send()
        else:
            self._waits.send()
        return loss

    def synchronize(self) -> None:
        """Make the host wait until the state of the last step is on the CPU, with `offload_state`.

        Call it before ``state`` is read; methods that return state call it.
        """
        if self._offloaded is not None:
            self._offloaded.synchronize()

    def wait(self) -> None:
        """Wait until all parameters have the values of the last step, with `module`."""
        if self._waits is not None:
            self._waits.wait()

    def step_with(self, grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step this rank's parameters among those that have a gradient here, with that gradient; sends nothing."""
        self._forget_consolidated()
        self._part.step_with(grads, self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or set them to zero."""
        if self.overlap is not None:
            self.overlap.begin()
        super().zero_grad(set_to_none)
        if self.gradients is not None:
            self.gradients.drop()
            self.gradients.refresh()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward accumulate gradients without reducing them, with `overlap_gradients`.

        The next backward outside reduces their sum.
        """
        gradients = self.gradients
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

    # -- torch.distributed.algorithms.Join --------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook by which a rank without inputs left takes part in the steps of the others.

        Another joinable has to set the gradients on that rank before; DDP's does not.

        Raises:
            RuleError: such a rank runs no backward, in which `overlap_gradients` reduces.
        """
        if self.gradients is not None:
            raise RuleError(
                "a rank without inputs left runs no backward, so it cannot take part in reductions there",
                fix="leave overlap_gradients out, and pass Join a Joinable before this one that averages gradients",
            )
        hook = JoinHook()
        hook.main_hook = self.step_again  # type: ignore[method-assign]
        return hook

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._all_params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group of the ranks."""
        return self.process_group
