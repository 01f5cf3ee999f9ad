"""Folders of checkpoints: the one to be written, the newest of many, and whether all ranks see the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from shardtensor.checkpoint.manifest import NAME, Manifest, read_manifest
from shardtensor.checkpoint.storage import Folder
from shardtensor.checkpoint.together import agree_or_raise
from shardtensor.comm.group import Group
from shardtensor.errors import CheckpointError

PARTIAL = ".{}.partial"
"""The name of the folder in which a checkpoint is written."""
OLD = ".{}.old"
"""The name that an earlier checkpoint has while the new one gets its name."""
_PROBE = "probe"


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest checkpoint in a folder of checkpoints; None if there is none.

    The newest is the one with the largest ``step``; if none has a step, the one that was saved last. Folders with a
    damaged manifest are ignored. Sends nothing: call it on every rank, or broadcast the result of rank 0.

    Example:
        >>> import tempfile, shardtensor as st
        >>> folder = tempfile.mkdtemp()
        >>> for step in (90, 100):
        ...     st.save(f"{folder}/step-{step}", extra={}, step=step)
        >>> st.latest(folder).rsplit("/", 1)[1]
        'step-100'
    """
    found = max(checkpoints_in(Folder(folder)), key=sort_key, default=None)
    return None if found is None else found[1].path


Found = tuple[Manifest, Folder]


def sort_key(found: Found) -> tuple[int, float]:
    """Return what orders checkpoints by age."""
    manifest, _ = found
    return (-1 if manifest.step is None else manifest.step, manifest.saved_at)


def checkpoints_in(parent: Folder) -> Iterator[Found]:
    """Yield the checkpoints in a folder whose manifests can be read."""
    names = parent.names()
    for name in names:
        old = re.fullmatch(re.escape(OLD).replace(r"\{\}", "(.*)"), name)
        if old is not None and old[1] not in names:  # its successor did not get the name
            name = old[1]
        elif name.startswith("."):
            continue
        folder = parent.within(name)
        with suppress(CheckpointError, OSError):
            yield read_manifest(manifest_text(settled(folder))), folder


def manifest_text(folder: Folder) -> str:
    """Return the text of the manifest of a checkpoint.

    Raises:
        FileNotFoundError: there is no manifest.
        CheckpointError: it is not text.
    """
    try:
        return folder.read(NAME).decode()
    except UnicodeDecodeError:
        raise CheckpointError(f'"{NAME}" is damaged: it is not text', fix="load an earlier checkpoint") from None


def settled(folder: Folder) -> Folder:
    """Return the folder that has the contents of `folder`: if a crash came between the two renames that replace a
    checkpoint, that is the earlier one."""
    old = folder.beside(OLD.format(folder.name))
    return old if folder.is_local and not folder.has() and old.has(NAME) else folder


def make_folder(partial: Folder, target: Folder, group: Group, call: str) -> None:
    """Make the empty folder `partial` for a checkpoint that is to become `target`. All ranks of the group call it.

    Rank 0 makes it; the others check that they see it.

    Raises:
        CheckpointError: on every rank: something at the target must not be replaced, the folder cannot be made, or a
            rank does not see it.
    """
    fault = None
    try:
        if group.index == 0:
            _refuse_others(target)
            partial.remove()
            partial.make()
            partial.touch(_PROBE)
    except CheckpointError as error:
        fault = error
    except OSError as error:
        fault = CheckpointError(
            "the folder of the checkpoint cannot be made",
            {"folder": target.path, "why": f"{type(error).__name__}: {error.strerror or error}"},
            "choose a folder that this process may write",
        )
    agree_or_raise(group, call, {}, fault)
    if not partial.has(_PROBE):
        fault = CheckpointError(
            "this rank does not see the folder that rank 0 has made: its machine has a disk of its own there",
            {"folder": target.path, "assumed": "a file system that all ranks share"},
            "name a folder that all machines share, or a URL such as s3://bucket/run/step-100",
        )
    agree_or_raise(group, call, {}, fault)
    if group.index == 0:
        with suppress(OSError):
            partial.remove(_PROBE)


def _refuse_others(target: Folder) -> None:
    """Raise CheckpointError if there is something at the target that a checkpoint must not, or cannot, replace."""
    if not target.is_local and target.has(NAME):  # a crash on the way would leave files of two checkpoints
        raise CheckpointError(
            "there is a checkpoint of that name, and only on a local disk can a rename replace it",
            {"path": target.path},
            "choose another name, such as one with the number of the step",
        )
    if target.is_local and target.has() and target.names() and not target.has(NAME):
        raise CheckpointError(
            "there is a folder or file of that name, which is no checkpoint",
            {"path": target.path},
            "choose another name, or remove it",
        )
