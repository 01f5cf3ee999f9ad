"""`Unit`: a module whose parameters are gathered together, just before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardtensor.comm.group import Pending
from shardtensor.fsdp.domain import Domain
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.streams import Lane, Streams
from shardtensor.fsdp.values import cast_floats, with_hook

if TYPE_CHECKING:
    from shardtensor.fsdp.schedule import Schedule


SMALL = 1 << 16  # bytes; to gather so few again costs more than to keep them


class Unit:
    """The parameters of one module, and what happens to them around its forward and backward.

    Attributes:
        flats: the parameters; of one dtype each.
        schedule: what decides when they are gathered; the same for all units of a model. None before the first call.
        is_gathered: whether a gather of the present values was started, and nothing else took the memory.
        is_awaited: whether the caller's stream was made to wait for that gather.
        stays_gathered: whether its parameters stay gathered from its forward to the end of its backward.
        is_running: whether the module's forward is being called.
    """

    def __init__(
        self,
        module: nn.Module,
        flats: list[Flat],
        domain: Domain,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
        device: torch.device,
    ) -> None:
        self.modules = [module]
        self.module, self.flats, self.domain, self.policy, self.device = module, flats, domain, policy, device
        self.reshard_after_forward = reshard_after_forward
        self.schedule: Schedule | None = None
        self.index, self.name = -1, ""
        self.is_container = self.stays_gathered = False
        self.syncs, self.find_unused = True, False
        self.is_gathered = self.is_awaited = False
        self.is_running = 0
        self.slot: Any = None
        self._pending: list[Pending] = []
        self._swaps: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._rnns: list[nn.RNNBase] = []

    def settle(self) -> None:
        """Know what there is to know before the first forward."""
        self.is_container = any(unit is not self for module in self.modules for _, unit in units_in(module))
        self.stays_gathered = self._stays_gathered()

    def _stays_gathered(self) -> bool:
        if self.reshard_after_forward is None:
            return self.is_container or sum(flat.whole_bytes for flat in self.flats) <= SMALL
        return self.is_container or self.reshard_after_forward is False

    is_kept = False
    is_needed_in_backward = True

    # -- the module's parameters ------------------------------------------------------------------------------------

    def make_swaps(self) -> None:
        """Settle what is put into modules while they run, and what afterwards."""
        found: dict[int, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
        for flat in self.flats:
            for entry, view, shell in zip(flat.entries, flat.shown, flat.shells, strict=True):
                for owner, name in entry.homes:
                    place = owner._parameters
                    _, views, shells = found.setdefault(id(place), (place, {}, {}))
                    views[name], shells[name] = view, shell
        self._swaps = list(found.values())
        owners = {id(owner): owner for flat in self.flats for entry in flat.entries for owner, _ in entry.homes}
        self._rnns = [owner for owner in owners.values() if isinstance(owner, nn.RNNBase)]

    def show_views(self) -> None:
        """Let modules compute with the gathered parameters."""
        for place, views, _ in self._swaps:
            place.update(views)
        self._show_rnns()

    def show_shells(self) -> None:
        """Let modules show their sharded parameters."""
        for place, _, shells in self._swaps:
            place.update(shells)
        self._show_rnns()

    def _show_rnns(self) -> None:
        """Have recurrent layers, which keep a list of their parameters, list those that are shown."""
        for owner in self._rnns:
            owner._flat_weights = [owner._parameters[name] for name in owner._flat_weights_names]

    def use(self, streams: Streams) -> None:
        """Be gathered beside these streams from now on."""
        self.streams, self._ready = streams, streams.event()

    # -- gathering --------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start to gather; in the caller's lane."""
        self._pending = [flat.gather() for flat in self.flats]
        self.is_gathered, self.is_awaited = True, False

    def wait(self) -> None:
        """Let what the caller does next find the parameters gathered."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self.streams.wait(self._ready)
        self.is_awaited = True

    def let_go(self) -> None:
        """Let no gather write into the memory any more, for another unit is to lie there."""
        for pending in self._pending:
            pending.wait()
        self._pending = []

    def started(self, lane: Lane) -> None:
        """Note where in `lane` the gather is."""
        if self.streams.is_cuda:
            self._pending = []
            lane.mark(self._ready)

    # -- forward and backward ---------------------------------------------------------------------------------------

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the module's forward."""
        schedule = self.schedule
        if schedule is None or not schedule.is_current:
            schedule = self._found_schedule()
        schedule.enter(self)
        if not self.is_running:
            self.show_views()
        self.is_running += 1
        policy = self.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), policy.param_dtype)
        return args, kwargs

    def leave(self, output: Any) -> Any:
        """After the module's forward."""
        self._left()
        assert self.schedule is not None
        if torch.is_grad_enabled() and self.is_needed_in_backward:
            output = with_hook(output, partial(self._before_backward, self.schedule.generation))
        if self.policy.output_dtype is not None:
            output = cast_floats(output, self.policy.output_dtype)
        self.schedule.leave(self)
        return output

    def abandon(self) -> None:
        """After a forward that raised."""
        self._left()
        assert self.schedule is not None
        self.schedule.abandon(self)

    def _left(self) -> None:
        self.is_running -= 1
        if not self.is_running:
            self.show_shells()

    def _before_backward(self, generation: int, grad: torch.Tensor) -> None:
        assert self.schedule is not None
        self.schedule.before_backward(self, generation)

    def _found_schedule(self) -> Schedule:
        from shardtensor.fsdp.schedule import Schedule

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
