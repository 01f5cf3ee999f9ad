"""`FSDPState`: a module whose parameters are gathered together, just before it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from shardtensor.comm.group import Pending
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError
from shardtensor.fsdp.autograd import (
    Versions,
    cast_floats,
    held_apart,
    set_versions,
    tensors_in,
    watch_backward,
    with_hook,
)
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.outside import UNCOMPILED
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.post_forward import PostForwardMesh, Reshard
from shardtensor.fsdp.streams import Stream, Streams
from shardtensor.plan.match.units import SMALL


class ShardedState(Enum):
    """What modules find when they run."""

    SHARDED = auto()
    UNSHARDING = auto()
    """A gather was started; the caller's stream does not wait for it yet."""
    UNSHARDED = auto()


SHARDED, UNSHARDING, UNSHARDED = ShardedState


class FSDPState:
    """The parameters of one module, and what happens to them around its forward and backward.

    Attributes:
        param_groups: the parameters; of one dtype each.
        runtime: what decides when they are gathered; the same for all units of a model. None before the first call.
        versions: the version counters of its gathered parameters.
        has_own_buffer: whether no other unit is gathered into its memory.
        is_asked: whether the user asks for it, by ``unshard()``.
        keeps_after_backward: whether it stays gathered after backward, until something writes to it.
        skips_backward: whether its backward needs no parameters.
        ahead: how many units are gathered ahead of the work while it runs, in forward and in backward.
        reductions_ahead: how many reductions may be on their way at a time; 0 for what is usual.
        post_forward_mesh: what is kept of it from forward to backward, with ``reshard_after_forward=n``.
        sharded_state: whether a gather of the present values was started, and waited for.
        is_kept: whether it was gathered for the next forward, which need not gather it if nothing is written to it.
        stays_gathered: whether its parameters stay gathered from its forward to the end of its backward.
        is_running: how many calls of the module's forward are going on.
        is_in_backward: whether its backward has begun, and the whole has not ended.
    """

    new_runtime: ClassVar[Callable[[FSDPState], Any]]  # set by `runtime`, which stands right of this file

    def __init__(
        self,
        module: nn.Module,
        param_groups: list[ParamGroup],
        data_mesh: DataMesh,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: Reshard,
        device: torch.device,
    ) -> None:
        self.modules = [module]
        for group in param_groups:
            group.state = weakref.ref(self)
        self.module, self.param_groups, self.data_mesh = module, param_groups, data_mesh
        self.policy, self.device = policy, device
        self.reshard_after_forward = reshard_after_forward
        self.runtime: Any = None
        self.index, self.name = -1, ""
        self.find_unused = False
        self.post_forward_mesh: PostForwardMesh | None = None
        if type(reshard_after_forward) is int:
            self.post_forward_mesh = PostForwardMesh(param_groups, data_mesh.shard, reshard_after_forward)
        self.is_container = self.stays_gathered = self.has_own_buffer = False
        self.is_asked = False
        self.keeps_after_backward = False
        self.skips_backward = False
        self.ahead, self.reductions_ahead = [1, 1], 0
        self.sharded_state, self.is_kept = SHARDED, False
        self.is_running, self.is_in_backward = 0, False
        self.buffer: Any = None
        self._pending: list[Pending] = []
        self._together: Sequence[FSDPState] = (self,)  # with which it was gathered; the event of the first tells when
        self._swaps: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._rnns: list[nn.RNNBase] = []
        self.versions = Versions(self, ())
        self._memory = range(0)
        watch_backward()

    def settle(self) -> None:
        """Compute the flags that do not change at run time."""
        self.is_container = any(state is not self for module in self.modules for _, state in states_in(module))
        self.stays_gathered = self._stays_gathered()
        self.has_own_buffer = self.stays_gathered or self.is_asked or self.keeps_after_backward

    def _stays_gathered(self) -> bool:
        if self.reshard_after_forward is None:
            return self.is_container or sum(group.whole_bytes for group in self.param_groups) <= SMALL
        return self.is_container or self.reshard_after_forward is False

    def forget(self) -> None:
        """Drop the buffer and the runtime; the next forward makes new ones, on all ranks."""
        self.runtime = self.buffer = None
        self.sharded_state, self.is_kept = SHARDED, False
        self._together, self._pending, self._swaps, self._rnns = (self,), [], [], []
        self.versions, self._memory = Versions(self, ()), range(0)
        for group in self.param_groups:
            group.forget()
        if self.post_forward_mesh is not None:
            self.post_forward_mesh.forget()

    @property
    def title(self) -> str:
        """What errors call its module."""
        return f"{self.name} ({type(self.module).__mro__[2 * (state_of(self.module) is self)].__name__})".strip()

    @property
    def _generation(self) -> int:
        assert self.runtime is not None
        return self.runtime.generation

    @property
    def is_lookup(self) -> bool:
        """Whether all its parameters are tables of embeddings, whose backward does not read them."""
        owners = [owner for group in self.param_groups for info in group.params_info for owner, _ in info.homes]
        kinds = (nn.Embedding, nn.EmbeddingBag)
        return all(type(owner) in kinds and owner.max_norm is None for owner in owners)

    @property
    def is_at_hand(self) -> bool:
        """Whether it is gathered and waited for, and nothing takes that away before the end of its backward."""
        return self.sharded_state is UNSHARDED and self.stays_gathered

    @property
    def is_gathered(self) -> bool:
        """Whether a gather of the present values was started, and nothing else took the memory."""
        return self.sharded_state is not SHARDED

    # -- the module's parameters ------------------------------------------------------------------------------------

    def make_swaps(self) -> None:
        """List which parameters each module holds while it runs, and which afterwards."""
        found: dict[int, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
        for group in self.param_groups:
            for info, view, sharded in zip(
                group.params_info, group.unsharded_params, group.sharded_params, strict=True
            ):
                for owner, name in info.homes:
                    place = owner._parameters
                    _, views, sharded_params = found.setdefault(id(place), (place, {}, {}))
                    views[name], sharded_params[name] = view, sharded
        self._swaps = list(found.values())
        parts = [part for group in self.param_groups for part in group.parts]
        if not self.versions.are_of(parts):
            self.versions = Versions(self, parts)
            ends = [
                place for part in parts for place in (part.data_ptr(), part.data_ptr() + part.nbytes) if part.nbytes
            ]
            self._memory = range(min(ends, default=0), max(ends, default=0))
        owners = {
            id(owner): owner for group in self.param_groups for info in group.params_info for owner, _ in info.homes
        }
        self._rnns = [owner for owner in owners.values() if isinstance(owner, nn.RNNBase)]

    def show_unsharded(self) -> None:
        """Put the unsharded parameters into the modules."""
        for place, views, _ in self._swaps:
            place.update(views)
        if self._rnns:
            self._show_rnns()

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules."""
        for place, _, sharded_params in self._swaps:
            place.update(sharded_params)
        if self._rnns:
            self._show_rnns()

    def _show_rnns(self) -> None:
        """Have recurrent layers, which keep a list of their parameters, list those that are shown."""
        for owner in self._rnns:
            owner._flat_weights = [owner._parameters[name] for name in owner._flat_weights_names]

    def use(self, streams: Streams) -> None:
        """Gather beside these streams from now on."""
        self.streams, self._ready = streams, streams.event()

    # -- gathering --------------------------------------------------------------------------------------------------

    def gather(self, is_again: bool) -> None:
        """Start to gather, for a forward or again for its backward; in the caller's stream."""
        coalesced = self.param_groups[0].coalesced if self.param_groups else None
        if coalesced is not None and coalesced.is_ready(is_again):
            for state in coalesced.states:
                state.finish()  # a gather that nobody waited for would write into the same memory
            together, pending = coalesced.states, [coalesced.gather()]
        elif self.post_forward_mesh is None:
            together, pending = [self], [group.gather() for group in self.param_groups]
        else:
            together, pending = [self], self.post_forward_mesh.gather(is_again)
        # Values come over what is there; no graph has saved those of this generation yet.
        set_versions([state.versions for state in together], self._generation, only_present=True)
        for state in together:
            state.buffer.holder = state
            state._together, state._pending = together, pending
            state.sharded_state = UNSHARDING

    def finish(self) -> None:
        """Wait for a gather whose buffer is taken for another one; in the caller's stream."""
        for pending in self._pending:
            pending.wait()
        self._pending = []

    def make_room_for(self, state: FSDPState) -> None:
        """Have `state`, perhaps this one anew, gathered into this one's memory; in the caller's stream.

        Raises:
            RuleError: this one's module runs, and computes with what lies there.
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
            self.versions.displaced()
        self.sharded_state = SHARDED
        self.finish()

    def move_from(self, wholes: Sequence[torch.Tensor | None]) -> None:
        """Take what was gathered into other memory."""
        for group, whole in zip(self.param_groups, wholes, strict=True):
            group.whole.copy_(whole)  # type: ignore[union-attr, arg-type]
        set_versions([self.versions], self._generation)
        self.sharded_state = UNSHARDED

    def wait(self) -> None:
        """Make the caller's stream wait for the gather."""
        self.finish()
        if self._ready is not None:
            self.streams.wait(self._together[0]._ready)
        there = []
        for state in self._together:
            if state._together is self._together:  # others are gathered anew
                if state.sharded_state is UNSHARDING:
                    state.sharded_state = UNSHARDED
                there.append(state.versions)
        set_versions(there, self._generation)

    def started(self, stream: Stream) -> None:
        """Note where in `stream`, a stream, the gather is."""
        self._pending = []
        stream.mark(self._together[0]._ready)

    # -- forward and backward ---------------------------------------------------------------------------------------

    @untraced(UNCOMPILED)
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the module's forward."""
        runtime = self.runtime
        if runtime is None or not runtime.is_current:
            runtime = self.found_runtime()
        policy = self.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), policy.param_dtype)
        runtime.enter(self)
        if not self.is_running:
            self.show_unsharded()
        self.is_running += 1
        return args, kwargs

    @untraced(UNCOMPILED)
    def leave(self, output: Any) -> Any:
        """After the module's forward."""
        self._left()
        assert self.runtime is not None
        output = held_apart(output, self._memory, self)
        if not torch.is_grad_enabled():
            if self.runtime.has_grad:  # of the outermost forward
                self.runtime.mark_recompute(self)
        else:
            hook = partial(self._before_backward, self.runtime.generation)
            output = with_hook(output, hook, self.runtime.start_backward)
            if self.runtime.order.is_recording:
                self.runtime.leaves(self, any(x.requires_grad for x in tensors_in(output)))
        if self.policy.output_dtype is not None:
            output = cast_floats(output, self.policy.output_dtype)
        self.runtime.leave(self)
        return output

    @untraced(UNCOMPILED)
    def abandon(self) -> None:
        """After a forward that raised."""
        self._left()
        assert self.runtime is not None
        self.runtime.abandon(self)

    def _left(self) -> None:
        self.is_running -= 1
        if not self.is_running and not self.is_in_backward:
            self.show_sharded()

    def end_backward(self) -> None:
        """After a backward that went through the module."""
        self.is_in_backward = False
        if not self.is_running:
            self.show_sharded()

    @untraced(UNCOMPILED)
    def _before_backward(self, generation: int, grad: torch.Tensor) -> None:
        if self.runtime is None:
            raise RuleError(
                "the backward of a fully sharded module came after free_gathered",
                {"module": self.title},
                "call backward before free_gathered, or the forward again",
            )
        self.runtime.before_backward(self, generation)
        if not self.is_in_backward:
            self.is_in_backward = True
            self.show_unsharded()  # a part of the module may be computed again

    def found_runtime(self) -> Any:
        """The runtime that it belongs to, or one of its own and of the states in it."""
        if self.runtime is None or not self.runtime.is_current:
            self.runtime = FSDPState.new_runtime(self)
        return self.runtime


def state_of(module: nn.Module) -> FSDPState | None:
    """The unit of a module itself, if it is one."""
    return module.__dict__.get("_fsdp_state")


def states_in(module: nn.Module) -> Iterator[tuple[str, FSDPState]]:
    """The units of a module and of all modules in it, outer ones first."""
    seen = set()
    for name, child in module.named_modules():
        state = state_of(child)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield name, state
