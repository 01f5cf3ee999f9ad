"""A disk, and a machine, that fail at a chosen call of the operating system, or in the middle of one."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs

from shardtensor.checkpoint.storage import Folder
from shardtensor.comm.torch_group import TorchGroup

CALLS = "open pwrite preadv fsync close rename mkdir rmdir unlink remove".split()
_SENDS = ("exchange", "exchange_objects", "all_to_all")


class Crash(BaseException):
    """The machine is off: no call has an effect any more."""


@attrs.frozen
class Fault:
    """What happens at a call: before it, after it, or when a share of its bytes is written.

    Attributes:
        kind: ``kill`` this process; ``crash``: raise `Crash` now and at every later call; ``error``: raise OSError.
        at: the number of the call.
        part: how much of the bytes is written if it comes in the middle.
        lasting: whether later writes fail, too, as on a full disk.
    """

    kind: Literal["kill", "crash", "error"]
    at: int
    when: Literal["before", "middle", "after"] = "before"
    part: float = 0.5
    code: int = errno.ENOSPC
    lasting: bool = False


@attrs.define
class Disk:
    """A context in which the calls that a checkpoint makes are counted, and one of them meets a fault.

    Attributes:
        calls: the names of the calls so far, with paths where they have one; `sizes` are the bytes that they write.
        remembers: also note what is not yet on the disk, for `lose_power`.
    """

    fault: Fault | None = None
    remembers: bool = False
    sends: bool = False
    calls: list[str] = attrs.field(factory=list)
    sizes: list[int] = attrs.field(factory=list)
    is_off: bool = False
    _lock: Any = attrs.field(factory=threading.RLock)
    _real: dict[str, Any] = attrs.field(factory=dict)
    _paths: dict[int, str] = attrs.field(factory=dict)
    _dirty: set[str] = attrs.field(factory=set)
    _changes: list[_Change] = attrs.field(factory=list)
    _others: list[tuple[type, str, Any]] = attrs.field(factory=list)

    def __enter__(self) -> Disk:
        for name in CALLS:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._wrapped(name))
        others = [(Folder, "read"), *([(TorchGroup, name) for name in _SENDS] if self.sends else [])]
        for owner, name in others:
            real = getattr(owner, name)
            self._others.append((owner, name, real))
            setattr(owner, name, self._counted(name, real))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        for owner, name, real in self._others:
            setattr(owner, name, real)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._meet(name, partial(real, *args, **kwargs))

        return call

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if self.is_off and name == "close":
                    return real(*args)  # the process lives on
                path = self._path(args[0], kwargs.get("dir_fd"))
                partly = None
                if name == "pwrite":

                    def partly(share: float) -> None:
                        real(args[0], memoryview(args[1])[: int(share * len(args[1]))], args[2])

                size = len(args[1]) if partly is not None else 0
                noted = partial(self._noted, name, path, partial(real, *args, **kwargs), args)
                return self._meet(f"{name} {path}", noted, partly, size)

        return call

    def _path(self, target: Any, folder: int | None) -> str:
        if isinstance(target, int):
            return self._paths.get(target, "")
        if folder is not None:
            return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), target)
        return os.path.abspath(target)

    def _meet(
        self, name: str, call: Callable[[], Any], partly: Callable[[float], None] | None = None, size: int = 0
    ) -> Any:
        if self.is_off:
            raise Crash
        number = len(self.calls)
        self.calls.append(name)
        self.sizes.append(size)
        fault = self.fault
        if fault is None or number < fault.at or (number > fault.at and not fault.lasting):
            return call()
        if number > fault.at and name.split()[0] != "pwrite":  # a full disk stays full
            return call()
        if fault.when == "middle" and partly is not None:
            partly(fault.part)
        elif fault.when == "after":
            with suppress(OSError):
                call()
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "crash":
            self.is_off = True
            raise Crash
        raise OSError(fault.code, os.strerror(fault.code))

    # -- what a loss of power takes away

    def _noted(self, name: str, path: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if not self.remembers:
            result = call()
            if name == "open":
                self._paths[result] = path
            return result
        was_there = os.path.lexists(path)
        kept = Path(path).read_bytes() if name in ("unlink", "remove") and was_there else b""
        result = call()
        folder = os.path.dirname(path)
        if name == "open":
            self._paths[result] = path
            if args[1] & os.O_CREAT and not was_there:
                self._changes.append(_Change(folder, path, lambda at: os.unlink(at)))
        elif name == "pwrite":
            self._dirty.add(path)
        elif name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode):
            self._changes = [each for each in self._changes if each.folder != path]
        elif name == "fsync":
            self._dirty.discard(path)
        elif name == "mkdir":
            self._changes.append(_Change(folder, path, shutil.rmtree))
        elif name == "rmdir":
            self._changes.append(_Change(folder, path, lambda at: os.mkdir(at)))
        elif name in ("unlink", "remove"):
            self._changes.append(_Change(folder, path, lambda at: Path(at).write_bytes(kept)))
        elif name == "rename":
            new = os.path.abspath(args[1])
            self._move(path, new)
            self._changes.append(_Change(folder, path, None, new))
        return result

    def _move(self, old: str, new: str) -> None:
        """Change the paths of what lies in a folder that gets another name."""

        def moved(path: str) -> str:
            return new + path[len(old) :] if path == old or path.startswith(old + "/") else path

        self._dirty = set(map(moved, self._dirty))
        for change in self._changes:
            inside = change.path.startswith(old + "/")
            change.folder, change.path = moved(change.folder), moved(change.path) if inside else change.path

    def lose_power(self, seed: int) -> None:
        """Take away what nobody has waited for: bytes of files, and the last of the changes of names."""
        generator = random.Random(seed)
        for path in sorted(self._dirty):
            if os.path.exists(path):
                size = os.path.getsize(path)
                os.truncate(path, generator.choice([0, size // 2, max(0, size - 1)]))
        kept = generator.randint(0, len(self._changes))
        while len(self._changes) > kept:
            change = self._changes.pop()
            if change.undo is not None:
                change.undo(change.path)
            else:
                os.rename(change.new, change.path)
                self._move(change.new, change.path)


@attrs.define
class _Change:
    """A change of names in a folder, and how it is undone; a rename if there is a `new` name."""

    folder: str
    path: str
    undo: Callable[[str], Any] | None
    new: str = ""
