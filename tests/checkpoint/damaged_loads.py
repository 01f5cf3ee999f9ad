"""What a load of a damaged checkpoint has to do: raise one kind of error that names what is damaged, change nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from damages import Damage
from small_run import Run

import shardtensor as st

UNCHANGED = 77


class Victim:
    """A checkpoint that is damaged and repaired many times, and a run that tries to load it."""

    def __init__(self, root: Path, run: Run) -> None:
        self.whole, self.other, self.folder = root / "whole", root / "other", root / "step-1"
        self.run = run
        run.save(self.whole, 1)
        run.save(self.other, 2)
        self.repair()

    def repair(self) -> None:
        """Copy the whole checkpoint to the place of the damaged one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder, copy_function=shutil.copyfile)

    def broken_law(self, damage: Damage) -> str:
        """Damage the checkpoint, load it, repair it, and return what was wrong; empty if nothing."""
        damage.apply(self.folder)
        self.run.set_to(UNCHANGED)
        try:
            st.load(self.folder, **self.run.parts)
            found = "it was loaded"
        except st.CheckpointError as error:
            found = "" if damage.is_named_by(str(error)) else f"{damage.named} are not named by: {error}"
            if wrong := self.run.wrong(UNCHANGED):
                found = f"changed, though it raised: {wrong}"
            st.latest(self.folder.parent)  # leaves out what it cannot read
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        self.repair()
        return found and f"{damage.name}: {found}"
