"""`Unit`: a module whose parameters are gathered together, just before it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardtensor.comm.group import Pending
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError
from shardtensor.fsdp.domain import Domain
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.near import NearRanks, Reshard
from shardtensor.fsdp.outside import UNCOMPILED
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.streams import Lane, Streams
from shardtensor.fsdp.values import cast_floats, held_apart, with_hook
from shardtensor.fsdp.versions import Versions, set_versions, watch_backward
from shardtensor.plan.match.units import SMALL

if TYPE_CHECKING:
    from shardtensor.fsdp.schedule import Schedule


class Unit:
    """The parameters of one module, and what happens to them around its forward and backward.

    Attributes:
        flats: the parameters; of one dtype each.
        schedule: what decides when they are gathered; the same for all units of a model. None before the first call.
        versions: the version counters of its gathered parameters.
        container: the unit that it is a part of: see `parts`.
        has_own_slot: whether no other unit is gathered into its memory.
        is_asked: whether the user asks for it, by ``unshard()``.
        keeps_after_backward: whether it stays gathered after backward, until something writes to it.
        skips_backward: whether its backward needs no parameters.
        ahead: how many units are gathered ahead of the work while it runs, in forward and in backward.
        reductions_ahead: how many reductions may be on their way at a time; 0 for what is usual.
        near: what is kept of it from forward to backward, with ``reshard_after_forward=n``.
        is_gathered: whether a gather of the present values was started, and nothing else took the memory.
        is_awaited: whether the caller's stream was made to wait for that gather.
        stays_gathered: whether its parameters stay gathered from its forward to the end of its backward.
        is_running: how many calls of the module's forward are going on.
        is_in_backward: whether its backward has begun, and the whole has not ended.
    """

    def __init__(
        self,
        module: nn.Module,
        flats: list[Flat],
        domain: Domain,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: Reshard,
        device: torch.device,
    ) -> None:
        self.modules = [module]
        for flat in flats:
            flat.unit = weakref.ref(self)
        self.module, self.flats, self.domain, self.policy, self.device = module, flats, domain, policy, device
        self.reshard_after_forward = reshard_after_forward
        self.schedule: Schedule | None = None
        self.index, self.name = -1, ""
        self.find_unused = False
        self.container: Unit | None = None
        self.near: NearRanks | None = None
        if type(reshard_after_forward) is int:
            self.near = NearRanks(flats, domain.shard, reshard_after_forward)
        self.is_container = self.stays_gathered = self.has_own_slot = False
        self.is_asked = False
        self.keeps_after_backward = False
        self.skips_backward = False
        self.ahead, self.reductions_ahead = [1, 1], 0
        self.is_gathered = self.is_awaited = False
        self.is_running, self.is_in_backward = 0, False
        self.slot: Any = None
        self._pending: list[Pending] = []
        self._together: Sequence[Unit] = (self,)  # with which it was gathered; the event of the first tells when
        self._swaps: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._rnns: list[nn.RNNBase] = []
        self.versions = Versions(self, ())
        self._memory = range(0)
        watch_backward()

    def settle(self) -> None:
        """Know what there is to know before the first forward."""
        self.is_container = any(unit is not self for module in self.modules for _, unit in units_in(module))
        self.stays_gathered = self._stays_gathered()
        self.has_own_slot = self.stays_gathered or self.is_asked or self.keeps_after_backward

    def _stays_gathered(self) -> bool:
        if self.reshard_after_forward is None:
            return self.is_container or sum(flat.whole_bytes for flat in self.flats) <= SMALL
        return self.is_container or self.reshard_after_forward is False

    def forget(self) -> None:
        """Have no memory to be gathered into, until the next forward makes a schedule, on all ranks."""
        self.schedule = self.slot = None
        self.is_gathered = self.is_awaited = False
        self._together, self._pending, self._swaps, self._rnns = (self,), [], [], []
        self.versions, self._memory = Versions(self, ()), range(0)
        for flat in self.flats:
            flat.forget()
        if self.near is not None:
            self.near.forget()

    @property
    def title(self) -> str:
        """What errors call its module."""
        return f"{self.name} ({type(self.module).__mro__[2 * (unit_of(self.module) is self)].__name__})".strip()

    @property
    def _generation(self) -> int:
        assert self.schedule is not None
        return self.schedule.generation

    @property
    def is_lookup(self) -> bool:
        """Whether all its parameters are tables of embeddings, whose backward does not read them."""
        owners = [owner for flat in self.flats for entry in flat.entries for owner, _ in entry.homes]
        kinds = (nn.Embedding, nn.EmbeddingBag)
        return all(type(owner) in kinds and owner.max_norm is None for owner in owners)

    is_needed_in_backward = True

    @property
    def is_at_hand(self) -> bool:
        """Whether it is gathered and waited for, and nothing takes that away before the end of its backward."""
        return self.is_awaited and self.is_gathered and self.stays_gathered

    # -- the module's parameters ------------------------------------------------------------------------------------

    def make_swaps(self) -> None:
        """Settle what is put into modules while they run, and what afterwards; where that lies, and its versions."""
        found: dict[int, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
        for flat in self.flats:
            for entry, view, shell in zip(flat.entries, flat.shown, flat.shells, strict=True):
                for owner, name in entry.homes:
                    place = owner._parameters
                    _, views, shells = found.setdefault(id(place), (place, {}, {}))
                    views[name], shells[name] = view, shell
        self._swaps = list(found.values())
        parts = [part for flat in self.flats for part in flat.parts]
        if not self.versions.are_of(parts):
            self.versions = Versions(self, parts)
            ends = [
                place
                for part in parts
                if part.nbytes and not part.is_meta
                for place in (part.data_ptr(), part.data_ptr() + part.nbytes)
            ]
            self._memory = range(min(ends, default=0), max(ends, default=0))
        owners = {id(owner): owner for flat in self.flats for entry in flat.entries for owner, _ in entry.homes}
        self._rnns = [owner for owner in owners.values() if isinstance(owner, nn.RNNBase)]

    def show_views(self) -> None:
        """Let modules compute with the gathered parameters."""
        for place, views, _ in self._swaps:
            place.update(views)
        if self._rnns:
            self._show_rnns()

    def show_shells(self) -> None:
        """Let modules show their sharded parameters."""
        for place, _, shells in self._swaps:
            place.update(shells)
        if self._rnns:
            self._show_rnns()

    def _show_rnns(self) -> None:
        """Have recurrent layers, which keep a list of their parameters, list those that are shown."""
        for owner in self._rnns:
            owner._flat_weights = [owner._parameters[name] for name in owner._flat_weights_names]

    def use(self, streams: Streams) -> None:
        """Be gathered beside these streams from now on."""
        self.streams, self._ready = streams, streams.event()

    # -- gathering --------------------------------------------------------------------------------------------------

    def gather(self, is_again: bool) -> None:
        """Start to gather, for a forward or again for its backward; in the caller's lane."""
        convoy = self.flats[0].convoy if self.flats else None
        if convoy is not None and convoy.is_ready(is_again):
            for unit in convoy.units:
                unit.finish()  # a gather that nobody waited for would write into the same memory
            together, pending = convoy.units, [convoy.gather()]
        elif self.near is None:
            together, pending = [self], [flat.gather() for flat in self.flats]
        else:
            together, pending = [self], self.near.gather(is_again)
        # Values come over what is there; no graph has saved those of this generation yet.
        set_versions([unit.versions for unit in together], self._generation, only_present=True)
        for unit in together:
            unit.slot.holder = unit
            unit._together, unit._pending = together, pending
            unit.is_gathered, unit.is_awaited = True, False

    def finish(self) -> None:
        """Let a gather come to its end whose memory is taken for another one; in the caller's lane."""
        for pending in self._pending:
            pending.wait()
        self._pending = []

    def make_room_for(self, unit: Unit) -> None:
        """Have `unit`, perhaps this one anew, gathered into this one's memory; in the caller's lane.

        Raises:
            RuleError: this one's module runs, and computes with what lies there.
        """
        if unit is not self:
            if self.is_running:
                raise RuleError(
                    "a fully sharded module called another one that is no submodule of it, and both take turns in one"
                    " piece of memory",
                    {"module": self.title, "called": unit.title},
                    [
                        "make the other a submodule of the caller, and shard that after it",
                        "fully_shard(caller, reshard_after_forward=False) keeps the caller in memory of its own",
                    ],
                )
            self.versions.displaced()
        self.is_gathered = False
        self.finish()

    def move_from(self, wholes: Sequence[torch.Tensor | None]) -> None:
        """Take what was gathered into other memory."""
        for flat, whole in zip(self.flats, wholes, strict=True):
            flat.whole.copy_(whole)  # type: ignore[union-attr, arg-type]
        set_versions([self.versions], self._generation)
        self.is_gathered = self.is_awaited = True

    def wait(self) -> None:
        """Let what the caller does next find the parameters gathered."""
        self.finish()
        if self._ready is not None:
            self.streams.wait(self._together[0]._ready)
        there = []
        for unit in self._together:
            if unit._together is self._together:  # others are gathered anew
                unit.is_awaited = True
                there.append(unit.versions)
        set_versions(there, self._generation)

    def started(self, lane: Lane) -> None:
        """Note where in `lane`, a stream, the gather is."""
        self._pending = []
        lane.mark(self._together[0]._ready)

    # -- forward and backward ---------------------------------------------------------------------------------------

    @untraced(UNCOMPILED)
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the module's forward."""
        schedule = self.schedule
        if schedule is None or not schedule.is_current:
            schedule = self.found_schedule()
        policy = self.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), policy.param_dtype)
        schedule.enter(self)
        if not self.is_running:
            self.show_views()
        self.is_running += 1
        return args, kwargs

    @untraced(UNCOMPILED)
    def leave(self, output: Any) -> Any:
        """After the module's forward."""
        self._left()
        assert self.schedule is not None
        output = held_apart(output, self._memory, self)
        if not torch.is_grad_enabled():
            if self.schedule.has_grad:  # of the outermost forward
                self.schedule.reductions.hide(self.flats)
        elif self.is_needed_in_backward:
            hook = partial(self._before_backward, self.schedule.generation)
            output = with_hook(output, hook, self.schedule.touch)
        if self.policy.output_dtype is not None:
            output = cast_floats(output, self.policy.output_dtype)
        self.schedule.leave(self)
        return output

    @untraced(UNCOMPILED)
    def abandon(self) -> None:
        """After a forward that raised."""
        self._left()
        assert self.schedule is not None
        self.schedule.abandon(self)

    def _left(self) -> None:
        self.is_running -= 1
        if not self.is_running and not self.is_in_backward:
            self.show_shells()

    def end_backward(self) -> None:
        """After a backward that went through the module."""
        self.is_in_backward = False
        if not self.is_running:
            self.show_shells()

    @untraced(UNCOMPILED)
    def _before_backward(self, generation: int, grad: torch.Tensor) -> None:
        if self.schedule is None:
            raise RuleError(
                "the backward of a fully sharded module came after free_gathered",
                {"module": self.title},
                "call backward before free_gathered, or the forward again",
            )
        self.schedule.before_backward(self, generation)
        if not self.is_in_backward:
            self.is_in_backward = True
            self.show_views()  # a part of the module may be computed again

    def found_schedule(self) -> Schedule:
        """The schedule that it belongs to, or one of its own and of the units in it."""
        if self.schedule is not None and self.schedule.is_current:
            return self.schedule
        from shardtensor.fsdp.checks import refuse_transform
        from shardtensor.fsdp.schedule import Schedule

        refuse_transform(self)
        self.schedule = Schedule.over(self)
        return self.schedule


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a module itself, if it is one."""
    return module.__dict__.get("_fsdp_unit")


def part_of(module: nn.Module) -> Unit | None:
    """The unit of a layer that its container gathers by itself, if it is one: see `fsdp.parts`."""
    return module.__dict__.get("_fsdp_part")


def units_in(module: nn.Module) -> Iterator[tuple[str, Unit]]:
    """The units of a module and of all modules in it, outer ones first, their parts included."""
    seen = set()
    for name, child in module.named_modules():
        unit = unit_of(child) or part_of(child)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield name, unit
