"""Files of a checkpoint: on a local disk by the calls of the operating system, elsewhere through fsspec."""

from __future__ import annotations

import ctypes
import errno
import os
import posixpath
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shardtensor.errors import CheckpointError

THREADS = 8 if (os.cpu_count() or 1) >= 16 else 4
"""How many files, or parts of one, a rank reads or writes at a time."""
_STEP_BYTES = 8 << 20  # a call of the operating system; larger ones are not faster

Buffer = memoryview | bytes


class Folder:
    """A folder, by its path or URL; the names of files in it use / as separator.

    Args:
        path: of a local folder, or a URL that fsspec knows: ``s3://bucket/run/step-100``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.fs, root = fsspec.core.url_to_fs(self.path)
        self.root = root.rstrip("/") or "/"
        self.is_local = isinstance(self.fs, LocalFileSystem)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.root)

    def beside(self, name: str) -> Folder:
        """Return the folder of another name in the same parent."""
        return self._at(posixpath.join(posixpath.dirname(self.root), name))

    def within(self, name: str) -> Folder:
        """Return the folder of a name in this one."""
        return self._at(posixpath.join(self.root, name))

    @property
    def parent(self) -> Folder:
        """The folder that contains this one."""
        return self._at(posixpath.dirname(self.root) or "/")

    def _at(self, root: str) -> Folder:
        made = Folder.__new__(Folder)
        made.root, made.fs, made.is_local = root, self.fs, self.is_local
        made.path = root if self.is_local else str(self.fs.unstrip_protocol(root))
        return made

    def at(self, name: str) -> str:
        """Return the full path of a file."""
        return posixpath.join(self.root, name)

    def has(self, name: str = "") -> bool:
        """Whether there is a file of this name; without a name, whether the folder is there."""
        return bool(self.fs.exists(self.at(name) if name else self.root))

    def names(self) -> list[str]:
        """Return the names of the files and folders in this folder, none if it is not there."""
        try:
            return sorted(posixpath.basename(path.rstrip("/")) for path in self.fs.ls(self.root, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int:
        """Return the number of bytes of a file.

        Raises:
            OSError: it is a folder, or a pipe or a device, which may have no end.
        """
        if not self.is_local:
            return int(self.fs.size(self.at(name)))
        found = os.stat(self.at(name))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", self.at(name))
        return found.st_size

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return a range of the bytes of a file."""
        if self.is_local:
            self.size(name)  # raises if it is no file
        return bytes(self.fs.cat_file(self.at(name), start=start, end=stop))

    def make(self) -> None:
        """Make the folder, if it is not there, and wait until the names of new folders above it are on the disk."""
        new = [self.root]
        while self.is_local and not os.path.exists(new[-1]):
            new.append(posixpath.dirname(new[-1]) or ".")
        self.fs.makedirs(self.root, exist_ok=True)
        for path in new[2:]:
            _sync_folder(path)

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write a file that consists of `parts`, and wait until it is on the disk.

        A local file of some size is written by several threads.
        """
        path = self.at(name)
        self.fs.makedirs(posixpath.dirname(path), exist_ok=True)
        if not self.is_local:
            with self.fs.open(path, "wb") as file:
                for part in parts:
                    file.write(part)
            return
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(handle, parts)
            os.fsync(handle)
        finally:
            os.close(handle)

    def touch(self, name: str) -> None:
        """Make an empty file, without waiting for the disk."""
        self.fs.touch(self.at(name))

    def sync(self) -> None:
        """Wait until the names of the files in this folder, and of its own folders, are on the disk."""
        if not self.is_local:
            return
        for path, _, _ in os.walk(self.root):
            _sync_folder(path)

    def rename(self, name: str) -> None:
        """Give this folder another name in the same parent, and wait until that is on the disk; local only."""
        os.rename(self.root, self.beside(name).root)
        _sync_folder(posixpath.dirname(self.root) or ".")

    def remove(self, name: str = "") -> None:
        """Remove a file, or without a name the folder and all in it; nothing if it is not there."""
        with suppress(FileNotFoundError):
            self.fs.rm(self.at(name) if name else self.root, recursive=not name)


class OpenFile:
    """An open file; threads read ranges of it at the same time."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._handle = os.open(folder.at(name), os.O_RDONLY) if folder.is_local else -1

    def read_exactly(self, view: memoryview, start: int) -> None:
        """Fill `view` with the bytes of the file from `start` on.

        Raises:
            CheckpointError: the file ends before.
        """
        done = 0
        while done < len(view):
            if self._handle < 0:
                data = self._folder.read(self._name, start + done, start + len(view))
                count = len(data)
                view[done : done + count] = data
            else:
                count = os.preadv(self._handle, [view[done : done + _STEP_BYTES]], start + done)
            if not count:
                raise CheckpointError(f'the file "{self._name}" has become shorter while it was read')
            done += count

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _write_all(handle: int, parts: Sequence[Buffer]) -> None:
    steps: list[tuple[memoryview, int]] = []
    end = 0
    for part in parts:
        view = memoryview(part)
        steps += [(view[at : at + _STEP_BYTES], end + at) for at in range(0, len(view), _STEP_BYTES)]
        end += len(view)

    def write(step: tuple[memoryview, int]) -> None:
        view, at = step
        while view:
            count = os.pwrite(handle, view, at)
            view, at = view[count:], at + count

    if end < 2 * _STEP_BYTES:
        for step in steps:
            write(step)
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(write, steps):
                pass


def _sync_folder(path: str) -> None:
    with suppress(OSError):  # some file systems have no fsync of folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def bytes_view(tensor: Any) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes; the tensor has to outlive it."""
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")
