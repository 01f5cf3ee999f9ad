"""Ranks as threads. One runs at a time, until it waits in a collective.

Then the next rank that can run continues, in rank order: a run is deterministic. The state that each process has is
swapped at each switch, so each rank computes the same bits as a process. There are no timeouts: a deadlock is found at
once.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from typing import Any

import attrs
import torch

from shardtensor.comm.agree import name_ranks
from shardtensor.comm.call_site import call_site
from shardtensor.errors import DisagreementError, RuleError
from shardtensor.mesh import Mesh, Ranks, name_group
from shardtensor.sim.channel import Call, Channel, Slot


@attrs.frozen
class ProcessState:
    """The default generators of torch and Python's `random`, the default dtype, and the filters of warnings.

    NumPy's global generator is left out: swapping it would cost more than all the rest.
    """

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    python: Any
    dtype: torch.dtype
    warned: tuple[Any, ...]

    @classmethod
    def capture(cls) -> ProcessState:
        """Return the state of this process; takes about 10 microseconds."""
        on_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        return cls(
            torch.default_generator.get_state(),
            tuple(generator.get_state() for generator in on_cuda),
            random.getstate(),
            torch.get_default_dtype(),
            tuple(getattr(warnings, name) for name in _WARNINGS),
        )

    def restore(self) -> None:
        """Set the state of this process."""
        torch.default_generator.set_state(self.cpu)
        for generator, state in zip(torch.cuda.default_generators, self.cuda, strict=False):
            generator.set_state(state)
        random.setstate(self.python)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        if warnings.filters is not self.warned[0]:
            for name, value in zip(_WARNINGS, self.warned, strict=True):
                setattr(warnings, name, value)
            warnings._filters_mutated()  # type: ignore[attr-defined]


_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")  # what warnings.catch_warnings saves


_ORDER = "make the same calls in the same order on every rank of the group"


class RankStopped(BaseException):
    """Ends a rank that waits for a rank that has failed. User code should not catch it."""


class Member:
    """One rank: its thread, the collective that it waits for, and how it ended."""

    def __init__(self, rank: int, state: ProcessState) -> None:
        self.rank = rank
        self.state = state
        self.turn = threading.Semaphore(0)
        self.thread = 0
        self.waits: Slot | None = None
        self.ended = ""
        self.result: Any = None

    @property
    def can_run(self) -> bool:
        return not self.ended and (self.waits is None or self.waits.is_complete)


class World:
    """The ranks of a mesh, as threads of this process.

    Args:
        mesh: the axes, and the ranks 0, 1, ...
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        state = ProcessState.capture()
        self.members = [Member(rank, state) for rank in range(mesh.size)]
        self.failures: dict[int, BaseException] = {}  # by rank, in the order of time
        self.stopped: dict[int, str] = {}  # by rank: the collective in which it was stopped
        self._start = state
        self._channels: dict[tuple[Ranks, int], Channel] = {}
        self._names: dict[Ranks, str] = {}
        self._over = threading.Semaphore(0)

    # -- running ------------------------------------------------------------------------------------------------

    def run(self, body: Callable[[int], Any], prepare: Callable[[int], None]) -> list[Any]:
        """Run ``body(rank)`` on all ranks and return their results; call `prepare` before it, in the same context.

        Raises the first exception of a rank, with a note on which ranks raised it and how the others ended.
        """
        modes = torch.is_grad_enabled(), torch.get_default_device()
        threads = []
        for member in self.members:
            args = (member, body, prepare, modes, copy_context())
            threads.append(threading.Thread(target=self._serve, args=args, name=f"rank {member.rank}", daemon=True))
            threads[-1].start()
        try:
            self.members[0].turn.release()
            self._over.acquire()
            for thread in threads:  # before the process ends
                thread.join()
        except BaseException as error:  # the caller was interrupted: no rank may continue
            for member in self.members:
                self.failures.setdefault(member.rank, error)
            raise
        finally:
            self._start.restore()
        if self.failures:
            raise self._first_failure()
        return [member.result for member in self.members]

    def _serve(
        self, member: Member, body: Any, prepare: Any, modes: tuple[bool, torch.device], context: Context
    ) -> None:
        member.thread = threading.get_ident()
        member.turn.acquire()
        member.state.restore()
        try:
            member.result = context.run(self._run_body, member.rank, body, prepare, modes)
            member.ended = "returned"
        except RankStopped:
            member.ended = "stopped"
        except BaseException as error:
            member.ended = "failed"
            self.failures.setdefault(member.rank, error)
        self._finish(member)

    def _run_body(self, rank: int, body: Any, prepare: Any, modes: tuple[bool, torch.device]) -> Any:
        prepare(rank)
        is_grad_enabled, device = modes
        # Else backward of CUDA tensors would run in one thread for all ranks, and a rank would block the others.
        with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(is_grad_enabled):
            if device.type == "cpu":
                return body(rank)
            with device:
                return body(rank)

    def _finish(self, member: Member) -> None:
        """End a rank's turn for good; ranks that wait for it fail."""
        for channel in self._channels.values():
            if member.rank in channel.ranks:
                for slot in channel.open_slots():
                    self._check_reachable(slot)
        following = self._next_after(member)
        if following is None:
            self._over.release()
        else:
            following.turn.release()

    def _first_failure(self) -> BaseException:
        """Return the first failure, with a note on which ranks failed and how the others ended."""
        rank, error = next(iter(self.failures.items()))
        alike = [r for r, e in self.failures.items() if type(e) is type(error) and str(e) == str(error)]
        if len(alike) == len(self.members):
            note = f"every rank of {self.mesh} raised this" if len(alike) > 1 else ""
        else:
            note = f"rank {rank} of {self.mesh} raised this"
            others = {r: f"raised {type(e).__name__}: {e}" for r, e in self.failures.items() if r not in alike}
            others |= {r: "raised this, too" for r in alike if r != rank}
            others |= {r: f"was stopped in {where}" for r, where in self.stopped.items()}
            for member in self.members:
                if member.ended == "returned":
                    others[member.rank] = "returned"
            note += "".join(f"\n  rank {r} {how}" for r, how in sorted(others.items()))
        if note:
            error.add_note(note)
        return error

    # -- switching ranks ----------------------------------------------------------------------------------------

    def _next_after(self, member: Member) -> Member | None:
        """Return the next rank that can run, in rank order after `member`; `member` itself is the last choice."""
        n = len(self.members)
        turns = (self.members[(member.rank + step) % n] for step in range(1, n + 1))
        return next((other for other in turns if other.can_run), None)

    def wait(self, member: Member, slot: Slot) -> Any:
        """Run other ranks until all members of the slot have called; return the common result.

        Raises:
            DisagreementError: their calls do not match, or some ranks would wait for ever.
        """
        member.waits = slot
        following = self._next_after(member)
        if following is None:
            self._break_deadlock()
            following = self._next_after(member)
            assert following is not None, "after a deadlock the waiting ranks can run, to raise"
        if following is not member:
            member.state = ProcessState.capture()
            following.turn.release()
            member.turn.acquire()
            member.state.restore()
        member.waits = None
        if slot.fault is RankStopped:
            self.stopped[member.rank] = self._wait_text(member.rank, slot).replace("\n", "\n  ")
        if slot.fault is not None:
            raise slot.fault()
        return slot.result

    def post(self, member: Member, ranks: Ranks, call: Call, communicator: int = 0) -> Slot:
        """Add a rank's call to its next collective of a group of `ranks`, on the communicator with this number."""
        self._check_running(member, call)
        channel = self.channel(ranks, communicator)
        index = ranks.index(member.rank)
        slot = channel.next_slot(index)
        other = next((i for i, made in enumerate(slot.calls) if made is not None), None)
        slot.add(index, call)
        if slot.fault is not None:
            return slot
        if other is not None and slot.calls[other].signature != call.signature:  # type: ignore[union-attr]
            first, second = sorted([ranks[other], member.rank])
            one, two = (slot.calls[ranks.index(rank)] for rank in (first, second))
            assert one is not None and two is not None
            what = "collectives" if one.name != two.name else f"calls of {one.name}"
            self._disagree(slot, f"ranks {first} and {second} are in different {what}", [first, second])
        elif not slot.left:
            fault = call.check(slot.all_calls()) if call.check is not None else ""
            if fault:
                self._disagree(slot, fault, ranks)
            else:
                slot.combine()
        else:
            self._check_reachable(slot)
        return slot

    def channel(self, ranks: Ranks, communicator: int = 0) -> Channel:
        """Return the channel of the groups of these ranks; each communicator has a channel of its own."""
        if (ranks, communicator) not in self._channels:
            self._channels[ranks, communicator] = Channel(ranks)
        return self._channels[ranks, communicator]

    # -- faults -------------------------------------------------------------------------------------------------

    def _check_running(self, member: Member, call: Call) -> None:
        if threading.get_ident() == member.thread and not member.ended:
            return
        raise RuleError(
            f"{call} was called for rank {member.rank} of a simulated world outside of its turn",
            {"rank": f"{member.rank}, which {'has ' + member.ended if member.ended else 'runs in another thread'}"},
            "make every call that talks to other ranks inside the function that `simulate` runs, in its own thread",
        )

    def _check_reachable(self, slot: Slot) -> None:
        """Fail a slot in which ranks wait for a rank that has ended."""
        missing = [self.members[rank] for rank in slot.channel.ranks if not slot.has(rank)]
        ended = [member for member in missing if member.ended]
        if slot.fault is not None or not ended:
            return
        if any(member.ended != "returned" for member in ended):
            slot.fault = RankStopped
            return
        self._deadlock([rank for rank in slot.channel.ranks if slot.has(rank)], [slot], [m.rank for m in ended])

    def _break_deadlock(self) -> None:
        waiting = {member.rank: member.waits for member in self.members if member.waits is not None}
        self._deadlock(list(waiting), list(waiting.values()), [])

    def _deadlock(self, ranks: Sequence[int], slots: Sequence[Slot], finished: Sequence[int]) -> None:
        """Fail slots in which ranks wait for each other, or for ranks that have returned."""
        slot_of = {rank: slot for slot in slots for rank in slot.channel.ranks if slot.has(rank)}
        facts = {f"rank {rank}": self._wait_text(rank, slot_of[rank]) for rank in ranks}
        if finished:
            facts[name_ranks(finished)] = "returned" if len(finished) == 1 else "have returned"
        whom = "a rank that has returned" if finished else "each other"
        fault = f"deadlock: {name_ranks(ranks)} would wait for {whom} for ever"
        for slot in slots:
            slot.fault = lambda: DisagreementError(fault, facts, _ORDER)

    def _disagree(self, slot: Slot, fault: str, ranks: Sequence[int]) -> None:
        """Fail a slot in which the calls of some ranks do not match."""
        facts = {f"rank {rank}": self._wait_text(rank, slot) for rank in ranks if slot.has(rank)}
        slot.fault = lambda: DisagreementError(f"{fault}; nothing was moved", facts, _ORDER)

    def _wait_text(self, rank: int, slot: Slot) -> str:
        call = slot.calls[slot.channel.ranks.index(rank)]
        return f"{call} over {self.name(slot.channel.ranks)}\n  {self._site(rank)}"

    def _site(self, rank: int) -> str:
        """Return the line of the user's code that a rank is in."""
        frame = sys._current_frames().get(self.members[rank].thread)
        return call_site(frame) if frame is not None else "its thread has ended"

    def name(self, ranks: Ranks) -> str:
        """Return the name of a group, by its axes or by its ranks."""
        if ranks not in self._names:
            self._names[ranks] = name_group(self.mesh, ranks)
        return self._names[ranks]
