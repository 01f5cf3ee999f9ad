"""`FSDPState`: the state of a module whose parameters are gathered together, just before it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from shardtensor.comm.copy_engines import Buffer, gather_buffer
from shardtensor.comm.group import Pending
from shardtensor.comm.streams import Stream, Streams
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError
from shardtensor.fsdp.autograd import Versions, not_in_buffer, watch_backward
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.outside import UNCOMPILED
from shardtensor.fsdp.param_group import ParamGroup, PostForwardMesh
from shardtensor.fsdp.policy import MixedPrecisionPolicy, Reshard
from shardtensor.layout.ranges import GATHER_BUFFERS, SMALL_BYTES, aligned_bytes, gather_buffers
from shardtensor.tensor.trees import cast_floats, tensors_in, with_hook


class ShardedState(Enum):
    """Whether a state's parameters are gathered."""

    SHARDED = auto()
    UNSHARDING = auto()
    """The all-gather was started; the caller's stream does not wait for it yet."""
    UNSHARDED = auto()


SHARDED, UNSHARDING, UNSHARDED = ShardedState


class FSDPState:
    """The parameters of one module, and the hooks around its forward and backward.

    Attributes:
        param_groups: the parameters, in groups of one dtype each.
        runtime: it calls all-gathers and reductions; shared by all states of a model. None before the first forward.
        index: of this state in the runtime.
        name: of the module in the runtime's outermost module.
        versions: the version counters of the unsharded parameters.
        stays_unsharded: whether parameters stay unsharded from forward to the end of backward.
        has_own_buffer: whether no other state is gathered into its buffer.
        is_user_unsharded: whether the user called ``unshard()``.
        is_kept: whether it is gathered for the next forward, which gathers it again only if it was written since.
        keeps_after_backward: `FSDPModule.set_reshard_after_backward`.
        skips_backward: `FSDPModule.set_unshard_in_backward`.
        ahead: how many states are gathered ahead while this one runs, in forward and in backward.
        reductions_ahead: how many reductions may be pending at a time; 0 for the default.
        post_forward_mesh: with ``reshard_after_forward=n``.
        is_running: how many calls of the module's forward are running.
        is_in_backward: whether its backward has begun, and the backward of the model has not ended.
    """

    new_runtime: ClassVar[Callable[[FSDPState], Any]]  # set by `runtime`, which imports this file

    def __init__(
        self,
        modules: list[nn.Module],
        param_groups: list[ParamGroup],
        data_mesh: DataMesh,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: Reshard,
        find_unused: bool,
        device: torch.device,
    ) -> None:
        self.modules, self.module, self.param_groups = modules, modules[0], param_groups
        self.data_mesh, self.policy, self.device = data_mesh, policy, device
        self.reshard_after_forward, self.find_unused = reshard_after_forward, find_unused
        self.post_forward_mesh: PostForwardMesh | None = None
        if type(reshard_after_forward) is int:
            self.post_forward_mesh = PostForwardMesh(param_groups, data_mesh.shard, reshard_after_forward)
        self.is_user_unsharded = self.keeps_after_backward = self.skips_backward = False
        self.ahead, self.reductions_ahead = [1, 1], 0
        self.index, self.name = -1, ""
        self.refer()
        watch_backward()

    def refer(self) -> None:
        """Set the groups' references to this state, and reset it to before the first forward."""
        for group in self.param_groups:
            group.state = weakref.ref(self)
        self.is_running, self.is_in_backward = 0, False
        self.forget()

    def forget(self) -> None:
        """Drop the buffer and the runtime; the next forward makes new ones, on all ranks."""
        self.runtime: Any = None
        self.buffer: Any = None
        self.sharded_state, self.is_kept = SHARDED, False
        self._pending: list[Pending] = []
        self._swaps: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._rnns: list[nn.RNNBase] = []
        self.versions, self._memory = Versions(self, ()), range(0)
        for group in self.param_groups:
            group.forget()
        if self.post_forward_mesh is not None:
            self.post_forward_mesh.forget()

    def compute_flags(self) -> None:
        """Compute the flags that do not change at run time."""
        self.is_container = any(state is not self for module in self.modules for _, state in states_in(module))
        is_small = sum(group.unsharded_bytes for group in self.param_groups) <= SMALL_BYTES
        self.stays_unsharded = self.is_container or (
            is_small if self.reshard_after_forward is None else self.reshard_after_forward is False
        )
        self.has_own_buffer = self.stays_unsharded or self.is_user_unsharded or self.keeps_after_backward

    @property
    def title(self) -> str:
        """The name of its module in errors."""
        return f"{self.name} ({plain_class(self.module).__name__})".strip()

    @property
    def is_lookup(self) -> bool:
        """Whether all its parameters are embedding tables, whose backward does not read them."""
        owners = [owner for group in self.param_groups for info in group.params_info for owner, _ in info.locations]
        kinds = (nn.Embedding, nn.EmbeddingBag)
        return all(type(owner) in kinds and owner.max_norm is None for owner in owners)

    # -- the module's parameters ------------------------------------------------------------------------------------

    def make_swaps(self) -> None:
        """List which parameters each module holds while it runs, and which after it."""
        found: dict[int, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
        owners: dict[int, nn.Module] = {}
        for group in self.param_groups:
            params = zip(group.params_info, group.unsharded_params, group.sharded_params, strict=True)
            for info, unsharded, sharded in params:
                for owner, name in info.locations:
                    owners[id(owner)] = owner
                    swap = found.setdefault(id(owner), (owner._parameters, {}, {}))
                    swap[1][name], swap[2][name] = unsharded, sharded
        self._swaps = list(found.values())
        self._rnns = [owner for owner in owners.values() if isinstance(owner, nn.RNNBase)]
        parts = [part for group in self.param_groups for part in group.parts]
        if not self.versions.are_of(parts):
            self.versions = Versions(self, parts)
            there = [part for part in parts if part.nbytes and not part.is_meta]
            ends = [end for part in there for end in (part.data_ptr(), part.data_ptr() + part.nbytes)]
            self._memory = range(min(ends, default=0), max(ends, default=0))

    def show_unsharded(self) -> None:
        """Put the unsharded parameters into the modules."""
        for place, unsharded, _ in self._swaps:
            place.update(unsharded)
        if self._rnns:
            self._show_rnns()

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules."""
        for place, _, sharded in self._swaps:
            place.update(sharded)
        if self._rnns:
            self._show_rnns()

    def _show_rnns(self) -> None:
        """Update the list of parameters that each recurrent layer keeps to those it holds now."""
        for owner in self._rnns:
            owner._flat_weights = [owner._parameters[name] for name in owner._flat_weights_names]

    # -- gathering --------------------------------------------------------------------------------------------------

    def use(self, streams: Streams) -> None:
        """Use these streams from now on."""
        self.streams, self._ready = streams, streams.event()

    def gather(self, stream: Stream, is_again: bool) -> None:
        """Start the all-gather in `stream`, for a forward or again for its backward."""
        if self.versions.present != self.versions.absent:  # no graph has saved values of this generation yet
            self.versions.set(self.runtime.generation)
        self.buffer.holder = self
        self.sharded_state = UNSHARDING
        if self._ready is None:
            self._pending = self._start(is_again)
            return
        stream.follow()
        with stream:
            self._start(is_again)
            stream.mark(self._ready)

    def _start(self, is_again: bool) -> list[Pending]:
        if self.post_forward_mesh is not None:
            return self.post_forward_mesh.gather(is_again)
        return [group.gather() for group in self.param_groups]

    def finish(self) -> None:
        """Wait for a pending all-gather, before another one uses its buffer."""
        if self._pending:
            for pending in self._pending:
                pending.wait()
            self._pending = []

    def make_room_for(self, state: FSDPState) -> None:
        """Free the buffer of this state for an all-gather of `state`, which may be this one again.

        Raises:
            RuleError: the module of this state is running, and computes with the values in the buffer.
        """
        if state is not self:
            if self.is_running:
                raise RuleError(
                    "a fully sharded module called another one that is no submodule of it, and both take turns in one"
                    " piece of memory",
                    {"module": self.title, "called": state.title},
                    [
                        "make the other a submodule of the caller, and shard that after it",
                        "fully_shard(caller, reshard_after_forward=False) keeps the caller in memory of its own",
                    ],
                )
            self.versions.set(self.versions.absent)
        self.sharded_state = SHARDED
        if self._pending:
            self.finish()

    def move_from(self, unsharded: list[torch.Tensor]) -> None:
        """Copy gathered values from old buffers into the present ones."""
        for group, values in zip(self.param_groups, unsharded, strict=True):
            assert group.unsharded is not None, "buffers were assigned before"
            group.unsharded.copy_(values)
        self.versions.set(self.runtime.generation)
        self.sharded_state, self.buffer.holder = UNSHARDED, self

    def wait(self) -> None:
        """Make the caller's stream, or on the CPU the host, wait for the all-gather."""
        if self._ready is None:
            self.finish()
        else:
            self.streams.wait(self._ready)
        if self.sharded_state is UNSHARDING:
            self.sharded_state = UNSHARDED
        self.versions.set(self.runtime.generation)

    # -- forward and backward ---------------------------------------------------------------------------------------

    @untraced(UNCOMPILED)
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the module's forward; return its inputs, cast by the policy."""
        runtime, policy = self.found_runtime(), self.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), policy.param_dtype)
        runtime.pre_forward(self)
        if not self.is_running:
            self.show_unsharded()
        self.is_running += 1
        return args, kwargs

    @untraced(UNCOMPILED)
    def leave(self, output: Any) -> Any:
        """Run after the module's forward; return its output, cast by the policy and with hooks for backward."""
        self._left()
        runtime = self.runtime
        output = not_in_buffer(output, self._memory, self)
        if torch.is_grad_enabled():
            output = with_hook(output, partial(self._pre_backward, runtime.generation), runtime.start_backward)
            if runtime.order.is_recording:
                runtime.leaves(self, any(x.requires_grad for x in tensors_in(output)))
        elif runtime.has_grad:  # of the outermost forward
            runtime.reducer.mark_recompute(self.param_groups)
            runtime.leaves(self, True)
        if self.policy.output_dtype is not None:
            output = cast_floats(output, self.policy.output_dtype)
        runtime.post_forward()
        return output

    @untraced(UNCOMPILED)
    def abandon(self) -> None:
        """Run after a forward that raised."""
        self._left()
        self.runtime.abandon()

    def _left(self) -> None:
        self.is_running -= 1
        if not self.is_running and not self.is_in_backward:
            self.show_sharded()

    @untraced(UNCOMPILED)
    def _pre_backward(self, generation: int, grad: torch.Tensor) -> None:
        """Run before the module's backward; `generation` is that of the values in its forward."""
        if self.runtime is None:
            raise RuleError(
                "the backward of a fully sharded module came after free_gathered",
                {"module": self.title},
                "call backward before free_gathered, or the forward again",
            )
        self.runtime.pre_backward(self, generation)
        if not self.is_in_backward:
            self.is_in_backward = True
            self.show_unsharded()  # checkpoints may recompute a part of the module

    def end_backward(self) -> None:
        """Run after a backward through the module."""
        self.is_in_backward = False
        if not self.is_running:
            self.show_sharded()

    def found_runtime(self) -> Any:
        """Return the runtime of this state; if it has none, make one for this state and those inside its module."""
        if self.runtime is None or not self.runtime.is_current:
            self.runtime = FSDPState.new_runtime(self)
        return self.runtime


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of a module itself; None if it is not fully sharded."""
    return module.__dict__.get("_fsdp_state")


def states_in(module: nn.Module) -> Iterator[tuple[str, FSDPState]]:
    """Yield the names and states of a module and of all modules in it, outer ones first."""
    seen = set()
    for name, child in module.named_modules():
        state = state_of(child)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield name, state


def plain_class(module: nn.Module) -> type:
    """Return the original class of a module, fully sharded or not."""
    return type(module).__mro__[2] if state_of(module) is not None else type(module)


@torch.inference_mode(False)  # otherwise autograd could not use tensors in the buffers
def assign_buffers(states: Sequence[FSDPState]) -> None:
    """Assign a buffer to every state: its own if it has to stay unsharded, else one of a ring, used in turns.

    The ring has a buffer for the module that computes and one for each module gathered ahead of it. All ranks call it:
    if the copy engines of GPUs can gather, the memory is registered on all ranks.
    """
    old = {id(state.buffer.allocation): state.buffer.allocation for state in states if state.buffer is not None}
    depth = max([GATHER_BUFFERS, *(1 + ahead for state in states for ahead in state.ahead)])
    sizes = [[aligned_bytes(group.unsharded_bytes) for group in state.param_groups] for state in states]
    planned = gather_buffers([(sum(s), state.has_own_buffer) for s, state in zip(sizes, states, strict=True)], depth)
    shard = states[0].data_mesh.shard
    allocation = gather_buffer(shard, sum(each.size_bytes for each in planned), states[0].device)
    buffers, start = [], 0
    for each in planned:
        buffers.append(Buffer(allocation))
        for number in each.users:
            state, place = states[number], start
            state.buffer = buffers[-1]
            for group, size in zip(state.param_groups, sizes[number], strict=True):
                if group.data_mesh.shard is shard:
                    group.gathers_by = allocation.group
                group.use_buffer(allocation.memory[place:])
                group.make_views()
                place += size
        start += each.size_bytes
    for buffer in buffers:
        buffer.count_users()
    for unused in old.values():
        unused.end()
