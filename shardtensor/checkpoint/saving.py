"""`save` and `async_save`: a checkpoint of a training run, or of a model, in one folder.

The files are written into a hidden folder next to the target. When all are on the disk, rank 0 writes the manifest and
renames the folder, so that at every moment the target is absent or complete.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

import attrs

from shardtensor.checkpoint.checksums import fingerprints
from shardtensor.checkpoint.contents import collect, config_texts, models_of
from shardtensor.checkpoint.files import files_and_records, index_texts, plan_files, to_owners, writes_its_part
from shardtensor.checkpoint.folders import OLD, PARTIAL, checkpoints_in, make_folder, sort_key
from shardtensor.checkpoint.manifest import NAME, FileRecord, Manifest
from shardtensor.checkpoint.storage import Folder
from shardtensor.checkpoint.together import agree_or_raise, fault_of
from shardtensor.checkpoint.writing import HostMemory, NewFile, write_files
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group, release_before_groups, simulated
from shardtensor.errors import CheckpointError
from shardtensor.version import __version__

LAYOUTS = ("whole", "as is")
_FINGERPRINT_BYTES = 256 << 20


def save(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    dataloader: Any = None,
    extra: Any = None,
    step: int | None = None,
    rng: bool = True,
    layout: str = "whole",
    keep_last: int | None = None,
    fingerprint: bool | None = None,
    process_group: Any = None,
) -> None:
    """Save a training run, or a model, into a folder. All ranks of the group call it.

    The model's tensors are written whole, as the safetensors files of Hugging Face: ``transformers``, vLLM and others
    load them from the folder. Each tensor goes to one rank, which writes it, so all ranks write about as many bytes.
    The optimizer's state is in the folder ``state``: each rank writes the parts that it holds. A checkpoint loads
    into any layout on any number of ranks.

    The folder appears at `path` when everything is on the disk. Until then, also if a rank crashes, `path` does not
    exist or has the earlier checkpoint.

    Args:
        path: the folder, which is created, on a disk that all ranks share; or a URL that fsspec supports.
        model: a module, a state dict, or a dict of several modules. A ``config`` of transformers is written, too.
        optimizer: a `ShardedOptimizer`, a `ZeroRedundancyOptimizer`, any ``torch.optim`` optimizer, or a dict of them;
            state is saved by the names of the parameters in the model.
        scheduler: an object with ``state_dict`` and ``load_state_dict``, such as a scheduler or a GradScaler, or a dict
            of them.
        dataloader: the same, but the state of each rank is saved.
        extra: numbers, text, tensors, and lists and dicts of these. If ranks pass different values, rank 0's are saved;
            keys must be equal.
        step: the number of the training step, by which `latest` finds the newest checkpoint.
        rng: save the states of each rank's random generators.
        layout: ``"whole"``, or ``"as is"``: each rank writes the parts of the model that it holds, and nothing is sent.
        keep_last: how many checkpoints to keep in the same parent folder, among those whose names differ from `path`
            only in numbers; older ones are removed.
        fingerprint: save the `fingerprint` of each model and optimizer, which a load compares. By default if all
            tensors together have at most 256 MiB: it reads about 3 GB in a second on a CPU, and 35 GB on a GPU.
        process_group: the ranks that save, by default all.

    Raises:
        CheckpointError: on every rank: something cannot be saved, the ranks pass different names or paths, or a file
            cannot be written. An earlier checkpoint at `path` is unchanged.

    Example:
        >>> import tempfile, torch, shardtensor as st
        >>> model = torch.nn.Linear(4, 2)
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> st.save(folder, model=model, extra={"epoch": 3}, step=1)
        >>> st.load(folder, model=model)
        {'epoch': 3}
    """
    values = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": dataloader}
    values |= {"extra": extra, "rng": rng}
    job, group = _prepare(path, process_group, values, step, layout, keep_last, fingerprint, copies_all=False)
    job.finish(group)


def async_save(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    dataloader: Any = None,
    extra: Any = None,
    step: int | None = None,
    rng: bool = True,
    layout: str = "whole",
    keep_last: int | None = None,
    fingerprint: bool | None = None,
    process_group: Any = None,
) -> Saving:
    """Start a `save`, and return when the values are copied; a thread of each rank writes them.

    The tensors are copied to host memory (page-locked for tensors on GPUs, where the copies run in the current stream,
    so the next kernels may change the tensors). That memory is kept for the next save. At most one save is in progress:
    another one, or a load, first waits for it. All ranks of the group call it.

    Args:
        path, model, optimizer, scheduler, dataloader, extra, step, rng, layout, keep_last, fingerprint, process_group:
            as for `save`. With ``layout="whole"`` tensors that no rank holds whole are exchanged before it returns.

    Returns:
        a handle; its ``wait()`` returns when the checkpoint is complete, or raises the error of the save.

    Example:
        >>> import tempfile, torch, shardtensor as st
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> saving = st.async_save(folder, model=torch.nn.Linear(4, 2))
        >>> saving.wait()
    """
    values = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": dataloader}
    values |= {"extra": extra, "rng": rng}
    job, group = _prepare(path, process_group, values, step, layout, keep_last, fingerprint, copies_all=True)
    other = group.for_other_thread()  # None for ranks that are threads of one process
    return Saving(partial(job.finish, other or group), in_thread=other is not None)


class Saving:
    """A save that is in progress."""

    def __init__(self, finish: Callable[[], None], *, in_thread: bool) -> None:
        global _current
        self._error: BaseException | None = None
        self._finish = finish
        self._thread = Thread(target=self._run, name="shardtensor async_save")
        if in_thread:
            _current = self
            release_before_groups(self)
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # `wait` raises it
            self._error = error

    def _joined(self) -> BaseException | None:
        """Wait for the thread; return the error of the save, once."""
        if self._thread.ident is not None:
            self._thread.join()
        error, self._error = self._error, None
        return error

    def done(self) -> bool:
        """Whether the checkpoint is complete, or its save has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: it could not be saved.
        """
        if (error := self._joined()) is not None:
            raise error

    def release(self) -> None:
        """Wait for the thread, before process groups are destroyed; warn of an error that no call has raised."""
        if (error := self._joined()) is not None:
            warnings.warn(f"a checkpoint was not saved: {error}", stacklevel=2)


_memory = HostMemory()
"""Used by all saves of this rank."""

_current: Saving | None = None


def wait_for_save() -> None:
    """Wait for the save that is in progress, and raise its error if no call has raised it."""
    global _current
    current, _current = _current, None
    if current is not None:
        current.wait()


@attrs.define
class _Job:
    """A save whose values are known: the files of this rank, and the manifest without the files of all ranks.

    `copied` waits for the copies of the values; `texts` are further files, by name.
    """

    folder: Folder
    texts: dict[str, str]
    keep_last: int | None
    copied: Callable[[], None] = lambda: None
    files: list[NewFile] = attrs.field(factory=list)
    manifest: Manifest = attrs.field(factory=Manifest)

    @property
    def partial(self) -> Folder:
        """Where the files are written."""
        return self.folder.beside(PARTIAL.format(self.folder.name)) if self.folder.is_local else self.folder

    def finish(self, group: Group) -> None:
        """Write the files, and then the manifest. All ranks of `group` call it."""
        call = f'save("{self.folder.path}")'
        written: dict[str, FileRecord] = {}
        fault = None
        try:
            self.copied()
            written = write_files(self.partial, self.files)
        except Exception as error:  # on one rank: the others raise it, too
            fault = _fault_of(error, self.partial)
        reports = group.exchange_objects({name: attrs.astuple(record) for name, record in written.items()})
        try:
            agree_or_raise(group, call, {}, fault)
            fault = None
            try:
                if group.index == 0:
                    self._commit({name: FileRecord(*each) for report in reports for name, each in report.items()})
            except Exception as error:
                fault = _fault_of(error, self.partial)
            agree_or_raise(group, call, {}, fault)
        except CheckpointError:
            if group.index == 0:
                with suppress(OSError):
                    self.partial.remove(NAME)
                    self.partial.remove()
            raise
        if group.index == 0 and self.keep_last is not None:
            _remove_older(self.folder, self.keep_last)

    def _commit(self, files: Mapping[str, FileRecord]) -> None:
        """Make the checkpoint complete, on rank 0."""
        partial, folder = self.partial, self.folder
        for name, text in self.texts.items():
            partial.write(name, [text.encode()])
        manifest = attrs.evolve(self.manifest, files=dict(sorted(files.items())))
        partial.write(NAME, [manifest.to_text().encode()])
        if not folder.is_local:
            return
        partial.sync()
        old = folder.beside(OLD.format(folder.name))
        if folder.has():
            old.remove()
            folder.rename(old.name)
        partial.rename(folder.name)
        with suppress(OSError):  # the new checkpoint is there
            old.remove()


def _fault_of(error: Exception, folder: Folder) -> CheckpointError:
    if not isinstance(error, OSError):
        return fault_of(error)
    return CheckpointError(
        "a file of the checkpoint cannot be written; there is no new checkpoint",
        {"folder": folder.path, "why": f"{type(error).__name__}: {error.strerror or error}"},
        "free space or choose a folder on another disk, and save again",
    )


def _prepare(
    path: str | os.PathLike[str],
    process_group: Any,
    values: Mapping[str, Any],
    step: int | None,
    layout: str,
    keep_last: int | None,
    fingerprint: bool | None,
    *,
    copies_all: bool,
) -> tuple[_Job, Group]:
    """Read the values to save, compare them between ranks, exchange whole tensors, and make the folder; `copies_all`
    makes the values independent of what the caller does next."""
    wait_for_save()
    group = as_group(process_group)
    call = f'save("{os.fspath(path)}")'
    folder, fault = None, None
    try:
        _check_options(layout, keep_last, step)
        folder = Folder(path)
    except Exception as error:  # fsspec raises any
        fault = fault_of(error)
    facts = {"path": os.fspath(path), "layout": layout, "step": str(step), "keep_last": str(keep_last)}
    made = collect(group, call, **values, facts={**facts, "fingerprint": str(fingerprint)}, fault=fault)
    assert folder is not None
    planned = plan_files(made, layout, group.ranks)
    own = [each.item for each in planned if writes_its_part(each, group)]
    memory = _memory if simulated.get() is None else HostMemory()  # threads of one process have one for each save
    copies, copied = memory.copies([*own, *made.own_items.values()], of_all=copies_all)  # the host does the rest
    job = _Job(folder, config_texts(models_of(values["model"])) | index_texts(planned), keep_last, copied)
    make_folder(job.partial, folder, group, call)
    job.files, records = files_and_records(made, planned, to_owners(planned, group), copies, group)
    if fingerprint is None:
        fingerprint = sum(item.whole_bytes for item in made.items.values()) <= _FINGERPRINT_BYTES
    job.manifest = Manifest(
        library=__version__,
        step=step,
        saved_at=round(time.time(), 3),
        world=max(group.ranks) + 1,
        tensors=records,
        aliases=made.aliases,
        values=made.values,
        fingerprint=fingerprints(made.by_section(), group) if fingerprint else {},
    )
    return job, group


def _check_options(layout: str, keep_last: int | None, step: int | None) -> None:
    if layout not in LAYOUTS:
        raise CheckpointError(
            f'no layout of files is called "{layout}"', fix=" or ".join(f'layout="{x}"' for x in LAYOUTS)
        )
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last} would remove the checkpoint itself", fix="keep one at least")
    if step is not None and (type(step) is not int or step < 0):
        raise CheckpointError(f"step={step!r} is not the number of a step", fix="pass an int, 0 or larger")


def _remove_older(folder: Folder, keep: int) -> None:
    """Remove the oldest of the checkpoints whose names differ from this one only in numbers."""
    pattern = re.sub(r"\d+", "#", folder.name)
    found = [each for each in checkpoints_in(folder.parent) if re.sub(r"\d+", "#", each[1].name) == pattern]
    for _, old in sorted(found, key=sort_key)[: max(0, len(found) - keep)]:
        if old.name == folder.name:
            continue
        with suppress(OSError):
            old.beside(OLD.format(old.name)).remove()
            if old.is_local and old.has():
                hidden = old.beside(PARTIAL.format(old.name))
                hidden.remove()
                old.rename(hidden.name)  # first: a crash leaves no folder that looks like a checkpoint
                hidden.remove()
            else:
                old.remove(NAME)
                old.remove()
