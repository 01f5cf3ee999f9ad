"""Ranks as threads that take turns: one runs at a time, and hands over only where it waits in a collective.

The next to run is the next in rank order that can, so a run is deterministic; what a process has for itself is swapped
at each hand-over, so each rank equals a lone process, bit for bit. Nothing waits by time: as soon as a rank cannot go
on, it is known why.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

import torch

from shardtensor.comm.call_site import call_site
from shardtensor.errors import DisagreementError, RuleError
from shardtensor.mesh import Mesh, Ranks
from shardtensor.sim.channel import Call, Channel, Slot
from shardtensor.sim.faults import RankStopped, deadlock, different_calls, unfit_calls
from shardtensor.sim.group_names import name_group
from shardtensor.sim.process_state import ProcessState


class Member:
    """One rank: its thread, its turn, what it waits for, and how it ended."""

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
        return not self.ended and (self.waits is None or self.waits.is_settled)


class World:
    """The ranks of a mesh, which run a body each as threads of this process.

    Args:
        mesh: the axes, and the ranks 0, 1, ...
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        state = ProcessState.capture()
        self.members = [Member(rank, state) for rank in range(mesh.size)]
        self.failures: dict[int, BaseException] = {}  # by rank, the first one first
        self.stopped: dict[int, str] = {}  # where the ranks stood that were stopped
        self._start = state
        self._channels: dict[tuple[Ranks, int], Channel] = {}
        self._names: dict[Ranks, str] = {}
        self._over = threading.Semaphore(0)

    # -- running ------------------------------------------------------------------------------------------------

    def run(self, body: Callable[[int], Any], prepare: Callable[[int], None]) -> list[Any]:
        """Run ``body(rank)`` on all ranks and return what they return; `prepare` is called before it, in its context.

        Raises what a rank raised first, with a note that says which ranks did and where the others stood.
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
            for thread in threads:  # their last lines, lest they meet the end of the process
                thread.join()
        except BaseException as error:  # the caller was interrupted: let no rank go on
            for member in self.members:
                self.failures.setdefault(member.rank, error)
            raise
        finally:
            self._start.restore()
        if self.failures:
            raise self._told()
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
        self._leave(member)

    def _run_body(self, rank: int, body: Any, prepare: Any, modes: tuple[bool, torch.device]) -> Any:
        prepare(rank)
        is_grad_enabled, device = modes
        # Backward of CUDA tensors would run in one thread for all ranks, which could not wait for itself.
        with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(is_grad_enabled):
            if device.type == "cpu":
                return body(rank)
            with device:
                return body(rank)

    def _leave(self, member: Member) -> None:
        """End a rank: those that wait for it learn it at once."""
        for channel in self._channels.values():
            if member.rank in channel.ranks:
                for slot in channel.open_slots():
                    self._check_reachable(slot)
        following = self._next_after(member)
        if following is None:
            self._over.release()
        else:
            following.turn.release()

    def _told(self) -> BaseException:
        """The first failure, with a note on who failed and where the other ranks stood."""
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

    # -- taking turns -------------------------------------------------------------------------------------------

    def _next_after(self, member: Member) -> Member | None:
        """The next rank that can run, in rank order from `member` on, itself the last."""
        n = len(self.members)
        turns = (self.members[(member.rank + step) % n] for step in range(1, n + 1))
        return next((other for other in turns if other.can_run), None)

    def wait(self, member: Member, slot: Slot) -> Any:
        """Let the others run until all members of the slot have called; return what they made together.

        Raises:
            DisagreementError: their calls do not fit together, or some would wait for ever.
        """
        member.waits = slot
        following = self._next_after(member)
        if following is None:
            self._break_deadlock()
            following = self._next_after(member)
            assert following is not None, "a deadlock sets those who wait free"
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
        return slot.board

    def post(self, member: Member, ranks: Ranks, call: Call, twin: int = 0) -> Slot:
        """Bring a rank's part in its next collective of the group of `ranks`, or of a twin of it."""
        self._check_running(member, call)
        channel = self.channel(ranks, twin)
        index = ranks.index(member.rank)
        slot = channel.next_slot(index)
        other = next((i for i, there in enumerate(slot.calls) if there is not None), None)
        slot.put(index, call)
        if slot.fault is not None:
            return slot
        if other is not None and slot.calls[other].alike != call.alike:  # type: ignore[union-attr]
            pair = sorted([ranks[other], member.rank])
            self._fail(slot, different_calls(self.name(ranks), self._where(slot, pair)))
        elif not slot.left:
            fault = call.check(slot.all_calls()) if call.check is not None else ""
            if fault:
                self._fail(slot, unfit_calls(fault, self.name(ranks), self._where(slot, list(ranks))))
            else:
                slot.combine()
        else:
            self._check_reachable(slot)
        return slot

    def channel(self, ranks: Ranks, twin: int = 0) -> Channel:
        """The channel of the group of some ranks; one for all groups of these, but for those that are twins."""
        if (ranks, twin) not in self._channels:
            self._channels[ranks, twin] = Channel(ranks)
        return self._channels[ranks, twin]

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
        """Set free those who wait in a slot for a rank that has ended."""
        missing = [self.members[rank] for rank in slot.channel.ranks if not slot.has(rank)]
        ended = [member for member in missing if member.ended]
        if slot.fault is not None or not ended:
            return
        if any(member.ended != "returned" for member in ended):
            slot.fault = RankStopped
            return
        waits = {rank: self._wait_text(rank, slot) for rank in slot.channel.ranks if slot.has(rank)}
        self._fail(slot, deadlock(waits, [member.rank for member in ended]))

    def _break_deadlock(self) -> None:
        waiting = {member.rank: member.waits for member in self.members if member.waits is not None}
        text = deadlock({rank: self._wait_text(rank, slot) for rank, slot in waiting.items()}, [])
        for slot in waiting.values():
            self._fail(slot, text)

    def _fail(self, slot: Slot, text: str) -> None:
        slot.fault = lambda: DisagreementError(text)

    def _where(self, slot: Slot, ranks: list[int]) -> dict[int, tuple[Call, str]]:
        calls = ((rank, slot.calls[slot.channel.ranks.index(rank)]) for rank in ranks)
        return {rank: (call, self._site(rank)) for rank, call in calls if call is not None}

    def _wait_text(self, rank: int, slot: Slot) -> str:
        call = slot.calls[slot.channel.ranks.index(rank)]
        return f"{call} over {self.name(slot.channel.ranks)}\n  {self._site(rank)}"

    def _site(self, rank: int) -> str:
        """Where in the user's code a rank stands now."""
        frame = sys._current_frames().get(self.members[rank].thread)
        return call_site(frame) if frame is not None else "its thread has ended"

    def name(self, ranks: Ranks) -> str:
        """A group as people call it: by its axes where it lies along some, else by its ranks."""
        if ranks not in self._names:
            self._names[ranks] = name_group(self.mesh, ranks)
        return self._names[ranks]
