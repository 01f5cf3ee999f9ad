"""`FSDPModule`: what a fully sharded module is besides what it was. METHODS.md lists its methods beside torch's."""

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

    Its methods have the names and the meaning of those of ``torch.distributed.fsdp.FSDPModule``. They are called on
    all ranks alike, between forward and backward passes where they say nothing else, and send nothing themselves
    except where they say so. What they set holds from the next forward or backward on.
    """

    _fsdp_state: FSDPState

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the class as it was: slices of containers call their class, and are not sharded."""
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
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Return an independent copy, as fully sharded as this, on the same ranks. It sends nothing."""
        return deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuleError(
            "a fully sharded module cannot be pickled: it holds process groups",
            {"module": type(self).__name__},
            "save model.state_dict(), build the module anew, fully_shard it and load that",
        )

    # -- gathering --------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters now, so that its next forward need not. Collective; not recursive.

        The module goes on to show its sharded parameters, and a write to them before the forward shows: the forward
        then gathers again. All ranks write alike. Gathered parameters stay until the backward of that forward, or
        until ``reshard()``.

        Args:
            async_op: return at once; the forward waits for the gather, or the handle does.

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
        """Have this module's own parameters gathered anew before their next use. Not recursive; sends nothing."""
        state = self._fsdp_state
        if state.runtime is not None:
            state.runtime.reshard(state)

    def reset_iter_state(self) -> None:
        """Forget what a forward or backward left that raised, and gradients that wait for a reduction.

        The next forward does the first by itself; call this to give up gradients that were accumulated, too.

        Raises:
            RuleError: another fully sharded module holds this one; it is to be called on that.
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
            LayoutError: (a ValueError) it is not a bool. Give a number of ranks to `fully_shard`.
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
        """Free gathered parameters after backward, or keep them for the next forward, as long as nobody writes to them.

        Keeping them saves gathers while gradients accumulate. A forward after an optimizer's step gathers in any case.
        """
        for state in _states(self, recurse):
            if state.keeps_after_backward is reshard_after_backward:
                state.keeps_after_backward = not reshard_after_backward
                _is_changed(state)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ahead as many modules as the list has, while this one runs forward; without a call, one.

        They are gathered in the order of their use, which all ranks know after the first forward, whatever the order
        of the list. Each module more takes memory for one gathered module.
        """
        self._set_prefetch(0, modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ahead as many modules as the list has, while this one runs backward; without a call, one."""
        self._set_prefetch(1, modules)

    def _set_prefetch(self, direction: int, modules: Sequence[Any]) -> None:
        _check_all_sharded(modules)
        ahead = self._fsdp_state.ahead
        if ahead[direction] != len(modules):
            ahead[direction] = len(modules)
            _is_changed(self._fsdp_state)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say that this module's backward needs no parameters (False), which saves a gather.

        It has an effect where that can be verified: for a module whose parameters are all of embeddings.
        """
        state = self._fsdp_state
        skips = not unshard_in_backward and state.is_lookup
        if state.skips_backward is not skips:
            state.skips_backward = skips
            _is_changed(state)

    # -- gradients --------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in the backwards to come, or let them add up on each rank (``no_sync``).

        Gradients that are not reduced are kept whole, in ``reduce_dtype`` where that is wider, and are no parameter's
        ``.grad`` yet; the next backward that reduces takes them along.
        """
        for state in _states(self, recurse):
            for group in state.param_groups:
                group.gradients.requires_sync = group.gradients.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With copies of the shards (a mesh of two axes): sum over the copies, too, or let one copy's sums add up."""
        for state in _states(self, recurse):
            for group in state.param_groups:
                group.gradients.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is a step's last. It changes nothing: each backward leaves all in order."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients of this module's own parameters by `factor`, not by the number of ranks.

        Raises:
            LayoutError: (a ValueError) it is not above 0.
        """
        if not factor > 0:
            raise LayoutError(f"gradients cannot be divided by {factor!r}", fix="give a number above 0")
        for group in self._fsdp_state.param_groups:
            group.gradients.divide_by(float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """`set_gradient_divide_factor` by its old name."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with this rank's range of each averaged gradient, flat, before it becomes the parameters'.

        What it writes there, such as a sum over ranks that the mesh does not have, is what the parameters get.

        Args:
            hook: takes a tensor of ``reduce_dtype``.
            stream: the cuda stream it runs in; None for that of the reduction.

        Raises:
            LayoutError: (a ValueError) `stream` is given, and the mesh has copies.
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
        """Let the gathers of the next forward wait for `event`, too; then it is forgotten.

        They wait for all work before that forward in any case.
        """
        state = self._fsdp_state
        state.found_runtime().post_optim_event = event

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use sums only as reductions. That is so in any case."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Reduce zeros for parameters that a rank did not use. That is so in any case, for what any rank uses."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Have so many reductions on their way at a time, each with a buffer for packed gradients; 2 at least.

        Raises:
            TypeError: it is no int.
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

    # -- what torch's has and this has not ----------------------------------------------------------------------------

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reductions a communicator of their own. On NCCL they have one; elsewhere none is needed."""

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Refused: gathers go into fixed memory of the library's own."""
        _refuse("set_custom_all_gather", "use set_modules_to_forward_prefetch to set how far gathers run ahead")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Refused: gradients are packed into fixed memory of the library's own."""
        _refuse("set_custom_reduce_scatter", "use set_all_reduce_hook for a sum over more ranks")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused where `enable` is True: memory is made once and stays, it is not allocated for each collective."""
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm", "leave it out; buffers are fixed already")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Refused, as `set_allocate_memory_from_process_group_for_comm` is."""
        _refuse("set_symm_mem_for_comm", "leave it out; buffers are fixed already")


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, state: FSDPState) -> None:
        self._state = state

    def wait(self) -> None:
        """Let what the caller does next find the parameters gathered."""
        if self._state.sharded_state is not SHARDED:
            self._state.wait()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module` be gathered around another method as it is around ``forward``; nothing for other modules.

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
    """A method of a fully sharded module, with the module gathered around it."""

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
    """Let modules that no common one holds share streams and their memory, in torch's FSDP; here nothing is to be done.

    Gathered parameters and packed gradients lie in memory that is made once, so streams do not make it fall apart.

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
    """The class of a fully sharded module that was of class `kind`."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})
    return _CLASSES[kind]
