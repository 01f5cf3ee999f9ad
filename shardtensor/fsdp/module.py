"""`FSDPModule`: the base class of fully sharded modules. METHODS.md compares its methods with torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from shardtensor.errors import LayoutError, RuleError
from shardtensor.fsdp.checks import reset_if_complete
from shardtensor.fsdp.lifecycle import deep_copy
from shardtensor.fsdp.state import SHARDED, FSDPState, state_of, states_in


class FSDPModule:
    """The base that `fully_shard` gives a module's class.

    Its methods have the names and the meaning of those of ``torch.distributed.fsdp.FSDPModule``. All ranks make the
    same calls. Unless a method's docstring states otherwise, call it between forward and backward passes; it sends
    nothing. Options take effect from the next forward or backward on.
    """

    _fsdp_state: FSDPState

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class: a slice of a container calls its class, and is not sharded."""
        return cls.__mro__[2](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._fsdp_state
        args, kwargs = state.enter(args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            state.abandon()
            raise
        return state.leave(output)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        applied = super()._apply(fn, recurse)  # type: ignore[misc]
        reset_if_complete(self._fsdp_state)
        return applied

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Return an independent copy, fully sharded over the same ranks. It sends nothing."""
        return deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuleError(
            "a fully sharded module cannot be pickled: it holds process groups",
            {"module": type(self).__name__},
            "save model.state_dict(), build the module anew, fully_shard it and load that",
        )

    # -- gathering --------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters now, for its next forward. Collective; not recursive.

        The module still shows its sharded parameters. If they are written before the forward, on all ranks or on
        none, the forward gathers again. Gathered parameters stay until the backward of that forward, or until
        ``reshard()``.

        Args:
            async_op: return at once; the forward, or ``wait()`` of the handle, waits for the gather.

        Example:
            >>> from shardtensor.fsdp import fully_shard
            >>> layer = fully_shard(nn.Linear(2, 2))
            >>> layer.unshard(async_op=True).wait()
            >>> layer(torch.ones(1, 2)).shape
            torch.Size([1, 2])
        """
        state = self._fsdp_state
        state.found_runtime().unshard(state)
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Make the next use of this module's own parameters gather them again. Not recursive; sends nothing."""
        state = self._fsdp_state
        if state.runtime is not None:
            state.runtime.reshard(state)

    def reset_iter_state(self) -> None:
        """Reset the state that a forward or backward left when it raised, and drop accumulated gradients.

        The next forward resets the state by itself; call this to drop the accumulated gradients too.

        Raises:
            RuleError: another fully sharded module contains this one; call it on the outermost one.
        """
        state = self._fsdp_state
        if state.runtime is None:
            return
        if state.index != 0:
            raise RuleError(
                "reset_iter_state() was called on a module that another fully sharded one holds",
                {"module": state.name},
                f"call it on the outermost one, a {type(state.runtime.states[0].module).__name__}",
            )
        state.runtime.reset()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free gathered parameters after forward and gather them again for backward, or keep them.

        Raises:
            LayoutError: (a ValueError) it is not a bool. Pass a number of ranks to `fully_shard`.
        """
        if not isinstance(reshard_after_forward, bool):
            raise LayoutError(
                f"set_reshard_after_forward takes True or False, not {reshard_after_forward!r}",
                fix="give a number of ranks to fully_shard(reshard_after_forward=)",
            )
        for state in _states(self, recurse):
            if state.reshard_after_forward is not reshard_after_forward:
                state.reshard_after_forward, state.post_forward_mesh = reshard_after_forward, None
                _is_changed(state)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free gathered parameters after backward, or keep them for the next forward, unless they are written.

        Keeping them saves gathers while gradients accumulate. A forward after an optimizer step always gathers.
        """
        for state in _states(self, recurse):
            if state.keeps_after_backward is reshard_after_backward:
                state.keeps_after_backward = not reshard_after_backward
                _is_changed(state)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """While this module runs forward, gather as many of the next modules as the list has; the default is one.

        They are gathered in the order of their use, which the first forward records, whatever the order of the list.
        Each additional module takes memory for one gathered module.
        """
        self._set_prefetch(0, modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """While this module runs backward, gather as many of the next modules as the list has; the default is one."""
        self._set_prefetch(1, modules)

    def _set_prefetch(self, direction: int, modules: Sequence[Any]) -> None:
        _check_all_sharded(modules)
        ahead = self._fsdp_state.ahead
        if ahead[direction] != len(modules):
            ahead[direction] = len(modules)
            _is_changed(self._fsdp_state)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this module's backward gathers its parameters; False saves a gather if it does not need them.

        False has an effect only where that can be verified: for a module whose parameters are all of embeddings.
        """
        state = self._fsdp_state
        skips = not unshard_in_backward and state.is_lookup
        if state.skips_backward is not skips:
            state.skips_backward = skips
            _is_changed(state)

    # -- gradients --------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in the next backwards, or accumulate them on each rank (``no_sync``).

        Gradients that are not reduced are kept unsharded, in ``reduce_dtype`` if that is wider, and are in no
        parameter's ``.grad`` yet; the next backward that reduces includes them.
        """
        for state in _states(self, recurse):
            for group in state.param_groups:
                group.gradients.requires_sync = group.gradients.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a mesh of two axes: all-reduce over the replicas too, or accumulate the sums of each shard group."""
        for state in _states(self, recurse):
            for group in state.param_groups:
                group.gradients.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: each backward ends its reductions, whether it is the last of a step or not."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients of this module's own parameters by `factor`, not by the number of ranks.

        Raises:
            LayoutError: (a ValueError) it is not above 0.
        """
        if not factor > 0:
            raise LayoutError(f"gradients cannot be divided by {factor!r}", fix="give a number above 0")
        for group in self._fsdp_state.param_groups:
            group.gradients.divide_by(float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # its old name

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with this rank's range of each averaged gradient, flat, before it is set on the parameters.

        The parameters get the values that the hook writes there, such as a sum over ranks that the mesh does not have.

        Args:
            hook: takes a tensor of ``reduce_dtype``.
            stream: the cuda stream it runs in; None for that of the reduction.

        Raises:
            LayoutError: (a ValueError) `stream` is given, and the mesh has replicas.
        """
        state = self._fsdp_state
        if stream is not None and state.data_mesh.replicate is not None:
            raise LayoutError(
                "a stream for the all-reduce hook was given for a mesh with copies",
                fix="leave it out: the hook runs in the stream of the sum over the copies",
            )
        for group in state.param_groups:
            group.gradients.hook, group.gradients.stream = hook, stream

    def set_post_optim_event(self, event: Any) -> None:
        """Make the gathers of the next forward also wait for `event`; later ones do not.

        They always wait for all work that was launched before that forward.
        """
        state = self._fsdp_state
        state.found_runtime().post_optim_event = event

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: all reductions are sums already."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Do nothing: a rank already sends zeros for a parameter that it did not use and any other rank used."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be pending at a time, each with a buffer for packed gradients; at least 2.

        Raises:
            TypeError: it is not an int.
            LayoutError: (a ValueError) it is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers is an int, not {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise LayoutError(f"max_input_buffers={max_input_buffers} is below 1", fix="give 2, or more")
        for state in _states(self, recurse):
            if state.reductions_ahead != max_input_buffers:
                state.reductions_ahead = max_input_buffers
                _is_changed(state)

    # -- methods of torch that are not supported or do nothing here ---------------------------------------------------

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Do nothing: on NCCL reductions have a communicator of their own; other backends need none."""

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Raise RuleError: all-gathers write to fixed buffers of the library."""
        _refuse("set_custom_all_gather", "use set_modules_to_forward_prefetch to set how far gathers run ahead")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Raise RuleError: gradients are packed into fixed buffers of the library."""
        _refuse("set_custom_reduce_scatter", "use set_all_reduce_hook for a sum over more ranks")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Raise RuleError if `enable` is True: buffers are allocated once, not for each collective."""
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm", "leave it out; buffers are fixed already")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Raise RuleError, as `set_allocate_memory_from_process_group_for_comm` does."""
        _refuse("set_symm_mem_for_comm", "leave it out; buffers are fixed already")


class UnshardHandle:
    """The handle that ``unshard(async_op=True)`` returns."""

    def __init__(self, state: FSDPState) -> None:
        self._state = state

    def wait(self) -> None:
        """Wait until the parameters are gathered; on cuda only the caller's stream waits."""
        if self._state.sharded_state is not SHARDED:
            self._state.wait()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather `module` around another method as around ``forward``; do nothing if it is not fully sharded.

    Args:
        module: one that `fully_shard` was called on.
        method_name: of a method that computes with parameters.

    Raises:
        LayoutError: (a ValueError) there is no such method.

    Example:
        >>> from shardtensor.fsdp import fully_shard
        >>> class Head(nn.Linear):
        ...     def logits(self, x):
        ...         return super().forward(x).log_softmax(-1)
        >>> head = fully_shard(Head(2, 3))
        >>> register_fsdp_forward_method(head, "logits")
        >>> head.logits(torch.ones(1, 2)).shape
        torch.Size([1, 3])
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise LayoutError(f"{type(module).__name__} has no method {method_name!r}", fix="name one of its methods")
    setattr(module, method_name, _Around(module, method_name))


class _Around:
    """Calls a method of a fully sharded module with its parameters gathered, as its forward is called."""

    def __init__(self, module: FSDPModule, name: str) -> None:
        self._module, self.__name__ = module, name
        method = getattr(module, name)
        self.__doc__ = method.__doc__
        self._function = getattr(method, "__func__", None)  # a copy of the module binds it to itself
        self._method = method if self._function is None else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._module._fsdp_state
        args, kwargs = state.enter(args, kwargs)
        try:
            if self._function is not None:
                output = self._function(self._module, *args, **kwargs)
            else:
                output = cast(Any, self._method)(*args, **kwargs)
        except BaseException:
            state.abandon()
            raise
        return state.leave(output)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Check the modules, nothing else. In torch's FSDP, modules without a common root then share streams and memory.

    Here gathered parameters and packed gradients use buffers that are allocated once, so no memory is fragmented.

    Raises:
        LayoutError: (a ValueError) a module is not fully sharded.
    """
    _check_all_sharded(modules)


def _check_all_sharded(modules: Iterable[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise LayoutError(
                f"a list of fully sharded modules holds a {type(module).__name__}", fix="call fully_shard on it first"
            )


def _is_changed(state: FSDPState) -> None:
    if state.runtime is not None:
        state.runtime.is_stale = True


def _refuse(name: str, way_out: str) -> NoReturn:
    raise RuleError(f"{name}() is not there: collectives run on fixed memory that fully_shard made", fix=way_out)


def _states(module: Any, recurse: bool) -> list[FSDPState]:
    state = state_of(module)
    assert state is not None
    return [state for _, state in states_in(module)] if recurse else [state]


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a fully sharded module that was of class `kind`."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})
    return _CLASSES[kind]
