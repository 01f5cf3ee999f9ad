"""Objects with a state of their own, such as schedulers: they take the saved state, or get back their earlier one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import attrs

from shardtensor.checkpoint.together import agree_or_raise
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError


@attrs.frozen(eq=False)
class Loadable:
    """An object whose state is loaded: its name, functions that return and set its state, and the saved state."""

    name: str
    state: Callable[[], Any]
    load: Callable[[Any], None]
    saved: Callable[[], Any]


def of_user(name: str, owner: Any, saved: Callable[[], Any]) -> Loadable:
    """Return the loadable of an object with ``state_dict`` and ``load_state_dict``."""
    return Loadable(name, lambda: copy.deepcopy(owner.state_dict()), owner.load_state_dict, saved)


class Loads:
    """The loads of one checkpoint into objects; if a later step fails, `undo` sets their earlier states."""

    def __init__(self, group: Group, call: str) -> None:
        self._group, self._call = group, call
        self._before: list[tuple[Loadable, Any]] = []

    def load(self, loadables: Iterable[Loadable]) -> None:
        """Load the saved states. All ranks of the group call it, with the same objects.

        Raises:
            CheckpointError: on every rank: an object of a rank did not take its state; all have their earlier states.
        """
        fault = None
        for each in loadables:
            try:
                self._before.append((each, each.state()))
                each.load(each.saved())
            except Exception as error:  # user code raises anything
                fault = CheckpointError(
                    f'"{each.name}" does not take the saved state; nothing has been loaded',
                    {"why": f"{type(error).__name__}: {error}"[:400]},
                    "load it into an object of the class that was saved",
                )
                break
        self.agree(fault)

    def agree(self, fault: CheckpointError | None) -> None:
        """Raise on every rank, and set the earlier states, if a rank has a fault."""
        try:
            agree_or_raise(self._group, self._call, {}, fault)
        except Exception:
            self.undo()
            raise

    def undo(self) -> None:
        """Set the earlier states of all objects, the last one first."""
        for each, state in reversed(self._before):
            with suppress(Exception):  # an object that cannot even take its own state
                each.load(state)
        self._before.clear()
