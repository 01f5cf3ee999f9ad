"""Find, read and parse the files of a plan, each once, within limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.plan.text.scope import Node
from shardtensor.plan.text.syntax import MAX_LENGTH, parse_plan
from shardtensor.spec.diagnostics import Source, nearest

MAX_FILES = 64

_HERE = Path(__file__).resolve().parents[2]
PACKAGED = next((path for path in (_HERE / "specs", _HERE.parent / "specs") if path.is_dir()), _HERE / "specs")
"""The folder of the package's plans for model families."""


@attrs.frozen(eq=False)
class File:
    """One file of a plan.

    Attributes:
        key: identifies it; files with one key are one file.
        folder: its includes are searched here first; None for a text that is in no file.
        tree: its statements, or the error if it could not be parsed.
    """

    source: Source
    key: str
    folder: Path | None
    tree: Node | SpecError


@attrs.define(eq=False)
class Files:
    """All files that a plan was read from, in the order in which they were opened."""

    opened: dict[str, File] = attrs.field(factory=dict)

    def main(self, plan: str | Path | Source) -> File:
        """Open the plan itself: a path, the name of a packaged plan, or its text.

        Raises:
            SpecError: E003, it does not exist or is no text.
        """
        if isinstance(plan, Source):
            folder = Path(plan.file).parent
            return self._parsed(plan, plan.file, folder if folder.is_dir() else None)
        if isinstance(plan, str) and ("\n" in plan or plan.startswith("shard ")):
            return self._parsed(Source(plan, "<plan>"), "<plan>", None)
        path = Path(plan)
        for at in (path, PACKAGED / path, PACKAGED / f"{path}.shard"):
            try:
                if at.is_file():
                    return self._opened(at, path.as_posix() if at == path else _label(at))
            except (OSError, ValueError) as error:
                raise SpecError(f"{at} cannot be read as text", {"why": str(error)}, code="E003") from None
        known = sorted(at.stem for at in PACKAGED.glob("*.shard") if not at.stem.endswith(".dims"))
        facts = {"looked for": str(path), "packaged": ", ".join(known) or "(none)"}
        fix = nearest(str(path), known) or "give the path of a file"
        raise SpecError("there is no such plan", facts, fix, code="E003")

    def include(self, name: str, file: File, include_error: Any) -> File:
        """Open a file that another includes: relative to that one, else a packaged one.

        Args:
            include_error: returns the error at the place of the include, from a fault, a reason and a fix.
        """
        folders = [folder for folder in (file.folder, PACKAGED) if folder is not None]
        for folder in folders:
            try:
                if (folder / name).is_file():
                    if len(self.opened) >= MAX_FILES:
                        raise include_error(f"a plan includes at most {MAX_FILES} files")
                    return self._opened(folder / name, _label(folder / name))
            except SpecError:
                raise
            except (OSError, ValueError):
                raise include_error(f"`{name}` cannot be read as text") from None
        known = [f'"{at.relative_to(folder)}"' for folder in folders for at in sorted(folder.glob("**/*.shard"))[:100]]
        looked = " and ".join("the plans of the package" if at is PACKAGED else str(at) for at in folders)
        raise include_error(f"`{name}` is not there", f"looked in {looked}", nearest(f'"{name}"', known))

    def _opened(self, path: Path, label: str) -> File:
        key = str(path.resolve())
        if key in self.opened:
            return self.opened[key]
        with path.open(encoding="utf-8", newline="") as stream:
            text = stream.read(MAX_LENGTH + 1)
        return self._parsed(Source(text, label), key, path.parent)

    def _parsed(self, source: Source, key: str, folder: Path | None) -> File:
        tree: Node
        try:
            if sum(len(file.source.text) for file in self.opened.values()) + len(source.text) > 2 * MAX_LENGTH:
                raise source.error("E001", (0, 1), "the files of this plan are too long together")
            tree = parse_plan(source)
        except SpecError as error:
            tree = error
        self.opened[key] = File(source, key, folder, tree)
        return self.opened[key]


def _label(path: Path) -> str:
    """Return the name of a file in messages: for packaged files their place in the package."""
    resolved = path.resolve()
    if resolved.is_relative_to(PACKAGED.resolve()):
        return resolved.relative_to(PACKAGED.resolve()).as_posix()
    return path.as_posix()
